"""Each layer's own variables, out of a pipeline's buffers: what `Pipeline.layer_variables` does.

The model is never put on one device: a leaf is split over `stage`, as far as it divides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jpipe.memory.layout import StageTree, device_index, local
from jpipe.sharding.meshes import AXIS, on_stages, part_shape
from jpipe.sharding.shardings import names_in


def take_apart(trees: dict[str, StageTree]) -> dict[int, dict[str, Any]]:
    """The own tree by collection of each layer that has variables, by index. To be called under `jax.jit`.

    A leaf is split over `stage` along the first dimension that divides, so that no device gets all of the model; one
    without such a dimension is on all of them.

    Args:
      trees: some or all collections, laid out by one pipeline.
    """
    layouts = {name: tree.layout for name, tree in trees.items()}
    layout = next(iter(layouts.values()))
    places = sorted((i, v, j) for v, known in enumerate(layout.users) for j, users in enumerate(known) for i in users)
    leaves = {
        (name, v): [_SharedOut(leaf, spec, layout.mesh) for leaf, spec in zip(known.leaves, known.specs, strict=True)]
        for name, lay in layouts.items()
        for v, known in enumerate(lay.storage.record_types)
    }

    def body(trees: dict[str, Any]) -> list[dict[str, Any]]:
        buffers, device = local(trees), device_index(layout.mesh)

        def read(name: str, v: int, j: int) -> list[Any]:
            mine = layout.storage.record_types[v].devices[j] == device
            found = layouts[name].storage.read(buffers[name], v, j)
            return [known.share_out(leaf, mine) for known, leaf in zip(leaves[name, v], found, strict=True)]

        return [{name: read(name, v, j) for name in layouts} for _, v, j in places]

    plain = {name: dict(tree) for name, tree in trees.items()}
    in_specs = {name: lay.storage.specs((AXIS,)) for name, lay in layouts.items()}
    specs = [{name: [known.result_spec for known in leaves[name, v]] for name in layouts} for _, v, _ in places]
    found = on_stages(body, layout.mesh, (in_specs,), specs)(plain)
    return {
        i: {name: jax.tree.unflatten(layouts[name].treedefs[v], own) for name, own in item.items()}
        for (i, v, _), item in zip(places, found, strict=True)
    }


@dataclass(frozen=True)
class _SharedOut:
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
        parts, num_stages = part_shape(self.leaf.shape, self.spec, self.mesh, lambda name: True), self.mesh.shape[AXIS]
        return next((d for d, n in enumerate(parts) if n and n % num_stages == 0 and num_stages > 1), None)

    @property
    def result_spec(self) -> PartitionSpec:
        """The spec of what is shared out."""
        entries = [list(names_in(entry)) for entry in self.spec] + [[] for _ in self.leaf.shape[len(self.spec) :]]
        if self.dimension is not None:
            entries[self.dimension].append(AXIS)
        return PartitionSpec(*map(tuple, entries))

    def share_out(self, leaf: jax.Array, mine: Any) -> jax.Array:
        """A device's part of the leaf, whoever has it (`mine` on that stage alone)."""
        if leaf.dtype == jnp.bool_:
            return self.share_out(leaf.astype(jnp.int8), mine).astype(jnp.bool_)
        leaf = jnp.where(mine, leaf, jnp.zeros_like(leaf))
        if self.dimension is not None:
            return jax.lax.psum_scatter(leaf, AXIS, scatter_dimension=self.dimension, tiled=True)
        return jax.lax.psum(leaf, AXIS)


def as_auto(tree: Any) -> Any:
    """Arrays split as they are, but by Auto axes: plain Flax computes with them however they are split."""

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, Tracer) or AxisType.Explicit not in leaf.sharding.mesh.axis_types:
            return leaf
        mesh = leaf.sharding.mesh
        auto = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
        return jax.device_put(leaf, NamedSharding(auto, leaf.sharding.spec))

    return jax.tree.map(convert, tree)
