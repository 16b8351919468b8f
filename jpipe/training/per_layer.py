"""`per_layer`: shows an optax transformation one layer's parameters at a time.

Under a layout, leaves of many layers lie together in buffers. Elementwise transformations and global norms don't
notice. Those that look at shapes, paths or norms of single parameters do, so `per_layer` shows them each layer's own
tree, on the device where it lies.

A model that is one module is shown as one tree, once, as shapes: all paths, masks and labels are those of the model.
The layers that were found in it are no matter of the optimiser. So each parameter has those equations of the trace that
its update needs (`_ModelUpdate`), and a layer runs those of its parameters. The slices of a stacked parameter lie on
several stages: each is shown as a parameter, without the stacked dimension.

    state leaf          whose path ends with that of a parameter: it belongs to this one, and lies with it
                        other                                           it belongs to none ("shared"), such as a count
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial, reduce
from itertools import zip_longest
from operator import getitem
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec

from jpipe.jax.flat_jaxpr import flatten
from jpipe.jax.in_place import Index, look_up
from jpipe.jax.primitives import ClosedJaxpr
from jpipe.jax.tracing import no_mesh, replay
from jpipe.jax.trees import nested
from jpipe.memory.layout import NO_PART, Layout, ModelTree, PerLayerError, StageTree, add_stage_axis, drop_stage_axis
from jpipe.memory.records import Arrays, Leaves, Records
from jpipe.memory.storage import Buffers, build_storage
from jpipe.model.alike import Kinds, PartJaxpr
from jpipe.model.groups import Constants, differing, scalars_of
from jpipe.partitioner.axes import on_stages
from jpipe.partitioner.per_device import jaxpr_per_device
from jpipe.partitioner.shardings import Shape, replicated
from jpipe.training.optimizers import check_is_optimizer, not_tried, told_as
from jpipe.types import Leaf, PyTree, Shapes, Structure

Trees = dict[str, PyTree]
"""One layer's trees by name: its `params`, an optimiser's `state` for it."""
OnTrees = Callable[[Trees, PyTree], Trees]
"""`(one layer's trees, arguments that are the same for all layers) -> its new trees`."""
OnDevice = Callable[[int, Index, Leaves, Records, PyTree], Leaves]
"""`(set of variables, layer, a device's parts of its leaves by tree, all records, arguments that are the same for all
layers) -> parts of its new leaves`."""
Room = tuple[int, jax.ShapeDtypeStruct]
"""A place of a layer's state: (which parameter of the layer it belongs to, shape)."""
PROGRAM = "jpipe_per_layer"
"""The name of what runs for all layers, in jaxprs."""


def per_layer(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Shows a transformation each layer's own tree, as `layer_variables` gives it, instead of the stage's buffers.

    Of a model that is one module it shows the model's own tree, as `model_variables` gives it without metadata boxes,
    so that masks and labels by path are those of the plain model; of parameters that a scan stacks, a slice each.

    It is for transformations that look at one parameter's shape, path or norm: adafactor, lamb, muon, weight-decay
    masks, `optax.multi_transform`. A sum over a tree (a clipped norm) is then a sum over one layer, and in a model that
    is one module an error; keep global norms outside:
    `optax.chain(optax.clip_by_global_norm(1.0), jpipe.per_layer(optax.adamw(1e-3, mask=mask)))`. Keep
    `optax.apply_if_finite` outside too: inside, each layer would skip updates for itself.

    Args:
      tx: any optax transformation.

    Returns:
      A transformation of parameters that a `jpipe.Pipeline` made. Its state lies where the layers do.

    Raises:
      TypeError: if `tx` is no transformation; in `init`, if the parameters are not a pipeline's, or if `tx.init` raises
        an error; in `init` and `update`, of a model that is one module: an update follows from several parameters.
    """
    check_is_optimizer(tx)
    inner = optax.with_extra_args_support(tx)

    def init(params: PyTree) -> PyTree:
        make = lambda trees, _: {"state": inner.init(trees["params"])}
        with told_as(lambda words: PerLayerError(f"jpipe.per_layer: tx.init raised {words}")):
            return _updated(inner, make, {"params": params}, {}, ("state",))["state"]

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra: PyTree) -> tuple[PyTree, PyTree]:
        def make(trees: Trees, extra: PyTree) -> Trees:
            updates, state = inner.update(trees["updates"], trees["state"], trees.get("params"), **extra)
            return {"updates": updates, "state": state}

        trees = {"updates": updates, "state": state} | ({} if params is None else {"params": params})
        new = _updated(inner, make, trees, extra, ("updates", "state"))
        return new["updates"], new["state"]

    return not_tried(optax.GradientTransformationExtraArgs(init, update))


class PerParameterState(NamedTuple):
    """The state of `per_layer` for a model that is one module.

    Attributes:
      shared: the leaves that belong to no parameter, such as counts, in nested dicts by the path in the inner state.
      own: the others, which lie with their parameters.
    """

    shared: PyTree
    own: StageTree


def _updated(
    tx: optax.GradientTransformation, make: OnTrees, trees: Trees, extra: PyTree, results: tuple[str, ...]
) -> Trees:
    """Calls a function of trees of all layers, each of whose results is a tree for all layers.

    Args:
      tx: the transformation, which makes the state.
      make: the function of one layer's trees, or of a whole model's.
      trees: "params" or "updates" among them.
      extra: the function's other arguments.
      results: the names of the trees that it returns.
    """
    layout = _layout_of(trees["updates"] if "updates" in trees else trees["params"])
    if layout.model_tree is None:
        layouts = {name: _layout_of(tree) for name, tree in trees.items()}
        layouts.setdefault("state", layouts.get("state") or _state_layout(tx, layout))
        return _for_each_layer(partial(_on_trees, make), layouts, trees, extra, results)
    state = _ModelState(tx, layout, layout.model_tree)
    cut = _ModelUpdate(make, state, tuple(sorted(trees)), tuple(sorted(results)), jax.eval_shape(lambda x: x, extra))
    before = [reduce(getitem, path, trees["state"].shared) for path in state.shared_paths if "state" in trees]
    own = {name: tree.own if name == "state" else tree for name, tree in trees.items()}
    shared = [*before, *jax.tree.leaves(extra)]
    layouts = dict.fromkeys(own, layout) | {"state": state.own_layout}
    new = _for_each_layer(cut.on_device, layouts, own, shared, results)
    counts = nested(zip(state.shared_paths, map(jnp.asarray, cut.of_shared(*shared)), strict=True))
    return new | {"state": PerParameterState(counts, new["state"])}


def _for_each_layer(
    function: OnDevice, layouts: dict[str, Layout], trees: dict[str, StageTree], extra: PyTree, results: tuple[str, ...]
) -> dict[str, StageTree]:
    """Runs a function of one layer's whole trees for all layers, each on the devices of its stage.

        buffers of a stage                one layer's leaves           its whole trees, only while tracing
        {"params": {"float32_8x8": ..}}   {"params": [kernel, bias]}   {"params": {"kernel": .., "bias": ..}}
                        --storage.read-->               --unflatten--> function of `_on_trees`
                        <-storage.write--  {"state": [..]}  <----------- {"state": ..}

    The loop over layers carries all buffers, so that a layer's results replace its old trees in place.

    Args:
      function: of a device's parts of one layer's leaves; `_on_trees` makes it of a function of trees.
      layouts, trees: the layout of each tree that it takes or returns; those that it takes, of all layers.
      extra: its other arguments, the same for all layers and on all devices.
      results: names of trees that it returns; those that it doesn't take begin as zeros.
    """
    records = Records(layouts)

    def body(arrays: Arrays, extra: PyTree) -> list[Buffers]:
        """One device's part: its buffers `[1, size, ...]` by tree -> new ones."""
        taken = drop_stage_axis(arrays)
        carry = {name: layouts[name].zeros_of_state() for name in results if name not in taken} | taken
        updated = records.updated(lambda v, i, leaves: function(v, i, leaves, records, extra), carry, taken)
        return add_stage_axis([updated[name] for name in results])

    specs = records.specs
    in_specs = {name: specs[name] for name in trees}, jax.tree.map(lambda _: PartitionSpec(), extra)
    run = on_stages(body, records.layout.mesh, in_specs, [specs[name] for name in results])
    program = lambda trees, extra: run(trees, extra)
    program.__name__ = PROGRAM  # one equation of whatever calls it
    new = jax.jit(program)({name: dict(tree) for name, tree in trees.items()}, extra)
    return {name: StageTree(tree, layouts[name]) for name, tree in zip(results, new, strict=True)}


def _on_trees(function: OnTrees, v: int, layer: Index, leaves: Leaves, records: Records, extra: PyTree) -> Leaves:
    """Runs a device's part of a function of one layer's trees; arguments as of `OnDevice`."""

    def of_leaves(leaves: Leaves, extra: PyTree) -> Leaves:
        trees = {name: jax.tree.unflatten(records.layouts[name].treedefs[v], leaves[name]) for name in leaves}
        return {name: jax.tree.leaves(tree) for name, tree in function(trees, extra).items()}

    return _on_parts(of_leaves, v, records, leaves, extra)


def _on_parts(function: Callable[..., Leaves], v: int, records: Records, leaves: Leaves, *extra: PyTree) -> Leaves:
    """Runs a device's part of a function of one layer's leaves.

    The function is written for whole arrays, while a device has parts of them. So it is traced on whole shapes, and the
    partitioner carries out its equations on parts. Its arguments and results are split as their layouts say.

    Args:
      function: `(leaves by tree, *extra) -> leaves by tree`.
      v: the index of the layer's set of variables.
      records: the records of all trees, also of those that it returns.
      leaves: the device's parts of the leaves of the trees that it takes.
      extra: its other arguments, whole on all devices.

    Returns:
      The device's parts of the leaves of what `function` returns.
    """
    axes, lying = records.lying(v)
    shardings_of = lambda names: [sharding for name in sorted(names) for sharding in lying[name]]
    whole = {name: list(records.layouts[name].storage.record_types[v].leaves) for name in leaves}
    with no_mesh():
        jaxpr, new = jax.make_jaxpr(function, return_shape=True)(whole, *jax.eval_shape(lambda x: x, extra))
    taken = shardings_of(leaves) + [replicated(axes)] * len(jax.tree.leaves(extra))
    on_parts = jaxpr_per_device(jaxpr, axes, taken, [lambda _, s=s: s for s in shardings_of(new)])
    return replay(on_parts.jaxpr, new)(leaves, *extra)


def _layout_of(tree: PyTree) -> Layout:
    """The layout of a pipeline's parameters, or of an optimiser's state for them."""
    if not isinstance(tree, StageTree):
        raise PerLayerError(
            f"jpipe.per_layer takes the parameters of a jpipe.Pipeline, not a {type(tree).__name__}; put it outermost"
        )
    return tree.layout


def _state_layout(tx: optax.GradientTransformation, layout: Layout) -> Layout:
    """Where the optimiser's state for each layer lies: with the layer, split as the parameters that it belongs to."""
    types = zip(layout.treedefs, layout.storage.record_types, strict=True)
    states = [jax.eval_shape(tx.init, jax.tree.unflatten(treedef, one.leaves)) for treedef, one in types]
    _check_numbers(states)
    rooms, treedefs = [], tuple(map(jax.tree.structure, states))
    for state, treedef, of_params in zip(states, treedefs, layout.treedefs, strict=True):
        rooms.append(list(zip(_owners(_paths(treedef), _paths(of_params)), jax.tree.leaves(state), strict=True)))
    return _with_rooms(layout, rooms, treedefs, None)


def _with_rooms(
    layout: Layout,
    rooms: Sequence[Sequence[tuple[int | None, jax.ShapeDtypeStruct]]],
    treedefs: tuple[Structure, ...],
    model_tree: ModelTree | None,
) -> Layout:
    """The layout of a state, of which each set has these leaves: (which parameter of the layer one belongs to, it).

    A leaf is split as its parameter if it has its shape; one of none as all parameters of its shape, if these agree.
    """
    specs, types = [], layout.storage.record_types
    for of_set, one in zip(rooms, types, strict=True):
        params = [*enumerate(zip(one.leaves, one.specs, strict=True))]
        alike = [{s for k, (p, s) in params if p.shape == leaf.shape and owner in (k, None)} for owner, leaf in of_set]
        specs.append([found.pop() if len(found) == 1 else PartitionSpec() for found in alike])
    shapes, devices = [[leaf for _, leaf in of_set] for of_set in rooms], [one.devices for one in types]
    storage = build_storage(shapes, devices, device_of=range(layout.num_stages), specs=specs)
    return replace(layout, storage=storage, treedefs=treedefs, model_tree=model_tree)


def _check_numbers(state: Shapes) -> None:
    """Checks that a layer's state can lie in buffers.

    Raises:
      TypeError: it holds random keys.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise PerLayerError(
                f"jpipe.per_layer: state{jax.tree_util.keystr(path)} is a random key, the same for each layer; keep it "
                "outside, as in optax.chain(optax.add_noise(...), jpipe.per_layer(...))"
            )


# --- a model that is one module ---------------------------------------------------------------------------------------

Path = tuple[str, ...]


def _paths(treedef: Structure) -> list[Path]:
    """The path of each leaf of a tree."""
    return ModelTree(treedef, ()).paths


def _owners(paths: Sequence[Path], params: Sequence[Path]) -> list[int | None]:
    """The parameter to which each leaf of a state belongs, if it is in a copy of the parameters' tree.

    Such a copy has leaves, or trees (`optax.sm3`), in the places of parameters alone: `hyperparams/b1` beside
    `hyperparams/learning_rate` isn't the state of a parameter `b1`.
    """
    by_path = {path: i for i, path in enumerate(params)}
    at = lambda end: next((by_path[end[:n]] for n in range(len(end) + 1) if end[:n] in by_path), None)
    cuts = [[(path[:n], at(path[n:])) for n in range(len(path) + 1)] for path in paths]
    others = {start for of_leaf in cuts for start, owner in of_leaf if owner is None}
    return [next((owner for start, owner in of_leaf if start not in others), None) for of_leaf in cuts]


def _by_owner(values: Iterable[int], owners: Iterable[int | None]) -> defaultdict[int | None, list[int]]:
    """The values of each parameter, and of none."""
    lists = defaultdict[int | None, list[int]](list)
    for value, owner in zip(values, owners, strict=True):
        lists[owner].append(value)
    return lists


@dataclass(frozen=True, eq=False)
class _ModelState:
    """The state of a transformation for the tree of a whole model.

    Attributes:
      tx: the transformation.
      layout: where the parameters lie.
      tree: the tree of the parameters.
    """

    tx: optax.GradientTransformation
    layout: Layout
    tree: ModelTree

    @cached_property
    def params(self) -> Shapes:
        """The tree of the parameters as a transformation sees it, of a slice of each stacked one."""
        leaves: dict[int, jax.ShapeDtypeStruct] = {}
        for instances, record_type in zip(self.tree.parts, self.layout.storage.record_types, strict=True):
            for parts in instances:
                leaves |= {part[0]: leaf for part, leaf in zip(parts, record_type.leaves, strict=True)}
        return jax.tree.unflatten(self.tree.treedef, [leaves[i] for i in range(self.tree.treedef.num_leaves)])

    @cached_property
    def shapes(self) -> Shapes:
        """The state, as the transformation makes it for the tree."""
        with no_mesh():
            shapes = jax.eval_shape(self.tx.init, self.params)
        _check_numbers(shapes)
        return shapes

    @cached_property
    def owners(self) -> list[int | None]:
        """The parameter to which each leaf belongs, or None."""
        return _owners(_paths(jax.tree.structure(self.shapes)), self.tree.paths)

    @property
    def shared_paths(self) -> list[Path]:
        """The paths of the leaves that belong to no parameter."""
        pairs = zip(_paths(jax.tree.structure(self.shapes)), self.owners, strict=True)
        return [path or ("state",) for path, owner in pairs if owner is None]

    @cached_property
    def rooms(self) -> list[tuple[list[Room], list[dict[int, int]]]]:
        """For each set of variables its layers' room for state, and by instance which leaf lies in which room.

        Leaves of one shape have the same room in all layers of a set, whatever their names: rates may differ.
        """
        leaves, sets = jax.tree.leaves(self.shapes), []
        owned = _by_owner(range(len(leaves)), self.owners)
        for instances in self.tree.parts:
            rooms, lying = dict[tuple[int, Shape, np.dtype, int], int](), list[dict[int, int]]()
            for parts in instances:
                own, count = {}, Counter()
                for k, leaf in ((k, leaf) for k, (owner, _) in enumerate(parts) for leaf in owned[owner]):
                    room = k, leaves[leaf].shape, leaves[leaf].dtype
                    count[room] += 1
                    own[rooms.setdefault((*room, count[room]), len(rooms))] = leaf
                lying.append(own)
            sets.append(([(k, jax.ShapeDtypeStruct(shape, dtype)) for k, shape, dtype, _ in rooms], lying))
        return sets

    @cached_property
    def own_layout(self) -> Layout:
        """Where the leaves lie that belong to parameters."""
        parts, structure = [], jax.tree.structure(self.shapes)
        for instances, (rooms, lying) in zip(self.tree.parts, self.rooms, strict=True):
            part = lambda at, own, i, k: (own[i], at[k][1]) if i in own else NO_PART
            pairs = zip(instances, lying, strict=True)
            parts.append(tuple(tuple(part(*pair, i, k) for i, (k, _) in enumerate(rooms)) for pair in pairs))
        tree, rooms = ModelTree(structure, tuple(parts)), [rooms for rooms, _ in self.rooms]
        return _with_rooms(self.layout, rooms, (structure,) * len(rooms), tree)


_Kind = list[tuple[tuple[int, ...], ClosedJaxpr, Constants]]
"""The function of some layers of a set, the same but for numbers: for each parameter, where the layers' state for it
lies; a jaxpr that takes what belongs to the parameter, then what is shared, and gives what belongs to it; the numbers.
"""


class _ModelUpdate:
    """A function of trees of the whole model, parameter by parameter.

    Args:
      function: of trees like the parameters ("updates", "params") or the state ("state"), and of other arguments.
      state: the state.
      takes: the names of the trees that it takes, sorted.
      gives: the names of those that it returns, sorted.
      extra: the shapes of its other arguments.

    Raises:
      PerLayerError: what it gives for one parameter depends on another.
    """

    def __init__(
        self, function: OnTrees, state: _ModelState, takes: tuple[str, ...], gives: tuple[str, ...], extra: Shapes
    ):
        self._state, self._takes, self._gives = state, takes, gives
        whole, params = state.params, range(len(state.tree.paths))
        trees = {"updates": whole, "params": whole, "state": state.shapes}
        owners = {"updates": params, "params": params, "state": state.owners}
        with no_mesh():
            jaxpr = jax.make_jaxpr(function)({name: trees[name] for name in takes}, extra)
        # So what a branch gives for a parameter (`optax.novograd`) doesn't follow from all that the branch reads.
        self._flat = flatten(jaxpr, selects=True)
        of_arguments = (owner for name in takes for owner in owners[name])
        self._owners = dict(zip_longest(self._flat.arguments, of_arguments))  # other arguments belong to none
        self._takes_of = _by_owner(self._owners, self._owners.values())
        self._gives_of = _by_owner(self._flat.results, (owner for name in gives for owner in owners[name]))
        self._cut, self._part = Kinds(), cache(self._part_of)
        # The results that belong to no parameter; its arguments are `shared` of `on_device`.
        self.of_shared = jaxpr_as_fun(self._part(None).closed)

    def _part_of(self, owner: int | None) -> PartJaxpr:
        """Cuts off the equations that the results of one parameter need, or of None, the shared ones."""
        gives = self._gives_of[owner]
        equations = [self._flat.equations[i] for i in self._flat.needed_for(gives)]
        for number in (*gives, *(number for equation in equations for number in equation.reads)):
            if (other := self._owners.get(number)) not in (owner, None):
                self._refuse(owner, other)
        takes = self._takes_of[None] if owner is None else [*self._takes_of[owner], *self._takes_of[None]]
        return self._cut.part(self._flat, equations, takes, gives)

    def _refuse(self, owner: int | None, other: int) -> None:
        paths = ["/".join(path) for path in self._state.tree.paths]
        what = "what it keeps for all parameters" if owner is None else f"the update of {paths[owner]}"
        raise PerLayerError(
            f"jpipe.per_layer: {what} follows from {paths[other]} too; keep sums over parameters outside: optax.chain("
            "optax.clip_by_global_norm(1.0), jpipe.per_layer(...)), optax.apply_if_finite(jpipe.per_layer(...), 5)"
        )

    def _kinds(self, v: int) -> tuple[list[_Kind], dict[int, int]]:
        """(The functions of layers of a set, which of them each layer has)."""
        found: dict[tuple, dict[int, list[ClosedJaxpr]]] = {}
        rooms, lying = self._state.rooms[v]
        for parts, own, (first, *_) in zip(self._state.tree.parts[v], lying, self._state.layout.users[v], strict=True):
            cut = [self._part(owner) for owner, _ in parts]
            at = tuple(tuple(i for i in own if rooms[i][0] == k) for k in range(len(parts)))
            found.setdefault((at, *(part.kind for part in cut)), {})[first] = [part.closed for part in cut]
        kinds: list[_Kind] = []
        for (at, *_), layers in found.items():
            one, scalars = min(layers), lambda k, layers=layers: {i: scalars_of(cut[k]) for i, cut in layers.items()}
            kinds.append([(rooms, layers[one][k], differing(scalars(k), one)) for k, rooms in enumerate(at)])
        return kinds, {first: i for i, layers in enumerate(found.values()) for first in layers}

    def on_device(self, v: int, layer: Index, leaves: Leaves, records: Records, shared: Sequence[Leaf]) -> Leaves:
        """A device's parts of what the function gives for one layer.

        Args:
          v: the index of the layer's set of variables.
          layer: the layer.
          leaves: the device's parts of the leaves of what the function takes.
          records: the records of all trees.
          shared: what belongs to no parameter, whole on all devices: leaves of the state, then other arguments.
        """

        def branch(kind: _Kind) -> Callable[[Leaves, list[Leaf], Index], Leaves]:
            numbers = lambda layer: [constants.of(layer) for *_, constants in kind]
            function = partial(self._of_layer, v, kind)
            return lambda leaves, shared, layer: _on_parts(function, v, records, leaves, shared, numbers(layer))

        kinds, kind_of = self._kinds(v)
        which = look_up([kind_of.get(i, 0) for i in range(max(kind_of) + 1)], layer)
        branches, operands = list(map(branch, kinds)), (leaves, list(shared), layer)
        return branches[which](*operands) if isinstance(which, int) else jax.lax.switch(which, branches, *operands)

    def _of_layer(self, v: int, kind: _Kind, leaves: Leaves, shared: list[Leaf], numbers: list[list[Leaf]]) -> Leaves:
        """Computes the function for one layer, from its leaves; room in which it has none stays as it is."""
        before = leaves.get("state") or [jnp.zeros(room.shape, room.dtype) for _, room in self._state.rooms[v][0]]
        new = {"updates": list[Leaf](), "state": list(before)}
        for k, (rooms, jaxpr, constants) in enumerate(kind):
            own = [leaves[name][i] for name in self._takes for i in (rooms if name == "state" else [k])]
            results = jaxpr_as_fun(constants.put_into(jaxpr, numbers[k]))(*own, *shared)
            for i, leaf in zip(rooms, results, strict=False):
                new["state"][i] = leaf
            new["updates"] += results[len(rooms) :]
        return {name: new[name] for name in self._gives}
