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
from typing import TypeVar, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpipe.jax.flat_jaxpr import FlatEquation, FlatJaxpr, flatten
from jpipe.jax.in_place import Index, each, is_on_host, put_slice, take_slice, when
from jpipe.jax.inside import carry_out
from jpipe.jax.primitives import ELEMENTWISE, JaxprEqn
from jpipe.jax.trees import is_float
from jpipe.memory.buffers import in_order
from jpipe.memory.layout import LANES, Layout, StageTree, may_go, slices_of, zeros_like
from jpipe.mesh.axes import on_stages
from jpipe.partitioner.shardings import Shape, names_in
from jpipe.training.optimizers import update_with_loss
from jpipe.training.per_layer import PROGRAM
from jpipe.types import Leaf, PyTree

Values = dict[int, Leaf]
"""Values of an update by their numbers."""
Place = PartitionSpec | str
"""Where a leaf of a state lies: on the hosts and read by slices (the mesh axes that split it), as part of a state of
`jpipe.per_layer` (`RECORDS`), or on the `DEVICE`."""
RECORDS, DEVICE = "records", "device"


def updated(
    tx: optax.GradientTransformation, grads: StageTree, opt_state: PyTree, params: StageTree, loss: Leaf
) -> tuple[StageTree, PyTree]:
    """Does an optimiser's update: (the new parameters, its new state)."""

    def update(opt_state: PyTree, params: StageTree, grads: StageTree, loss: Leaf) -> tuple[PyTree, StageTree]:
        changes, new = update_with_loss(tx, grads, opt_state, params, loss)
        return new, cast(StageTree, optax.apply_updates(params, changes))

    run = partial(_by_slices, update, params.layout) if state_is_on_hosts(params) else update
    new, params = run(opt_state, params, grads, loss)
    return params, new


def state_is_on_hosts(params: PyTree) -> bool:
    """Whether an optimiser's state for these parameters lies on the hosts; never for a tree that is no pipeline's."""
    return isinstance(params, StageTree) and params.layout.state_on_hosts


def initial(tx: optax.GradientTransformation, shardings: PyTree, params: StageTree) -> PyTree:
    """Makes the state of an optimiser for these parameters, which is to lie as `shardings` say."""
    if not state_is_on_hosts(params):
        return tx.init(params)
    room = lambda leaf, sharding: zeros_like(leaf.update(sharding=sharding)) if is_float(leaf) else leaf
    rooms = jax.tree.map(room, jax.eval_shape(tx.init, params), shardings)
    return _by_slices(lambda _, params: tx.init(params), params.layout, rooms, params)


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


def _places_of(state: PyTree, params: Layout) -> list[Place]:
    """Where each leaf of an optimiser's state for parameters of this layout lies."""

    def of_leaf(layout: Layout, buffer: jax.ShapeDtypeStruct, leaf: Leaf) -> Place:
        if layout != params:
            return RECORDS
        return buffer.sharding.spec if may_go(leaf, buffer, by_layer=False) else DEVICE

    places = by_buffer(state, of_leaf, lambda _: DEVICE)
    return jax.tree.leaves(places, is_leaf=lambda node: isinstance(node, Place))


def _by_slices(function: Callable[..., PyTree], params: Layout, state: PyTree, *arguments: PyTree) -> PyTree:
    """Calls a function of whole arrays.

    Args:
      function: to be traced; its results take the places of its first arguments.
      params: the layout of the parameters.
      state: its first argument, of which arrays lie on the hosts.
      arguments: the others.
    """
    leaves, structure = jax.tree.flatten((state, *arguments))
    places = _places_of(state, params)
    places += [DEVICE] * (len(leaves) - len(places))
    placed = zip(leaves, places, strict=True)
    on_device = [_on_device(leaf) if isinstance(place, PartitionSpec) else leaf for leaf, place in placed]
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*jax.tree.unflatten(structure, on_device))
    update = _Update(flatten(closed, keeps=_is_program, selects=True), params.mesh, leaves, places)
    return jax.tree.unflatten(jax.tree.structure(shapes), update.results())


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
      records: the arguments that are the state of `jpipe.per_layer`.
    """

    def __init__(self, flat: FlatJaxpr, mesh: Mesh, leaves: Sequence[Leaf], places: Sequence[Place]):
        self._flat, self._mesh, placed = flat, mesh, list(zip(flat.arguments, places, strict=True))
        self.values: Values = {**flat.constants, **dict(zip(flat.arguments, leaves, strict=True))}
        self.sliced = {number: place for number, place in placed if isinstance(place, PartitionSpec)}
        self.records = {number for number, place in placed if place == RECORDS}

    def results(self) -> list[Leaf]:
        """The arrays of all results, each in the place of an argument."""
        for flat in self._flat.equations:
            self._visit(flat)
        pairs, loops = list(zip(self._flat.results, self._flat.arguments, strict=False)), defaultdict(dict)
        for number, into in pairs:
            if number != into and not self.sliced.keys().isdisjoint((number, into)):
                spec = self.sliced[into if into in self.sliced else number]
                loops[self._flat.avals[number].shape, spec][into] = number
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
        state = [n for n in flat.reads if n in self.records]
        before = dict(zip(flat.makes[len(flat.makes) - len(state) :], state, strict=True))
        taken, selected = self._selected(before)

        def run(operands: Values, carry: Values) -> Values:
            now = operands | {old: carry[n] for n, old in before.items()}
            return dict(zip(flat.makes, carry_out(flat.equation, [now[n] for n in flat.reads]), strict=True))

        carry = {n: operands.pop(old) for n, old in before.items()}
        if taken is None:
            return run(operands, carry)
        kind = lambda array: (array.shape, array.dtype)
        alike = {kind(operand): operand for operand in operands.values()}  # they lie as updates do
        carry |= {n: jnp.zeros_like(alike[kind(self._flat.avals[n])]) for n in flat.makes if n not in before}
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
        loop = _Loop(self._flat, equations, targets, reads, reads & self.sliced.keys(), sharding, total)
        specs = {n: spec if jnp.shape(array) else PartitionSpec() for n, array in arrays.items()}
        names = tuple(name for entry in spec for name in names_in(entry))
        results = dict.fromkeys(targets, PartitionSpec(names) if total else spec)
        return on_stages(loop.run, self._mesh, (specs,), results)(arrays)

    def _followed(self, numbers: Iterable[int]) -> tuple[list[FlatEquation], set[int]]:
        """(The elementwise equations that some values follow from, the values that these begin with)."""
        avals, reads, equations = self._flat.avals, {*numbers}, []
        for flat in reversed(self._flat.equations):
            name, shapes = flat.equation.primitive.name, [avals[n].shape for n in (*flat.makes, *flat.reads)]
            spreads = name == "broadcast_in_dim" and shapes[1] == ()
            if not reads.isdisjoint(flat.makes) and shapes[0] and (name in ELEMENTWISE or spreads):
                reads = reads.difference(flat.makes).union(flat.reads)
                equations.insert(0, flat)
        return equations, {n for n in reads if avals[n].shape or n not in self._flat.constants}


@dataclass(frozen=True, eq=False)
class _Loop:
    """A loop over the slices of a device's part of some buffers of one shape.

    Attributes:
      flat: the jaxpr.
      equations: elementwise, in order.
      targets, total: as of `_Update._loop`.
      reads: the arrays and scalars that are read.
      hosted: those of them on the hosts.
      sharding: of the buffers.
    """

    flat: FlatJaxpr
    equations: list[FlatEquation]
    targets: dict[int, int]
    reads: set[int]
    hosted: set[int]
    sharding: NamedSharding
    total: JaxprEqn | None

    def run(self, arrays: Values) -> Values:
        """One device's part: its arrays and scalars -> of each target its part, or the sums of its slices."""
        avals = {key: self.flat.avals[number] for key, number in self.targets.items()}
        shape = self.sharding.shard_shape(next(iter(avals.values())).shape)
        view, size = slices_of(shape, max(aval.dtype.itemsize for aval in avals.values()), self.sharding.mesh)
        pairs, rest = divmod(view[1], 2 * size)
        begun = (2 * pairs + (rest > 0),) if self.total else view
        arrays = {n: array.reshape(view) if array.ndim else array for n, array in arrays.items()}
        arrays = {key: jax.lax.empty(begun, aval.dtype) for key, aval in avals.items()} | arrays
        carry = {n: arrays.pop(n) for n in self.hosted | {*self.targets}}
        slices = lambda indices, rows, *arrays: self._slices(indices, size, (1, rows, *view[2:]), *arrays)
        carry = each(0, pairs, arrays, lambda i, *arrays: slices([2 * i, 2 * i + 1], size, *arrays), carry)
        carry = slices([2 * pairs] * (rest > 0), rest, arrays, carry)
        return {key: carry[key] if self.total else carry[key].reshape(shape) for key in self.targets}

    def _slices(self, indices: list[Index], size: int, shape: Shape, fixed: Values, carry: Values) -> Values:
        """Makes slices of all targets, one after the other; what lies on the host comes first."""
        arrays = fixed | carry
        # In this order a slice is one piece of memory. Where the last dimension would be padded to `LANES`, a compiler
        # has another one innermost, and is left to.
        lying = lambda array: in_order(array, None if shape[-1] % LANES else (*range(len(shape)),))
        arrived = [{n: lying(take_slice(arrays[n], (0, i * size), shape)) for n in self.hosted} for i in indices]
        for k, i in enumerate(indices):
            values = self._values(arrays, arrived[k], i * size, shape)
            new = {key: values[number] for key, number in self.targets.items()}
            # Of one array all slices are read before one is written: else a GPU's compiler copies it whole. And numbers
            # are each slice's own: else a compiler may multiply by a reciprocal that two divisions have in common.
            tied = {n: array for n, array in arrays.items() if n in self.hosted or not array.ndim}
            tied, arrived[k + 1 :], new = jax.lax.optimization_barrier((tied, arrived[k + 1 :], new))
            arrays |= tied
            for key, value in new.items():
                if self.total:
                    (value,) = carry_out(self.total, [value], self.total.params | {"axes": (*range(value.ndim),)})
                    arrays[key] = put_slice(arrays[key], value[None], (i,))
                else:
                    value = lying(value) if is_on_host(arrays[key]) else value
                    arrays[key] = put_slice(arrays[key], value, (0, i * size))
        return {n: arrays[n] for n in carry}

    def _values(self, arrays: Values, arrived: Values, start: Index, shape: Shape) -> Values:
        """The values of one slice."""
        values = self.flat.constants | arrived
        for n in self.reads - arrived.keys():
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
