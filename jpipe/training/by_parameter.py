"""Cuts an optax transformation, as traced on the tree of a whole model, into a function for each of its parameters.

The transformation sees the tree once, as shapes: all paths, masks and labels are those of the model. Then each
parameter has those equations of the trace that its update needs. Parameters whose equations are the same but for
numbers, in layers that are one function, are one function here too; the numbers are a table by layer.

    state leaf          whose path ends with that of a parameter: it belongs to this one, and lies with it
                        other                                           it belongs to none ("shared"), such as a count

The slices of a stacked parameter lie on several stages. So each is shown as a parameter, without the stacked dimension.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial, reduce
from itertools import chain

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec

from jpipe.jax.flat_jaxpr import flatten
from jpipe.jax.in_place import Index, look_up
from jpipe.jax.primitives import ClosedJaxpr
from jpipe.jax.tracing import no_mesh, replay
from jpipe.memory.layout import NO_PART, Layout, ModelPart, ModelTree
from jpipe.memory.records import Leaves, Records
from jpipe.memory.storage import build_storage
from jpipe.model.groups import Constants, differing, scalars_of
from jpipe.model.kinds import Kinds, PartJaxpr
from jpipe.partitioner.per_device import jaxpr_per_device
from jpipe.partitioner.shardings import Axis, Sharding, replicated
from jpipe.types import Leaf, PyTree, Shapes

Path = tuple[str, ...]
Function = Callable[..., tuple[PyTree, ...]]
"""(trees of the whole model, then other arguments) -> trees of the whole model."""


@dataclass(frozen=True, eq=False)
class StateTree:
    """The state of a transformation for the tree of a whole model.

    Attributes:
      layout: where the parameters lie.
      shapes: the state, as the transformation makes it for the tree.
    """

    layout: Layout
    shapes: Shapes

    @cached_property
    def tree(self) -> ModelTree:
        """The tree of the parameters."""
        assert self.layout.model_tree is not None
        return self.layout.model_tree

    @cached_property
    def paths(self) -> list[Path]:
        """The path of each leaf of the state."""
        return ModelTree(jax.tree.structure(self.shapes), ()).paths

    @cached_property
    def owners(self) -> list[int | None]:
        """The parameter to which each leaf of the state belongs, if it is in a copy of the parameters' tree.

        All leaves of such a copy are named as parameters are: `hyperparams/b1` beside `hyperparams/learning_rate` isn't
        the state of a parameter `b1`.
        """
        by_path, below = {path: i for i, path in enumerate(self.tree.paths)}, defaultdict[Path, set[Path]](set)
        cuts = [[(path[:n], path[n:]) for n in range(len(path) + 1)] for path in self.paths]
        for start, end in chain.from_iterable(cuts):
            below[start].add(end)
        is_copy = lambda start: below[start] <= by_path.keys()
        return [next((by_path[end] for start, end in of_leaf if is_copy(start)), None) for of_leaf in cuts]

    @cached_property
    def owned(self) -> list[list[int]]:
        """The leaves of the state that belong to each parameter."""
        leaves: list[list[int]] = [[] for _ in self.tree.paths]
        for leaf, owner in enumerate(self.owners):
            if owner is not None:
                leaves[owner].append(leaf)
        return leaves

    @cached_property
    def rooms(self) -> list[list[tuple[int, jax.ShapeDtypeStruct]]]:
        """For each set of variables the places of its layers' state: (which parameter of the layer, shape)."""
        return [rooms for rooms, _ in self._given]

    @cached_property
    def rooms_of(self) -> list[list[list[list[int]]]]:
        """For each set, instance and parameter of it, the places of the leaves of `owned`."""
        return [places for _, places in self._given]

    @cached_property
    def _given(self) -> list[tuple[list, list]]:
        """Leaves of one shape have the same place in all layers of a set, whatever their names: rates may differ."""
        leaves, given = jax.tree.leaves(self.shapes), []
        for instances in self.tree.parts:
            rooms: list[tuple[int, jax.ShapeDtypeStruct]] = []
            places = [[self._placed(rooms, k, part, leaves) for k, part in enumerate(parts)] for parts in instances]
            given.append((rooms, places))
        return given

    def _placed(self, rooms: list, k: int, part: ModelPart, leaves: Sequence[jax.ShapeDtypeStruct]) -> list[int]:
        places: list[int] = []
        for leaf in self.owned[part[0]]:
            wanted = k, jax.ShapeDtypeStruct(leaves[leaf].shape, leaves[leaf].dtype)
            free = (i for i, room in enumerate(rooms) if room == wanted and i not in places)
            places.append(next(free, len(rooms)))
            if places[-1] == len(rooms):
                rooms.append(wanted)
        return places

    @cached_property
    def layout_of_own(self) -> Layout:
        """Where the leaves lie that belong to parameters: with these, split as these if they have their shape."""
        types, specs, parts = self.layout.storage.record_types, [], []
        for v, instances in enumerate(self.tree.parts):
            one, rooms = types[v], self.rooms[v]
            lie_alike = [(k, shape.shape == one.leaves[k].shape) for k, shape in rooms]
            specs.append([one.specs[k] if is_alike else PartitionSpec() for k, is_alike in lie_alike])
            parts.append(tuple(self._parts(v, j) for j in range(len(instances))))
        shapes, devices = [[shape for _, shape in rooms] for rooms in self.rooms], [one.devices for one in types]
        storage = build_storage(shapes, devices, device_of=range(self.layout.num_stages), specs=specs)
        tree = ModelTree(jax.tree.structure(self.shapes), tuple(parts))
        treedefs = tuple(jax.tree.structure([0] * len(rooms)) for rooms in self.rooms)
        return Layout(storage, treedefs, self.layout.users, self.layout.mesh, tree)

    def by_path(self, shared: Sequence[Leaf]) -> PyTree:
        """The leaves that belong to no parameter, in nested dicts by their paths."""
        tree: PyTree = {}
        for path, leaf in zip(self._shared_paths, shared, strict=True):
            inner = tree
            for name in path[:-1]:
                inner = inner.setdefault(name, {})
            inner[path[-1]] = leaf
        return tree

    def in_order(self, tree: PyTree) -> list[Leaf]:
        """The inverse of `by_path`."""
        return [reduce(lambda inner, name: inner[name], path, tree) for path in self._shared_paths]

    @cached_property
    def _shared_paths(self) -> list[Path]:
        return [path or ("state",) for path, owner in zip(self.paths, self.owners, strict=True) if owner is None]

    def _parts(self, v: int, j: int) -> tuple[ModelPart, ...]:
        parts = [NO_PART] * len(self.rooms[v])
        for (owner, indices), places in zip(self.tree.parts[v][j], self.rooms_of[v][j], strict=True):
            for leaf, place in zip(self.owned[owner], places, strict=True):
                parts[place] = leaf, indices
        return tuple(parts)


def model_shapes(layout: Layout) -> Shapes:
    """The tree of a whole model as a transformation sees it, of a slice of each stacked parameter."""
    tree = layout.model_tree
    assert tree is not None
    leaves: dict[int, jax.ShapeDtypeStruct] = {}
    for instances, record_type in zip(tree.parts, layout.storage.record_types, strict=True):
        for parts in instances:
            leaves |= {part[0]: leaf for part, leaf in zip(parts, record_type.leaves, strict=True)}
    return jax.tree.unflatten(tree.treedef, [leaves[i] for i in range(tree.treedef.num_leaves)])


@dataclass(frozen=True, eq=False)
class _Kind:
    """The function of one parameter of some layers of a set, the same but for numbers.

    Attributes:
      places: where the layers' state lies among the room for that of this parameter.
      jaxpr: takes what belongs to the parameter, then what is shared, and gives what belongs to it.
      constants: the numbers.
    """

    places: tuple[int, ...]
    jaxpr: ClosedJaxpr
    constants: Constants


class ByParameter:
    """A function of trees of the whole model, parameter by parameter.

    Args:
      function: the first of its arguments and all of its results are trees like the parameters, or the state.
      state: the state.
      takes: the names of those arguments: "updates", "state", "params".
      gives: the names of the results: "updates", "state".
      extra: the shapes of its other arguments.

    Raises:
      ValueError: what it gives for one parameter depends on another.
    """

    def __init__(
        self, function: Function, state: StateTree, takes: Sequence[str], gives: Sequence[str], *extra: Shapes
    ):
        self._state, self._takes, self._gives = state, takes, gives
        whole, num_params = model_shapes(state.layout), len(state.tree.paths)
        of_name = {"updates": whole, "params": whole, "state": state.shapes}
        owners = {"updates": [*range(num_params)], "params": [*range(num_params)], "state": state.owners}
        with no_mesh():
            closed = jax.make_jaxpr(function)(*(of_name[name] for name in takes), *extra)
        self._flat = flatten(closed)
        of_arguments = [owner for name in takes for owner in owners[name]]
        of_arguments += [None] * (len(self._flat.arguments) - len(of_arguments))
        self._arguments = dict(zip(self._flat.arguments, of_arguments, strict=True))
        self._takes_of = defaultdict[int | None, list[int]](list)
        self._gives_of = defaultdict[int | None, list[int]](list)
        for number, owner in self._arguments.items():
            self._takes_of[owner].append(number)
        for number, owner in zip(self._flat.results, (o for name in gives for o in owners[name]), strict=True):
            self._gives_of[owner].append(number)
        self._parts, self._of = Kinds(), cache(self._needed)
        self._shared = jaxpr_as_fun(self._of(None).closed)

    def of_shared(self, shared: Sequence[Leaf]) -> list[jax.Array]:
        """Computes the results that belong to no parameter; `shared` as of `on_device`."""
        return list(map(jnp.asarray, self._shared(*shared)))

    def _needed(self, owner: int | None) -> PartJaxpr:
        """Cuts off the equations that the results of one parameter need, or of None, the shared ones."""
        gives = self._gives_of[owner]
        equations = [self._flat.equations[i] for i in self._flat.needed_for(gives)]
        for number in (*gives, *(number for equation in equations for number in equation.reads)):
            if (whose := self._arguments.get(number)) not in (owner, None):
                self._refuse(owner, whose)
        takes = self._takes_of[None] if owner is None else [*self._takes_of[owner], *self._takes_of[None]]
        return self._parts.part(self._flat, equations, takes, gives)

    def _refuse(self, owner: int | None, other: int) -> None:
        paths = ["/".join(path) for path in self._state.tree.paths]
        what = "what it keeps for all parameters" if owner is None else f"the update of {paths[owner]}"
        raise ValueError(
            f"jpipe.per_layer: {what} follows from {paths[other]} too, but parameters lie on different stages; keep "
            "what sums over several parameters, or counts skipped updates, outside: "
            "optax.chain(optax.clip_by_global_norm(1.0), jpipe.per_layer(...)), optax.apply_if_finite(jpipe.per_layer("
            "...), 5)"
        )

    def _kinds(self, v: int, k: int) -> tuple[list[_Kind], dict[int, int]]:
        """(The kinds of functions of parameter k of layers of a set, which of them each layer has)."""
        found: dict[tuple[tuple[int, ...], int], dict[int, ClosedJaxpr]] = {}
        rooms = [i for i, (parameter, _) in enumerate(self._state.rooms[v]) if parameter == k]
        for j, (first, *_) in enumerate(self._state.layout.users[v]):
            owner = self._state.tree.parts[v][j][k][0]
            part, places = self._of(owner), tuple(rooms.index(i) for i in self._state.rooms_of[v][j][k])
            found.setdefault((places, part.kind), {})[first] = part.closed
        kind_of = {first: i for i, own in enumerate(found.values()) for first in own}
        numbers = [{i: scalars_of(jaxpr) for i, jaxpr in own.items()} for own in found.values()]
        kinds = [
            _Kind(places, own[min(own)], differing(scalars, min(own)))
            for ((places, _), own), scalars in zip(found.items(), numbers, strict=True)
        ]
        return kinds, kind_of

    def on_device(self, v: int, layer: Index, leaves: Leaves, records: Records, shared: Sequence[Leaf]) -> Leaves:
        """A device's parts of what the function gives for one layer.

        Args:
          v: the index of the layer's set of variables.
          layer: the layer.
          leaves: the device's parts of the leaves of what the function takes.
          records: the records of all trees.
          shared: what belongs to no parameter, whole on all devices: leaves of the state, then other arguments.
        """
        axes, lying = records.lying(v)
        new: dict[str, dict[int, Leaf]] = {name: {} for name in self._gives}
        for k in range(len(lying["params"])):
            rooms = [i for i, (parameter, _) in enumerate(self._state.rooms[v]) if parameter == k]
            at = {"updates": [k], "params": [k], "state": rooms}
            lie = {name: [lying[name][i] for i in at[name]] for name in lying}
            types = {name: records.layouts[name].storage.record_types[v].leaves for name in lying}
            whole = {name: [types[name][i] for i in at[name]] for name in lying}
            kinds, kind_of = self._kinds(v, k)
            branches = [partial(self._run, kind, whole, lie, axes) for kind in kinds]
            which = look_up([kind_of.get(i, 0) for i in range(max(kind_of) + 1)], layer)
            operands = {name: [leaves[name][i] for i in at[name]] for name in self._takes}, list(shared), layer
            one = isinstance(which, int)
            results = branches[which](*operands) if one else jax.lax.switch(which, branches, *operands)
            for name in new:
                new[name] |= dict(zip(at[name], results[name], strict=True))
        return {name: [of_name[i] for i in range(len(of_name))] for name, of_name in new.items()}

    def _run(
        self,
        kind: _Kind,
        whole: dict[str, list[jax.ShapeDtypeStruct]],
        lie: dict[str, list[Sharding]],
        axes: tuple[Axis, ...],
        parts: Leaves,
        shared: list[Leaf],
        layer: Index,
    ) -> Leaves:
        """A device's parts of what a function of one parameter gives, by the partitioner (`per_layer.on_trees`)."""

        def function(leaves: Leaves, numbers: list[Leaf], shared: list[Leaf]) -> Leaves:
            own = [leaves[name][i] for name in self._takes for i in (kind.places if name == "state" else [0])]
            results = jaxpr_as_fun(kind.constants.put_into(kind.jaxpr, numbers))(*own, *shared)
            updates = results[: len(results) - len(kind.places)]
            state = dict(zip(kind.places, results[len(updates) :], strict=True))
            # Room of other layers' state stays as it is.
            before = leaves.get("state") or [jnp.zeros(leaf.shape, leaf.dtype) for leaf in whole["state"]]
            new = {"updates": updates, "state": [state.get(i, old) for i, old in enumerate(before)]}
            return {name: new[name] for name in self._gives}

        numbers = kind.constants.of(layer)
        shapes = jax.eval_shape(lambda leaves: leaves, (numbers, shared))
        with no_mesh():
            closed, results = jax.make_jaxpr(function, return_shape=True)({n: whole[n] for n in parts}, *shapes)
        taken = [sharding for name in sorted(parts) for sharding in lie[name]]
        taken += [replicated(axes)] * (len(numbers) + len(shared))
        wanted = [lambda _, s=s: s for name in sorted(results) for s in lie[name]]
        return replay(jaxpr_per_device(closed, axes, taken, wanted).jaxpr, results)(parts, numbers, shared)
