"""Progress of long work on the terminal, drawn by rich: what is being done, for how long, how much of how much.

    with task("measuring costs", total=len(layers), unit="kinds of layers") as advance:
        for layer in layers:
            measure(layer)
            advance()

It is drawn once it has taken `SHOWN_AFTER`, so that what is quick doesn't flicker. Of what took `KEPT_AFTER` one dim
line stays, with the time: so a user sees afterwards where a run's first minutes went, and which save was slow.

Only the first process draws, on stderr, and only where that is a terminal. A notebook's is none, so there it is quiet;
so it is in other threads than the main one, whose lines would mix, and while a display of rich that is the user's own
is on the screen. What is computed never depends on any of this.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import jax
from rich.console import Console
from rich.control import Control
from rich.file_proxy import FileProxy
from rich.filesize import decimal
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import ControlType
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

SHOWN_AFTER = 0.5
"""Seconds after which a task is shown."""

KEPT_AFTER = 1.0
"""Seconds after which a line stays of a task."""

_chosen: bool | None = None
"""What the user said; None: what the environment says."""

_display: _Display | None = None
"""What draws, while there is a task."""


def show_progress(shown: bool) -> None:
    """Switches the display of long work on or off: planning, compilation, first steps, checkpoints.

    It is on where stderr is a terminal and the environment variable JPIPE_PROGRESS isn't "0", which this overrides.
    Where stderr is no terminal (a file, a pipe, a notebook) there is none.

    Args:
      shown: whether it is on.

    Raises:
      TypeError: that is no bool.
    """
    global _chosen
    if not isinstance(shown, bool):
        raise TypeError(f"shown={shown!r} is no bool; pass True or False")
    _chosen = shown


@contextmanager
def task(what: str, total: int | None = None, unit: str = "") -> Iterator[Callable[..., None]]:
    """Shows a task while this context is open; one within another is shown below it, and leaves no line.

    Args:
      what: what is being done, in words.
      total: how much is to be done, if that is known: then there is a bar.
      unit: what `total` counts: "bytes", or a noun in plural.

    Yields:
      `advance(by=1)`, to be told how much was done.
    """
    global _display
    new, display = _Task(what, total, unit), _opened()
    if display is None:
        yield new.advance
        return
    _display = display
    display.tasks.append(new)
    try:
        yield new.advance
        new.is_done = True
    finally:
        display.tasks.remove(new)
        if not display.tasks:
            _display = None
            display.close(new)


def is_shown() -> bool:
    """Whether a task that begins now would be shown."""
    return _in_main_thread() and (_display is not None or _console() is not None)


def in_units(amount: int, unit: str) -> str:
    """An amount in words.

    >>> in_units(3, "layers"), in_units(1_500_000, "bytes")
    ('3 layers', '1.5 MB')
    """
    return decimal(amount) if unit == "bytes" else f"{amount} {unit}"


@dataclass(eq=False)
class _Task:
    what: str
    total: int | None
    unit: str
    done: int = 0
    is_done: bool = False
    begin: float = field(default_factory=time.perf_counter)

    def advance(self, by: int = 1) -> None:
        """Notes that more was done."""
        self.done += by

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.begin

    @property
    def amount(self) -> str:
        """How much of how much; empty if that isn't known."""
        if self.total is None:
            return ""
        done = decimal(self.done) if self.unit == "bytes" else self.done
        return f"{done} of {in_units(self.total, self.unit)}"

    def __str__(self) -> str:
        amount = "" if self.total is None else f" ({in_units(self.total, self.unit)})"
        return f"{self.what}{amount} ... {_duration(self.seconds, digits=1)}"


class _Display:
    """The tasks of now as lines on a console, once the first of them has taken `SHOWN_AFTER`."""

    def __init__(self, console: Console):
        self.tasks: list[_Task] = []
        self._console, self._stream = console, sys.stderr
        self._spinner = Spinner("line" if console.options.ascii_only else "dots")
        self._live: Live | None = None
        self._lock, self._is_over = threading.Lock(), False
        self._timer = threading.Timer(SHOWN_AFTER, self._start)
        self._timer.daemon = True
        self._timer.start()

    def _start(self) -> None:
        """Draws from now on; runs in the timer's thread."""
        with self._lock:
            if self._is_over:
                return
            # What is printed meanwhile goes above the lines, if it goes to the same terminal, and nobody catches it.
            self._live = Live(
                console=self._console,
                get_renderable=self._lines,
                transient=True,
                refresh_per_second=8,
                redirect_stdout=_is_terminal(sys.stdout),
                redirect_stderr=sys.stderr is self._stream,
            )
            # In place of the line that the cursor is on: a bar such as tqdm's, which draws itself again. What was
            # printed without a newline is lost; rich would erase it as well, and leave the rest of a long line.
            self._console.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)))
            self._live.start(refresh=True)
            self._console.show_cursor(True)  # a process that is killed could not bring it back

    def close(self, last: _Task) -> None:
        """Takes the lines away; one stays of the last task if it came to its end and took long."""
        self._timer.cancel()
        with self._lock:
            self._is_over = True
            if self._live is not None:
                self._live.stop()
        if last.is_done and last.seconds >= KEPT_AFTER:
            self._console.print(Text(str(last), style="dim"))

    def _lines(self) -> Table:
        lines = Table.grid(padding=(0, 1))
        for task in [task for task in self.tasks if task.seconds >= SHOWN_AFTER]:
            bar = "" if task.total is None else ProgressBar(max(task.total, 1), task.done, width=20)
            words = [Text(part, no_wrap=True) for part in (task.amount, _duration(task.seconds))]
            lines.add_row(self._spinner, Text(task.what, no_wrap=True, overflow="ellipsis"), bar, *words)
        return lines


def _opened() -> _Display | None:
    """What a task that begins now is drawn by; None if it isn't."""
    if _display is not None:
        return _display if _in_main_thread() else None
    console = _console()
    return None if console is None else _Display(console)


def _console() -> Console | None:
    """A console that draws on stderr; None if nothing should be drawn."""
    chosen = os.environ.get("JPIPE_PROGRESS") != "0" if _chosen is None else _chosen
    of_others = any(isinstance(stream, FileProxy) for stream in (sys.stdout, sys.stderr))
    if not chosen or of_others or not _in_main_thread() or not _is_terminal(sys.stderr) or jax.process_index() != 0:
        return None
    console = Console(file=sys.stderr)
    return console if console.is_interactive else None


def _is_terminal(stream: object) -> bool:
    """Whether something is drawn there at once; a file isn't, whatever FORCE_COLOR says of its colours."""
    try:
        return bool(getattr(stream, "isatty", bool)())
    except ValueError:  # it is closed
        return False


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _duration(seconds: float, digits: int = 0) -> str:
    """A time in words; digits after the point only if it is short.

    >>> _duration(14.23), _duration(14.23, digits=1), _duration(125.0, digits=1)
    ('14 s', '14.2 s', '2 min 5 s')
    """
    if seconds < 60:
        return f"{seconds:.{digits}f} s"
    return f"{int(seconds) // 60} min {int(seconds) % 60} s"
