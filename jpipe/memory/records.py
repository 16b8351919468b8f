"""Takes one layer's record out of the buffers of all stages, puts one in, or makes all anew.

So whole states go to another layout, to a checkpoint and back, while no device holds more than its part of the model
and of one layer: a leaf that one stage has is scattered (`jpipe.memory.scattered`). Or all are made anew where they lie
(`Records.updated`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jpipe.arrays.indexing import Index, look_up, take_row
from jpipe.memory.layout import Layout, add_stage_axis, device_index, drop_stage_axis
from jpipe.memory.scattered import ScatteredLeaf
from jpipe.memory.storage import Buffers
from jpipe.mesh.axes import AXIS, stage_axes
from jpipe.mesh.on_stages import on_stages
from jpipe.mesh.specs import on_all_stages
from jpipe.partitioner.shardings import Axis, Sharding, of_spec
from jpipe.types import Leaf

Arrays = dict[str, Buffers]
"""Global arrays `[K, ...]`, or one device's, by collection and buffer."""
Leaves = dict[str, list[jax.Array]]
"""The leaves of a record by tree."""


@dataclass(frozen=True, eq=False)
class Records:
    """The records of some trees of variables, each with the leaves that all of these trees have for it.

    A function of one record is compiled once for a record type: which one, and so who has it, is an argument.

    Attributes:
      layouts: the layout of each tree by name, of one pipeline: the same record types, with other leaves.
    """

    layouts: Mapping[str, Layout]

    @property
    def layout(self) -> Layout:
        """One of them, for what all have in common."""
        return next(iter(self.layouts.values()))

    @property
    def specs(self) -> dict[str, dict[str, PartitionSpec]]:
        """PartitionSpecs of `Arrays`."""
        return {name: layout.specs for name, layout in self.layouts.items()}

    @property
    def places(self) -> list[tuple[int, int, tuple[int, ...]]]:
        """`(record type, record, the layers that use it)`, in the order of layers."""
        found = [(v, j, users) for v, known in enumerate(self.layout.users) for j, users in enumerate(known)]
        return sorted(found, key=lambda place: place[2])

    def leaves(self, record_type: int) -> dict[str, list[ScatteredLeaf]]:
        """The leaves of a record of this type, by tree; those that have none are missing."""
        types = {name: layout.storage.record_types[record_type] for name, layout in self.layouts.items()}
        pairs = {name: zip(known.leaves, known.specs, strict=True) for name, known in types.items() if known.leaves}
        return {name: [ScatteredLeaf(*pair, self.layout.mesh) for pair in own] for name, own in pairs.items()}

    def _scattered_specs(self, record_type: int) -> dict[str, list[PartitionSpec]]:
        """PartitionSpecs of a scattered record's leaves."""
        return {name: [leaf.sharding.spec for leaf in own] for name, own in self.leaves(record_type).items()}

    @cached_property
    def take(self) -> Callable[[Arrays, int, int], Leaves]:
        """`(arrays, record type, record) -> its leaves by tree`, scattered over all devices; compiled."""

        def take(arrays: Arrays, record_type: int, record: Leaf) -> Leaves:
            body = lambda arrays, record: self._parts(drop_stage_axis(arrays), record_type, record)
            specs = (self.specs, PartitionSpec()), self._scattered_specs(record_type)
            return on_stages(body, self.layout.mesh, *specs)(arrays, record)

        return jax.jit(take, static_argnums=1)

    def put(self, arrays: Arrays, record_type: int, record: int, leaves: Mapping[str, Sequence[Leaf]]) -> Arrays:
        """One record into the arrays, which are donated: the inverse of `take`.

        Args:
          arrays: of all trees.
          record_type: the index of its type.
          record: its index among the records of the type.
          leaves: by tree (some may be missing), on the host or split in any way over the layouts' devices.
        """
        known = self.leaves(record_type)
        parts = {name: [s.put(leaf) for s, leaf in zip(known[name], own, strict=True)] for name, own in leaves.items()}
        return self._put(arrays, record_type, parts, np.int32(record))

    @cached_property
    def _put(self) -> Callable[..., Arrays]:
        """`(arrays, record type, scattered leaves by tree, record) -> arrays` on all devices, compiled."""

        def put(arrays: Arrays, record_type: int, parts: Leaves, record: Leaf) -> Arrays:
            def body(arrays: Arrays, parts: Leaves, record: Index) -> Arrays:
                return add_stage_axis(self._with_parts(drop_stage_axis(arrays), record_type, record, parts))

            specs = {name: spec for name, spec in self._scattered_specs(record_type).items() if name in parts}
            in_specs = (self.specs, specs, PartitionSpec())
            return on_stages(body, self.layout.mesh, in_specs, self.specs)(arrays, parts, record)

        shardings = {n: {b: a.sharding for b, a in layout.shapes.items()} for n, layout in self.layouts.items()}
        return jax.jit(put, static_argnums=1, donate_argnums=0, out_shardings=shardings)

    def updated(self, function: Callable[[int, Index, Leaves], Leaves], arrays: Arrays, given: Iterable[str]) -> Arrays:
        """A device's arrays with what a function makes of each record, in a program on all stages.

        Records that one stage has are made on its devices, by a loop; what lies on all stages they make together.

        Args:
          function: `(record type, the first layer that uses the record, its leaves by tree) -> new leaves by tree` of a
            device's parts, which lie as `lying` says.
          arrays: of one device, by tree.
          given: the trees whose leaves it looks at.
        """
        given, users = list(given), self.layout.users
        together = [v for v in range(len(users)) if self._is_spread(v)]

        def read(v: int, record: Index, carry: Arrays) -> tuple[Index, Leaves]:
            layer = take_row(jnp.asarray([own[0] for own in users[v]], jnp.int32), record)
            return layer, {name: self.layouts[name].storage.read(carry[name], v, record) for name in given}

        def visit(v: int, record: Index, found: tuple[Index, Leaves], carry: Arrays) -> Arrays:
            made = function(v, *found).items()
            return carry | {n: self.layouts[n].storage.write(carry[n], v, record, new) for n, new in made}

        device = device_index(self.layout.mesh)
        arrays = self.layout.storage.for_each_local(read, visit, device, arrays, without=together)
        for v in together:
            for record, (layer, *_) in enumerate(users[v]):
                own = self._parts(arrays, v, record)
                made = function(v, layer, {name: own.get(name, []) for name in given})
                arrays = self._with_parts(arrays, v, record, made)
        return arrays

    def lying(self, record_type: int) -> tuple[tuple[Axis, ...], dict[str, list[Sharding]]]:
        """The axes that split arrays while `updated` makes a record of this type, and how its leaves lie by tree."""
        mesh, together = self.layout.mesh, self._is_spread(record_type)
        axes = stage_axes(mesh, ()) + (Axis((AXIS,), (mesh.shape[AXIS],)),) * together
        spec = lambda leaf, spec: ScatteredLeaf(leaf, spec, mesh).sharding.spec if together else spec
        types = {name: layout.storage.record_types[record_type] for name, layout in self.layouts.items()}
        pairs = {name: zip(known.leaves, known.specs, strict=True) for name, known in types.items()}
        return axes, {name: [of_spec(spec(*pair), axes) for pair in own] for name, own in pairs.items()}

    def _is_spread(self, record_type: int) -> bool:
        """Whether any leaf of records of this type lies on all stages."""
        known = [layout.storage.record_types[record_type] for layout in self.layouts.values()]
        return any(on_all_stages(spec) for own in known for spec in own.specs)

    def _parts(self, arrays: Arrays, record_type: int, record: Index) -> Leaves:
        """A device's parts of a record's leaves, scattered over all devices, out of its own arrays."""
        mine, found = self._mine(record_type, record), {}
        for name, own in self.leaves(record_type).items():
            read = self.layouts[name].storage.read(arrays[name], record_type, record)
            found[name] = [known.scatter(leaf, mine) for known, leaf in zip(own, read, strict=True)]
        return found

    def _with_parts(self, arrays: Arrays, record_type: int, record: Index, parts: Leaves) -> Arrays:
        """A device's arrays with a record, of which it is given its parts.

        All devices run the same program, so each of them writes, also those that don't have the record. There something
        else lies in its place, and is written back (K = 4, a leaf w of record 2 of 3, which device 1 has):

            device                          0       1       2       3
            parts, as `take` gives them     w[0]    w[1]    w[2]    w[3]
            after `unscatter`               w       w       w       w
            at the record's entry           a       b       c       d       (`storage.read`)
            written there                   a       w       c       d

        Of a leaf that is split over all stages at rest, each writes its own part.
        """
        mine, leaves = self._mine(record_type, record), self.leaves(record_type)
        for name, own in parts.items():
            storage = self.layouts[name].storage
            old = storage.read(arrays[name], record_type, record)
            known = zip(leaves.get(name, []), own, old, strict=True)
            new = [jnp.where(leaf.lies_so or mine, leaf.unscatter(part), before) for leaf, part, before in known]
            arrays = arrays | {name: storage.write(arrays[name], record_type, record, new)}
        return arrays

    def _mine(self, record_type: int, record: Index) -> jax.Array | bool:
        """Whether this device has the record."""
        return look_up(self.layout.storage.record_types[record_type].devices, record) == device_index(self.layout.mesh)
