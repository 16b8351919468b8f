"""Control flow that never copies what it passes on.

A `lax.cond` or `lax.switch` copies the buffers that a branch hands through (accumulators, residuals), a loop updates
them in place. So whatever a stage may or may not do here is a loop with as many trips as it has layers to run, none
if it has none. Bounds that are Python integers are resolved while tracing.

A compiler may move what doesn't change from trip to trip out of a loop, and then computes it for zero trips too. What a
body works on is therefore tied to its trip by `tie`, and the loop counts on from the trip that `tie` gives back:
otherwise the compiler would drop the tie as unused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Body = Callable[[Any, Any], tuple[Any, Any]]
"""`(trip, carry) -> (trip, carry)`; the trip as it was taken, or as `tie` gave it back."""


def when(condition: Any, body: Body, carry: Any) -> Any:
    """The carry after `body(0, carry)` if `condition` (a Python or traced bool) holds, else `carry`."""
    return each(0, int(condition) if isinstance(condition, bool) else jnp.asarray(condition, jnp.int32), body, carry)


def tie(values: Any, trip: Any) -> tuple[Any, Any]:
    """`(values, trip)`, unchanged, as if each depended on the other."""
    return (values, trip) if isinstance(trip, int) else jax.lax.optimization_barrier((values, trip))


def of_trip(array: Any, trip: Any) -> Any:
    """The array, multiplied by a one that only the trip knows of, so that no compiler casts it ahead of the loop.

    A TPU's compiler sees through `tie` and slices, and casts whole stacks of parameters ahead of all loops. The product
    is fused with the cast and takes no memory.

    Args:
      array: any shape; one that isn't real, or has less than two dimensions, is returned as it is.
      trip: an index that `tie` gave, at least 0.
    """
    if array.ndim < 2 or not jnp.issubdtype(array.dtype, jnp.floating):
        return array
    return array * (jnp.asarray(trip) >= 0).astype(array.dtype)


def each(start: Any, stop: Any, body: Body, carry: Any, *, reverse: bool = False) -> Any:
    """The carry after `body(i, carry)` for i from `start` to `stop` (Python or traced integers), or backwards."""
    if isinstance(start, int) and isinstance(stop, int):
        if stop - start <= 1:
            return body(start, carry)[1] if stop > start else carry
        visit = (lambda i, c: body(start + stop - 1 - i, c)[1]) if reverse else (lambda i, c: body(i, c)[1])
        return jax.lax.fori_loop(start, stop, visit, carry)
    first, last = jnp.asarray(start, jnp.int32), jnp.asarray(stop, jnp.int32)

    def trip(state: tuple[Any, Any]) -> tuple[Any, Any]:
        i, carry = body(*state)
        return (i - 1 if reverse else i + 1), carry

    if reverse:
        return jax.lax.while_loop(lambda state: state[0] >= first, trip, (last - 1, carry))[1]
    return jax.lax.while_loop(lambda state: state[0] < last, trip, (first, carry))[1]
