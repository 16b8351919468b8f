"""Works on arrays in place: slices at traced indices, on devices and hosts, and loops that copy no values.

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

Indices are never negative here, and JAX is told so: to handle negative ones would be half of a small jaxpr. Of an array
that lies on the host, what is read is brought to the device, and what is written is brought to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jpipe.types import Leaf, PyTree

Carry = TypeVar("Carry")
HOST, DEVICE = "pinned_host", "device"
"""The two memories, as JAX calls them in shardings (`memory_kind`) and in `jax.checkpoint` policies."""


def is_apart(mesh: Mesh | AbstractMesh) -> bool:
    """Whether the hosts' memory is another than that of the devices, as it isn't on CPUs."""
    return not isinstance(mesh, Mesh) or mesh.devices.flat[0].platform != "cpu"


def on_host(sharding: NamedSharding) -> NamedSharding:
    """The same sharding in the memory of the hosts; as it is on CPUs, which have no other.

    A device that isn't there, as its compiler is given it or as planning takes it, may not say that it has such memory.
    """
    mesh = sharding.mesh
    if not is_apart(mesh):
        return sharding
    says = not isinstance(mesh, Mesh) or hasattr(mesh.devices.flat[0], "client")
    if says and (there := sharding.with_memory_kind(HOST)).memory_kind == HOST:
        return there
    return NamedSharding(mesh.abstract_mesh, sharding.spec, memory_kind=HOST)


def is_on_host(array: jax.Array) -> bool:
    """Whether an array, traced, lies in the memory of the host."""
    return jax.typeof(array).memory_space == jax.memory.Space.Host


def to_host(tree: PyTree) -> PyTree:
    """Arrays, traced, in the memory of the host."""
    return jax.device_put(tree, jax.memory.Space.Host)


def to_device(tree: PyTree) -> PyTree:
    """Arrays, traced, in the memory of the device."""
    return jax.device_put(tree, jax.memory.Space.Device)


# --- slices and rows --------------------------------------------------------------------------------------------------


def is_whole(leaf: Leaf) -> bool:
    """Whether this process can read all of a leaf."""
    return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated


Index = int | jax.Array
"""One index, a Python integer or traced."""


def look_up(table: Sequence[int], index: Index, *, once: bool = False) -> Index:
    """`table[index]`; a Python integer if `index` is one, or if all entries are equal.

    With `once` all its readers share one value. A GPU's compiler computes an index that is a slice of a table anew in
    each kernel that reads it. Where an array is read, added to and written at such an index, it then doesn't see that
    this is one place, and copies the slice by kernels of its own. A sum is computed once. (A barrier would do, but not
    all of this compiler's passes know it.)
    """
    if isinstance(index, int):
        return int(table[index])
    # Tables that differ by a constant are looked up once.
    first, steps = int(table[0]), np.asarray(table, np.int32) - np.int32(table[0])
    if not steps.any():
        return first
    if once:
        return first + jnp.sum(jnp.where(np.arange(len(table), dtype=np.int32) == index, steps, 0), dtype=jnp.int32)
    return first + take_row(jnp.asarray(steps), index)


def take_slice(array: jax.Array, index: Sequence[Index], shape: Sequence[int]) -> jax.Array:
    """The slice of `shape` that begins at `index`, which may leave out dimensions at the end: they begin at 0."""
    part = jax.lax.dynamic_slice(array, _start(array, index), shape, allow_negative_indices=False)
    return to_device(part) if is_on_host(array) else part


def put_slice(array: jax.Array, update: jax.Array, index: Sequence[Index]) -> jax.Array:
    """The array with the slice that begins at `index` replaced by `update`; in a loop this copies nothing else."""
    update = to_host(update) if is_on_host(array) else update
    return jax.lax.dynamic_update_slice(array, update, _start(array, index), allow_negative_indices=False)


def take_row(array: jax.Array, row: Index) -> jax.Array:
    """`array[row]`."""
    part = jax.lax.dynamic_index_in_dim(array, row, 0, keepdims=False, allow_negative_indices=False)
    return to_device(part) if is_on_host(array) else part


def put_row(array: jax.Array, value: jax.Array, row: Index) -> jax.Array:
    """The array with `array[row]` replaced by `value`; in a loop this copies nothing else."""
    value = to_host(value) if is_on_host(array) else value
    return jax.lax.dynamic_update_index_in_dim(array, value, row, 0, allow_negative_indices=False)


def _start(array: jax.Array, index: Sequence[Index]) -> list[jax.Array]:
    """One start index a dimension, all of one type: 64-bit mode would mix them."""
    return [jnp.asarray(i, jnp.int32) for i in (*index, *([0] * (array.ndim - len(index))))]


Where: TypeAlias = bool | jax.Array | None
"""Whether something is written, or what was there stays; None if nothing else can be there."""


def chosen(
    where: Where, new: Sequence[Leaf], read: Callable[[Carry], Sequence[Leaf]], arrays: Carry
) -> tuple[Sequence[Leaf], Carry]:
    """(`new` if `where` holds, else what is read from the arrays; the arrays, to write that into).

    All is read before. A compiler copies the arrays if it may read one leaf after another is written.
    """
    if where is None:
        return new, arrays
    old, arrays = jax.lax.optimization_barrier((read(arrays), arrays))
    return [a if where is True else jnp.where(where, a, b) for a, b in zip(new, old, strict=True)], arrays


# --- loops ------------------------------------------------------------------------------------------------------------


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
    reads_in_trip = None if reads is None else lambda _, fixed, carry: reads(fixed, carry)
    return each(0, condition, fixed, lambda _, values, carry: body(values, carry), carry, reads=reads_in_trip)


def _tie(values: PyTree, trip: Index) -> tuple[PyTree, Index]:
    """`(values, trip)`, unchanged, as if each depended on the other."""
    if isinstance(trip, int) or not jax.tree.leaves(values):
        return values, trip
    return jax.lax.optimization_barrier((values, trip))
