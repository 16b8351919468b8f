"""Loops in place of `lax.cond`: control flow that never copies the values that it passes on.

A `lax.cond` or `lax.switch` copies the buffers that a branch hands through (accumulators, residuals), a loop updates
them in place. So whatever a stage may or may not do here is a loop with as many trips as it has layers to run, none
if it has none. Bounds that are Python integers are resolved while tracing.

A compiler may move a computation that is the same in all trips out of a loop, and then does it for zero trips too. So
a loop here *ties* the values that its body works on to the trip, before the body gets them:

    while i < stop:
        fixed, i = tie(fixed, i)                        # as if each depended on the other
        values, i = tie(reads(i, fixed, carry), i)      # only if there is a `reads`
        carry = body(i, values, carry)
        i += 1                                          # of the tied i, or the compiler would drop the tie as unused
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from jpipe.arrays.indexing import Index
from jpipe.types import PyTree

Carry = TypeVar("Carry")
Fixed = TypeVar("Fixed")


def each(
    start: Index,
    stop: Index,
    fixed: Fixed,
    body: Callable[[Index, PyTree, Carry], Carry],
    carry: Carry,
    *,
    reads: Callable[[Index, Fixed, Carry], PyTree] | None = None,
    reverse: bool = False,
) -> Carry:
    """The carry after `body(i, values, carry)` for i from `start` to `stop`, which is left out, or backwards.

    Args:
      start, stop: Python or traced integers.
      fixed: a pytree of values that are the same in all trips; () for none.
      body: the work of a trip. It has to take all arrays from `values` and the carry: arrays from around the loop
        aren't tied.
      carry: a pytree of arrays.
      reads: `(i, fixed, carry) -> values`, any pytree, where `fixed` is tied already; without it `values` are `fixed`.
        It is for values that may be the same in all trips although they are read at an index or out of the carry: a
        slice of a whole array is that array, at any index, and the body may never change a part of the carry.
      reverse: from the last trip to the first.
    """

    def trip(i: Index, carry: Carry) -> tuple[Index, Carry]:
        values, tied = _tie(fixed, i)
        if reads is not None:
            values, tied = _tie(reads(i, values, carry), tied)
        return tied, body(i, values, carry)

    if isinstance(start, int) and isinstance(stop, int):
        if stop - start <= 1:
            return trip(start, carry)[1] if stop > start else carry
        index = (lambda i: start + stop - 1 - i) if reverse else (lambda i: i)
        return jax.lax.fori_loop(start, stop, lambda i, carry: trip(index(i), carry)[1], carry)
    first, last = jnp.asarray(start, jnp.int32), jnp.asarray(stop, jnp.int32)

    def turn(state: tuple[jax.Array, Carry]) -> tuple[jax.Array, Carry]:
        i, carry = trip(*state)
        return jnp.asarray(i - 1 if reverse else i + 1), carry

    goes_on = (lambda state: state[0] >= first) if reverse else (lambda state: state[0] < last)
    return jax.lax.while_loop(goes_on, turn, (last - 1 if reverse else first, carry))[1]


def when(
    condition: bool | jax.Array,
    fixed: Fixed,
    body: Callable[[PyTree, Carry], Carry],
    carry: Carry,
    *,
    reads: Callable[[Fixed, Carry], PyTree] | None = None,
) -> Carry:
    """The carry after `body(values, carry)` if `condition` holds, else `carry`; as `each`, with one trip or none."""
    trips = int(condition) if isinstance(condition, bool) else jnp.asarray(condition, jnp.int32)
    reads_in_trip = None if reads is None else lambda _, fixed, carry: reads(fixed, carry)
    return each(0, trips, fixed, lambda _, values, carry: body(values, carry), carry, reads=reads_in_trip)


def of_trip(array: jax.Array, trip: Index) -> jax.Array:
    """Multiplies an array by a one that is computed in the trip, so that no compiler casts it ahead of the loop.

    A TPU's compiler sees through ties and slices, and casts whole stacks of parameters ahead of all loops. The product
    is fused with the cast and takes no memory.

    Args:
      array: any shape; one that isn't real, or has less than two dimensions, is returned as it is.
      trip: an integer of at least 0 that a loop gave as one of its `values`.
    """
    if array.ndim < 2 or not jnp.issubdtype(array.dtype, jnp.floating):
        return array
    return array * (jnp.asarray(trip) >= 0).astype(array.dtype)


def _tie(values: PyTree, trip: Index) -> tuple[PyTree, Index]:
    """`(values, trip)`, unchanged, as if each depended on the other."""
    if isinstance(trip, int) or not jax.tree.leaves(values):
        return values, trip
    return jax.lax.optimization_barrier((values, trip))
