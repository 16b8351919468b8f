"""Takes each layer's own variables out of a pipeline's buffers, and puts them back (`Pipeline.layer_variables`).

    buffers [K, ...]  --to_layers-->    trees by layer and collection  --to_items-->    each library's own (linen, nnx)
                      <--from_layers--                                 <--from_items--  checked

The model is never put on one device: trees that come out are split over `stage` (`jpipe.memory.records`), and each
device is given its part of trees that go in. An *item* is one layer's variables as its own library has them (linen,
nnx, or bare parameters).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jpipe.arrays.trees import check_same_shapes, check_same_structure, named_leaves
from jpipe.layers.base import AnyLayer, LayerError
from jpipe.layers.frozen import thawed
from jpipe.memory.layout import Layout, StageTree
from jpipe.memory.records import Arrays, Records
from jpipe.memory.scattered import ScatteredLeaf, is_whole
from jpipe.model.groups import Model
from jpipe.types import Leaf, PyTree

LayerTrees = Mapping[int, Mapping[str, PyTree]]
"""Layer -> collection -> the layer's tree of whole arrays."""


def to_layers(trees: dict[str, StageTree]) -> dict[int, dict[str, PyTree]]:
    """`LayerTrees` of some or all collections, laid out by one pipeline. To be called under `jax.jit`.

    Layers without variables are missing; a collection that a layer lacks is `{}`. Leaves are split over `stage`, so
    that no device gets all of the model (`jpipe.memory.records`).
    """
    records = Records({name: tree.layout for name, tree in trees.items()})
    arrays, layers = {name: dict(tree) for name, tree in trees.items()}, {}
    for v, j, users in records.places:
        leaves = records.take(arrays, v, j)
        variables = {name: jax.tree.unflatten(trees[name].layout.treedefs[v], leaves[name]) for name in trees}
        layers |= dict.fromkeys(users, variables)
    return dict(sorted(layers.items()))


def from_layers(layouts: Mapping[str, Layout], trees: LayerTrees) -> dict[str, StageTree]:
    """The inverse of `to_layers`: global arrays by collection. To be called outside of `jax.jit`, by all processes.

    Leaves may lie anywhere. Where this process can read all of them it gives each of its devices that device's part of
    the buffers; if it has only a part of some, all records are put in on the devices (`Records.put`), which all
    processes do together. Neither a device nor a host gets all of the model.

    Args:
      layouts: the layout of each collection, of one pipeline. An array has the dtype that it names.
      trees: as `to_layers` gives them, of any number of stages. Of layers that share variables the first one's count.
        The places of layers and collections that are missing hold zeros.
    """
    records, leaves = Records(layouts), {name: {} for name in layouts}  # by collection and (record type, record)
    for v, j, users in records.places:
        for name in layouts:
            if tree_leaves := jax.tree.leaves(trees.get(users[0], {}).get(name)):
                leaves[name][v, j] = tree_leaves
    if all(map(is_whole, jax.tree.leaves(trees))):
        arrays = {name: _from_host(layout, leaves[name]) for name, layout in layouts.items()}
    else:
        arrays = {name: _from_host(layout, {}) for name, layout in layouts.items()}
        for v, j, _ in records.places:
            if record := {name: leaves[name][v, j] for name in layouts if (v, j) in leaves[name]}:
                arrays = records.put(arrays, v, j, record)
    return {name: StageTree(arrays[name], layout) for name, layout in layouts.items()}


def _from_host(layout: Layout, leaves: Mapping[tuple[int, int], Sequence[Leaf]]) -> dict[str, jax.Array]:
    """Global arrays by buffer of the leaves of each (record type, record); the places of others hold zeros."""

    def make(name: str, shape: jax.ShapeDtypeStruct) -> jax.Array:
        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            """A device's part `[1, ...]` of `[K, ...]`."""
            assert index, "JAX asks for slices"
            device = None if shape.shape[0] < layout.num_stages else index[0].start or 0
            return layout.storage.on_host(name, device, leaves)[None][(slice(None), *index[1:])]

        return jax.make_array_from_callback(shape.shape, shape.sharding, part)

    return {name: make(name, shape) for name, shape in layout.shapes.items()}


def to_items(model: Model, trees: LayerTrees) -> list[PyTree]:
    """`LayerTrees` as the layers' own libraries have them, a list of N items."""
    items = []
    for index in range(model.num_layers):
        group = model.group_at(index)
        variables = {name: tree for name, tree in trees.get(index, {}).items() if name in group.variables}
        items.append(group.layer.to_item(as_auto(variables)))
    return items


def from_items(model: Model, layouts: Mapping[str, Layout], trees: Sequence[PyTree]) -> dict[str, StageTree]:
    """Items as global arrays by collection: the inverse of `to_layers` followed by `to_items`.

    Args:
      model: the layers.
      layouts: the layout of each collection.
      trees: for each layer its own variables, on the host or on devices.

    Raises:
      TypeError, ValueError: these aren't the variables of these layers; the first that differs is named.
    """
    if not isinstance(trees, list | tuple):
        raise TypeError(f"trees is a {type(trees).__name__}; pass a list of each layer's own variables")
    if len(trees) != model.num_layers:
        raise ValueError(f"there are {len(trees)} trees but {model.num_layers} layers; give one a layer")
    for name, leaf in named_leaves("trees", trees):
        if isinstance(leaf, Tracer):
            raise TypeError(
                f"{name} is being traced; from_layer_variables puts values on devices, so call it outside of jax.jit "
                "and its like"
            )
    layers: dict[int, dict[str, PyTree]] = {}
    for index, tree in enumerate(trees):
        group = model.group_at(index)
        try:
            variables = group.layer.from_item(tree)
        except LayerError as error:
            raise TypeError(f"trees[{index}]: {group.layer.name} {error}") from error
        # There and back, so that both have the containers that `from_item` makes.
        expected = group.layer.from_item(group.layer.to_item(group.variables))
        what = f"trees[{index}] ({group.layer.name})"
        _check_item(what, thawed(variables), thawed(expected), remedy=_remedy(model, index))
        layers[index] = {name: variables[name] for name in group.variables}
    _check_tied(model, layers)
    return from_layers(layouts, layers)


def ready_values(layouts: Mapping[str, Layout], layers: Sequence[AnyLayer]) -> Arrays:
    """Buffers by collection with the values of layers that come with their own."""
    trees = {index: layer.ready for index, layer in enumerate(layers) if layer.ready}
    some = {name: layout for name, layout in layouts.items() if any(name in tree for tree in trees.values())}
    return {name: dict(tree) for name, tree in from_layers(some, trees).items()} if some else {}


def _remedy(model: Model, index: int) -> str:
    """The remedy for missing variables of a layer that shares those of an earlier layer; else empty."""
    first = next((users[0] for one in model.variable_sets for users in one.users if index in users), index)
    remedy = f"; it shares its parameters with layer {first}: give it the same tree as trees[{first}]"
    return remedy if first != index else ""


def _check_item(what: str, variables: Mapping[str, PyTree], expected: Mapping[str, PyTree], *, remedy: str) -> None:
    """Checks one layer's variables by collection against their shapes.

    Raises:
      ValueError: a collection or leaf is missing, or has another shape.
    """
    for name, tree in expected.items():
        if name not in variables:
            raise ValueError(f"{what} lacks the collection {name!r}; got {sorted(variables)}{remedy}")
        check_same_structure(f"{what}[{name!r}]", variables[name], tree)
        check_same_shapes(f"{what}[{name!r}]", variables[name], tree)


def _check_tied(model: Model, trees: LayerTrees) -> None:
    """Checks that layers which share their parameters were given the same ones.

    Raises:
      ValueError: naming the first two that differ.
    """
    for first, *others in (users for one in model.variable_sets for users in one.users):
        for other in others:
            pairs = zip(*(jax.tree.leaves(trees[index].get("params")) for index in (first, other)), strict=True)
            if not all(a is b or _are_equal(a, b) for a, b in pairs):
                raise ValueError(
                    f"trees[{first}] and trees[{other}] differ, but layers {first} and {other} "
                    f"({model.group_at(first).layer.name}) share "
                    "their parameters; give both the same, or don't share them"
                )


def _are_equal(a: Leaf, b: Leaf) -> bool:
    """`np.array_equal`, also of arrays that are split over processes; all of these get the same answer."""
    if is_whole(a) and is_whole(b):
        return np.array_equal(a, b)
    sharding = next(x.sharding for x in (a, b) if not is_whole(x))
    everywhere = NamedSharding(sharding.mesh, PartitionSpec())
    scattered = ScatteredLeaf(jax.ShapeDtypeStruct(a.shape, a.dtype), PartitionSpec(), sharding.mesh)
    return bool(jax.jit(jnp.array_equal, out_shardings=everywhere)(scattered.put(a), scattered.put(b)))


def as_auto(tree: PyTree) -> PyTree:
    """Arrays split as they are, but by Auto axes: plain Flax computes with them however they are split.

    Args:
      tree: a pytree of arrays; tracers stay as they are.
    """

    def convert(leaf: jax.Array) -> jax.Array:
        if isinstance(leaf, Tracer) or not isinstance(leaf.sharding, NamedSharding):
            return leaf
        mesh, spec = leaf.sharding.mesh, leaf.sharding.spec
        if not isinstance(mesh, Mesh) or AxisType.Explicit not in mesh.axis_types:
            return leaf
        auto = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
        return jax.device_put(leaf, NamedSharding(auto, spec))

    return jax.tree.map(convert, tree)
