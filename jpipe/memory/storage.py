"""`Storage`: says where each leaf of each layer lies in the buffers of its stage, and reads and writes it.

One program runs on all stages, so an array has the same shape on all of them. But layers differ. So their leaves lie in
buffers (`jpipe.memory.buffers`), and every buffer is as large as the fullest stage needs.

Leaves that are stored together are a *record*: one layer's parameters, or one layer's residuals for a micro-batch, or
the activation at one boundary. Records with equal leaves are of one *record type*. The *owner* of a record decides
which records lie side by side: a stage, a virtual stage, a boundary. A *device* is an index k along `stage` here.
`build_storage` gives each record its place, as plain data. The same class keeps parameters, gradients, state, an
optimiser's state, residuals, and the values that cross boundaries (`Boundaries`).

Five equal layers and two ends, in two stages:

    record type 0: w [4, 4], b [4]      records 0 1 2, on device 0; 3 4, on device 1
    record type 1: e [9, 8]             record 0, on device 0
    record type 2: h [8, 7]             record 0, on device 1

    buffer                              device 0           device 1
    float32_4x4  [3, 4, 4]  stacked     w0  w1  w2         w3  w4  --       an entry is a leaf: w4 has entry 1
    float32_4    [3, 4]     stacked     b0  b1  b2         b3  b4  --
    float32      [72]       flat        eeeeeeeeee         hhhhhhh---       an entry is an element: e and h have entry 0

The kernels of a run of layers are one array that a loop slices. Leaves that few stages have share a flat array. Records
on several devices may have the same entry, since each device has arrays of its own. Places marked `-` belong to no
record. They hold zeros, or whatever lies there.

A buffer that holds many micro-batches in flight repeats this, a *row* for each of them. Row r begins at entry
`r * stride`. A device's stride is as large as its own leaves need, so a device with few leaves may have more rows.

    float32_4x4, rows = (1, 2)      w0  w1  w2  --      w3  w4 | w3' w4'        strides (3, 2), size 4

A leaf that is split over `stage` too lies on all devices, a part of it on each; its entry is its own on all of them.
Shapes are those of the whole stage. Where other mesh axes split a buffer, `read`, `write` and `add` work on a device's
part of it, and with a device's parts of leaves.
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

from jpipe.jax.in_place import Carry, Index, Where, chosen, each, look_up, put_slice, take_slice
from jpipe.jax.trees import bytes_of
from jpipe.memory.buffers import Buffer, FlatBuffer, LeafType, Order, StackedBuffer, largest_first
from jpipe.partitioner.axes import on_all_stages
from jpipe.types import Leaf

Buffers = dict[str, jax.Array]
"""The arrays of one device, by the name of the buffer."""
Read = TypeVar("Read")

WASTE = 1 / 4
"""How much memory stacking may cost, as a share. A type of leaves is always stacked if its stacked buffer is used for
more than half, or if mesh axes split it. Other types are stacked, from the largest on, while all buffers take at most
(1 + WASTE) times the bytes that they would take if all these others lay flat."""


class Row(NamedTuple):
    """A row, for one micro-batch in flight: row r of a buffer begins at entry `r * strides[device]`.

    Attributes:
      row: its index.
      device: the index along `stage`.
      stays: of rows that go to the host (`jpipe.planning.kept`): 1 if this one has stayed, else 0; None if all have
        left, or none ever does.
    """

    row: Index
    device: Index
    stays: Index | None = None


@dataclass(frozen=True)
class RecordType:
    """Records with the same leaves, and where they lie.

    Attributes:
      leaves: `[leaves]`, the shapes of a record's leaves.
      specs: `[leaves]`, the mesh axes that each leaf is split over.
      buffers: `[leaves]`, the name of each leaf's buffer.
      devices: `[records]`, the device that has each record.
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

    Fields are hashable: a storage is part of a `Layout`, which JAX hashes and compares.

    In the methods, `t` is the index of a record type, and `record` the index of a record among those of its type, which
    may be traced. `arrays` are the buffers of one device; `at` is the record's row, in a storage with rows.

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

    def read(self, arrays: Buffers, t: int, record: Index, at: Row | None = None) -> list[Leaf]:
        """Reads the leaves of a record; on a device that doesn't have it, whatever lies there."""
        return [self.read_leaf(arrays, t, leaf, record, at) for leaf in range(len(self.record_types[t].leaves))]

    def read_leaf(self, arrays: Buffers, t: int, leaf: int, record: Index, at: Row | None = None) -> Leaf:
        """Reads the leaf of this index, as `read`."""
        name, entry, order = self._place(t, leaf, record, at)
        value = self.buffers[name].take(arrays[name], entry, self.record_types[t].leaves[leaf].shape)
        return value.transpose(np.argsort(order))

    def write(
        self, arrays: Buffers, t: int, record: Index, leaves: Sequence[Leaf], at: Row | None = None, where: Where = None
    ) -> Buffers:
        """The arrays with a record's leaves replaced, cast to the arrays' dtype; in a loop this happens in place.

        It is called on the device that has the record: on another it overwrites what lies there, unless `where` is
        False.
        """
        leaves, arrays = chosen(where, leaves, lambda arrays: self.read(arrays, t, record, at), arrays)
        for leaf, value in enumerate(leaves):
            arrays = self.write_leaf(arrays, t, leaf, record, value, at)
        return arrays

    def write_leaf(
        self, arrays: Buffers, t: int, leaf: int, record: Index, value: Leaf, at: Row | None = None
    ) -> Buffers:
        """The arrays with one leaf of a record replaced, as `write`."""
        name, entry, order = self._place(t, leaf, record, at)
        return arrays | {name: self.buffers[name].put(arrays[name], entry, value.transpose(order))}

    def add(
        self, arrays: Buffers, t: int, record: Index, leaves: Sequence[Leaf | None], *, on_gpu: bool = False
    ) -> Buffers:
        """The arrays with leaves added to the record's, in the arrays' dtype; None leaves the record's as it is.

        With `on_gpu` it says the same in the words of which a GPU's compiler makes one kernel a leaf.
        """
        arrays = dict(arrays)
        for leaf, value in enumerate(leaves):
            if value is not None:
                name, entry, order = self._place(t, leaf, record, once=on_gpu)
                add = self.buffers[name].add_to_slice if on_gpu else self.buffers[name].add
                arrays[name] = add(arrays[name], entry, value.transpose(order))
        return arrays

    def in_numpy(self, name: str, device: int | None, leaves: Mapping[tuple[int, int], Sequence[Leaf]]) -> np.ndarray:
        """Makes one buffer of one device, `[size, ...]`, in NumPy.

        Args:
          name: the buffer.
          device: its index along `stage`; None for a buffer that is split over it, whole.
          leaves: the leaves of each (record type, record); places of records that are missing hold zeros.
        """
        array = np.zeros(self.buffers[name].shape, self.buffers[name].dtype)
        flat, entry_size = array.reshape(-1), array[:1].size
        for (t, record), values in leaves.items():
            if device in (None, self.record_types[t].devices[record]):
                for leaf, value in enumerate(values):
                    buffer_name, entry, order = self._place(t, leaf, record)
                    if buffer_name == name:
                        elements = np.ravel(np.transpose(np.asarray(value), order))
                        flat[entry * entry_size :][: elements.size] = elements
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
        """`carry = body(t, record, read(t, record, carry), carry)` for all records of one device.

        It is called in a program on the stages. `record` is traced, `read` may return any pytree. The body runs for
        records that this device has, and for no others: device k takes the first `count[k]` entries of line k of a
        table `[K, longest]`. For record type 0 of the picture above the table is [[0, 1, 2], [3, 4, 0]], and the counts
        are (3, 2). What `read` gives is tied to the trip before the body gets it (`jpipe.jax.in_place`). Else a
        compiler may compute the body ahead of the loop, also on devices that have no such record.

        A record with leaves on all stages is visited on its `RecordType.devices` alone; name its type in `without` if
        all stages have to work on it.

        Args:
          read, body: functions of one record, as above.
          device: the index of this device.
          carry: any pytree of arrays.
          without: the record types that are left out.
        """

        def for_each_of(t: int, carry: Carry) -> Carry:
            devices = self.record_types[t].devices
            lines = [[j for j, owner in enumerate(devices) if owner == k] for k in range(self.num_devices)]
            longest = max(map(len, lines))
            table = jnp.asarray([line + [0] * (longest - len(line)) for line in lines], jnp.int32)

            def reads(i: Index, _: tuple[()], carry: Carry) -> tuple[jax.Array, Read]:
                record = take_slice(table, (device, i), (1, 1)).reshape(())
                return record, read(t, record, carry)

            visit = lambda _, read, carry: body(t, read[0], read[1], carry)
            return each(0, look_up([len(line) for line in lines], device), (), visit, carry, reads=reads)

        for t in range(len(self.record_types)):
            carry = carry if t in without else for_each_of(t, carry)
        return carry

    def _place(
        self, t: int, leaf: int, record: Index, at: Row | None = None, *, once: bool = False
    ) -> tuple[str, Index, Order]:
        """Finds where a leaf of a record lies: `(buffer's name, entry, order of the leaf's dimensions there)`."""
        record_type = self.record_types[t]
        name, shape = record_type.buffers[leaf], record_type.leaves[leaf].shape
        buffer, entry = self.buffers[name], look_up(record_type.entries[leaf], record, once=once)
        if at is not None:
            entry = entry + at.row * look_up(buffer.strides, at.device)
        is_turned = isinstance(buffer, StackedBuffer) and buffer.type.shape != shape
        return name, entry, largest_first(shape) if is_turned else tuple(range(len(shape)))


# --- building ---------------------------------------------------------------------------------------------------------


def build_storage(
    leaves: Sequence[Sequence[jax.ShapeDtypeStruct]],
    owners: Sequence[Sequence[int]],
    *,
    device_of: Sequence[int],
    specs: Sequence[Sequence[PartitionSpec]] | None = None,
    rows: Sequence[int] | None = None,
    orders: Sequence[Sequence[Order | None]] | None = None,
    labels: Sequence[Sequence[tuple[int, ...]]] | None = None,
    waste: float | None = WASTE,
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
      orders: for each record type and leaf, the order of its dimensions in memory. By default the compiler chooses, and
        leaves that few owners have lie turned if several types become one then.
      labels: for each record type and leaf, numbers that tell its stacked buffer from others.
      waste: how much more memory stacked buffers may take than flat ones would, as a share; None if none may be flat.
    """
    num_devices = max(device_of, default=0) + 1
    specs = specs or [[PartitionSpec()] * len(record) for record in leaves]
    nothing = [[None] * len(record) for record in leaves]
    leaf_type_of = lambda leaf, *rest: LeafType(tuple(leaf.shape), leaf.dtype.name, *rest)
    records = zip(leaves, specs, orders or nothing, labels or nothing, strict=True)
    types = [[leaf_type_of(*fields) for fields in zip(*record, strict=True)] for record in records]
    needs = _Needs(_counts(types, owners, len(device_of)), device_of, rows or (1,) * num_devices)
    if orders is None:
        turned = needs.turned()
        types = [[turned.get(leaf_type, leaf_type) for leaf_type in record] for record in types]
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
    for record, record_specs, leaf_types, owner_of in zip(leaves, specs, types, owners, strict=True):
        names = tuple(leaf_type.name if leaf_type in stacked else leaf_type.dtype for leaf_type in leaf_types)
        entries: list[list[int]] = [[] for _ in leaf_types]
        for owner in owner_of:
            for name, leaf_type, begins in zip(names, leaf_types, entries, strict=True):
                place = name, None if on_all_stages(leaf_type.spec) else owner
                begins.append(ends[place])
                ends[place] += 1 if leaf_type in stacked else leaf_type.elements
        devices = tuple(device_of[owner] for owner in owner_of)
        record_types.append(RecordType(tuple(record), tuple(record_specs), names, devices, tuple(map(tuple, entries))))
    return Storage(tuple(record_types), tuple(buffers.items()), num_devices)


def _counts(
    types: Sequence[Sequence[LeafType]], owners: Sequence[Sequence[int]], num_owners: int
) -> dict[LeafType, np.ndarray]:
    """Counts each type of leaf, `[owners]`: how many an owner has; of a type that lies on all stages, all of them."""
    counts: dict[LeafType, np.ndarray] = {}
    for leaf_types, owner_of in zip(types, owners, strict=True):
        by_owner = np.bincount(owner_of, minlength=num_owners)
        for leaf_type in leaf_types:
            counts.setdefault(leaf_type, np.zeros(num_owners, int))
            counts[leaf_type] += len(owner_of) if on_all_stages(leaf_type.spec) else by_owner
    assert len({leaf_type.name for leaf_type in counts}) == len(counts), "two types of leaves share a buffer"
    return counts


@dataclass(frozen=True)
class _Needs:
    """The leaves that every owner has to store. They decide how large a buffer is.

    A row holds the leaves of one owner at a time, which may be any of the device's owners. A buffer has the same shape
    on all devices. With four owners, virtual stages 0 and 2 on device 0 and 1 and 3 on device 1, for one type of leaf:

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
        """`[K]`, the leaves or elements (as in `counts`) of a row on each device: as many as its fullest owner has."""
        most = np.zeros(len(self.rows), counts.dtype)
        np.maximum.at(most, np.asarray(self.device_of), counts)
        return tuple(most.tolist())

    def size(self, counts: np.ndarray) -> int:
        """The size that the device with the most leaves needs for all of its rows."""
        return max(n * r for n, r in zip(self.strides(counts), self.rows, strict=True))

    def num_bytes(self, stacked: Collection[LeafType]) -> int:
        """The bytes of all buffers if leaves of these types are stacked and others lie flat."""
        flat = sum(jnp.dtype(dtype).itemsize * self.size(count) for dtype, count in self.elements(stacked).items())
        return flat + sum(self.size(self.counts[leaf_type]) * leaf_type.num_bytes for leaf_type in stacked)

    def is_common(self, leaf_type: LeafType) -> bool:
        """Whether owners use more than half of a stacked buffer of this type, on the average."""
        counts = self.counts[leaf_type]
        used = sum(n * self.rows[device] for n, device in zip(counts.tolist(), self.device_of, strict=True))
        return self.size(counts) * len(self.device_of) < 2 * used

    def turned(self) -> dict[LeafType, LeafType]:
        """The types whose leaves lie turned so that several types become one, each with that one.

        Leaves turn if they lie on all stages, or if one buffer for all of them is smaller than a buffer for each type.
        """
        alike: dict[LeafType, list[LeafType]] = {}
        for leaf_type in self.counts:
            if on_all_stages(leaf_type.spec) or not self.is_common(leaf_type):
                alike.setdefault(leaf_type.turned, []).append(leaf_type)
        turned: dict[LeafType, LeafType] = {}
        for one, several in alike.items():
            together = self.size(np.sum([self.counts[leaf_type] for leaf_type in several], axis=0))
            separate = sum(self.size(self.counts[leaf_type]) for leaf_type in several)
            if len(several) > 1 and (on_all_stages(several[0].spec) or together < separate):
                turned |= dict.fromkeys(several, one)
        return turned

    def stacked(self, waste: float | None) -> set[LeafType]:
        """Chooses the types of leaves that are stacked; the others lie flat.

        Stacked are types whose stacked buffer is used for the larger part (`is_common`), and types that are split over
        other mesh axes, since a flat buffer can't be. More follow while `waste` permits, the largest leaves first.
        """
        chosen = {leaf_type for leaf_type in self.counts if any(leaf_type.spec) or self.is_common(leaf_type)}
        limit = np.inf if waste is None else (1 + waste) * self.num_bytes(chosen)
        for leaf_type in sorted(set(self.counts) - chosen, key=lambda kind: (-kind.num_bytes, kind.name)):
            if self.num_bytes(chosen | {leaf_type}) > limit:
                break
            chosen.add(leaf_type)
        return chosen


# --- the values that travel from layer to layer and from stage to stage -----------------------------------------------


WASTE_AT_BOUNDARIES = 1.0
"""How much more memory (as a share) stacked leaves may take than flat ones would: a device holds one set of these
buffers, and a copy of the part that crosses for each micro-batch that waits. What stacking saves is the copy that
flattening a leaf makes on an accelerator."""


@dataclass(frozen=True)
class Boundaries(Storage):
    """The common format of the activations (or of their cotangents) at all boundaries of a model.

    Boundaries have leaves of their own shapes, while one program passes them on in all stages. So the activation at any
    boundary is a record of one storage, and a device holds one of these records at a time. Leaves lie row-major in it,
    so that no two loops disagree on their layout; several of one type have buffers of their own, so that one can be
    read while another is written. Boundaries with equal leaves have equal places, so that a loop over a group of layers
    may use the first one's boundary for all. Only the first entries of a buffer cross between stages: as many as the
    largest activation at any cut needs.

    Record type i is boundary i (what layer i gives and layer i + 1 takes), with a single record; for cotangents, of the
    floating-point leaves only.

    Attributes:
      crossing_sizes: for each buffer that crosses between stages, how many of its entries do, from the first on: leaves
        of a stacked buffer, elements of a flat one.
    """

    crossing_sizes: tuple[tuple[str, int], ...]

    def crossing(self, buffers: Buffers) -> Buffers:
        """The part of the buffers that crosses from stage to stage."""
        whole = lambda name, size: buffers[name].shape[0] == size
        return {n: buffers[n] if whole(n, size) else buffers[n][:size] for n, size in self.crossing_sizes}

    @property
    def crossing_bytes(self) -> int:
        """The bytes of what crosses."""
        return bytes_of(jax.eval_shape(lambda: self.crossing(self.empty())))

    def with_crossed(self, buffers: Buffers, part: Buffers) -> Buffers:
        """The buffers with a part that crossed, as `crossing` gives it, written to their first entries."""
        whole = lambda name, array: buffers[name].shape == array.shape
        return buffers | {n: a if whole(n, a) else put_slice(buffers[n], a, (0,)) for n, a in part.items()}


def make_boundaries(boundaries: Sequence[Sequence[jax.ShapeDtypeStruct]], crossed: Sequence[int]) -> Boundaries:
    """The common format for a model's boundaries.

    All boundaries are records of one row on one device, since a device holds one activation at a time; each begins at
    entry 0 of every buffer. What crosses is then a run from entry 0 on, as long as the largest one needs. Here layers 0
    to 3 give x [4, 3], (x, mask [4]), (x, y [4, 3]) and x, and virtual stages end after layers 0 and 1:

        boundary            0    1    2    3        crossing_sizes, the most at boundaries 0 and 1
        float32_4x3         x    x    x    x        1
        bool_4                  mask                1
        float32_4x3_of_1              y             none: `y` is the second of its type, in a buffer of its own

    Args:
      boundaries: for each boundary between a layer and the next, its leaves as one device has them.
      crossed: the indices of the boundaries whose values have to have room in what crosses: those between two virtual
        stages.
    """
    count = len(boundaries)
    all_types = [[(leaf.shape, leaf.dtype) for leaf in leaves] for leaves in boundaries]
    storage = build_storage(
        boundaries,
        [[i] for i in range(count)],
        device_of=[0] * count,  # all use the same places
        orders=[[tuple(range(leaf.ndim)) for leaf in leaves] for leaves in boundaries],
        labels=[[(n,) if (n := types[:i].count(one)) else () for i, one in enumerate(types)] for types in all_types],
        waste=WASTE_AT_BOUNDARIES,
    )
    sizes: dict[str, int] = {}
    for i in crossed:
        boundary = storage.record_types[i]
        for leaf, name, (entry,) in zip(boundary.leaves, boundary.buffers, boundary.entries, strict=True):
            length = leaf.size if isinstance(storage.buffers[name], FlatBuffer) else 1
            sizes[name] = max(sizes.get(name, 0), entry + length)
    return Boundaries(storage.record_types, storage.named_buffers, storage.num_devices, tuple(sorted(sizes.items())))
