"""Takes each layer's own variables out of the buffers of all stages, and puts them in (`Pipeline.layer_variables`).

    buffers [K, ...]  --to_layers-->    trees by layer and collection  --to_items-->    each library's own (linen, nnx)
                      <--from_layers--                                 <--from_items--  checked

So whole states go to another layout, to a checkpoint and back too, while no device holds more than its part of the
model and of one layer: a leaf that one stage has is scattered (`jpipe.memory.layout`), and each device is given its
part of trees that go in. `Records.updated` makes all records anew where they lie. An *item* is one layer's variables as
its own library has them (linen, nnx, or bare parameters).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jpipe.jax.in_place import HOST, Index, is_on_host, is_whole, look_up, on_host, take_row
from jpipe.jax.trees import Casts, check_same_shapes, check_same_structure, named_leaves
from jpipe.layers.base import AnyLayer, LayerError, LayerVariables, variables_of
from jpipe.layers.frozen import FROZEN, thawed
from jpipe.memory.layout import Layout, ScatteredLeaf, StageTree, add_stage_axis, device_index, drop_stage_axis
from jpipe.memory.storage import Buffers
from jpipe.model.groups import Model
from jpipe.partitioner.axes import on_stages, stage_axes
from jpipe.partitioner.shardings import Axis, Sharding, of_spec
from jpipe.types import Leaf, PyTree

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
            return layout.storage.in_numpy(name, device, leaves)[None][(slice(None), *index[1:])]

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


def from_items(model: Model, trees: Sequence[PyTree], casts: dict[str, Casts]) -> LayerTrees:
    """Items as `LayerTrees`: the inverse of `to_items`.

    Args:
      model: the layers.
      trees: for each layer its own variables, on the host or on devices.
      casts: the dtypes in which they are given are added, by collection.

    Raises:
      TypeError, ValueError: these aren't the variables of these layers; the first that differs is named.
    """
    if not isinstance(trees, list | tuple):
        raise TypeError(f"trees is a {type(trees).__name__}; pass a list of each layer's own variables")
    if len(trees) != model.num_layers:
        raise ValueError(f"there are {len(trees)} trees but {model.num_layers} layers; give one a layer")
    for name, leaf in named_leaves("trees", trees):
        if isinstance(leaf, Tracer):
            raise TypeError(f"{name} is being traced; call from_layer_variables outside of jax.jit and its like")
    layers: dict[int, dict[str, PyTree]] = {}
    for index, tree in enumerate(trees):
        group = model.group_at(index)
        try:
            # There and back, so that both have the containers that `from_item` makes.
            expected = group.layer.from_item(group.layer.to_item(group.variables))
            variables = variables_of(group.layer, tree, expected)
        except LayerError as error:
            raise TypeError(f"trees[{index}]: {group.layer.name} {error}") from error
        what = f"trees[{index}] ({group.layer.name})"
        _check_item(what, variables, expected, casts, remedy=_remedy(model, index))
        layers[index] = {name: variables[name] for name in group.variables}
    _check_tied(model, layers)
    return layers


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


def _check_item(
    what: str, variables: LayerVariables, expected: LayerVariables, casts: dict[str, Casts], *, remedy: str
) -> None:
    """Checks one layer's variables by collection against their shapes.

    Raises:
      ValueError: a collection or leaf is missing, or has another shape.
    """
    whole = thawed(variables)
    for name, tree in thawed(expected).items():
        if name not in whole:
            raise ValueError(f"{what} lacks the collection {name!r}; got {sorted(whole)}{remedy}")
        check_same_structure(f"{what}[{name!r}]", whole[name], tree)
    for name, tree in expected.items():
        place = f"{what}[{'params' if name == FROZEN else name!r}]"
        check_same_shapes(place, variables[name], tree, casts.setdefault(name, {}))


def _check_tied(model: Model, trees: LayerTrees) -> None:
    """Checks that layers which share their parameters were given the same ones.

    Raises:
      ValueError: naming the first two that differ.
    """
    for first, *others in (users for one in model.variable_sets for users in one.users):
        for other in others:
            pairs = zip(*(jax.tree.leaves(trees[index].get("params")) for index in (first, other)), strict=True)
            if not all(a is b or _are_equal(a, b) for a, b in pairs):
                raise ValueError(f"trees[{first}] and trees[{other}] differ, but share parameters; give both the same")


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
