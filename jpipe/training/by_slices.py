"""Computes an optimiser's update while its state lies in the memory of the hosts, a slice at a time.

The update is traced to a list of equations. Arrays of the state that lie as the parameters do, and all that follows
from them element by element, are never whole on a device: a loop over slices of a buffer brings two slices at once,
computes what is wanted of the first while the second arrives, and of the second while the first goes back.

    on the device, whole        scalars (rates, counts); sums over gradients; what `jpipe.per_layer` does
    slice by slice              elementwise values: moments, updates, parameters
    in a loop of its own        a sum over values that follow from the state (a norm of Adam's updates): the loop only
                                adds up, and a later one computes these values again

A branch (`optax.MultiSteps`, `optax.apply_if_finite`) becomes a selection between what both give.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpipe.jax.flat_jaxpr import FlatEquation, FlatJaxpr, flatten
from jpipe.jax.in_place import Index, each, is_on_host, on_host, put_slice, take_slice, when
from jpipe.jax.inside import carry_out
from jpipe.jax.primitives import ELEMENTWISE, JaxprEqn
from jpipe.memory.buffers import in_order
from jpipe.memory.layout import LANES, Layout, StageTree, may_go, slices_of, zeros_like
from jpipe.mesh.axes import on_stages
from jpipe.partitioner.shardings import Shape, names_in
from jpipe.training.optimizers import update_with_loss
from jpipe.training.per_layer import PROGRAM
from jpipe.types import Leaf, PyTree

Values = dict[int, Leaf]
"""Values of an update by their numbers."""
SLICES, RECORDS, DEVICE = "slices", "records", "device"


class Place(NamedTuple):
    """Where a leaf lies.

    Attributes:
      spec: the mesh axes that split it.
      where: on the hosts and read by `SLICES`, part of a state of `jpipe.per_layer` (`RECORDS`), or on the `DEVICE`.
    """

    spec: PartitionSpec = PartitionSpec()
    where: str = DEVICE


def updated(
    tx: optax.GradientTransformation, grads: StageTree, opt_state: PyTree, params: StageTree, loss: Leaf
) -> tuple[StageTree, PyTree]:
    """Does an optimiser's update: (the new parameters, its new state)."""

    def update(params: StageTree, opt_state: PyTree, grads: StageTree, loss: Leaf) -> tuple[StageTree, PyTree]:
        changes, new = update_with_loss(tx, grads, opt_state, params, loss)
        return cast(StageTree, optax.apply_updates(params, changes)), new

    if not state_is_on_hosts(params):
        return update(params, opt_state, grads, loss)
    places = [*_places_of(params), *_places_of(opt_state, params.layout), *_places_of(grads), Place()]
    return _by_slices(update, params.layout.mesh, (params, opt_state, grads, loss), places)


def state_is_on_hosts(params: PyTree) -> bool:
    """Whether an optimiser's state for these parameters lies on the hosts; never for a tree that is no pipeline's."""
    return isinstance(params, StageTree) and params.layout.state_on_hosts


def initial(tx: optax.GradientTransformation, params: StageTree) -> PyTree:
    """Makes the state of an optimiser for these parameters."""
    if not state_is_on_hosts(params):
        return tx.init(params)
    shapes, mesh = jax.eval_shape(tx.init, params), params.layout.mesh
    places, (leaves, structure) = _places_of(shapes, params.layout), jax.tree.flatten(shapes)
    room = lambda leaf, spec: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=on_host(NamedSharding(mesh, spec)))
    placed = zip(leaves, places, strict=True)
    rooms = [zeros_like(room(leaf, place.spec)) if place.where == SLICES else leaf for leaf, place in placed]
    arguments, places = (jax.tree.unflatten(structure, rooms), params), [*places, *_places_of(params)]
    return _by_slices(lambda _, params: tx.init(params), mesh, arguments, places)


T = TypeVar("T")


def by_buffer(
    tree: PyTree, of_leaf: Callable[[Layout, jax.ShapeDtypeStruct, Leaf], T], of_other: Callable[[Leaf], T]
) -> PyTree:
    """Maps a pytree: each leaf that has the shape of its buffer, of a layout, by `of_leaf`, each other leaf alone."""

    def of_node(node: Leaf | StageTree) -> PyTree:
        if not isinstance(node, StageTree):
            return of_other(node)
        shapes, layout = node.layout.shapes, node.layout
        of = lambda buffer, leaf: of_leaf(layout, buffer, leaf) if leaf.shape == buffer.shape else of_other(leaf)
        return StageTree({n: jax.tree.map(partial(of, shapes[n]), node[n]) for n in node}, layout)

    return jax.tree.map(of_node, tree, is_leaf=lambda node: isinstance(node, StageTree))


def _places_of(tree: PyTree, params: Layout | None = None) -> list[Place]:
    """Where each leaf of a tree lies, which is an optimiser's state for parameters of a layout, if one is given."""

    def of_leaf(layout: Layout, buffer: jax.ShapeDtypeStruct, leaf: Leaf) -> Place:
        by_record = params not in (None, layout)
        hosted = params is not None and may_go(leaf, buffer, by_layer=False)
        return Place(buffer.sharding.spec, RECORDS if by_record else SLICES if hosted else DEVICE)

    places = by_buffer(tree, of_leaf, lambda _: Place())
    return jax.tree.leaves(places, is_leaf=lambda node: isinstance(node, Place))


def _by_slices(
    function: Callable[..., PyTree], mesh: Mesh, arguments: tuple[PyTree, ...], places: Sequence[Place]
) -> PyTree:
    """Calls a function of trees of whole arrays, some of which lie on the hosts.

    Args:
      function: to be traced; its results take the places of its first arguments.
      mesh: the devices.
      arguments: the trees.
      places: where each of their leaves lies.
    """
    leaves, structure = jax.tree.flatten(arguments)
    placed = zip(leaves, places, strict=True)
    on_device = [_on_device(leaf) if place.where == SLICES else leaf for leaf, place in placed]
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*jax.tree.unflatten(structure, on_device))
    flat = flatten(closed, keeps=_is_program, selects=True)
    return jax.tree.unflatten(jax.tree.structure(shapes), _Update(flat, mesh, leaves, places).results())


def _on_device(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    """The type of an array as if it lay on the device."""
    sharding = jax.typeof(leaf).sharding
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=None if sharding.mesh.empty else sharding)


def _is_program(equation: JaxprEqn) -> bool:
    return equation.params.get("name") == PROGRAM


class _Update:
    """Evaluates the equations of an update: some values whole, some only a slice at a time.

    Attributes:
      values: what lies somewhere as arrays: on the hosts, if they are in `sliced`.
      sliced: the values that are on the device a slice at a time alone, each with the mesh axes that split it.
    """

    def __init__(self, flat: FlatJaxpr, mesh: Mesh, leaves: Sequence[Leaf], places: Sequence[Place]):
        self._flat, self._mesh, self._places = flat, mesh, dict(zip(flat.arguments, places, strict=True))
        self.values: Values = {**flat.constants, **dict(zip(flat.arguments, leaves, strict=True))}
        self.sliced = {number: place.spec for number, place in self._places.items() if place.where == SLICES}

    def results(self) -> list[Leaf]:
        """The arrays of all results, each in the place of an argument."""
        for flat in self._flat.equations:
            self._visit(flat)
        pairs, loops = list(zip(self._flat.results, self._flat.arguments, strict=False)), defaultdict(dict)
        for number, into in pairs:
            if number != into and {number, into} & self.sliced.keys():
                loops[self._flat.avals[number].shape, self._places[into].spec][into] = number
        made: Values = {}
        for (_, spec), targets in loops.items():
            made |= self._loop(spec, targets)
        return [made[into] if into in made else jnp.asarray(self.values[number]) for number, into in pairs]

    def _visit(self, flat: FlatEquation) -> None:
        """Computes an equation whole, if its operands are known; one that is elementwise waits until it is wanted."""
        equation, name = flat.equation, flat.equation.primitive.name
        specs = {self.sliced[n] for n in flat.reads if n in self.sliced}
        if self.values.keys() >= {*flat.makes}:
            return  # a selection of what `per_layer` has made
        if _is_program(equation):
            self.values |= self._of_program(flat)
        elif not specs:
            self.values |= zip(flat.makes, carry_out(equation, [self.values[n] for n in flat.reads]), strict=True)
        elif name in ELEMENTWISE:
            (self.sliced[flat.makes[0]],) = specs  # all operands are split alike
        elif name in _SUMS and not self._flat.avals[flat.makes[0]].shape:
            sums = self._loop(*specs, {flat.makes[0]: flat.reads[0]}, equation)[flat.makes[0]]
            self.values |= zip(flat.makes, carry_out(equation, [sums], equation.params | {"axes": (0,)}), strict=True)
        else:
            raise ValueError(_REFUSED.format(name))

    # --- jpipe.per_layer ---

    def _of_program(self, flat: FlatEquation) -> Values:
        """The results of `per_layer`, whose state is replaced in place: of a branch, only if that branch is taken."""
        whole = lambda n: self._loop(self.sliced[n], {-1: n})[-1] if n in self.sliced else self.values[n]
        operands = {n: whole(n) for n in flat.reads}
        state = [n for n in flat.reads if n in self._places and self._places[n].where == RECORDS]
        before = dict(zip(flat.makes[len(flat.makes) - len(state) :], state, strict=True))
        taken, selected = self._selected(before)

        def run(operands: Values, carry: Values) -> Values:
            now = operands | {before[n]: carry[n] for n in before if n in carry}
            return dict(zip(flat.makes, carry_out(flat.equation, [now[n] for n in flat.reads]), strict=True))

        if taken is None:
            return run(operands, {})
        carry = {n: operands.pop(old) for n, old in before.items()}
        kind = lambda array: (array.shape, array.dtype)
        alike = {kind(operand): operand for operand in operands.values()}  # they lie as updates do
        carry |= {n: jnp.zeros_like(alike[kind(self._flat.avals[n])]) for n in flat.makes if n not in carry}
        new = when(taken, operands, run, carry)
        return new | {n: new[number] for n, number in selected.items()}

    def _selected(self, before: dict[int, int]) -> tuple[jax.Array | None, dict[int, int]]:
        """Selections between new states of `per_layer` and those before: (is it the new one, selected -> new state).

        Args:
          before: by the new state the one that it replaces.
        """
        taken, selected = None, {n: n for n in before}
        for flat in self._flat.equations:
            if flat.equation.primitive.name != "select_n" or selected.keys().isdisjoint(flat.reads):
                continue
            which, *choices = flat.reads
            new = next(n for n in choices if n in selected)
            if {*choices} != {new, before[selected[new]]} or which not in self.values or jnp.shape(self.values[which]):
                raise ValueError(_REFUSED.format("a selection"))
            here = self.values[which] == choices.index(new)
            taken, selected[flat.makes[0]] = here if taken is None else taken & here, selected[new]
        return taken, selected

    # --- loops over slices ---

    def _loop(self, spec: PartitionSpec, targets: dict[int, int], total: JaxprEqn | None = None) -> Values:
        """Makes values by a loop over slices, on all devices.

        Args:
          spec: the mesh axes that split them.
          targets: the number of the array that is replaced -> that of its new value; a new array where there is none.
          total: what adds a value up: then the new array holds the sums of the slices.
        """
        equations, reads = self._followed(targets.values())
        arrays = {n: self.values[n] for n in {*reads, *targets} if n in self.values}
        sharding = NamedSharding(self._mesh, spec)
        loop = _Loop(self._flat, equations, targets, frozenset(reads & self.sliced.keys()), sharding, total)
        specs = {n: spec if jnp.shape(array) else PartitionSpec() for n, array in arrays.items()}
        names = tuple(name for entry in spec for name in names_in(entry))
        results = dict.fromkeys(targets, PartitionSpec(names) if total else spec)
        return on_stages(loop.run, self._mesh, (specs,), results)(arrays)

    def _followed(self, numbers: Iterable[int]) -> tuple[list[FlatEquation], set[int]]:
        """(The elementwise equations that some values follow from, the values that these begin with)."""
        avals, constants, todo, indices, reads = (
            self._flat.avals,
            self._flat.constants,
            [*numbers],
            set[int](),
            set[int](),
        )
        while todo:
            i = self._flat.made_by.get(number := todo.pop())
            if i is not None and avals[number].shape and self._is_elementwise(self._flat.equations[i]):
                todo += [] if i in indices else self._flat.equations[i].reads
                indices.add(i)
            elif number not in constants or avals[number].shape:
                reads.add(number)
        return [self._flat.equations[i] for i in sorted(indices)], reads

    def _is_elementwise(self, flat: FlatEquation) -> bool:
        name = flat.equation.primitive.name
        return name in ELEMENTWISE or (name == "broadcast_in_dim" and not self._flat.avals[flat.reads[0]].shape)


@dataclass(frozen=True, eq=False)
class _Loop:
    """A loop over the slices of a device's part of some buffers of one shape.

    Attributes:
      flat: the jaxpr.
      equations: elementwise, in order.
      targets, total: as of `_Update._loop`.
      hosted: the arrays that are read from the hosts.
      sharding: of the buffers.
    """

    flat: FlatJaxpr
    equations: list[FlatEquation]
    targets: dict[int, int]
    hosted: frozenset[int]
    sharding: NamedSharding
    total: JaxprEqn | None

    def run(self, arrays: Values) -> Values:
        """One device's part: its arrays and scalars -> of each target its part, or the sums of its slices."""
        avals = [self.flat.avals[number] for number in self.targets.values()]
        shape = self.sharding.shard_shape(avals[0].shape)
        view, parts = slices_of(shape, max(aval.dtype.itemsize for aval in avals))
        begun = (sum(count for *_, count in parts),) if self.total else view
        begin = {key: jax.lax.empty(begun, aval.dtype) for key, aval in zip(self.targets, avals, strict=True)}
        arrays = begin | {n: array.reshape(view) if array.ndim else array for n, array in arrays.items()}
        carry = {n: arrays.pop(n) for n in {*self.hosted, *self.targets}}
        for start, size, count in parts:
            at = lambda i, start=start, size=size: start + i * size
            of = partial(self._slices, parts[0][1], (1, size, *view[2:]))
            two = lambda i, fixed, carry, at=at, of=of: of([at(2 * i), at(2 * i + 1)], fixed, carry)
            carry = each(0, count // 2, arrays, two, carry)
            carry = of([at(count - 1)] * (count % 2), arrays, carry)
        return {key: carry[key] if self.total else carry[key].reshape(shape) for key in self.targets}

    def _slices(self, size: int, shape: Shape, starts: list[Index], fixed: Values, carry: Values) -> Values:
        """Makes slices of all targets, one after the other; what lies on the host comes first."""
        arrays = fixed | carry
        # In this order a slice is one piece of memory. Where the last dimension would be padded to `LANES`, a compiler
        # has another one innermost, and is left to.
        lying = lambda array: in_order(array, None if shape[-1] % LANES else (*range(len(shape)),))
        arrived = [{n: lying(take_slice(arrays[n], (0, start), shape)) for n in self.hosted} for start in starts]
        for k, start in enumerate(starts):
            values = self._values(arrays, arrived[k], start, shape)
            new = {key: values[number] for key, number in self.targets.items()}
            # Of one array all slices are read before one is written: else a GPU's compiler copies it whole. And numbers
            # are each slice's own: else a compiler may multiply by a reciprocal that two divisions have in common.
            tied = {n: array for n, array in arrays.items() if n in self.hosted or not array.ndim}
            tied, arrived[k + 1 :], new = jax.lax.optimization_barrier((tied, arrived[k + 1 :], new))
            arrays |= tied
            for key, value in new.items():
                if self.total:
                    (value,) = carry_out(self.total, [value], self.total.params | {"axes": (*range(value.ndim),)})
                    arrays[key] = put_slice(arrays[key], value[None], (start // size,))
                else:
                    value = lying(value) if is_on_host(arrays[key]) else value
                    arrays[key] = put_slice(arrays[key], value, (0, start))
        return {n: arrays[n] for n in carry}

    def _values(self, arrays: Values, arrived: Values, start: Index, shape: Shape) -> Values:
        """The values of one slice."""
        read = {n for flat in self.equations for n in flat.reads} | {*self.targets.values()}
        values = self.flat.constants | arrived
        for n in read & arrays.keys() - arrived.keys():
            values[n] = take_slice(arrays[n], (0, start), shape) if arrays[n].ndim else arrays[n]
        for flat in self.equations:
            operands = [values[n] for n in flat.reads]
            if flat.equation.primitive.name == "broadcast_in_dim":
                values[flat.makes[0]] = jnp.broadcast_to(operands[0], shape)
            else:
                values |= zip(flat.makes, carry_out(flat.equation, operands), strict=True)
        return values


_SUMS = frozenset({"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or"})
"""Sums of whole arrays: sums of what slices give, too."""
_REFUSED = (
    'offload="optimizer" takes transformations that work element by element, besides sums over whole arrays, but {!r} '
    "reads the state of tx; if that part of tx may look at one layer at a time, wrap it in jpipe.per_layer(...) "
    '(MultiSteps inside it, apply_if_finite outside), else leave "optimizer" out of offload='
)
