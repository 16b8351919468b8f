"""The layout of variables: from one buffer a stage to each layer's own tree, and back.

A `StageTree` is what optax, checkpoints and users hold: a pytree of arrays `[K, ...]` split over `stage`, which knows
its `Layout`. The layout translates to and from the layers' trees without ever putting the model on one device.
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
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jpipe.memory.storage import Buffers, Storage, build_storage
from jpipe.model.groups import Sequential
from jpipe.sharding.meshes import AXIS, batch_axes, is_batch_axis, on_stages, part_shape
from jpipe.sharding.shardings import gather_axes, names_in, scatter_axes


@dataclass(frozen=True)
class Layout:
    """Where the variables of each layer lie, for one collection.

    Attributes:
      storage: the places within a stage.
      treedefs: the layers' tree, by home.
      members: by home, for each member the indices (ends included) of the layers that show it.
      mesh: the devices.
    """

    storage: Storage
    treedefs: tuple[Any, ...]
    members: tuple[tuple[tuple[int, ...], ...], ...]
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
          dtype_of: a bank's dtype -> that of its buffer.
          at_work: with the data axes gathered.
        """
        over = (lambda name: not is_batch_axis(name)) if at_work else (lambda name: True)
        shape = lambda bank: part_shape(bank.shape, bank.spec, self.mesh, over)
        return {name: jnp.zeros(shape(bank), dtype_of(bank.dtype)) for name, bank in self.storage.named_banks}

    def gathered(self, buffers: Buffers) -> Buffers:
        """A device's buffers with the data axes gathered."""
        return {n: gather_axes(buffers[n], bank.spec, is_batch_axis) for n, bank in self.storage.named_banks}

    def gathered_leaves(self, home: int, leaves: list[Any]) -> list[Any]:
        """`gathered` of the leaves of one layer."""
        specs = self.storage.shelves[home].specs
        return [gather_axes(leaf, spec, is_batch_axis) for leaf, spec in zip(leaves, specs, strict=True)]

    def reduced(self, buffers: Buffers) -> Buffers:
        """The inverse of `gathered` for sums over a device's own examples: over all examples, at rest."""
        return {n: self._reduced(buffers[n], bank.spec) for n, bank in self.storage.named_banks}

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
        """Global arrays that hold the leaves of the given layers; each device gets its own part from the host."""
        by_member = {
            (h, j): leaves[shown[0]]
            for h, group in enumerate(self.members)
            for j, shown in enumerate(group)
            if shown[0] in leaves
        }

        def make(name: str, shape: jax.ShapeDtypeStruct) -> Any:
            def fill(index: Any) -> np.ndarray:
                stage = index[0].start or 0
                return self.storage.assemble(stage, by_member, name)[None][(slice(None), *index[1:])]

            return jax.make_array_from_callback(shape.shape, shape.sharding, fill)

        return StageTree({name: make(name, shape) for name, shape in self.shapes.items()}, self)


NOT_SAVED = (
    "a pipeline's variables and states lie as its own devices need it, so they aren't pickled or serialised as they "
    "are; save trees = jax.device_get(pipe.layer_variables(variables)), and load them by "
    "pipe.from_layer_variables(trees, batch); or save a state by orbax, for pipe.abstract_state(batch, tx)"
)


class StageTree(dict):
    """Variables of all layers under a layout: arrays `[K, ...]` split over `stage`, by bank (`jpipe.memory.storage`).

    A pytree. Elementwise operations and sums over all elements are exact: places that no layer owns hold zeros.
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
    model: Sequential, bounds: Sequence[tuple[int, int]], mesh: Mesh, *, apart: bool = False
) -> dict[str, Layout]:
    """The layout of each collection for a model cut into virtual stages.

    Args:
      model: the traced layers.
      bounds: for each virtual stage, its first layer and one past its last, ends included in the numbering.
      mesh: with K devices along `stage`.
      apart: each leaf of a kind has a bank of its own, if it has a typed one.
    """
    num_stages = mesh.shape[AXIS]
    stage_of = [s % num_stages for s, (first, last) in enumerate(bounds) for _ in range(first, last)]
    homes = model.homes
    kinds = [model.kinds[home.kind] for home in homes]
    cells = [[stage_of[shown[0]] for shown in home.members] for home in homes]
    layouts = {}
    for name in ["params", *sorted({n for kind in model.kinds for n in kind.variables} - {"params"})]:
        trees = [kind.variables.get(name, {}) if home.members else {} for kind, home in zip(kinds, homes, strict=True)]
        storage = build_storage(
            [jax.tree.leaves(tree) for tree in trees],
            cells,
            num_devices=num_stages,
            specs=[kind.specs.get(name, []) if home.members else [] for kind, home in zip(kinds, homes, strict=True)],
            apart=apart,
        )
        members = tuple(home.members for home in homes)
        layouts[name] = Layout(storage, tuple(map(jax.tree.structure, trees)), members, mesh)
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


def take_apart(trees: dict[str, StageTree]) -> list[dict[str, Any]]:
    """Each layer's own tree by collection, in the order of `members` (ends included). To be called under `jax.jit`.

    A leaf is split over `stage` along the first dimension that divides, so that no device gets all of the model; one
    without such a dimension is on all of them.
    """
    layouts = {name: tree.layout for name, tree in trees.items()}
    layout = next(iter(layouts.values()))
    num_stages = layout.num_stages
    places = sorted((i, h, j) for h, group in enumerate(layout.members) for j, shown in enumerate(group) for i in shown)
    mesh = layout.mesh

    def split(leaf: Any, spec: PartitionSpec) -> int | None:
        """The dimension along which a leaf is split over the stages, besides its other splits."""
        parts = part_shape(leaf.shape, spec, mesh, lambda name: True)
        return next((d for d, n in enumerate(parts) if n and n % num_stages == 0 and num_stages > 1), None)

    def spec_of(leaf: Any, spec: PartitionSpec) -> PartitionSpec:
        entries = [list(names_in(entry)) for entry in spec] + [[] for _ in leaf.shape[len(spec) :]]
        dimension = split(leaf, spec)
        if dimension is not None:
            entries[dimension].append(AXIS)
        return PartitionSpec(*map(tuple, entries))

    def on_shelf(name: str, c: int) -> list[tuple[Any, PartitionSpec]]:
        shelf = layouts[name].storage.shelves[c]
        return list(zip(shelf.leaves, shelf.specs, strict=True))

    def share(leaf: Any, dimension: int | None, mine: Any) -> Any:
        if leaf.dtype == jnp.bool_:
            return share(leaf.astype(jnp.int8), dimension, mine).astype(jnp.bool_)
        leaf = jnp.where(mine, leaf, jnp.zeros_like(leaf))
        if dimension is not None:
            return jax.lax.psum_scatter(leaf, AXIS, scatter_dimension=dimension, tiled=True)
        return jax.lax.psum(leaf, AXIS)

    def body(trees: dict[str, Any]) -> list[dict[str, Any]]:
        buffers, device = local(trees), device_index(mesh)

        def read(name: str, c: int, j: int) -> list[Any]:
            mine = layout.storage.shelves[c].cells[j] % num_stages == device
            leaves = layouts[name].storage.read(buffers[name], c, j)
            return [share(leaf, split(*known), mine) for leaf, known in zip(leaves, on_shelf(name, c), strict=True)]

        return [{name: read(name, c, j) for name in layouts} for _, c, j in places]

    plain = {name: dict(tree) for name, tree in trees.items()}
    in_specs = {name: lay.storage.specs((AXIS,)) for name, lay in layouts.items()}
    specs = [{name: [spec_of(*known) for known in on_shelf(name, c)] for name in layouts} for _, c, _ in places]
    found = on_stages(body, mesh, (in_specs,), specs)(plain)
    return [
        {name: jax.tree.unflatten(layouts[name].treedefs[c], leaves) for name, leaves in item.items()}
        for (_, c, _), item in zip(places, found, strict=True)
    ]


def as_auto(tree: Any) -> Any:
    """Arrays split as they are, but by Auto axes: plain Flax computes with them however they are split."""

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, Tracer) or AxisType.Explicit not in leaf.sharding.mesh.axis_types:
            return leaf
        mesh = leaf.sharding.mesh
        auto = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
        return jax.device_put(leaf, NamedSharding(auto, leaf.sharding.spec))

    return jax.tree.map(convert, tree)
