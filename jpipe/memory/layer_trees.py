"""Each layer's own variables, out of a pipeline's buffers and back: `Pipeline.layer_variables` and its inverse.

The model is never put on one device: a leaf is split over `stage`, along the first dimension that K divides. An *item*
is one layer's variables as its own library has them (linen, nnx, or bare parameters).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jpipe.jax_tools.indexing import look_up
from jpipe.jax_tools.trees import check_same_shapes, check_same_structure
from jpipe.layers.base import LayerError
from jpipe.memory.layout import Layout, StageTree, device_index, local, stacked
from jpipe.model.groups import Model
from jpipe.sharding.meshes import AXIS, on_stages, part_shape
from jpipe.sharding.shardings import names_in


def take_apart(trees: dict[str, StageTree]) -> dict[int, dict[str, Any]]:
    """Each layer's own trees: index -> collection -> tree of whole arrays. To be called under `jax.jit`.

    Layers without variables are missing; a collection that a layer lacks is `{}`.

    A leaf is split over `stage` along the first dimension that divides, so that no device gets all of the model; one
    without such a dimension is on all of them.

    Args:
      trees: some or all collections, laid out by one pipeline.
    """
    layouts = {name: tree.layout for name, tree in trees.items()}
    layout = next(iter(layouts.values()))
    places = sorted((i, v, j) for v, known in enumerate(layout.users) for j, users in enumerate(known) for i in users)
    leaves = _scattered(layouts)

    def body(trees: dict[str, Any]) -> list[dict[str, Any]]:
        buffers, device = local(trees), device_index(layout.mesh)

        def read(name: str, v: int, j: int) -> list[Any]:
            mine = layout.storage.record_types[v].devices[j] == device
            found = layouts[name].storage.read(buffers[name], v, j)
            return [known.scatter(leaf, mine) for known, leaf in zip(leaves[name, v], found, strict=True)]

        return [{name: read(name, v, j) for name in layouts} for _, v, j in places]

    plain = {name: dict(tree) for name, tree in trees.items()}
    in_specs = {name: lay.storage.specs((AXIS,)) for name, lay in layouts.items()}
    specs = [{name: [known.result_spec for known in leaves[name, v]] for name in layouts} for _, v, _ in places]
    found = on_stages(body, layout.mesh, (in_specs,), specs)(plain)
    return {
        i: {name: jax.tree.unflatten(layouts[name].treedefs[v], own) for name, own in item.items()}
        for (i, v, _), item in zip(places, found, strict=True)
    }


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
    users = next(iter(layouts.values())).users
    shardings = {name: jax.tree.map(lambda a: a.sharding, dict(lay.shapes)) for name, lay in layouts.items()}
    scattered, writers = _scattered(layouts), {}
    places = [(v, j, taken.get(own[0], {})) for v, known in enumerate(users) for j, own in enumerate(known)]
    arrays = _zeros(layouts, places)
    for v, j, item in places:
        leaves = {
            name: [
                _on_devices(leaf, known.shape.sharding)
                for leaf, known in zip(jax.tree.leaves(item[name]), scattered[name, v], strict=True)
            ]
            for name in layouts
            if item.get(name)
        }
        chosen = (v, *leaves)
        if chosen not in writers:
            write = _writer(layouts, v, tuple(leaves))
            writers[chosen] = jax.jit(write, donate_argnums=0, out_shardings=shardings)
        arrays = writers[chosen](arrays, leaves, np.int32(j)) if leaves else arrays
    return {name: StageTree(tree, layouts[name]) for name, tree in arrays.items()}


def _zeros(layouts: dict[str, Layout], places: list[tuple[int, int, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Global arrays of zeros by collection, with the dtypes of the leaves that will lie in them.

    Args:
      layouts: the layout of each collection.
      places: (record type, record, a layer's trees by collection).
    """
    types: dict[tuple[str, str], Any] = {}  # of the leaves in each buffer
    for v, _, item in places:
        for name in filter(layouts.__contains__, item):
            buffers = layouts[name].storage.record_types[v].buffers
            pairs = zip(buffers, jax.tree.leaves(item[name]), strict=True)
            types.update({(name, buffer): leaf.dtype for buffer, leaf in pairs})
    shapes = {name: dict(layout.shapes) for name, layout in layouts.items()}
    dtype = lambda name, buffer: types.get((name, buffer), shapes[name][buffer].dtype)
    make = lambda: {n: {b: jnp.zeros(a.shape, dtype(n, b)) for b, a in tree.items()} for n, tree in shapes.items()}
    return jax.jit(make, out_shardings=jax.tree.map(lambda a: a.sharding, shapes))()


def _writer(layouts: dict[str, Layout], v: int, names: tuple[str, ...]) -> Any:
    """`(global arrays, leaves, record) -> global arrays` with the leaves of some collections of a record written.

    Args:
      layouts: the layout of each collection.
      v: the record type.
      names: the collections, whose leaves come as `item_shapes` says.
    """
    layout, scattered = next(iter(layouts.values())), _scattered(layouts)

    def body(arrays: dict[str, Any], leaves: dict[str, list[Any]], record: Any) -> dict[str, Any]:
        arrays = local(arrays)
        mine = look_up(layout.storage.record_types[v].devices, record) == device_index(layout.mesh)
        for name in names:
            storage = layouts[name].storage
            whole = [known.gather(part) for known, part in zip(scattered[name, v], leaves[name], strict=True)]
            old = storage.read(arrays[name], v, record)
            new = [jnp.where(mine, a, b) for a, b in zip(whole, old, strict=True)]
            arrays = arrays | {name: storage.write(arrays[name], v, record, new)}
        return stacked(arrays)

    whole_specs = {name: dict(lay.specs) for name, lay in layouts.items()}
    leaf_specs = {name: [known.result_spec for known in scattered[name, v]] for name in names}
    return on_stages(body, layout.mesh, (whole_specs, leaf_specs, PartitionSpec()), whole_specs)


def item_shapes(layouts: dict[str, Layout]) -> dict[int, dict[str, Any]]:
    """What `take_apart` gives, as ShapeDtypeStructs with shardings: of whole leaves, split over the stages.

    Args:
      layouts: the layout of each collection, of one pipeline.
    """
    scattered, users = _scattered(layouts), next(iter(layouts.values())).users
    trees = {
        (name, v): jax.tree.unflatten(layouts[name].treedefs[v], [known.shape for known in own])
        for (name, v), own in scattered.items()
        if users[v]
    }
    pairs = sorted((i, v) for v, known in enumerate(users) for own in known for i in own)
    return {i: {name: trees[name, v] for name in layouts} for i, v in pairs}


@dataclass(frozen=True)
class _Scattered:
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

    @property
    def shape(self) -> jax.ShapeDtypeStruct:
        """The shape of what is shared out, with its sharding."""
        sharding = NamedSharding(self.mesh, self.result_spec)
        return jax.ShapeDtypeStruct(self.leaf.shape, self.leaf.dtype, sharding=sharding)


def _on_devices(leaf: Any, sharding: NamedSharding) -> jax.Array:
    """An array split so; of one that is on the host, or whole in this process, each device gets its part."""
    if isinstance(leaf, jax.Array) and leaf.sharding.device_set == sharding.device_set:
        return jax.device_put(leaf, sharding)
    if not _is_whole(leaf):
        raise ValueError(
            f"an array {leaf.dtype}{list(leaf.shape)} is split over {len(leaf.sharding.device_set)} devices other than "
            f"those of the pipeline's mesh; move it there first: jax.device_put(array, NamedSharding(pipe.mesh, ...)), "
            "or jax.experimental.multihost_utils.process_allgather(array, tiled=True)"
        )
    whole = np.asarray(leaf)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def _scattered(layouts: dict[str, Layout]) -> dict[tuple[str, int], list[_Scattered]]:
    """How the leaves of each collection and record type are shared out."""
    return {
        (name, v): [_Scattered(leaf, spec, lay.mesh) for leaf, spec in zip(known.leaves, known.specs, strict=True)]
        for name, lay in layouts.items()
        for v, known in enumerate(lay.storage.record_types)
    }


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
        _check_item(f"trees[{index}] ({group.layer.name})", own, expected)
        for name in group.variables:
            found[name][index] = jax.tree.leaves(own[name])
    _check_tied(model, found["params"])
    return laid_out(layouts, found)


def laid_out(layouts: dict[str, Layout], leaves: dict[str, dict[int, list[Any]]]) -> dict[str, StageTree]:
    """Leaves by collection and layer, as `Layout.place` takes them, as global arrays.

    Those that are whole in this process go by way of the host; if one isn't, all stay on the devices.
    """
    if all(_is_whole(leaf) for leaf in jax.tree.leaves(leaves)):
        return {name: layouts[name].place(found) for name, found in leaves.items()}
    taken: dict[int, dict[str, Any]] = {}
    for name, found in leaves.items():
        for index, own in found.items():
            taken.setdefault(index, {})[name] = own
    return put_together_on_devices({name: layouts[name] for name in leaves}, taken)


def _is_whole(leaf: Any) -> bool:
    """Whether this process can read all of a leaf."""
    return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated


def _check_item(what: str, own: Any, expected: dict[str, Any]) -> None:
    """Checks one layer's variables by collection against their shapes.

    Raises:
      ValueError: a collection or leaf is missing, or has another shape.
    """
    lacking = [name for name in expected if name not in own]
    if lacking:
        raise ValueError(f"{what} lacks the collection {lacking[0]!r}; got {sorted(own)}")
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
    if _is_whole(a) and _is_whole(b):
        return np.array_equal(a, b)
    sharding = next(x.sharding for x in (a, b) if not _is_whole(x))
    everywhere = NamedSharding(sharding.mesh, PartitionSpec())
    compare = jax.jit(jnp.array_equal, out_shardings=everywhere)
    return bool(compare(_on_devices(a, sharding), _on_devices(b, sharding)))


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
