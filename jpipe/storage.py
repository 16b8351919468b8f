"""Where every layer's arrays lie on its stage's device.

One program runs on all stages, so an array has the same shape on all of them, while layers differ. Two ways out:

- a *stack* `[slots, ...]` for each leaf of a kind with several layers spread over the stages, a layer a slot;
- a *pool* `[shards, size]` for each dtype, in which the layers of the other kinds lie end to end. A pool is as large
  as the fullest stage needs: an embedding on the first stage and a head on the last one share the same bytes.

A `Storage` is the address book of both, plain data. The same class keeps parameters, gradients, state collections,
optimiser state (a *cell* is a stage) and residuals (a *cell* is a virtual stage; each micro-batch in flight has a row).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

Buffers = dict[str, Any]
"""`{"stacks": {kind: [leaf, ...]}, "pools": {dtype: array}}`, a pytree."""


@dataclass(frozen=True)
class Shelf:
    """The places of one kind's layers: leaf shapes, and cell, slot and pool offsets of every member."""

    leaves: tuple[jax.ShapeDtypeStruct, ...]
    specs: tuple[PartitionSpec, ...]
    stacked: bool
    cells: tuple[int, ...]
    slots: tuple[int, ...]  # a member's position in its stack
    offsets: tuple[tuple[int, ...], ...]  # [leaves][members], in elements of a shard of the leaf's dtype's pool
    num_slots: int
    rows: int


@dataclass(frozen=True)
class Storage:
    """The places of all kinds' layers.

    Attributes:
      shelves: one a kind.
      strides: for each dtype, the pool elements (of a shard) that a row takes on each device.
      sizes: for each dtype, the pool's length.
      shards: the leading dimension of pools and pooled leaves, split over the data axes of the mesh.
    """

    shelves: tuple[Shelf, ...]
    strides: tuple[tuple[str, tuple[int, ...]], ...]
    sizes: tuple[tuple[str, int], ...]
    shards: int = 1

    def zeros(self, dtype_of: Callable[[Any], Any] = lambda dtype: dtype) -> Buffers:
        """Buffers of one device, zero; `dtype_of` maps a leaf's dtype to that of its buffer."""
        stacks = {
            str(c): [
                jnp.zeros((*((shelf.rows,) if shelf.rows else ()), shelf.num_slots, *leaf.shape), dtype_of(leaf.dtype))
                for leaf in shelf.leaves
            ]
            for c, shelf in enumerate(self.shelves)
            if shelf.stacked and shelf.leaves
        }
        pools = {name: jnp.zeros((self.shards, size), dtype_of(np.dtype(name))) for name, size in self.sizes}
        return {"stacks": stacks, "pools": pools}

    def shapes(self) -> Buffers:
        """`zeros` as ShapeDtypeStructs."""
        return jax.eval_shape(self.zeros)

    def specs(self, prefix: tuple = ()) -> Buffers:
        """PartitionSpecs of the buffers, `prefix` in front: the axes that layers ask for, none for pools."""
        stacks = {
            str(c): [PartitionSpec(*prefix, *((None,) if shelf.rows else ()), None, *spec) for spec in shelf.specs]
            for c, shelf in enumerate(self.shelves)
            if shelf.stacked and shelf.leaves
        }
        return {"stacks": stacks, "pools": {name: PartitionSpec(*prefix) for name, _ in self.sizes}}

    def read(self, buffers: Buffers, c: int, member: Any, at: Row | None = None) -> list[Any]:
        """The leaves of a member of kind `c`."""
        shelf = self.shelves[c]
        if shelf.stacked:
            index = _slot(shelf, member, at)
            stacks = buffers["stacks"][str(c)] if shelf.leaves else []
            return [_take(stack, index) for stack in stacks]
        return [
            _slice_pool(buffers["pools"][leaf.dtype.name], self._offset(shelf, i, member, at), leaf.shape)
            for i, leaf in enumerate(shelf.leaves)
        ]

    def write(self, buffers: Buffers, c: int, member: Any, leaves: Sequence[Any], at: Row | None = None) -> Buffers:
        """Buffers with a member's leaves replaced (in place, in a loop)."""
        return self._update(buffers, c, member, leaves, at, add=False)

    def add(self, buffers: Buffers, c: int, member: Any, leaves: Sequence[Any]) -> Buffers:
        """Buffers with floating-point `leaves` added to a member's, in the buffers' dtype; others replace it."""
        return self._update(buffers, c, member, leaves, None, add=True)

    def assemble(self, cell: int, leaves: dict[tuple[int, int], Any], part: str, name: str, leaf: int) -> np.ndarray:
        """One buffer of one device, on the host.

        Args:
          cell: the device.
          leaves: the leaves of each (kind, member); places of members that are missing hold zeros.
          part: "stacks" or "pools".
          name: the kind (as a string) or the dtype.
          leaf: in a stack, which leaf.
        """
        if part == "stacks":
            shelf = self.shelves[int(name)]
            buffer = np.zeros((shelf.num_slots, *shelf.leaves[leaf].shape), shelf.leaves[leaf].dtype)
            for member, (owner, slot) in enumerate(zip(shelf.cells, shelf.slots, strict=True)):
                if owner == cell and (int(name), member) in leaves:
                    buffer[slot] = np.asarray(leaves[int(name), member][leaf])
            return buffer
        buffer = np.zeros((self.shards, dict(self.sizes)[name]), name)
        for (c, member), values in leaves.items():
            shelf = self.shelves[c]
            for i, spec in enumerate(shelf.leaves):
                if not shelf.stacked and shelf.cells[member] == cell and spec.dtype.name == name:
                    flat = np.asarray(values[i]).reshape(self.shards, -1)
                    buffer[:, shelf.offsets[i][member] :][:, : flat.shape[1]] = flat
        return buffer

    def _update(
        self, buffers: Buffers, c: int, member: Any, leaves: Sequence[Any], at: Row | None, *, add: bool
    ) -> Buffers:
        shelf = self.shelves[c]
        stacks, pools = dict(buffers["stacks"]), dict(buffers["pools"])
        if shelf.stacked and shelf.leaves:
            index = _slot(shelf, member, at)
            stacks[str(c)] = [
                _put(s, index, leaf, add and is_float(leaf)) for s, leaf in zip(stacks[str(c)], leaves, strict=True)
            ]
        elif not shelf.stacked:
            for i, (spec, leaf) in enumerate(zip(shelf.leaves, leaves, strict=True)):
                name, offset = spec.dtype.name, self._offset(shelf, i, member, at)
                pools[name] = _update_pool(pools[name], offset, leaf, add and is_float(leaf))
        return {"stacks": stacks, "pools": pools}

    def _offset(self, shelf: Shelf, leaf: int, member: Any, at: Row | None) -> Any:
        offset = look_up(shelf.offsets[leaf], member)
        if at is None:
            return offset
        strides = dict(self.strides)[shelf.leaves[leaf].dtype.name]
        return offset + at.row * look_up(strides, at.device)


@dataclass(frozen=True)
class Row:
    """Which row of a storage with rows: that of one micro-batch in flight on a device (both may be traced)."""

    row: Any
    device: Any


def is_float(leaf: Any) -> bool:
    """Whether a leaf has a floating-point (or complex) dtype, so that it can be summed and has gradients."""
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def accumulator_dtype(dtype: Any) -> Any:
    """The dtype in which values of `dtype` are summed: at least float32, integers as they are."""
    narrow = jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize < 4
    return np.dtype(np.float32) if narrow else dtype


def look_up(table: Sequence[int], index: Any) -> Any:
    """`table[index]` for a Python or traced index; a constant where all entries are equal."""
    if isinstance(index, int):
        return int(table[index])
    if len(set(table)) == 1:
        return int(table[0])
    return jnp.asarray(np.asarray(table, np.int32))[index]


def _slot(shelf: Shelf, member: Any, at: Row | None) -> tuple:
    slot = look_up(shelf.slots, member)
    return (slot,) if at is None else (at.row, slot)


def _start(array: Any, index: tuple) -> list:
    """Start indices for a slice of `array`, of one type whatever the index is (64-bit mode mixes them)."""
    return [jnp.asarray(i, jnp.int32) for i in (*index, *([0] * (array.ndim - len(index))))]


def _take(stack: Any, index: tuple) -> Any:
    shape = stack.shape[len(index) :]
    return jax.lax.dynamic_slice(stack, _start(stack, index), (1,) * len(index) + shape).reshape(shape)


def _put(stack: Any, index: tuple, leaf: Any, add: bool) -> Any:
    update = leaf.astype(stack.dtype)
    if add:
        update = update + _take(stack, index)
    return jax.lax.dynamic_update_slice(stack, update.reshape((1,) * len(index) + leaf.shape), _start(stack, index))


def _slice_pool(pool: Any, offset: Any, shape: tuple[int, ...]) -> Any:
    size = int(np.prod(shape)) // pool.shape[0]
    return jax.lax.dynamic_slice(pool, _start(pool, (0, offset)), (pool.shape[0], size)).reshape(shape)


def _update_pool(pool: Any, offset: Any, leaf: Any, add: bool) -> Any:
    flat = leaf.reshape(pool.shape[0], -1).astype(pool.dtype)
    if add:
        flat = flat + jax.lax.dynamic_slice(pool, _start(pool, (0, offset)), flat.shape)
    return jax.lax.dynamic_update_slice(pool, flat, _start(pool, (0, offset)))


def build_storage(
    leaves: Sequence[Sequence[jax.ShapeDtypeStruct]],
    cells: Sequence[Sequence[int]],
    stacked: Sequence[bool],
    *,
    num_devices: int,
    specs: Sequence[Sequence[PartitionSpec]] | None = None,
    rows: Sequence[int] | None = None,
    shards: int = 1,
) -> Storage:
    """Gives every layer its place.

    Args:
      leaves: for each kind, the leaves of one of its layers.
      cells: for each kind, the cell of each of its members; cell `s` is on device `s % num_devices`.
      stacked: for each kind, whether its layers lie in a stack or in the pools.
      num_devices: K.
      specs: for each kind and leaf, the mesh axes it is split over.
      rows: for each device, how many rows it needs; None for a storage without rows.
      shards: leading dimension of the pools; used only if it divides every pooled leaf's.
    """
    pooled = [leaf for group, flag in zip(leaves, stacked, strict=True) if not flag for leaf in group]
    if any(not leaf.shape or leaf.shape[0] % shards for leaf in pooled):
        shards = 1
    taken: dict[str, dict[int, int]] = {leaf.dtype.name: {} for leaf in pooled}
    shelves = []
    for c, group in enumerate(leaves):
        slots = [list(cells[c][:i]).count(cell) for i, cell in enumerate(cells[c])]
        offsets = [[0] * len(cells[c]) for _ in group]
        if not stacked[c]:
            for member, cell in enumerate(cells[c]):
                for i, leaf in enumerate(group):
                    end = taken[leaf.dtype.name]
                    offsets[i][member] = end.get(cell, 0)
                    end[cell] = end.get(cell, 0) + int(np.prod(leaf.shape)) // shards
        shelf = Shelf(
            leaves=tuple(group),
            specs=tuple(specs[c]) if specs else (PartitionSpec(),) * len(group),
            stacked=stacked[c],
            cells=tuple(cells[c]),
            slots=tuple(slots),
            offsets=tuple(map(tuple, offsets)),
            num_slots=max(slots, default=-1) + 1,
            rows=max(rows[cell % num_devices] for cell in cells[c]) if rows else 0,
        )
        shelves.append(shelf)
    strides = {
        name: tuple(max([n for cell, n in ends.items() if cell % num_devices == k] or [0]) for k in range(num_devices))
        for name, ends in taken.items()
    }
    counts = rows or (1,) * num_devices
    sizes = {name: max(n * r for n, r in zip(stride, counts, strict=True)) for name, stride in strides.items()}
    return Storage(tuple(shelves), tuple(strides.items()), tuple(sizes.items()), shards)


def choose_stacked(cells: Sequence[int], num_devices: int, split: bool) -> bool:
    """Whether a kind's layers go into a stack rather than into the pools.

    A stack has as many slots on every device as the fullest one needs. It is used if that wastes less than half, or if
    a leaf is split over another mesh axis (a flat pool would lose that).
    """
    per_device = [sum(cell % num_devices == k for cell in cells) for k in range(num_devices)]
    return split or max(per_device) * num_devices <= 2 * len(cells)
