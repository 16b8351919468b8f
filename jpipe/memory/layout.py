"""The layout of variables: which buffers hold them, as global arrays split over the stages.

A `StageTree` is what optax, checkpoints and users hold: a pytree of arrays `[K, ...]` split over `stage`, which knows
its `Layout`. `Layout.place` lays out the layers' leaves; `jpipe.memory.layer_trees` takes them out again.

*At rest*, between steps, arrays are split over all mesh axes that their specs name. *At work* they are gathered along
the data axes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpipe.memory.storage import Buffers, Storage, build_storage, each_apart
from jpipe.mesh.axes import AXIS, batch_axes, is_batch_axis
from jpipe.mesh.specs import gather_axes, scatter_axes, shard_shape
from jpipe.model.groups import Model
from jpipe.partitioner.shardings import names_in
from jpipe.schedules.placement import Placement


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
    """

    storage: Storage
    treedefs: tuple[Any, ...]
    users: tuple[tuple[tuple[int, ...], ...], ...]
    mesh: Mesh

    @property
    def num_stages(self) -> int:
        """K."""
        return self.mesh.shape[AXIS]

    @cached_property
    def specs(self) -> StageTree:
        """PartitionSpecs of the global arrays."""
        return StageTree(self.storage.specs((AXIS,)), self)

    @cached_property
    def shapes(self) -> StageTree:
        """ShapeDtypeStructs of the global arrays, with their shardings."""
        sharded = lambda leaf, spec: jax.ShapeDtypeStruct(
            (self.num_stages, *leaf.shape), leaf.dtype, sharding=NamedSharding(self.mesh, spec)
        )
        return jax.tree.map(sharded, StageTree(self.storage.shapes(), self), self.specs)

    def zeros(self, dtype_of: Callable[[Any], Any] = lambda dtype: dtype, *, at_work: bool = False) -> Buffers:
        """A device's own part of zero buffers, inside of a program on all devices.

        Args:
          dtype_of: a buffer's dtype -> that of its array here.
          at_work: with the shapes that `gathered` gives.
        """
        over = (lambda name: not is_batch_axis(name)) if at_work else (lambda name: True)
        shape = lambda buffer: shard_shape(buffer.shape, buffer.spec, self.mesh, over)
        return {name: jnp.zeros(shape(buffer), dtype_of(buffer.dtype)) for name, buffer in self.storage.named_buffers}

    def gathered(self, buffers: Buffers) -> Buffers:
        """A device's buffers with the data axes gathered."""
        return {n: gather_axes(buffers[n], known.spec, is_batch_axis) for n, known in self.storage.named_buffers}

    def gathered_leaves(self, variable_set: int, leaves: list[Any]) -> list[Any]:
        """`gathered` of the leaves of one layer, whose variables are of this set."""
        specs = self.storage.record_types[variable_set].specs
        return [gather_axes(leaf, spec, is_batch_axis) for leaf, spec in zip(leaves, specs, strict=True)]

    def reduced(self, buffers: Buffers) -> Buffers:
        """Sums over all examples, at rest, from each device's sums over its own, in the shapes of `gathered`."""
        return {n: self._reduced(buffers[n], known.spec) for n, known in self.storage.named_buffers}

    def _reduced(self, array: Any, spec: PartitionSpec) -> Any:
        scattered = {name for entry in spec for name in names_in(entry)}
        whole = tuple(n for n in batch_axes(self.mesh) if self.mesh.shape[n] > 1 and n not in scattered)
        array = scatter_axes(array, spec, is_batch_axis)
        return jax.lax.psum(array, whole) if whole else array

    def placed(self, tree: StageTree) -> StageTree:
        """The arrays of a tree, with those on the host moved to where they belong."""
        move = lambda leaf, shape: jax.device_put(leaf, shape.sharding) if isinstance(leaf, np.ndarray) else leaf
        return StageTree({name: move(leaf, self.shapes[name]) for name, leaf in tree.items()}, self)

    def place(self, leaves: dict[int, list[Any]]) -> StageTree:
        """Global arrays that hold the leaves of the given layers; each device gets its own part from the host.

        Args:
          leaves: by layer, in the order of `jax.tree.leaves`; of layers that share variables the first one's count.
            The places of others hold zeros.
        """
        by_record = {
            (v, j): leaves[users[0]]
            for v, instances in enumerate(self.users)
            for j, users in enumerate(instances)
            if users[0] in leaves
        }

        def make(name: str, shape: jax.ShapeDtypeStruct) -> Any:
            def fill(index: Any) -> np.ndarray:
                stage = index[0].start or 0
                return self.storage.assemble(stage, by_record, name)[None][(slice(None), *index[1:])]

            return jax.make_array_from_callback(shape.shape, shape.sharding, fill)

        return StageTree({name: make(name, shape) for name, shape in self.shapes.items()}, self)


NOT_SAVED = (
    "a pipeline's variables and states lie as its own devices need it, so they aren't pickled or serialised as they "
    "are; save trees = jax.device_get(pipe.layer_variables(variables)), and load them by "
    "pipe.from_layer_variables(trees, batch); or save a state by jpipe.Checkpointer(directory).save(pipe, state)"
)


class StageTree(dict):
    """Variables of all layers under a layout: arrays `[K, ...]` split over `stage`, by buffer (`jpipe.memory.storage`).

    A pytree. Places that no layer owns hold zeros, and keep them under elementwise operations that map 0 to 0, so that
    sums and norms over all elements are exact.
    """

    def __init__(self, buffers: Buffers, layout: Layout):
        super().__init__(buffers)
        self.layout = layout

    def __copy__(self) -> StageTree:
        return StageTree(dict(self), self.layout)

    def __deepcopy__(self, memo: dict[int, Any]) -> StageTree:
        return StageTree(copy.deepcopy(dict(self), memo), self.layout)

    def __reduce__(self) -> NoReturn:
        raise TypeError(NOT_SAVED)


def _flatten(tree: StageTree) -> tuple[Any, Any]:
    names = tuple(sorted(tree))
    return [tree[name] for name in names], (names, tree.layout)


def _flatten_with_keys(tree: StageTree) -> tuple[Any, Any]:
    children, kept = _flatten(tree)
    return list(zip(map(jax.tree_util.DictKey, kept[0]), children, strict=True)), kept


jax.tree_util.register_pytree_with_keys(
    StageTree,
    _flatten_with_keys,
    lambda kept, children: StageTree(dict(zip(kept[0], children, strict=True)), kept[1]),
    _flatten,
)


def make_layouts(
    model: Model, bounds: Sequence[tuple[int, int]], placement: Placement, mesh: Mesh, *, apart: bool = False
) -> dict[str, Layout]:
    """The layout of each collection for a model cut into virtual stages.

    Record type v of each is `model.variable_sets[v]`. Variables that layers share lie on the first one's stage.

    Args:
      model: the traced layers.
      bounds: for each virtual stage, its first layer and one past its last.
      placement: on which stage each virtual stage is.
      mesh: with K devices along `stage`.
      apart: each leaf of a set of variables has a stacked buffer of its own, if it has one at all.
    """
    stage_of = [placement.stage_of(s) for s, (start, stop) in enumerate(bounds) for _ in range(start, stop)]
    sets = model.variable_sets
    groups = [model.groups[known.group] for known in sets]
    owners = [[stage_of[users[0]] for users in known.users] for known in sets]
    layouts = {}
    for name in ["params", *sorted({name for group in groups for name in group.state_names})]:
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
        layouts[name] = Layout(storage, tuple(map(jax.tree.structure, trees)), users, mesh)
    return layouts


def local(tree: Any) -> Any:
    """A stage's own buffers `[...]` out of its part `[1, ...]` of global arrays."""
    return jax.tree.map(lambda a: a[0], tree)


def stacked(tree: Any) -> Any:
    """The inverse of `local`."""
    return jax.tree.map(lambda a: a[None], tree)


def device_index(mesh: Mesh) -> Any:
    """The index of this stage, inside of a program on the stages; a Python integer if there is only one."""
    return 0 if mesh.shape[AXIS] == 1 else jax.lax.axis_index(AXIS)
