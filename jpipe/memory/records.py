"""Takes one layer's record out of the buffers of all stages, puts one in, or makes all anew.

So whole states go to another layout, to a checkpoint and back, while no device holds more than its part of the model
and of one layer: a leaf that one stage has is scattered (`jpipe.memory.scattered`). `Records.updated` makes all records
anew where they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jpipe.arrays.host import HOST, is_on_host, on_host
from jpipe.arrays.indexing import Index, look_up, take_row
from jpipe.memory.layout import Layout, add_stage_axis, device_index, drop_stage_axis
from jpipe.memory.scattered import ScatteredLeaf
from jpipe.memory.storage import Buffers
from jpipe.mesh.axes import on_stages, stage_axes
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
        """One of the layouts, for the properties that all have in common."""
        return next(iter(self.layouts.values()))

    @property
    def specs(self) -> dict[str, dict[str, PartitionSpec]]:
        """PartitionSpecs of `Arrays`."""
        return {name: layout.specs for name, layout in self.layouts.items()}

    @property
    def places(self) -> list[tuple[int, int, tuple[int, ...]]]:
        """`(record type, record, the layers that use it)`, in the order of layers."""
        places = [(v, j, users) for v, records in enumerate(self.layout.users) for j, users in enumerate(records)]
        return sorted(places, key=lambda place: place[2])

    def leaves(self, record_type: int) -> dict[str, list[ScatteredLeaf]]:
        """The leaves of a record of this type, by tree."""
        types = {name: layout.storage.record_types[record_type] for name, layout in self.layouts.items()}
        pairs = {name: zip(one.leaves, one.specs, strict=True) for name, one in types.items()}
        return {name: [ScatteredLeaf(*pair, self.layout.mesh) for pair in pairs[name]] for name in pairs}

    def _scattered_specs(self, record_type: int) -> dict[str, list[PartitionSpec]]:
        """PartitionSpecs of a scattered record's leaves, by tree."""
        return {name: [s.sharding.spec for s in leaves] for name, leaves in self.leaves(record_type).items()}

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
        scattered = self.leaves(record_type)
        pairs = {name: zip(scattered[name], tree, strict=True) for name, tree in leaves.items()}
        parts = {name: [s.put(leaf) for s, leaf in pairs[name]] for name in pairs}
        buffers = ((name, b, array) for name, tree in arrays.items() for b, array in tree.items())
        hosted = frozenset((name, b) for name, b, array in buffers if array.sharding.memory_kind == HOST)
        return self._put(hosted)(arrays, record_type, parts, np.int32(record))

    @cached_property
    def _put(self) -> Callable[[frozenset[tuple[str, str]]], Callable[..., Arrays]]:
        """(Tree, buffer) of the arrays that lie on the hosts, and stay there -> `_compiled_put`, made once."""
        return cache(self._compiled_put)

    def _compiled_put(self, hosted: frozenset[tuple[str, str]]) -> Callable[..., Arrays]:
        """`(arrays, record type, scattered leaves by tree, record) -> arrays` on all devices, compiled."""

        def put(arrays: Arrays, record_type: int, parts: Leaves, record: Leaf) -> Arrays:
            def body(arrays: Arrays, parts: Leaves, record: Index) -> Arrays:
                return add_stage_axis(self._with_parts(drop_stage_axis(arrays), record_type, record, parts))

            specs = self._scattered_specs(record_type)
            in_specs = (self.specs, {name: specs[name] for name in parts}, PartitionSpec())
            return on_stages(body, self.layout.mesh, in_specs, self.specs)(arrays, parts, record)

        lies = lambda n, b, sharding: on_host(sharding) if (n, b) in hosted else sharding
        layouts = self.layouts.items()
        shardings = {n: {b: lies(n, b, a.sharding) for b, a in layout.shapes.items()} for n, layout in layouts}
        return jax.jit(put, static_argnums=1, donate_argnums=0, out_shardings=shardings)

    def updated(
        self, function: Callable[[int, Index, Leaves], Leaves], arrays: Arrays, names: Collection[str]
    ) -> Arrays:
        """Replaces each record in a device's arrays by the one that a function makes, in a program on all stages.

        Records that one stage has are made on its devices, by a loop; all stages together make those that lie on all.

        Args:
          function: `(record type, the first layer that uses the record, its leaves by tree) -> new leaves by tree` of a
            device's parts, which lie as `lying` says.
          arrays: those of one device, by tree.
          names: the trees whose leaves the function reads.
        """
        users = self.layout.users
        together = [v for v in range(len(users)) if self._is_spread(v)]

        def read(v: int, record: Index, carry: Arrays) -> tuple[Index, Leaves]:
            layer = take_row(jnp.asarray([layers[0] for layers in users[v]], jnp.int32), record)
            return layer, {name: self.layouts[name].storage.read(carry[name], v, record) for name in names}

        def visit(v: int, record: Index, layer_and_leaves: tuple[Index, Leaves], carry: Arrays) -> Arrays:
            new = function(v, *layer_and_leaves)
            if any(map(is_on_host, jax.tree.leaves(carry))):
                # All is read before anything is written: else a GPU's compiler copies whole arrays on the host.
                carry, _, new = jax.lax.optimization_barrier((carry, layer_and_leaves, new))
            return carry | {n: self.layouts[n].storage.write(carry[n], v, record, new[n]) for n in new}

        device = device_index(self.layout.mesh)
        arrays = self.layout.storage.for_each_local(read, visit, device, arrays, without=together)
        for v in together:
            for record, (layer, *_) in enumerate(users[v]):
                parts = self._parts(arrays, v, record)
                new = function(v, layer, {name: parts[name] for name in names})
                arrays = self._with_parts(arrays, v, record, new)
        return arrays

    def lying(self, record_type: int) -> tuple[tuple[Axis, ...], dict[str, list[Sharding]]]:
        """The axes that split arrays while `updated` makes a record of this type, and how its leaves lie by tree."""
        together = self._is_spread(record_type)
        axes = stage_axes(self.layout.mesh, (), over_stages=together)
        types = {name: layout.storage.record_types[record_type] for name, layout in self.layouts.items()}
        specs = self._scattered_specs(record_type) if together else {name: one.specs for name, one in types.items()}
        return axes, {name: [of_spec(spec, axes) for spec in specs[name]] for name in specs}

    def _is_spread(self, record_type: int) -> bool:
        """Whether any leaf of records of this type lies on all stages."""
        return any(leaf.lies_so for leaves in self.leaves(record_type).values() for leaf in leaves)

    def _parts(self, arrays: Arrays, record_type: int, record: Index) -> Leaves:
        """A device's parts of a record's leaves, scattered over all devices, out of its own arrays."""
        is_mine, parts = self._is_mine(record_type, record), {}
        for name, scattered in self.leaves(record_type).items():
            leaves = self.layouts[name].storage.read(arrays[name], record_type, record)
            parts[name] = [s.scatter(leaf, is_mine) for s, leaf in zip(scattered, leaves, strict=True)]
        return parts

    def _with_parts(self, arrays: Arrays, record_type: int, record: Index, parts: Leaves) -> Arrays:
        """A device's arrays with a record replaced, whose leaves are given as this device's parts.

        All devices run the same program, so each of them writes, also those that don't have the record. There something
        else lies in its place, and is written back (K = 4, a leaf w of record 2 of 3, which device 1 has):

            device                          0       1       2       3
            parts, as `take` gives them     w[0]    w[1]    w[2]    w[3]
            after `unscatter`               w       w       w       w
            at the record's entry           a       b       c       d       (`storage.read`)
            written there                   a       w       c       d

        If a leaf is split over all stages at rest, each stage writes its own part.
        """
        is_mine, scattered = self._is_mine(record_type, record), self.leaves(record_type)
        for name in parts:
            storage = self.layouts[name].storage
            old = storage.read(arrays[name], record_type, record)
            triples = zip(scattered[name], parts[name], old, strict=True)
            new = [jnp.where(s.lies_so or is_mine, s.unscatter(part), before) for s, part, before in triples]
            arrays = arrays | {name: storage.write(arrays[name], record_type, record, new)}
        return arrays

    def _is_mine(self, record_type: int, record: Index) -> jax.Array | bool:
        """Whether this device has the record."""
        return look_up(self.layout.storage.record_types[record_type].devices, record) == device_index(self.layout.mesh)
