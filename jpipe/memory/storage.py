"""Where every layer's arrays lie on its stage's device.

One program runs on all stages, so an array has the same shape on all of them, while layers differ: their leaves lie in
banks (`jpipe.memory.buffers`), as many of each as the fullest stage needs.

A `Storage` is the address book of them all, plain data. The same class keeps parameters, gradients, state collections,
optimiser state (a *cell* is a stage) and residuals (a *cell* is a virtual stage; each micro-batch in flight has a row).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jpipe.jax_tools.dtypes import is_float
from jpipe.jax_tools.indexing import look_up, take_slice
from jpipe.jax_tools.loops import anchor, each
from jpipe.jax_tools.memory_order import Order
from jpipe.memory.buffers import LeafType, Pool, TypedBank

Buffers = dict[str, Any]
"""`{bank: array}`."""

OWN_BANKS = 1 / 4
"""How much more memory (as a share) banks may take than pools would, so that large leaves aren't flattened."""


@dataclass(frozen=True)
class Shelf:
    """The places of one kind's layers: for each leaf its type and bank, for each member its cell and entries."""

    leaves: tuple[jax.ShapeDtypeStruct, ...]
    specs: tuple[PartitionSpec, ...]
    banks: tuple[str, ...]
    cells: tuple[int, ...]
    entries: tuple[tuple[int, ...], ...]  # [leaves][members]


@dataclass(frozen=True)
class Storage:
    """The places of all kinds' layers.

    Attributes:
      shelves: one a kind.
      named_banks: the banks and their names, in order.
      num_devices: K.
    """

    shelves: tuple[Shelf, ...]
    named_banks: tuple[tuple[str, TypedBank | Pool], ...]
    num_devices: int

    @cached_property
    def banks(self) -> dict[str, TypedBank | Pool]:
        """The banks by name."""
        return dict(self.named_banks)

    def zeros(self, dtype_of: Callable[[Any], Any] = lambda dtype: dtype) -> Buffers:
        """Buffers of one stage, zero; `dtype_of` maps a bank's dtype to that of its buffer."""
        return {name: jnp.zeros(bank.shape, dtype_of(bank.dtype)) for name, bank in self.named_banks}

    def empty(self) -> Buffers:
        """Buffers of one stage in which nothing is written yet, of any values."""
        return {name: jax.lax.empty(bank.shape, bank.dtype) for name, bank in self.named_banks}

    def shapes(self) -> Buffers:
        """`zeros` as ShapeDtypeStructs."""
        return jax.eval_shape(self.zeros)

    def specs(self, prefix: tuple = ()) -> Buffers:
        """PartitionSpecs of the buffers, `prefix` in front."""
        return {name: PartitionSpec(*prefix, *bank.spec) for name, bank in self.named_banks}

    def read(self, buffers: Buffers, c: int, member: Any, at: Row | None = None) -> list[Any]:
        """The leaves of a member of kind `c`."""
        shelf = self.shelves[c]
        return [
            self.banks[name].take(buffers[name], self._entry(shelf, i, member, at), shelf.leaves[i].shape)
            for i, name in enumerate(shelf.banks)
        ]

    def write(self, buffers: Buffers, c: int, member: Any, leaves: Sequence[Any], at: Row | None = None) -> Buffers:
        """Buffers with a member's leaves replaced (in place, in a loop)."""
        shelf, buffers = self.shelves[c], dict(buffers)
        for i, (name, leaf) in enumerate(zip(shelf.banks, leaves, strict=True)):
            buffers[name] = self.banks[name].put(buffers[name], self._entry(shelf, i, member, at), leaf)
        return buffers

    def add(self, buffers: Buffers, c: int, member: Any, leaves: Sequence[Any]) -> Buffers:
        """Buffers with floating-point `leaves` added to a member's, in the buffers' dtype; others replace it."""
        shelf, buffers = self.shelves[c], dict(buffers)
        for i, (name, leaf) in enumerate(zip(shelf.banks, leaves, strict=True)):
            change = self.banks[name].add if is_float(leaf) else self.banks[name].put
            buffers[name] = change(buffers[name], self._entry(shelf, i, member, None), leaf)
        return buffers

    def assemble(self, cell: int, leaves: dict[tuple[int, int], Any], name: str) -> np.ndarray:
        """One bank of one device, on the host.

        Args:
          cell: the device.
          leaves: the leaves of each (kind, member); places of members that are missing hold zeros.
          name: the bank.
        """
        bank = self.banks[name]
        array = np.zeros(bank.shape, bank.dtype)
        for (c, member), values in leaves.items():
            shelf = self.shelves[c]
            for i, place in enumerate(shelf.banks):
                if place == name and shelf.cells[member] == cell:
                    bank.fill(array, shelf.entries[i][member], values[i])
        return array

    def for_each_local(
        self, read: Callable[[int, Any, Any], Any], body: Callable[[int, Any, Any, Any], Any], device: Any, carry: Any
    ) -> Any:
        """`carry = body(home, member, read(home, member, carry), carry)` for all variables of one device.

        To be called inside of a program on the stages. What is made from `read`'s arrays is computed only on devices
        that have such a layer.
        """
        for c, shelf in enumerate(self.shelves):
            if not shelf.cells:
                continue
            per_device = [
                [j for j, s in enumerate(shelf.cells) if s % self.num_devices == k] for k in range(self.num_devices)
            ]
            longest = max(map(len, per_device))
            table = jnp.asarray([row + [0] * (longest - len(row)) for row in per_device], jnp.int32)
            count = look_up([len(row) for row in per_device], device)

            def visit(i: Any, carry: Any, c: int = c, table: Any = table) -> tuple[Any, Any]:
                member = take_slice(table, (device, i), (1, 1)).reshape(())
                (member, values), i = anchor((member, read(c, member, carry)), i)
                return i, body(c, member, values, carry)

            carry = each(0, count, visit, carry)
        return carry

    def _entry(self, shelf: Shelf, leaf: int, member: Any, at: Row | None) -> Any:
        entry = look_up(shelf.entries[leaf], member)
        if at is None:
            return entry
        return entry + at.row * look_up(self.banks[shelf.banks[leaf]].strides, at.device)


class Row(NamedTuple):
    """Which row of a storage with rows: that of one micro-batch in flight on a device (both may be traced)."""

    row: Any
    device: Any


def build_storage(
    leaves: Sequence[Sequence[jax.ShapeDtypeStruct]],
    cells: Sequence[Sequence[int]],
    *,
    num_devices: int,
    specs: Sequence[Sequence[PartitionSpec]] | None = None,
    rows: Sequence[int] | None = None,
    orders: Sequence[Sequence[Order | None]] | None = None,
    apart: bool = False,
) -> Storage:
    """Gives every layer its place.

    Args:
      leaves: for each kind, the leaves of one of its layers.
      cells: for each kind, the cell of each of its members; cell `s` is on device `s % num_devices`.
      num_devices: K.
      specs: for each kind and leaf, the mesh axes it is split over.
      rows: for each device, how many rows it needs (default: one).
      orders: for each kind and leaf, how it lies in memory (default: as the compiler likes).
      apart: each leaf of a kind has a bank of its own, if it has a typed one.
    """
    specs = specs or [[PartitionSpec()] * len(group) for group in leaves]
    orders = orders or [[None] * len(group) for group in leaves]
    types = [
        [
            LeafType(tuple(leaf.shape), leaf.dtype.name, spec, order, (c, i) if apart else None)
            for i, (leaf, spec, order) in enumerate(zip(*group, strict=True))
        ]
        for c, group in enumerate(zip(leaves, specs, orders, strict=True))
    ]
    counts: dict[LeafType, Counter] = {}  # by type, the leaves of each cell
    for group, places in zip(types, cells, strict=True):
        for kind in group if places else ():
            counts.setdefault(kind, Counter()).update(places)
    rows = rows or (1,) * num_devices
    own = _own_banks(counts, num_devices, rows)
    pooled = [kind for kind in counts if kind not in own]
    shelves = _shelve(leaves, specs, types, cells, own)
    banks: dict[str, TypedBank | Pool] = {}
    for kind in sorted(own, key=lambda kind: kind.name):
        strides = _strides(counts[kind], num_devices)
        banks[kind.name] = TypedBank(kind, strides, _size(strides, rows))
    for dtype in sorted({kind.dtype for kind in pooled}):
        strides = _strides(_pooled(counts, [kind for kind in pooled if kind.dtype == dtype]), num_devices)
        banks[dtype] = Pool(jnp.dtype(dtype), strides, _size(strides, rows))
    return Storage(shelves, tuple(banks.items()), num_devices)


def _shelve(
    leaves: Sequence, specs: Sequence, types: Sequence[Sequence[LeafType]], cells: Sequence, own: set
) -> tuple[Shelf, ...]:
    """Places leaves one after the other in their banks, cell by cell."""
    ends: Counter = Counter()
    shelves = []
    for c, group in enumerate(types):
        names = tuple(kind.name if kind in own else kind.dtype for kind in group)
        entries = [[0] * len(cells[c]) for _ in group]
        for member, cell in enumerate(cells[c]):
            for i, kind in enumerate(group):
                entries[i][member] = ends[names[i], cell]
                ends[names[i], cell] += 1 if kind in own else kind.elements
        used = (tuple(leaves[c]), tuple(specs[c]), names) if cells[c] else ((), (), ())
        shelves.append(Shelf(*used, tuple(cells[c]), tuple(map(tuple, entries))))
    return tuple(shelves)


def _own_banks(counts: dict[LeafType, Counter], num_devices: int, rows: Sequence[int]) -> set[LeafType]:
    """The types of leaves that get banks of their own; the others are pooled.

    Those are types that most stages have (less than half of the bank is wasted), types that are split over other mesh
    axes (a pool would lose that), and then, from the largest leaves on, as many as memory permits (`OWN_BANKS`).
    """

    def size(kind: LeafType) -> int:
        return _size(_strides(counts[kind], num_devices), rows)

    def num_bytes(own: set[LeafType]) -> int:
        dtypes: dict[str, list[LeafType]] = {}
        for kind in counts:
            if kind not in own:
                dtypes.setdefault(kind.dtype, []).append(kind)
        pools = [
            jnp.dtype(dtype).itemsize * _size(_strides(_pooled(counts, group), num_devices), rows)
            for dtype, group in dtypes.items()
        ]
        return sum(size(kind) * kind.elements * kind.itemsize for kind in own) + sum(pools)

    def common(kind: LeafType) -> bool:
        strides = _strides(counts[kind], num_devices)
        return size(kind) * num_devices < 2 * sum(n * r for n, r in zip(strides, rows, strict=True))

    own = {kind for kind in counts if any(kind.spec) or common(kind)}
    most = (1 + OWN_BANKS) * num_bytes(own)
    for kind in sorted(set(counts) - own, key=lambda kind: (-kind.elements * kind.itemsize, kind.name)):
        if num_bytes(own | {kind}) > most:
            break
        own.add(kind)
    return own


def _pooled(counts: dict[LeafType, Counter], kinds: Sequence[LeafType]) -> Counter:
    """Elements that leaves of these types take, by cell."""
    total: Counter = Counter()
    for kind in kinds:
        total.update({cell: n * kind.elements for cell, n in counts[kind].items()})
    return total


def _strides(counts: Counter, num_devices: int) -> tuple[int, ...]:
    """What a row takes on each device: as much as the fullest of its cells."""
    return tuple(max([n for cell, n in counts.items() if cell % num_devices == k] or [0]) for k in range(num_devices))


def _size(strides: Sequence[int], rows: Sequence[int]) -> int:
    """What the device with the most needs."""
    return max(n * r for n, r in zip(strides, rows, strict=True))
