"""The layout of variables: which buffers hold them, as global arrays split over the stages.

A `StageTree` is what optax, checkpoints and users hold: a pytree of arrays `[K, ...]` split over `stage`, which knows
its `Layout`. `jpipe.memory.layer_trees` makes them of the layers' own trees, and these of them.

*At rest*, between steps, arrays are split over all mesh axes that their specs name. They may be gathered along the data
axes for a step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpipe.jax_tools.indexing import Index
from jpipe.memory.storage import Buffers, Storage, build_storage, each_apart
from jpipe.mesh.axes import AXIS
from jpipe.mesh.specs import gather_axes, scatter_axes, split_by
from jpipe.model.groups import Model
from jpipe.partitioner.shardings import names_in
from jpipe.schedules.placement import Placement
from jpipe.types import Leaf, PyTree, Structure


@dataclass(frozen=True)
class Layout:
    """Where the variables of each layer lie, for one collection.

    It is the static part of a `StageTree`, which JAX hashes and compares: its fields have to be hashable.

    Attributes:
      storage: the places within a stage, with a record type for each set of variables (`jpipe.model.groups`) and a
        record for each of its instances.
      treedefs: for each set, the structure of a layer's tree.
      users: for each set and instance, the indices of the layers that use it.
      mesh: the devices.
      batch_axes: the mesh's data axes.
    """

    storage: Storage
    treedefs: tuple[Structure, ...]
    users: tuple[tuple[tuple[int, ...], ...], ...]
    mesh: Mesh
    batch_axes: tuple[str, ...]

    @property
    def num_stages(self) -> int:
        """K."""
        return self.mesh.shape[AXIS]

    @cached_property
    def specs(self) -> dict[str, PartitionSpec]:
        """PartitionSpecs of the global arrays."""
        return {name: PartitionSpec(AXIS, *buffer.spec) for name, buffer in self.storage.named_buffers}

    @cached_property
    def shapes(self) -> StageTree:
        """ShapeDtypeStructs of the global arrays, with their shardings."""
        sharding = lambda name: NamedSharding(self.mesh, self.specs[name])
        whole = lambda name, a: jax.ShapeDtypeStruct((self.num_stages, *a.shape), a.dtype, sharding=sharding(name))
        return StageTree({name: whole(name, buffer) for name, buffer in self.storage.named_buffers}, self)

    def zeros(
        self, dtype_of: Callable[[np.dtype], np.dtype] = lambda dtype: dtype, *, gathered: bool = False
    ) -> Buffers:
        """A device's own part of zero buffers, inside of a program on all devices.

        Args:
          dtype_of: a buffer's dtype -> that of its array here.
          gathered: with the shapes that `gathered` gives, else those at rest.
        """
        stays = lambda name: not gathered or name not in self.batch_axes
        at = lambda spec: split_by(spec, stays)
        shape = lambda buffer: NamedSharding(self.mesh, at(buffer.spec)).shard_shape(buffer.shape)
        return {name: jnp.zeros(shape(buffer), dtype_of(buffer.dtype)) for name, buffer in self.storage.named_buffers}

    def gathered(self, buffers: Buffers) -> Buffers:
        """A device's buffers with the data axes gathered."""
        return {n: gather_axes(buffers[n], known.spec, self.batch_axes) for n, known in self.storage.named_buffers}

    def reduced(self, buffers: Buffers, over: Mapping[str, Sequence[str]]) -> Buffers:
        """A device's buffers at rest, from its partial sums of them.

        Args:
          buffers: split only over those axes of their specs that they aren't partial along.
          over: for each buffer the mesh axes that it is partial along.
        """

        def reduced(array: jax.Array, spec: PartitionSpec, over: Sequence[str]) -> jax.Array:
            split = {name for entry in spec for name in names_in(entry)}
            others = tuple(name for name in over if name not in split)
            array = scatter_axes(array, spec, over)
            return jax.lax.psum(array, others) if others else array

        return {n: reduced(buffers[n], known.spec, over[n]) for n, known in self.storage.named_buffers}

    def on_devices(self, tree: StageTree) -> StageTree:
        """A tree with those of its arrays that are on the host moved to where they belong."""
        move = lambda leaf, sharding: jax.device_put(leaf, sharding) if isinstance(leaf, np.ndarray) else leaf
        return StageTree({name: move(leaf, self.shapes[name].sharding) for name, leaf in tree.items()}, self)


NOT_SAVED = (
    "a pipeline's variables and states lie as its own devices need it, so they aren't pickled or serialised as they "
    "are; save trees = jax.device_get(pipe.layer_variables(variables)), and load them by "
    "pipe.from_layer_variables(trees, batch); or save a state by jpipe.Checkpointer(directory).save(pipe, state)"
)


@jax.tree_util.register_pytree_with_keys_class
class StageTree(dict):
    """Variables of all layers under a layout: arrays `[K, ...]` split over `stage`, by buffer (`jpipe.memory.storage`).

    A pytree. Places that no layer owns hold zeros, and keep them under elementwise operations that map 0 to 0, so that
    sums and norms over all elements are exact.
    """

    def __init__(self, buffers: Mapping[str, Leaf], layout: Layout):
        super().__init__(buffers)
        self.layout = layout

    def __copy__(self) -> StageTree:
        return StageTree(dict(self), self.layout)

    def __deepcopy__(self, memo: dict[int, object]) -> StageTree:
        return StageTree(copy.deepcopy(dict(self), memo), self.layout)

    def __reduce__(self) -> NoReturn:
        raise TypeError(NOT_SAVED)

    def tree_flatten_with_keys(self) -> tuple[list[tuple[object, Leaf]], tuple[tuple[str, ...], Layout]]:
        """The arrays in the order of their names, each with its key; what isn't an array."""
        names = tuple(sorted(self))
        return [(jax.tree_util.DictKey(name), self[name]) for name in names], (names, self.layout)

    @classmethod
    def tree_unflatten(cls, kept: tuple[tuple[str, ...], Layout], leaves: Sequence[Leaf]) -> StageTree:
        """The inverse."""
        names, layout = kept
        return cls(dict(zip(names, leaves, strict=True)), layout)


def make_layouts(
    model: Model,
    bounds: Sequence[tuple[int, int]],
    placement: Placement,
    mesh: Mesh,
    batch_axes: tuple[str, ...],
    *,
    apart: bool = False,
) -> dict[str, Layout]:
    """The layout of each collection for a model cut into virtual stages.

    Record type v of each is `model.variable_sets[v]`. Variables that layers share lie on the first one's stage.

    Args:
      model: the traced layers.
      bounds: for each virtual stage, its first layer and one past its last.
      placement: on which stage each virtual stage is.
      mesh: with K devices along `stage`.
      batch_axes: its data axes.
      apart: each leaf of a set of variables has a stacked buffer of its own, if it has one at all.
    """
    stage_of = [placement.stage_of(s) for s, (start, stop) in enumerate(bounds) for _ in range(start, stop)]
    sets = model.variable_sets
    groups = [model.groups[known.group] for known in sets]
    owners = [[stage_of[users[0]] for users in known.users] for known in sets]
    layouts = {}
    for name in ["params", *sorted({name for group in groups for name in group.variables} - {"params"})]:
        trees = [group.variables.get(name, {}) for group in groups]
        leaves = [jax.tree.leaves(tree) for tree in trees]
        storage = build_storage(
            leaves,
            owners,
            device_of=range(placement.num_stages),
            specs=[group.specs.get(name, []) for group in groups],
            tags=each_apart(leaves) if apart else None,
        )
        users = tuple(known.users for known in sets)
        layouts[name] = Layout(storage, tuple(map(jax.tree.structure, trees)), users, mesh, batch_axes)
    return layouts


def drop_stage_axis(tree: PyTree) -> PyTree:
    """A stage's own buffers `[...]` out of its part `[1, ...]` of global arrays `[K, ...]`."""
    return jax.tree.map(lambda a: a[0], tree)


def add_stage_axis(tree: PyTree) -> PyTree:
    """The inverse of `drop_stage_axis`."""
    return jax.tree.map(lambda a: a[None], tree)


def device_index(mesh: Mesh) -> Index:
    """The index of this stage, inside of a program on the stages; a Python integer if there is only one."""
    return 0 if mesh.shape[AXIS] == 1 else jax.lax.axis_index(AXIS)
