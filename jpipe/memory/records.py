"""One layer's arrays at a time, out of the buffers of all stages and into them.

So whole states go to another layout, to a checkpoint and back, while no device holds more than its part of the model
and of one layer: a leaf that one stage has is *scattered*, split over `stage` along the first dimension that K divides.
A leaf without such a dimension is on all stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpipe.jax_tools.indexing import look_up
from jpipe.memory.layout import Layout, device_index, local, stacked
from jpipe.mesh.axes import AXIS
from jpipe.mesh.programs import on_stages
from jpipe.mesh.specs import shard_shape
from jpipe.partitioner.shardings import names_in

Arrays = dict[str, dict[str, Any]]
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
        parts, num_stages = shard_shape(self.leaf.shape, self.spec, self.mesh, lambda name: True), self.mesh.shape[AXIS]
        return next((d for d, n in enumerate(parts) if n and n % num_stages == 0 and num_stages > 1), None)

    @property
    def result_spec(self) -> PartitionSpec:
        """The spec of what is shared out."""
        entries = [list(names_in(entry)) for entry in self.spec] + [[] for _ in self.leaf.shape[len(self.spec) :]]
        if self.dimension is not None:
            entries[self.dimension].append(AXIS)
        return PartitionSpec(*map(tuple, entries))

    @property
    def shape(self) -> jax.ShapeDtypeStruct:
        """The shape of what is shared out, with its sharding."""
        sharding = NamedSharding(self.mesh, self.result_spec)
        return jax.ShapeDtypeStruct(self.leaf.shape, self.leaf.dtype, sharding=sharding)

    def scatter(self, leaf: jax.Array, mine: Any) -> jax.Array:
        """A device's part of the leaf, whoever has it (`mine` on that stage alone)."""
        if leaf.dtype == jnp.bool_:
            return self.scatter(leaf.astype(jnp.int8), mine).astype(jnp.bool_)
        leaf = jnp.where(mine, leaf, jnp.zeros_like(leaf))
        if self.dimension is not None:
            return jax.lax.psum_scatter(leaf, AXIS, scatter_dimension=self.dimension, tiled=True)
        return jax.lax.psum(leaf, AXIS)

    def gather(self, part: jax.Array) -> jax.Array:
        """The inverse of `scatter`: the leaf, as each stage has it, from a device's part."""
        return part if self.dimension is None else jax.lax.all_gather(part, AXIS, axis=self.dimension, tiled=True)

    def put(self, leaf: Any) -> jax.Array:
        """The leaf shared out; of one that is on the host, or whole in this process, each device gets its part.

        Raises:
          ValueError: it is split over other devices, and this process has only a part.
        """
        sharding = NamedSharding(self.mesh, self.result_spec)
        if isinstance(leaf, jax.Array) and leaf.sharding.device_set == sharding.device_set:
            return jax.device_put(leaf, sharding)
        if not is_whole(leaf):
            raise ValueError(
                f"an array {leaf.dtype}{list(leaf.shape)} is split over {len(leaf.sharding.device_set)} devices other "
                "than those of the pipeline's mesh; move it there first: jax.device_put(array, "
                "NamedSharding(pipe.mesh, ...)), or jax.experimental.multihost_utils.process_allgather(array, "
                "tiled=True)"
            )
        whole = np.asarray(leaf)
        return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def is_whole(leaf: Any) -> bool:
    """Whether this process can read all of a leaf."""
    return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated


@dataclass(frozen=True, eq=False)
class Records:
    """The records of some trees of variables, each with the leaves that all of these trees have for it.

    What works on one record is compiled once for a record type.

    Attributes:
      layouts: the layout of each tree by name, of one pipeline: the same record types, with other leaves.
    """

    layouts: Mapping[str, Layout]
    _compiled: dict[Any, Callable[..., Any]] = field(default_factory=dict)

    @property
    def layout(self) -> Layout:
        """One of them, for what all have in common."""
        return next(iter(self.layouts.values()))

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

    def specs(self, record_type: int, names: Sequence[str]) -> dict[str, list[PartitionSpec]]:
        """The PartitionSpecs of the scattered leaves of some trees."""
        leaves = self.leaves(record_type)
        return {name: [known.result_spec for known in leaves[name]] for name in names}

    def scatter(self, arrays: Arrays, record_type: int, record: Any) -> dict[str, list[Any]]:
        """A device's part of a record, out of its own buffers; inside of a program on the stages."""
        mine = self._mine(record_type, record)
        return {
            name: [
                known.scatter(leaf, mine)
                for known, leaf in zip(
                    leaves, self.layouts[name].storage.read(arrays[name], record_type, record), strict=True
                )
            ]
            for name, leaves in self.leaves(record_type).items()
        }

    def take(self, arrays: Arrays, record_type: int, record: int) -> dict[str, list[jax.Array]]:
        """A record's leaves by tree, scattered over all devices."""
        key = ("take", record_type)
        if key not in self._compiled:
            body = lambda arrays, record: self.scatter(local(arrays), record_type, record)
            out_specs = self.specs(record_type, list(self.leaves(record_type)))
            run = on_stages(body, self.layout.mesh, (self._specs, PartitionSpec()), out_specs)
            self._compiled[key] = jax.jit(run)
        return self._compiled[key](arrays, np.int32(record))

    def write(self, arrays: Arrays, record_type: int, record: int, leaves: Mapping[str, Sequence[Any]]) -> Arrays:
        """The arrays, which are donated, with a record's leaves written.

        Args:
          arrays: of all trees.
          record_type: the index of its type.
          record: its index among the records of the type.
          leaves: by tree (some may be missing), on the host or split in any way over the layouts' devices.
        """
        known, names = self.leaves(record_type), tuple(sorted(leaves))
        key = ("write", record_type, names)
        if key not in self._compiled:
            self._compiled[key] = self._writer(record_type, names)
        put = {name: [s.put(leaf) for s, leaf in zip(known[name], leaves[name], strict=True)] for name in names}
        return self._compiled[key](arrays, put, np.int32(record))

    def _writer(self, record_type: int, names: tuple[str, ...]) -> Callable[..., Arrays]:
        """`(arrays, scattered leaves by tree, record) -> arrays` on all devices, compiled."""
        leaves = self.leaves(record_type)

        def body(arrays: Arrays, parts: dict[str, list[Any]], record: Any) -> Arrays:
            arrays, mine = local(arrays), self._mine(record_type, record)
            for name in names:
                storage = self.layouts[name].storage
                whole = [known.gather(part) for known, part in zip(leaves[name], parts[name], strict=True)]
                # On other stages something else lies in this place, and is written back.
                old = storage.read(arrays[name], record_type, record)
                new = [jnp.where(mine, a, b) for a, b in zip(whole, old, strict=True)]
                arrays = arrays | {name: storage.write(arrays[name], record_type, record, new)}
            return stacked(arrays)

        in_specs = (self._specs, self.specs(record_type, names), PartitionSpec())
        run = on_stages(body, self.layout.mesh, in_specs, self._specs)
        shardings = jax.tree.map(lambda a: a.sharding, {name: dict(lay.shapes) for name, lay in self.layouts.items()})
        return jax.jit(run, donate_argnums=0, out_shardings=shardings)

    def zeros(self, dtypes: Mapping[tuple[str, str], Any]) -> Arrays:
        """New arrays; `dtypes` by tree and buffer, where they aren't those of the layout."""
        shapes = {name: dict(layout.shapes) for name, layout in self.layouts.items()}
        dtype = lambda name, buffer: dtypes.get((name, buffer), shapes[name][buffer].dtype)
        make = lambda: {n: {b: jnp.zeros(a.shape, dtype(n, b)) for b, a in tree.items()} for n, tree in shapes.items()}
        return jax.jit(make, out_shardings=jax.tree.map(lambda a: a.sharding, shapes))()

    @property
    def _specs(self) -> Arrays:
        return {name: dict(layout.specs) for name, layout in self.layouts.items()}

    def _mine(self, record_type: int, record: Any) -> Any:
        return look_up(self.layout.storage.record_types[record_type].devices, record) == device_index(self.layout.mesh)
