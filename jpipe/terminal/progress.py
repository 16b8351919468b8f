"""Draws the progress of long work on the terminal, by rich: what is done, for how long, how much of how much.

    with task("measuring costs", total=len(layers), unit="kinds of layers") as advance:
        for layer in layers:
            measure(layer)
            advance()

It is drawn once it has taken `SHOWN_AFTER`, so that what is quick doesn't flicker. A task that took `KEPT_AFTER` leaves
one dim line, with the time: so a user sees afterwards where a run's first minutes went, and which save was slow.

Only the first process draws, on stderr, and only where that is a terminal. A notebook's is none, so there it is quiet;
so it is in other threads than the main one, whose lines would mix, and while a display of rich that is the user's own
is on the screen. What is computed never depends on any of this.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import jax
from rich.console import Console, RenderableType
from rich.control import Control
from rich.file_proxy import FileProxy
from rich.filesize import decimal
from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
from rich.progress_bar import ProgressBar
from rich.segment import ControlType
from rich.table import Column
from rich.text import Text

SHOWN_AFTER = 0.5
"""Seconds after which a task is shown."""

KEPT_AFTER = 1.0
"""Seconds after which a line stays of a task."""

_chosen: bool | None = None
"""The user's choice; None leaves it to the environment."""

_display: _Display | None = None
"""The display that draws, while there is a task."""


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
      what: the task in words.
      total: the amount to be done, if it is known: then there is a bar.
      unit: the unit of `total`: "bytes", or a noun in plural.

    Yields:
      `advance(by=1)`, to be told how much was done.
    """
    global _display
    if not is_shown():
        yield lambda by=1: None
        return
    is_outermost, begin = _display is None, time.perf_counter()
    display = _display = _display or _Display(Console(file=sys.stderr))
    index = display.add_task(what, total=total, unit=unit)
    try:
        yield partial(display.advance, index)
        seconds = time.perf_counter() - begin
    finally:
        display.remove_task(index)
        if is_outermost:
            _display = None
            display.close()
    if is_outermost and seconds >= KEPT_AFTER:
        amount = "" if total is None else f" ({in_units(total, unit)})"
        display.console.print(Text(f"{what}{amount} ... {_duration(seconds)}", style="dim"))


def is_shown() -> bool:
    """Whether a task that begins now would be shown."""
    if _display is not None:
        return _in_main_thread()
    chosen = os.environ.get("JPIPE_PROGRESS") != "0" if _chosen is None else _chosen
    of_others = any(isinstance(stream, FileProxy) for stream in (sys.stdout, sys.stderr))
    if not chosen or of_others or not _in_main_thread() or not _is_terminal(sys.stderr) or jax.process_index() != 0:
        return False
    return Console(file=sys.stderr).is_interactive


def in_units(amount: float, unit: str) -> str:
    """An amount in words.

    >>> in_units(3, "layers"), in_units(1_500_000, "bytes")
    ('3 layers', '1.5 MB')
    """
    return decimal(int(amount)) if unit == "bytes" else f"{int(amount)} {unit}"


class _Bar(ProgressColumn):
    """A column for tasks with a known total: their bar."""

    def render(self, task: Task) -> RenderableType:
        return "" if task.total is None else ProgressBar(max(task.total, 1), task.completed, width=20)


class _Amount(ProgressColumn):
    """A column for how much is done of how much, if that is known."""

    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text()
        unit = task.fields["unit"]
        done = in_units(task.completed, unit if unit == "bytes" else "").rstrip()
        return Text(f"{done} of {in_units(task.total, unit)}", no_wrap=True)


class _Display(Progress):
    """The tasks of now as lines on a console, once the first of them has taken `SHOWN_AFTER`."""

    def __init__(self, console: Console):
        super().__init__(
            SpinnerColumn("line" if console.options.ascii_only else "dots", style=""),
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
            _Bar(),
            _Amount(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            refresh_per_second=8,
            redirect_stdout=_is_terminal(sys.stdout),  # then what is printed meanwhile goes above the lines
        )
        self._streams = sys.stdout, sys.stderr
        self._timer = threading.Timer(SHOWN_AFTER, self._begin)
        self._timer.daemon = True
        self._timer.start()

    def _begin(self) -> None:
        """Draws from now on, unless the user catches what is printed; runs in the timer's thread."""
        if self._streams != (sys.stdout, sys.stderr):
            return
        # In place of the line that the cursor is on: a bar such as tqdm's, which draws itself again. What was printed
        # without a newline is lost; rich would erase it as well, and leave the rest of a long line.
        self.console.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)))
        self.start()
        self.console.show_cursor(True)  # a process that is killed could not bring it back

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table([task for task in self.tasks if (task.elapsed or 0) >= SHOWN_AFTER])

    def close(self) -> None:
        """Takes the lines away."""
        self._timer.cancel()
        self._timer.join()  # it may be drawing the first lines
        self.stop()


def _is_terminal(stream: object) -> bool:
    """Whether something is drawn there at once; a file isn't, whatever FORCE_COLOR says of its colours."""
    try:
        return bool(getattr(stream, "isatty", bool)())
    except ValueError:  # it is closed
        return False


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _duration(seconds: float) -> str:
    """A time in words.

    >>> _duration(14.23), _duration(125.0)
    ('14.2 s', '2 min 5 s')
    """
    return f"{seconds:.1f} s" if seconds < 60 else f"{int(seconds) // 60} min {int(seconds) % 60} s"
