"""Computes an optimiser's update while its state lies in the memory of the hosts, a slice at a time.

The update is traced to a list of equations. Arrays of the state that lie as the parameters do, and all that follows
from them element by element, are not whole on a device: a loop over slices of a buffer brings two slices at once,
computes what is wanted of the first while the second arrives, and of the second while the first goes back.

    on the device, whole        scalars (rates, counts); sums over gradients; what `jpipe.per_layer` does
    slice by slice              elementwise values: moments, updates, parameters
    in a loop of its own        what other operations read of values that follow from the state: of a sum (a norm of
                                Adam's updates) the sums of slices, else whole; a later loop computes it again

A branch (`optax.MultiSteps`, `optax.apply_if_finite`) becomes a selection between what both give. `jpipe.per_layer`
replaces its state in place; where a branch around it may keep the state before, the compiler copies that on the hosts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import zip_longest
from typing import NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from jpipe.jax.flat_jaxpr import FlatEquation, FlatJaxpr, flatten
from jpipe.jax.in_place import Index, each, is_on_host, put_slice, take_slice, to_device
from jpipe.jax.inside import carry_out
from jpipe.jax.primitives import ELEMENTWISE, REDUCTIONS, JaxprEqn
from jpipe.jax.trees import is_float
from jpipe.memory.buffers import in_order
from jpipe.memory.layout import LANES, Layout, StageTree, may_go, slices_of, zeros_like
from jpipe.partitioner.axes import on_stages
from jpipe.partitioner.shardings import Shape
from jpipe.training.optimizers import update_with_loss
from jpipe.training.per_layer import PROGRAM
from jpipe.types import Leaf, PyTree

Values = dict[int, Leaf]
"""Values of an update by their numbers."""


class Place(NamedTuple):
    """The place of a leaf of an optimiser's state that is laid out as the parameters are.

    Attributes:
      spec: the mesh axes that split it.
      by_layer: whether it is part of a state of `jpipe.per_layer`, which replaces it in place.
    """

    spec: PartitionSpec
    by_layer: bool


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


def _places_of(state: PyTree, params: Layout) -> list[Place | None]:
    """The place of each leaf of an optimiser's state for parameters of this layout; None for one that is read whole."""

    def of_leaf(layout: Layout, buffer: jax.ShapeDtypeStruct, leaf: Leaf) -> Place | None:
        by_layer = layout != params
        return Place(buffer.sharding.spec, by_layer) if by_layer or may_go(leaf, buffer, by_layer=False) else None

    places = by_buffer(state, of_leaf, lambda _: None)
    return jax.tree.leaves(places, is_leaf=lambda node: node is None or isinstance(node, Place))


def _by_slices(function: Callable[..., PyTree], params: Layout, state: PyTree, *arguments: PyTree) -> PyTree:
    """Calls a function of whole arrays, of which those on the hosts are only there a slice at a time.

    Args:
      function: to be traced; its results take the places of its first arguments.
      params: the layout of the parameters.
      state: its first argument, of which arrays lie on the hosts.
      arguments: the others.
    """
    places, (leaves, structure) = _places_of(state, params), jax.tree.flatten((state, *arguments))
    placed = zip_longest(leaves, places)
    on_device = [leaf if place is None or place.by_layer else jax.eval_shape(to_device, leaf) for leaf, place in placed]
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*jax.tree.unflatten(structure, on_device))
    update = _Update(flatten(closed, keeps=_is_program, selects=True), params.mesh, leaves, places)
    return jax.tree.unflatten(jax.tree.structure(shapes), update.results())


def _is_program(equation: JaxprEqn) -> bool:
    return equation.params.get("name") == PROGRAM


class _Update:
    """Evaluates the equations of an update: some values whole, some only a slice at a time.

    Attributes:
      flat: the equations.
      mesh: the devices.
      values: the values that are arrays somewhere; those that are in `placed` too lie on the hosts.
      placed: the values that are on the device a slice at a time alone.
    """

    def __init__(self, flat: FlatJaxpr, mesh: Mesh, leaves: Sequence[Leaf], places: Sequence[Place | None]):
        self.flat, self.mesh = flat, mesh
        self.values: Values = {**flat.constants, **dict(zip(flat.arguments, leaves, strict=True))}
        self.placed = {n: place for n, place in zip(flat.arguments, places, strict=False) if place is not None}
        for equation in flat.equations:
            self._visit(equation)

    def results(self) -> list[Leaf]:
        """The arrays of all results, each in the place of an argument.

        A loop is needed for each result that is sliced, or replaces what is, unless its array is there already; those
        of one shape and spec share one.
        """
        loops: dict[tuple[Shape, PartitionSpec], dict[int, int]] = defaultdict(dict)
        pairs = list(zip(self.flat.results, self.flat.arguments, strict=False))
        for number, into in pairs:
            found = [self.placed[n] for n in (into, number) if n in self.placed]
            is_there = number == into or (into in self.placed and found[0].by_layer and number in self.values)
            if found and not is_there:
                loops[self.flat.avals[number].shape, found[0].spec][into] = number
        made: Values = {}
        for (_, spec), targets in loops.items():
            made |= self._loop(spec, targets)
        return [made[into] if into in made else jnp.asarray(self.values[number]) for number, into in pairs]

    def _visit(self, flat: FlatEquation) -> None:
        """Computes an equation of whole arrays; one that is elementwise and of slices waits until it is wanted."""
        name, read = flat.equation.primitive.name, {n: self.placed[n] for n in flat.reads if n in self.placed}
        if read and name in ELEMENTWISE:
            (spec,) = {place.spec for place in read.values()}  # all operands are split alike
            self.placed[flat.makes[0]] = Place(spec, by_layer=False)
            return
        state = [n for n in flat.reads if n in read and read[n].by_layer and _is_program(flat.equation)]
        is_there = lambda n: n not in read or n in state
        sums = name in REDUCTIONS and self.flat.avals[flat.makes[0]].shape == ()
        made = lambda n: self._loop(read[n].spec, {-1: n}, flat.equation if sums else None)[-1]
        operands = [self.values[n] if is_there(n) else made(n) for n in flat.reads]
        self.values |= zip(flat.makes, carry_out(flat.equation, operands), strict=True)
        for new, old in zip(reversed(flat.makes), reversed(state), strict=False):  # `per_layer` gives its state last
            self.placed[new] = self.placed[old]

    def _loop(self, spec: PartitionSpec, targets: dict[int, int], sums: JaxprEqn | None = None) -> Values:
        """Makes values by a loop over slices, on all devices.

        Args:
          spec: the mesh axes that split them.
          targets: the number of the array that is replaced -> that of its new value; a new array where there is none.
          sums: the reduction that adds a value up; the new array then holds the sums of slices.
        """
        loop = _Loop(self, targets, sums)
        arrays = {n: self.values[n] for n in {*loop.reads, *targets} if n in self.values}
        specs = {n: spec if jnp.shape(array) else PartitionSpec() for n, array in arrays.items()}
        return on_stages(loop.run, self.mesh, (specs,), dict.fromkeys(targets, spec))(arrays)

    def followed(self, numbers: Iterable[int]) -> tuple[list[FlatEquation], set[int]]:
        """(The equations that some values follow from, the values that these begin with but for scalar constants).

        It goes back as long as equations make arrays element by element, or spread a scalar.
        """
        avals, reads, equations = self.flat.avals, {*numbers}, []
        for flat in reversed(self.flat.equations):
            name, shapes = flat.equation.primitive.name, [avals[n].shape for n in (*flat.makes, *flat.reads)]
            spreads = name == "broadcast_in_dim" and shapes[1] == ()
            if not reads.isdisjoint(flat.makes) and shapes[0] and (name in ELEMENTWISE or spreads):
                reads = reads.difference(flat.makes).union(flat.reads)
                equations.insert(0, flat)
        return equations, {n for n in reads if avals[n].shape or n not in self.flat.constants}


class _Loop:
    """A loop over the slices of a device's part of some buffers of one shape.

    Args:
      update: the update that it is a part of.
      targets, sums: as of `_Update._loop`.

    Attributes:
      equations: elementwise, in order.
      reads: the arrays and scalars that are read.
      hosted: those of them on the hosts.
    """

    def __init__(self, update: _Update, targets: dict[int, int], sums: JaxprEqn | None):
        self.flat, self.mesh, self.targets, self.sums = update.flat, update.mesh, targets, sums
        self.equations, self.reads = update.followed(targets.values())
        self.hosted = self.reads & update.placed.keys()

    def run(self, arrays: Values) -> Values:
        """Runs the loop on one device: its parts of arrays, and scalars -> its part of each target."""
        dtypes = {key: self.flat.avals[number].dtype for key, number in self.targets.items()}
        shape = next(array.shape for array in arrays.values() if array.ndim)
        view, size = slices_of(shape, max(dtype.itemsize for dtype in dtypes.values()), self.mesh)
        pairs, rest = divmod(view[1], 2 * size)
        arrays = {n: array.reshape(view) if array.ndim else array for n, array in arrays.items()}
        summed = (1, 2 * pairs + (rest > 0), *(1 for _ in shape[2:]))
        begun, made = (summed, summed) if self.sums else (view, shape)
        arrays = {key: jax.lax.empty(begun, dtype) for key, dtype in dtypes.items()} | arrays
        carry = {n: arrays.pop(n) for n in self.hosted | {*self.targets}}
        slices = lambda indices, rows, *arrays: self._slices(indices, size, (1, rows, *view[2:]), *arrays)
        carry = each(0, pairs, arrays, lambda i, *arrays: slices([2 * i, 2 * i + 1], size, *arrays), carry)
        carry = slices([2 * pairs] * (rest > 0), rest, arrays, carry)
        return {key: carry[key].reshape(made) for key in self.targets}

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
                if self.sums:
                    (value,) = carry_out(self.sums, [value], self.sums.params | {"axes": (*range(len(shape)),)})
                    value = value.reshape((1,) * arrays[key].ndim)
                value = lying(value) if is_on_host(arrays[key]) else value
                arrays[key] = put_slice(arrays[key], value, (0, i if self.sums else i * size))
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
