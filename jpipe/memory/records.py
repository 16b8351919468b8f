"""One record at a time, out of the buffers of all stages (`Records.take`) and into them (`Records.put`).

So whole states go to another layout, to a checkpoint and back, while no device holds more than its part of the model
and of one layer: a leaf that one stage has is *scattered*, split over `stage` along the first dimension that K divides.
A leaf without such a dimension is on all stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpipe.jax_tools.indexing import Index, look_up
from jpipe.memory.layout import Layout, add_stage_axis, device_index, drop_stage_axis
from jpipe.memory.storage import Buffers
from jpipe.mesh.axes import AXIS
from jpipe.mesh.on_stages import on_stages
from jpipe.partitioner.shardings import names_in
from jpipe.types import Leaf

Arrays = dict[str, Buffers]
"""Global arrays `[K, ...]` by collection and buffer."""


@dataclass(frozen=True)
class ScatteredLeaf:
    """How a leaf of one stage is shared out among all stages.

    Attributes:
      leaf: its shape.
      spec: how it is split over other mesh axes.
      mesh: the devices.
    """

    leaf: jax.ShapeDtypeStruct
    spec: PartitionSpec
    mesh: Mesh

    @property
    def dimension(self) -> int | None:
        """The dimension along which it is split over the stages, besides its other splits."""
        parts, num_stages = NamedSharding(self.mesh, self.spec).shard_shape(self.leaf.shape), self.mesh.shape[AXIS]
        return next((d for d, n in enumerate(parts) if n and n % num_stages == 0 and num_stages > 1), None)

    @property
    def sharding(self) -> NamedSharding:
        """How what is shared out lies."""
        entries = [list(names_in(entry)) for entry in self.spec] + [[] for _ in self.leaf.shape[len(self.spec) :]]
        if self.dimension is not None:
            entries[self.dimension].append(AXIS)
        return NamedSharding(self.mesh, PartitionSpec(*map(tuple, entries)))

    def scatter(self, leaf: jax.Array, mine: jax.Array | bool) -> jax.Array:
        """A device's part of the leaf, whoever has it (`mine` on that stage alone)."""
        if leaf.dtype == jnp.bool_:
            return self.scatter(leaf.astype(jnp.int8), mine).astype(jnp.bool_)
        leaf = jnp.where(mine, leaf, jnp.zeros_like(leaf))
        if self.dimension is not None:
            return jax.lax.psum_scatter(leaf, AXIS, scatter_dimension=self.dimension, tiled=True)
        return jax.lax.psum(leaf, AXIS)

    def unscatter(self, part: jax.Array) -> jax.Array:
        """The inverse of `scatter`: the leaf, as each stage has it, from a device's part."""
        return part if self.dimension is None else jax.lax.all_gather(part, AXIS, axis=self.dimension, tiled=True)

    def put(self, leaf: Leaf) -> jax.Array:
        """The leaf shared out; of one that is on the host, or whole in this process, each device gets its part.

        Raises:
          ValueError: it is split over other devices, and this process has only a part.
        """
        if isinstance(leaf, jax.Array) and leaf.sharding.device_set == self.sharding.device_set:
            return jax.device_put(leaf, self.sharding)
        if not is_whole(leaf):
            raise ValueError(
                f"an array {leaf.dtype}{list(leaf.shape)} is split over {len(leaf.sharding.device_set)} devices other "
                "than those of the pipeline's mesh; move it there first: jax.device_put(array, "
                "NamedSharding(pipe.mesh, ...)), or jax.experimental.multihost_utils.process_allgather(array, "
                "tiled=True)"
            )
        whole = np.asarray(leaf)
        return jax.make_array_from_callback(whole.shape, self.sharding, lambda index: whole[index])


def is_whole(leaf: Leaf) -> bool:
    """Whether this process can read all of a leaf."""
    return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated


@dataclass(frozen=True, eq=False)
class Records:
    """The records of some trees of variables, each with the leaves that all of these trees have for it.

    What works on one record is compiled once for a record type: which one, and so who has it, is an argument.

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
    def take(self) -> Callable[[Arrays, int, int], dict[str, list[jax.Array]]]:
        """`(arrays, record type, record) -> its leaves by tree`, scattered over all devices; compiled."""

        def take(arrays: Arrays, record_type: int, record: Leaf) -> dict[str, list[jax.Array]]:
            leaves = self.leaves(record_type)

            def body(arrays: Arrays, record: Index) -> dict[str, list[jax.Array]]:
                arrays, mine, found = drop_stage_axis(arrays), self._mine(record_type, record), {}
                for name, own in leaves.items():
                    read = self.layouts[name].storage.read(arrays[name], record_type, record)
                    found[name] = [known.scatter(leaf, mine) for known, leaf in zip(own, read, strict=True)]
                return found

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
        """`(arrays, record type, scattered leaves by tree, record) -> arrays` on all devices, compiled.

        All devices run the same program, so each of them writes, also those that don't have the record. There something
        else lies in its place, and is written back (K = 4, a leaf w of record 2 of 3, which device 1 has):

            device                          0       1       2       3
            parts, as `take` gives them     w[0]    w[1]    w[2]    w[3]
            after `unscatter`               w       w       w       w
            at the record's entry           a       b       c       d       (`storage.read`)
            written there                   a       w       c       d
        """

        def put(arrays: Arrays, record_type: int, parts: dict[str, list[jax.Array]], record: Leaf) -> Arrays:
            leaves = self.leaves(record_type)

            def body(arrays: Arrays, parts: dict[str, list[jax.Array]], record: Index) -> Arrays:
                arrays, mine = drop_stage_axis(arrays), self._mine(record_type, record)
                for name, own in parts.items():
                    storage = self.layouts[name].storage
                    whole = [known.unscatter(part) for known, part in zip(leaves[name], own, strict=True)]
                    old = storage.read(arrays[name], record_type, record)
                    new = [jnp.where(mine, a, b) for a, b in zip(whole, old, strict=True)]
                    arrays = arrays | {name: storage.write(arrays[name], record_type, record, new)}
                return add_stage_axis(arrays)

            specs = {name: spec for name, spec in self._scattered_specs(record_type).items() if name in parts}
            in_specs = (self.specs, specs, PartitionSpec())
            return on_stages(body, self.layout.mesh, in_specs, self.specs)(arrays, parts, record)

        shardings = {n: {b: a.sharding for b, a in layout.shapes.items()} for n, layout in self.layouts.items()}
        return jax.jit(put, static_argnums=1, donate_argnums=0, out_shardings=shardings)

    def _mine(self, record_type: int, record: Index) -> jax.Array | bool:
        """Whether this device has the record."""
        return look_up(self.layout.storage.record_types[record_type].devices, record) == device_index(self.layout.mesh)
