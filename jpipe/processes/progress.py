"""Draws the progress of long work on the terminal, by rich, finds the calls that compile, and warns users.

    with task("measuring costs", total=len(layers), unit="kinds of layers") as advance:
        for layer in layers:
            measure(layer)
            advance()

It is drawn once it has taken `SHOWN_AFTER`, so that what is quick doesn't flicker. A task that took `KEPT_AFTER` leaves
one dim line, with the time: so a user sees afterwards where a run's first minutes went, and which save was slow.

Only the first process draws, on stderr, and only where that is a terminal. A notebook's is none, so there it is quiet;
so it is in other threads than the main one, whose lines would mix, and while a display of rich that is the user's own
is on the screen. What is computed never depends on any of this.

    with first_call("the training step", state) as done:
        state, metrics = done(step(state, batch))

Which call compiles is known where it happens: a jitted function's Python runs when it is traced, and only then. So that
is where `compiles` is called, and it shows a task in the `first_call` around it. All other calls pay some microseconds,
and their arguments aren't looked at, unless somebody follows the calls (`followers`).
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.core import Tracer
from rich.console import Console, RenderableType
from rich.control import Control
from rich.file_proxy import FileProxy
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.segment import ControlType
from rich.table import Column
from rich.text import Text

from jpipe.types import PyTree

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
      total: the amount to be done, if it is known: then the bar shows how much of it is done.
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
    index = display.add_task(what, total=total)
    try:
        yield partial(display.advance, index)
        seconds = time.perf_counter() - begin
    finally:
        display.remove_task(index)
        if is_outermost:
            _display = None
            display.close()
    if is_outermost and seconds >= KEPT_AFTER:
        amount = "" if total is None else f" ({decimal(total)})" if unit == "bytes" else f" ({total} {unit})"
        display.console.print(Text(f"{what}{amount} ... {seconds:.1f} s", style="dim"))


def is_shown() -> bool:
    """Whether a task that begins now would be shown."""
    if _display is not None:
        return _in_main_thread()
    chosen = os.environ.get("JPIPE_PROGRESS") != "0" if _chosen is None else _chosen
    of_others = any(isinstance(stream, FileProxy) for stream in (sys.stdout, sys.stderr))
    if not chosen or of_others or not _in_main_thread() or not _is_terminal(sys.stderr) or jax.process_index() != 0:
        return False
    return Console(file=sys.stderr).is_interactive


class _Display(Progress):
    """The tasks of now as lines on a console, once the first of them has taken `SHOWN_AFTER`."""

    def __init__(self, console: Console):
        what = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis"))
        above = _is_terminal(sys.stdout)  # then what is printed meanwhile goes above the lines
        shown = {"console": console, "transient": True, "refresh_per_second": 8, "redirect_stdout": above}
        super().__init__(what, BarColumn(20), TaskProgressColumn(), TimeElapsedColumn(), **shown)
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


# --- first calls ------------------------------------------------------------------------------------------------------


Result = TypeVar("Result")

_begin: ContextVar[Callable[[str], None]] = ContextVar("_begin", default=lambda details: None)
"""The function that `compiles` calls in the call that this thread is in."""


@dataclass(eq=False)
class Call:
    """A call that somebody follows. Who follows it looks at it, and changes nothing.

    Attributes:
      what: the computation in words.
      is_compiling: whether it compiles now.
      has_returned: whether it has returned or raised; its devices may still compute.
      result: the smallest array of what it gave; None before, or if there is none.
    """

    what: str
    is_compiling: bool = False
    has_returned: bool = False
    result: jax.Array | None = None

    def gives(self, result: Result) -> Result:
        """Notes what the devices are computing from now on, and gives it back."""
        # The last of the smallest: of a state and its metrics a metric, since the state is donated to the next step.
        arrays = [leaf for leaf in reversed(jax.tree.leaves(result)) if isinstance(leaf, jax.Array)]
        plain = [array for array in arrays if not jnp.issubdtype(array.dtype, jax.dtypes.prng_key)]
        self.result = min(plain, key=lambda array: array.size, default=None)
        self.is_compiling = False
        return result


followers: list[Callable[[Call], None]] = []
"""Functions that are given each call when it begins."""


@contextmanager
def followed(what: str, arguments: PyTree) -> Iterator[Call | None]:
    """A context around a call, which the followers are told of.

    Yields:
      The call; None if nobody follows it, or if it is only traced, as some of its arguments are tracers.
    """
    if not followers or is_traced(arguments):
        yield None
        return
    call = Call(what)
    for follow in tuple(followers):  # another thread may end a watch
        follow(call)
    try:
        yield call
    finally:
        call.is_compiling, call.has_returned = False, True


@contextmanager
def first_call(what: str, arguments: PyTree) -> Iterator[Callable[[Result], Result]]:
    """A context around a call of a jitted function that calls `compiles` when it is traced.

    Under a user's own `jax.jit` nothing is shown: what is compiled then is more than this function.

    Args:
      what: the function's computation in words.
      arguments: the arguments that are tracers if the call is traced itself.

    Yields:
      `done`, a function that gives the call's result back; it waits for the first run, if that is shown.
    """
    begun: list[str] = []

    def begin(details: str) -> None:
        """Shows that the function is compiled; once, and only if it isn't called with tracers."""
        if not begun and not is_traced(arguments):
            begun.append(details)
            if call:
                call.is_compiling = True
            compiling.enter_context(task(f"compiling {what} ({details})"))

    def done(result: Result) -> Result:
        compiling.close()
        if call:
            call.gives(result)
        if begun and is_shown():
            with task(f"first run of {what}"):
                jax.block_until_ready(result)
        return result

    with followed(what, arguments) as call, ExitStack() as compiling:
        compiling.callback(_begin.reset, _begin.set(begin))
        yield done


def compiles(details: str) -> None:
    """Says that the function that is being traced will be compiled, if it is in a `first_call`.

    Args:
      details: the details of the function in words.
    """
    _begin.get()(details)


def is_traced(arguments: PyTree) -> bool:
    """Whether some arguments of a call are tracers: then it is only traced."""
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(arguments))


# --- warnings ---------------------------------------------------------------------------------------------------------


def warn_user(message: str) -> None:
    """Gives a UserWarning at the line of the code that called the package."""
    warnings.warn(message, UserWarning, stacklevel=_users_level())


@functools.cache
def warn_once(message: str) -> None:
    """Warns as `warn_user` does, but gives each message once in a program."""
    warn_user(message)


def _users_level() -> int:
    """How many frames above `warn_user` the caller of the package is, as `warnings` counts."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("jpipe", "jax", "contextlib"):
        level, frame = level + 1, frame.f_back
    return level
