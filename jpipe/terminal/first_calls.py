"""Finds the calls of jitted functions that compile, and shows them as progress.

    with first_call("the training step", state) as done:
        state, metrics = done(step(state, batch))

Which call compiles is known where it happens: a jitted function's Python runs when it is traced, and only then. So that
is where `compiles` is called, and it shows a task in the `first_call` around it. All other calls pay some microseconds,
and their arguments aren't looked at, unless somebody follows the calls (`followers`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.core import Tracer

from jpipe.terminal.progress import is_shown, task
from jpipe.types import PyTree

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
