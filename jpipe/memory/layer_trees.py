"""Each layer's own variables, out of a pipeline's buffers and back: `Pipeline.layer_variables` and its inverse.

The model is never put on one device: leaves are split over `stage` (`jpipe.memory.records`). An *item* is one layer's
variables as its own library has them (linen, nnx, or bare parameters).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jpipe.jax_tools.trees import check_same_shapes, check_same_structure
from jpipe.layers.base import AnyLayer, LayerError
from jpipe.memory.layout import Layout, StageTree, local
from jpipe.memory.records import Records, ScatteredLeaf, is_whole
from jpipe.mesh.programs import on_stages
from jpipe.model.groups import Model


def take_apart(trees: dict[str, StageTree]) -> dict[int, dict[str, Any]]:
    """Each layer's own trees: index -> collection -> tree of whole arrays. To be called under `jax.jit`.

    Layers without variables are missing; a collection that a layer lacks is `{}`. Leaves are split over `stage`, so
    that no device gets all of the model (`jpipe.memory.records`).

    Args:
      trees: some or all collections, laid out by one pipeline.
    """
    records = Records({name: tree.layout for name, tree in trees.items()})
    places, layout = records.places, records.layout
    names = [list(records.leaves(v)) for v, _, _ in places]

    def body(arrays: dict[str, Any]) -> list[dict[str, list[Any]]]:
        return [records.scatter(local(arrays), v, j) for v, j, _ in places]

    plain = {name: dict(tree) for name, tree in trees.items()}
    in_specs = {name: dict(tree.layout.specs) for name, tree in trees.items()}
    specs = [records.specs(v, own) for (v, _, _), own in zip(places, names, strict=True)]
    found = on_stages(body, layout.mesh, (in_specs,), specs)(plain)
    taken = {
        i: {name: jax.tree.unflatten(tree.layout.treedefs[v], own.get(name, [])) for name, tree in trees.items()}
        for (v, _, users), own in zip(places, found, strict=True)
        for i in users
    }
    return dict(sorted(taken.items()))


def put_together_on_devices(layouts: dict[str, Layout], taken: dict[int, dict[str, Any]]) -> dict[str, StageTree]:
    """The inverse of `take_apart`: global arrays by collection, of leaves that may be global arrays themselves.

    No process needs all of a leaf, and no device gets more than its part of the model and one layer at a time. To be
    called outside of `jax.jit`; in a cluster by all processes.

    Args:
      layouts: the layout of each collection, of one pipeline. Leaves may have other dtypes than it names, such as an
        optimiser's moments: an array has that of its leaves.
      taken: index -> collection -> tree of whole arrays, as `take_apart` gives them, of any number of stages: each on
        the host (the same in all processes), or split in any way over the layouts' devices. Of layers that share
        variables the first one's count. The places of layers and collections that are missing hold zeros.
    """
    records = Records(layouts)
    dtypes, found = {}, []  # of each (collection, buffer); (record type, record, leaves by collection)
    for v, j, users in records.places:
        item = taken.get(users[0], {})
        leaves = {name: jax.tree.leaves(item[name]) for name in layouts if item.get(name)}
        found.append((v, j, leaves))
        for name, own in leaves.items():
            buffers = layouts[name].storage.record_types[v].buffers
            dtypes |= {(name, buffer): leaf.dtype for buffer, leaf in zip(buffers, own, strict=True)}
    arrays = records.zeros(dtypes)
    for v, j, leaves in found:
        arrays = records.write(arrays, v, j, leaves) if leaves else arrays
    return {name: StageTree(tree, layouts[name]) for name, tree in arrays.items()}


def as_items(model: Model, taken: dict[int, dict[str, Any]]) -> list[Any]:
    """What `take_apart` found, as the layers' own libraries have it, a list of N."""
    items = []
    for index in range(model.num_layers):
        group = model.group_at(index)
        own = {name: tree for name, tree in taken.get(index, {}).items() if name in group.variables}
        items.append(group.layer.to_item(_as_auto(own)))
    return items


def put_together(model: Model, layouts: dict[str, Layout], trees: Any) -> dict[str, StageTree]:
    """Items laid out as global arrays by collection: the inverse of `take_apart` followed by `as_items`.

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
    _check_no_tracers(trees)
    found: dict[str, dict[int, list[Any]]] = {name: {} for name in layouts}
    for index, tree in enumerate(trees):
        group = model.group_at(index)
        try:
            own = group.layer.from_item(tree)
        except LayerError as error:
            raise TypeError(f"trees[{index}]: {group.layer.name} {error}") from error
        # There and back, so that both have the containers that `from_item` makes.
        expected = group.layer.from_item(group.layer.to_item(group.variables))
        _check_item(f"trees[{index}] ({group.layer.name})", own, expected, remedy=_remedy(model, index))
        for name in group.variables:
            found[name][index] = jax.tree.leaves(own[name])
    _check_tied(model, found["params"])
    return laid_out(layouts, found)


def laid_out(layouts: dict[str, Layout], leaves: dict[str, dict[int, list[Any]]]) -> dict[str, StageTree]:
    """Leaves by collection and layer, as `Layout.place` takes them, as global arrays.

    Those that are whole in this process go by way of the host; if one isn't, all stay on the devices.
    """
    if all(is_whole(leaf) for leaf in jax.tree.leaves(leaves)):
        return {name: layouts[name].place(found) for name, found in leaves.items()}
    taken: dict[int, dict[str, Any]] = {}
    for name, found in leaves.items():
        for index, own in found.items():
            taken.setdefault(index, {})[name] = own
    return put_together_on_devices({name: layouts[name] for name in leaves}, taken)


def ready_values(layouts: dict[str, Layout], layers: Sequence[AnyLayer]) -> dict[str, dict[str, Any]]:
    """Buffers by collection with the values of layers that come with their own."""
    leaves: dict[str, dict[int, Any]] = {}
    for index, layer in enumerate(layers):
        for name, tree in (layer.ready or {}).items():
            leaves.setdefault(name, {})[index] = jax.tree.leaves(tree)
    return {name: dict(tree) for name, tree in laid_out(layouts, leaves).items()}


def _remedy(model: Model, index: int) -> str:
    """What helps if a layer's variables are missing, where that isn't plain: it shares those of an earlier layer."""
    first = next((users[0] for known in model.variable_sets for users in known.users if index in users), index)
    if first == index:
        return ""
    return f"; it shares its parameters with layer {first}: give it the same tree as trees[{first}]"


def _check_item(what: str, own: Any, expected: dict[str, Any], *, remedy: str) -> None:
    """Checks one layer's variables by collection against their shapes.

    Raises:
      ValueError: a collection or leaf is missing, or has another shape.
    """
    lacking = [name for name in expected if name not in own]
    if lacking:
        raise ValueError(f"{what} lacks the collection {lacking[0]!r}; got {sorted(own)}{remedy}")
    for name, tree in expected.items():
        check_same_structure(f"{what}[{name!r}]", own[name], tree)
        check_same_shapes(f"{what}[{name!r}]", own[name], tree)


def _check_tied(model: Model, params: dict[int, list[Any]]) -> None:
    """Checks that layers which share their parameters were given the same ones.

    Args:
      model: the layers.
      params: the leaves of each layer's parameters.

    Raises:
      ValueError: naming the first two that differ.
    """
    for first, *others in (users for known in model.variable_sets for users in known.users):
        for other in others:
            pairs = zip(params.get(first, []), params.get(other, []), strict=True)
            if not all(a is b or _are_equal(a, b) for a, b in pairs):
                raise ValueError(
                    f"trees[{first}] and trees[{other}] differ, but layers {first} and {other} "
                    f"({model.group_at(first).layer.name}) share "
                    "their parameters; give both the same, or don't share them"
                )


def _are_equal(a: Any, b: Any) -> bool:
    """`np.array_equal`, also of arrays that are split over processes; all of these get the same answer."""
    if is_whole(a) and is_whole(b):
        return np.array_equal(a, b)
    sharding = next(x.sharding for x in (a, b) if not is_whole(x))
    everywhere = NamedSharding(sharding.mesh, PartitionSpec())
    known = ScatteredLeaf(jax.ShapeDtypeStruct(a.shape, a.dtype), PartitionSpec(), sharding.mesh)
    return bool(jax.jit(jnp.array_equal, out_shardings=everywhere)(known.put(a), known.put(b)))


def _check_no_tracers(trees: Any) -> None:
    """Checks that arrays have values.

    Raises:
      TypeError: one is being traced.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(trees):
        if isinstance(leaf, Tracer):
            raise TypeError(
                f"trees{jax.tree_util.keystr(path)} is being traced; from_layer_variables puts values on devices, so "
                "call it outside of jax.jit and its like"
            )


def _as_auto(tree: Any) -> Any:
    """Arrays split as they are, but by Auto axes: plain Flax computes with them however they are split."""

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, Tracer) or AxisType.Explicit not in leaf.sharding.mesh.axis_types:
            return leaf
        mesh = leaf.sharding.mesh
        auto = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
        return jax.device_put(leaf, NamedSharding(auto, leaf.sharding.spec))

    return jax.tree.map(convert, tree)
