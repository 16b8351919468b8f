"""Calls of jitted functions, of which the first one compiles: that is shown as progress.

    with Call("the training step", state) as call:
        state, metrics = call.done(step(state, batch))

Which call compiles is known where it happens: a jitted function's Python runs when it is traced, and only then. So that
is where `compiles` is called, and it shows a task in the `Call` around it. All other calls pay about a microsecond, and
their arguments aren't looked at.
"""

from __future__ import annotations

from contextlib import ExitStack
from contextvars import ContextVar, Token
from types import TracebackType
from typing import TypeVar

import jax
from jax.core import Tracer

from jpipe.terminal.progress import is_shown, task
from jpipe.types import PyTree

Result = TypeVar("Result")

_current: ContextVar[Call | None] = ContextVar("_current", default=None)
"""The call that this thread is in."""


class Call:
    """A context around a call of a jitted function that calls `compiles` when it is traced.

    Under a user's own `jax.jit` nothing is shown: what is compiled then is more than this function.

    Args:
      what: what the function computes, in words.
      arguments: those that are tracers if the call is traced itself.
    """

    __slots__ = ("_arguments", "_compiling", "_token", "_what")

    def __init__(self, what: str, arguments: PyTree):
        self._what, self._arguments = what, arguments
        self._compiling: ExitStack | None = None
        self._token: Token[Call | None] | None = None

    def __enter__(self) -> Call:
        self._token = _current.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._token is not None
        _current.reset(self._token)
        if self._compiling is not None:
            self._compiling.__exit__(kind, error, trace)

    def begin(self, details: str) -> None:
        """Shows that the function is compiled; once, and only if it isn't called with tracers."""
        if self._compiling or any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(self._arguments)):
            return
        self._compiling = ExitStack()
        self._compiling.enter_context(task(f"compiling {self._what} ({details})"))

    def done(self, result: Result) -> Result:
        """The call's result; waits for the first run, if that is shown."""
        if self._compiling is not None:
            self._compiling.close()
            if is_shown():
                with task(f"first run of {self._what}"):
                    jax.block_until_ready(result)
        return result


def compiles(details: str) -> None:
    """Says that the function that is being traced will be compiled, if it is in a `Call`.

    Args:
      details: of what, in words.
    """
    call = _current.get()
    if call is not None:
        call.begin(details)
