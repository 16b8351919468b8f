"""Calls of jitted functions, of which the first one compiles: that is shown as progress.

    with first_call("the training step", state) as done:
        state, metrics = done(step(state, batch))

Which call compiles is known where it happens: a jitted function's Python runs when it is traced, and only then. So that
is where `compiles` is called, and it shows a task in the `first_call` around it. All other calls pay some microseconds,
and their arguments aren't looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import TypeVar

import jax
from jax.core import Tracer

from jpipe.terminal.progress import is_shown, task
from jpipe.types import PyTree

Result = TypeVar("Result")

_begin: ContextVar[Callable[[str], None] | None] = ContextVar("_begin", default=None)
"""What `compiles` does in the call that this thread is in."""


@contextmanager
def first_call(what: str, arguments: PyTree) -> Iterator[Callable[[Result], Result]]:
    """A context around a call of a jitted function that calls `compiles` when it is traced.

    Under a user's own `jax.jit` nothing is shown: what is compiled then is more than this function.

    Args:
      what: what the function computes, in words.
      arguments: those that are tracers if the call is traced itself.

    Yields:
      `done`, a function that gives the call's result back; it waits for the first run, if that is shown.
    """
    begun: list[str] = []

    def begin(details: str) -> None:
        """Shows that the function is compiled; once, and only if it isn't called with tracers."""
        if not begun and not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(arguments)):
            begun.append(details)
            compiling.enter_context(task(f"compiling {what} ({details})"))

    def done(result: Result) -> Result:
        compiling.close()
        if begun and is_shown():
            with task(f"first run of {what}"):
                jax.block_until_ready(result)
        return result

    with ExitStack() as compiling:
        compiling.callback(_begin.reset, _begin.set(begin))
        yield done


def compiles(details: str) -> None:
    """Says that the function that is being traced will be compiled, if it is in a `first_call`.

    Args:
      details: of what, in words.
    """
    begin = _begin.get()
    if begin is not None:
        begin(details)
