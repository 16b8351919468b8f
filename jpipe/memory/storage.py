"""`Storage`: says where each leaf of each layer lies in the buffers of its stage, and reads and writes it.

One program runs on all stages, so an array has the same shape on all of them, while layers differ: their leaves lie in
buffers (`jpipe.memory.buffers`) that are as large as the fullest stage needs.

What is stored together is a *record*: one layer's parameters, one layer's residuals for a micro-batch, the activation
at one boundary. Records with the same leaves are of one *record type*. A `Storage` says where each leaf of each record
lies, as plain data. The same class keeps parameters, gradients, state, an optimiser's state, residuals, and what
crosses boundaries (`jpipe.memory.boundaries`). Five equal layers and two ends, in two stages:

    record type 0: w [4, 4], b [4]      records 0 1 2, on device 0; 3 4, on device 1
    record type 1: e [9, 8]             record 0, on device 0
    record type 2: h [8, 7]             record 0, on device 1

    buffer                              device 0           device 1
    float32_4x4  [3, 4, 4]  stacked     w0  w1  w2         w3  w4  --       an entry is a leaf: w4 has entry 1
    float32_4    [3, 4]     stacked     b0  b1  b2         b3  b4  --
    float32      [72]       flat        eeeeeeeeee         hhhhhhh---       an entry is an element: e and h have entry 0

The kernels of a run of layers are one array that a loop slices; leaves that few stages have share a flat one. Records
on several devices may have the same entry, since each device has arrays of its own. Places marked `-` are of no record:
they hold zeros, or whatever lies there.

A buffer that holds many micro-batches in flight repeats this, a *row* for each: row r begins at entry `r * stride`,
where a device's stride is what its own leaves need, so that the device with few leaves may have more rows.

    float32_4x4, rows = (1, 2)      w0  w1  w2  --      w3  w4 | w3' w4'        strides (3, 2), size 4

A leaf that is split over `stage` too lies on all devices, a part of it on each; it has its entry for itself. A *device*
is an index k along `stage` here. Shapes are those of the whole stage; where other mesh axes split a buffer, `read`,
`write` and `add` work on a device's part of it and give its part of each leaf.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jpipe.arrays.dtypes import is_float
from jpipe.arrays.indexing import Index, look_up, take_slice
from jpipe.arrays.loops import each
from jpipe.memory.buffers import Buffer, FlatBuffer, LeafType, StackedBuffer, largest_first
from jpipe.memory.memory_order import Order
from jpipe.mesh.specs import on_all_stages
from jpipe.types import Leaf as Leaf

Buffers = dict[str, jax.Array]
"""The arrays of one device, by the name of the buffer."""
Carry = TypeVar("Carry")
Read = TypeVar("Read")

WASTE = 1 / 4
"""How much memory stacking may cost, as a share. Types of leaves whose stacked buffer is used for more than half, or
that mesh axes split, are always stacked. Others are, from the largest on, while all buffers take at most (1 + WASTE)
times what they take with these flat."""


class Row(NamedTuple):
    """A row, for one micro-batch in flight: row r of a buffer begins at entry `r * strides[device]`.

    Attributes:
      row: its index.
      device: the index along `stage`.
    """

    row: Index
    device: Index


@dataclass(frozen=True)
class RecordType:
    """Records with the same leaves, and where they lie.

    Attributes:
      leaves: the shapes of a record's leaves.
      specs: for each leaf, the mesh axes that it is split over.
      buffers: for each leaf, the name of its buffer.
      devices: for each record, the device that has it.
      entries: `[leaves][records]`, where each leaf begins in its buffer, in row 0: the index of a leaf (stacked) or of
        its first element (flat). Records of different owners may have the same entry.
    """

    leaves: tuple[jax.ShapeDtypeStruct, ...]
    specs: tuple[PartitionSpec, ...]
    buffers: tuple[str, ...]
    devices: tuple[int, ...]
    entries: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Storage:
    """The places of all records.

    Attributes:
      record_types: in the order in which they were given to `build_storage`.
      named_buffers: the buffers and their names, in order.
      num_devices: K, the devices along `stage`.
    """

    record_types: tuple[RecordType, ...]
    named_buffers: tuple[tuple[str, Buffer], ...]
    num_devices: int

    @cached_property
    def buffers(self) -> dict[str, Buffer]:
        """The buffers by name."""
        return dict(self.named_buffers)

    def empty(self) -> Buffers:
        """One stage's arrays, of any values: nothing is written to memory."""
        return {name: jax.lax.empty(buffer.shape, buffer.dtype) for name, buffer in self.named_buffers}

    def read(self, arrays: Buffers, record_type: int, record: Index, at: Row | None = None) -> list[Leaf]:
        """The leaves of a record; on a device that doesn't have it, whatever lies there.

        Args:
          arrays: of one device.
          record_type: the index of its type.
          record: its index among the records of the type; may be traced.
          at: its row, in a storage with rows.
        """
        count = len(self.record_types[record_type].leaves)
        return [self.read_leaf(arrays, record_type, i, record, at) for i in range(count)]

    def read_leaf(self, arrays: Buffers, record_type: int, leaf: int, record: Index, at: Row | None = None) -> Leaf:
        """One leaf of a record, as `read`."""
        known = self.record_types[record_type]
        name, entry, shape = known.buffers[leaf], self._entry(known, leaf, record, at), known.leaves[leaf].shape
        found = self.buffers[name].take(arrays[name], entry, shape)
        return found.transpose(np.argsort(self._turn(known, leaf)))

    def write(
        self, arrays: Buffers, record_type: int, record: Index, leaves: Sequence[Leaf], at: Row | None = None
    ) -> Buffers:
        """The arrays with a record's leaves replaced, cast to the arrays' dtype; in a loop this happens in place.

        To be called on the device that has the record: on another it overwrites what lies there.
        """
        for i, leaf in enumerate(leaves):
            arrays = self.write_leaf(arrays, record_type, i, record, leaf, at)
        return arrays

    def write_leaf(
        self, arrays: Buffers, record_type: int, leaf: int, record: Index, value: Leaf, at: Row | None = None
    ) -> Buffers:
        """The arrays with one leaf of a record replaced, as `write`."""
        known = self.record_types[record_type]
        name, entry = known.buffers[leaf], self._entry(known, leaf, record, at)
        return arrays | {name: self.buffers[name].put(arrays[name], entry, value.transpose(self._turn(known, leaf)))}

    def add(self, arrays: Buffers, record_type: int, record: Index, leaves: Sequence[Leaf | None]) -> Buffers:
        """Adds floating-point `leaves` to the record's, in the arrays' dtype; writes others. None adds none."""
        known, arrays = self.record_types[record_type], dict(arrays)
        for i, (name, leaf) in enumerate(zip(known.buffers, leaves, strict=True)):
            if leaf is not None:
                change = self.buffers[name].add if is_float(leaf) else self.buffers[name].put
                lies = leaf.transpose(self._turn(known, i))
                arrays[name] = change(arrays[name], self._entry(known, i, record, None), lies)
        return arrays

    def on_host(self, name: str, device: int | None, leaves: Mapping[tuple[int, int], Sequence[Leaf]]) -> np.ndarray:
        """One buffer of one device, `[size, ...]`, in NumPy.

        Args:
          name: the buffer.
          device: its index along `stage`; None for a buffer that is split over it, whole.
          leaves: the leaves of each (record type, record); places of records that are missing hold zeros.
        """
        array = np.zeros(self.buffers[name].shape, self.buffers[name].dtype)
        flat, entry_size = array.reshape(-1), array[:1].size
        for (record_type, record), values in leaves.items():
            known = self.record_types[record_type]
            for i, (place, entries, leaf) in enumerate(zip(known.buffers, known.entries, values, strict=True)):
                if place == name and device in (None, known.devices[record]):
                    own = np.ravel(np.transpose(np.asarray(leaf), self._turn(known, i)))
                    flat[entries[record] * entry_size :][: own.size] = own
        return array

    def for_each_local(
        self,
        read: Callable[[int, jax.Array, Carry], Read],
        body: Callable[[int, jax.Array, Read, Carry], Carry],
        device: Index,
        carry: Carry,
        *,
        without: Collection[int] = (),
    ) -> Carry:
        """`carry = body(type, record, read(type, record, carry), carry)` for all records of one device.

        Those of the types `without` are left out. To be called inside of a program on the stages. `record` is traced,
        `read` may return any pytree. The body runs for records that this device has, and for no others: device k takes
        the first `count[k]` entries of row k of a table `[K, longest]`, which for type 0 of the picture above is
        [[0, 1, 2], [3, 4, 0]], with the counts (3, 2).
        What `read` gives is tied to the trip before the body gets it (`jpipe.arrays.loops`): else a compiler may
        compute the body ahead of the loop, on devices too that have no such record.
        """
        for t, known in enumerate(self.record_types):
            if t in without:
                continue
            own = [[j for j, owner in enumerate(known.devices) if owner == k] for k in range(self.num_devices)]
            longest = max(map(len, own))
            table = jnp.asarray([row + [0] * (longest - len(row)) for row in own], jnp.int32)
            count = look_up([len(row) for row in own], device)

            def reads(
                i: Index, _: tuple[()], carry: Carry, t: int = t, table: jax.Array = table
            ) -> tuple[jax.Array, Read]:
                record = take_slice(table, (device, i), (1, 1)).reshape(())
                return record, read(t, record, carry)

            def visit(_: Index, found: tuple[jax.Array, Read], carry: Carry, t: int = t) -> Carry:
                return body(t, *found, carry)

            carry = each(0, count, (), visit, carry, reads=reads)
        return carry

    def _turn(self, known: RecordType, leaf: int) -> Order:
        """The order in which a leaf's dimensions lie in its buffer."""
        shape, buffer = known.leaves[leaf].shape, self.buffers[known.buffers[leaf]]
        turned = isinstance(buffer, StackedBuffer) and buffer.type.shape != shape
        return largest_first(shape) if turned else tuple(range(len(shape)))

    def _entry(self, known: RecordType, leaf: int, record: Index, at: Row | None) -> Index:
        entry = look_up(known.entries[leaf], record)
        if at is None:
            return entry
        return entry + at.row * look_up(self.buffers[known.buffers[leaf]].strides, at.device)


# --- building ---------------------------------------------------------------------------------------------------------


def build_storage(
    leaves: Sequence[Sequence[jax.ShapeDtypeStruct]],
    owners: Sequence[Sequence[int]],
    *,
    device_of: Sequence[int],
    specs: Sequence[Sequence[PartitionSpec]] | None = None,
    rows: Sequence[int] | None = None,
    orders: Sequence[Sequence[Order | None]] | None = None,
    tags: Sequence[Sequence[tuple[int, ...]]] | None = None,
    waste: float = WASTE,
) -> Storage:
    """Gives every record its place.

    Args:
      leaves: for each record type, the leaves of a record.
      owners: for each record type, who owns each of its records: a stage, a virtual stage, a boundary. Records of one
        owner lie side by side. Owners on one device use the same places: a row holds one of them at a time, as it holds
        the residuals of one of a stage's virtual stages.
      device_of: for each owner, the index of its device along `stage`; the largest is K - 1.
      specs: for each record type and leaf, the mesh axes it is split over.
      rows: for each device, how many rows it needs (default: one).
      orders: for each record type and leaf, how it lies in memory (default: as the compiler likes; and leaves that few
        owners have lie turned where they are of one type then).
      tags: for each record type and leaf, what else tells its stacked buffer from others (`each_apart`).
      waste: how much more memory stacked buffers may take than flat ones would, as a share; `inf` if none may be flat.
    """
    num_devices = max(device_of, default=0) + 1
    specs = specs or [[PartitionSpec()] * len(group) for group in leaves]
    nothing = [[None] * len(record) for record in leaves]
    types = [
        [LeafType(tuple(a.shape), a.dtype.name, spec, order, tag) for a, spec, order, tag in zip(*group, strict=True)]
        for group in zip(leaves, specs, orders or nothing, tags or nothing, strict=True)
    ]
    used = {leaf_type for group in types for leaf_type in group}
    assert len({leaf_type.name for leaf_type in used}) == len(used), "two types of leaves would share a buffer"
    needs = _Needs(_counts(types, owners, len(device_of)), device_of, rows or (1,) * num_devices)
    if orders is None:
        turns = needs.turns()
        types = [[turns.get(leaf_type, leaf_type) for leaf_type in group] for group in types]
        needs = replace(needs, counts=_counts(types, owners, len(device_of)))
    stacked = needs.stacked(waste)
    buffers: dict[str, Buffer] = {
        leaf_type.name: StackedBuffer(leaf_type, needs.strides(count := needs.counts[leaf_type]), needs.size(count))
        for leaf_type in sorted(stacked, key=lambda leaf_type: leaf_type.name)
    }
    for dtype, count in sorted(needs.elements(stacked).items()):
        buffers[dtype] = FlatBuffer(jnp.dtype(dtype), needs.strides(count), needs.size(count))

    # Each owner's leaves are put down one after the other, as if it had its device to itself.
    ends: Counter[tuple[str, int | None]] = Counter()  # by (buffer, owner), the first entry that is free
    record_types = []
    for group, spec, kinds, own in zip(leaves, specs, types, owners, strict=True):
        names = tuple(kind.name if kind in stacked else kind.dtype for kind in kinds)
        entries: list[list[int]] = [[] for _ in kinds]
        for owner in own:
            for name, kind, found in zip(names, kinds, entries, strict=True):
                place = name, None if on_all_stages(kind.spec) else owner
                found.append(ends[place])
                ends[place] += 1 if kind in stacked else kind.elements
        devices = tuple(device_of[k] for k in own)
        record_types.append(RecordType(tuple(group), tuple(spec), names, devices, tuple(map(tuple, entries))))
    return Storage(tuple(record_types), tuple(buffers.items()), num_devices)


def _counts(
    types: Sequence[Sequence[LeafType]], owners: Sequence[Sequence[int]], num_owners: int
) -> dict[LeafType, np.ndarray]:
    """For each type of leaf `[owners]`, how many each owner has; of one that lies on all stages, all of them."""
    counts: dict[LeafType, np.ndarray] = {}
    for group, own in zip(types, owners, strict=True):
        for leaf_type in group:
            everywhere = on_all_stages(leaf_type.spec)
            more = np.full(num_owners, len(own)) if everywhere else np.bincount(own, minlength=num_owners)
            counts[leaf_type] = counts.get(leaf_type, 0) + more
    return counts


def each_apart(leaves: Sequence[Sequence[Leaf]]) -> list[list[tuple[int, ...]]]:
    """Tags for `build_storage`, by which no two leaves of a record, nor of two types, share a stacked buffer.

    For `unroll`, where each leaf is to be an array of its own. Leaves that lie flat still share one.
    """
    return [[(t, i) for i in range(len(group))] for t, group in enumerate(leaves)]


@dataclass(frozen=True)
class _Needs:
    """The leaves that every owner has to store, which decide how large a buffer is.

    A row holds one owner's leaves at a time, and any of the device's owners may come; one shape has to do for all
    devices. With four owners, virtual stages 0 and 2 on device 0 and 1 and 3 on device 1, for one type of leaf:

        counts by owner    3  1  2  2
        device_of          0  1  0  1
        strides            max(3, 2) = 3 on device 0, max(1, 2) = 2 on device 1
        rows               2 and 4
        size               max(3 * 2, 2 * 4) = 8 leaves

    Attributes:
      counts: for each type of leaf `[owners]`, how many of them each owner has.
      device_of: for each owner, its device.
      rows: for each device, how many rows it needs.
    """

    counts: dict[LeafType, np.ndarray]
    device_of: Sequence[int]
    rows: Sequence[int]

    def elements(self, stacked: Collection[LeafType]) -> dict[str, np.ndarray]:
        """The elements of all leaves that lie flat, by dtype, `[owners]`."""
        total: dict[str, np.ndarray] = {}
        for leaf_type, counts in self.counts.items():
            if leaf_type not in stacked:
                total[leaf_type.dtype] = total.get(leaf_type.dtype, 0) + counts * leaf_type.elements
        return total

    def strides(self, counts: np.ndarray) -> tuple[int, ...]:
        """`[K]`: what a row takes on each device, in leaves or elements as `counts`: what its fullest owner needs."""
        most = np.zeros(len(self.rows), counts.dtype)
        np.maximum.at(most, np.asarray(self.device_of), counts)
        return tuple(most.tolist())

    def size(self, counts: np.ndarray) -> int:
        """The size that the device with the most leaves needs for all of its rows."""
        return max(n * r for n, r in zip(self.strides(counts), self.rows, strict=True))

    def num_bytes(self, stacked: Collection[LeafType]) -> int:
        """The bytes of all buffers, if leaves of these types are stacked and others flat."""
        flat = sum(jnp.dtype(dtype).itemsize * self.size(count) for dtype, count in self.elements(stacked).items())
        return flat + sum(self.size(self.counts[leaf_type]) * leaf_type.num_bytes for leaf_type in stacked)

    def is_common(self, leaf_type: LeafType) -> bool:
        """Whether owners use more than half of a stacked buffer of this type, on the average."""
        counts = self.counts[leaf_type]
        used = sum(n * self.rows[device] for n, device in zip(counts.tolist(), self.device_of, strict=True))
        return self.size(counts) * len(self.device_of) < 2 * used

    def turns(self) -> dict[LeafType, LeafType]:
        """The types that lie turned, so that several are of one type: where that takes less, or on all stages."""
        alike: dict[LeafType, list[LeafType]] = {}
        for known in self.counts:
            if on_all_stages(known.spec) or not self.is_common(known):
                alike.setdefault(known.turned, []).append(known)
        size = lambda own: self.size(np.sum([self.counts[known] for known in own], axis=0))
        gains = lambda own: on_all_stages(own[0].spec) or size(own) < sum(size([known]) for known in own)
        return {known: turned for turned, own in alike.items() if len(own) > 1 and gains(own) for known in own}

    def stacked(self, waste: float) -> set[LeafType]:
        """The types of leaves that are stacked; the others lie flat.

        Those are types whose stacked buffer is used for the larger part (`is_common`), types that are split over other
        mesh axes (a flat buffer would lose that), and then, from the largest leaves on, as many as `waste` permits.
        """
        chosen = {leaf_type for leaf_type in self.counts if any(leaf_type.spec) or self.is_common(leaf_type)}
        limit = np.inf if waste == np.inf else (1 + waste) * self.num_bytes(chosen)
        for leaf_type in sorted(set(self.counts) - chosen, key=lambda known: (-known.num_bytes, known.name)):
            if self.num_bytes(chosen | {leaf_type}) > limit:
                break
            chosen.add(leaf_type)
        return chosen
