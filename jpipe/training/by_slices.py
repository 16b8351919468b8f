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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jpipe.jax.flat_jaxpr import FlatEquation, FlatJaxpr, flatten
from jpipe.jax.in_place import Index, each, is_apart, put_slice, take_slice, to_host, when
from jpipe.jax.inside import carry_out
from jpipe.jax.primitives import ELEMENTWISE, ClosedJaxpr, JaxprEqn
from jpipe.memory.buffers import in_order
from jpipe.memory.layout import Cuts, Layout, StageTree, may_go
from jpipe.mesh.axes import on_stages
from jpipe.partitioner.shardings import Shape, names_in
from jpipe.training.optimizers import update_with_loss
from jpipe.training.per_layer import PROGRAM
from jpipe.types import Leaf, PyTree

_Arrays = dict[int, jax.Array]
"""Arrays by the number of the value."""
_At = Callable[[Index], tuple[Index, ...]]
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
    return _by_slices(update, params.layout, (params, opt_state, grads, loss), places, places)


def state_is_on_hosts(params: PyTree) -> bool:
    """Whether an optimiser's state for these parameters lies on the hosts."""
    return isinstance(params, StageTree) and params.layout.state_on_hosts


def initial(tx: optax.GradientTransformation, params: StageTree) -> PyTree:
    """Makes the state of an optimiser for these parameters."""
    if not state_is_on_hosts(params):
        return tx.init(params)
    places = _places_of(jax.eval_shape(tx.init, params), params.layout)
    return _by_slices(tx.init, params.layout, (params,), _places_of(params), places, replaces=False)


def _places_of(tree: PyTree, params: Layout | None = None) -> list[Place]:
    """Where each leaf of a tree lies, which is an optimiser's state for parameters of a layout, if one is given."""

    def of_node(node: Leaf | StageTree) -> PyTree:
        if not isinstance(node, StageTree):
            return Place()
        of_buffer = lambda name: jax.tree.map(lambda leaf: of_leaf(node, name, leaf), node[name])
        return {name: of_buffer(name) for name in node}

    def of_leaf(node: StageTree, name: str, leaf: Leaf) -> Place:
        buffer, by_record = node.layout.shapes[name], params not in (None, node.layout)
        if leaf.shape != buffer.shape:
            return Place()
        hosted = params is not None and may_go(leaf, buffer, by_layer=False)
        return Place(buffer.sharding.spec, RECORDS if by_record else SLICES if hosted else DEVICE)

    nodes = jax.tree.map(of_node, tree, is_leaf=lambda node: isinstance(node, StageTree))
    return jax.tree.leaves(nodes, is_leaf=lambda node: isinstance(node, Place))


def _by_slices(
    function: Callable[..., PyTree],
    layout: Layout,
    arguments: tuple[PyTree, ...],
    places: Sequence[Place],
    results: Sequence[Place],
    *,
    replaces: bool = True,
) -> PyTree:
    """Calls a function of trees of whole arrays, some of which lie on the hosts.

    Args:
      function: to be traced.
      layout: of the parameters.
      arguments: the trees.
      places: where each of their leaves lies.
      results: where each leaf of what it returns is to lie; leaves behind them are ignored.
      replaces: the results take the places of the first arguments.
    """
    leaves, structure = jax.tree.flatten(arguments)
    placed = zip(leaves, places, strict=True)
    on_device = [_on_device(leaf) if place.where == SLICES else leaf for leaf, place in placed]
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*jax.tree.unflatten(structure, on_device))
    whole = _Update(closed, leaves, places, layout)
    into = whole.flat.arguments if replaces else (None,) * len(results)
    wanted = list(zip(whole.flat.results, into, results, strict=False))
    return jax.tree.unflatten(jax.tree.structure(shapes), whole.results(wanted))


def _on_device(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    """The type of an array as if it lay on the device."""
    sharding = jax.typeof(leaf).sharding
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=None if sharding.mesh.empty else sharding)


class _Target(NamedTuple):
    """A value that a loop over slices makes.

    Attributes:
      number: the value, or that which is added up.
      into: the number of the array that it replaces; None for a new one.
      on_host: whether a new one lies there.
      sums: the equation that adds it up, if that is wanted.
    """

    number: int
    into: int | None = None
    on_host: bool = False
    sums: JaxprEqn | None = None


class _Update:
    """Evaluates the equations of an update: some values whole, some only a slice at a time.

    Attributes:
      flat: the jaxpr.
      sliced: the values that are known a slice at a time alone, each with the mesh axes that split it.
      whole: the others, by number.
    """

    def __init__(self, closed: ClosedJaxpr, leaves: Sequence[jax.Array], places: Sequence[Place], layout: Layout):
        is_program = lambda equation: equation.params.get("name") == PROGRAM
        self.flat = flatten(closed, keeps=is_program, selects=True)
        self._layout, self._is_program = layout, is_program
        self.whole: dict[int, Leaf] = {**self.flat.constants}
        self.sliced: dict[int, PartitionSpec] = {}
        self._hosted: dict[int, jax.Array] = {}
        self._records = set[int]()
        self._replaced: dict[int, int] = {}
        for number, leaf, place in zip(self.flat.arguments, leaves, places, strict=True):
            if place.where == SLICES:
                self._hosted[number], self.sliced[number] = leaf, place.spec
            else:
                self.whole[number] = leaf
                self._records |= {number} if place.where == RECORDS else set()
        for equation in self.flat.equations:
            self._visit(equation)

    def results(self, wanted: Sequence[tuple[int, int | None, Place]]) -> list[Leaf]:
        """The arrays of some values: `(number, the argument that it replaces, where it is to lie)`."""
        loops: dict[tuple[tuple[int, ...], PartitionSpec], dict[int, _Target]] = {}
        for i, (number, into, place) in enumerate(wanted):
            is_kept = number == into and number in self._hosted  # its array stays as it is
            if (place.where == SLICES or number in self.sliced) and not is_kept:
                key = self.flat.avals[number].shape, place.spec
                loops.setdefault(key, {})[i] = _Target(number, into, place.where == SLICES)
        made: dict[int, Leaf] = {}
        for (_, spec), targets in loops.items():
            made |= zip(targets, self._loop(spec, list(targets.values())), strict=True)
        read = lambda number: self._hosted[number] if number in self._hosted else jnp.asarray(self.whole[number])
        return [made[i] if i in made else read(number) for i, (number, _, _) in enumerate(wanted)]

    def _visit(self, flat: FlatEquation) -> None:
        """Computes an equation whole, if its operands are known; one that is elementwise waits until it is wanted."""
        equation, specs = flat.equation, {self.sliced[n] for n in flat.reads if n in self.sliced}
        name, shape = equation.primitive.name, self.flat.avals[flat.makes[0]].shape if flat.makes else ()
        if not specs:
            if self._is_program(equation):
                results = self._of_program(flat)
            elif name == "select_n" and self._records.intersection(flat.reads):
                results = [self._of_records(flat)]
            else:
                results = carry_out(equation, [self.whole[n] for n in flat.reads])
        elif name in ELEMENTWISE:
            (self.sliced[flat.makes[0]],) = specs
            return
        elif name in _SUMS and shape == ():
            (operand,), (spec,) = flat.reads, specs
            results = self._loop(spec, [_Target(operand, sums=equation)])
        elif self._is_program(equation):
            for number in {*flat.reads} & {*self.sliced}:
                (self.whole[number],) = self._loop(self.sliced[number], [_Target(number)])
            results = self._of_program(flat)
        else:
            raise ValueError(_REFUSED.format(name))
        self.whole |= zip(flat.makes, results, strict=True)

    def _of_program(self, flat: FlatEquation) -> list[jax.Array]:
        """The results of `per_layer`, whose state is replaced in place: of a branch, only if that branch is taken."""
        state = [n for n in flat.reads if n in self._records]
        new = flat.makes[len(flat.makes) - len(state) :]
        self._records |= {*new}
        self._replaced |= zip(new, state, strict=True)
        operands = {n: self.whole[n] for n in flat.reads}
        results = lambda operands: carry_out(flat.equation, [operands[n] for n in flat.reads])
        run = lambda operands: dict(zip(flat.makes, results(operands), strict=True))
        if not state or (is_taken := self._is_taken(new[0])) is None:
            return list(run(operands).values())
        kind = lambda n: (self.flat.avals[n].shape, self.flat.avals[n].dtype)
        alike = {kind(n): operand for n, operand in operands.items() if n not in state}  # they lie as updates do
        before = {n: jnp.zeros_like(alike[kind(n)]) for n in flat.makes if n not in new}
        before |= {n: operands.pop(old) for n, old in zip(new, state, strict=True)}

        def body(operands: dict[int, Leaf], before: dict[int, Leaf]) -> dict[int, Leaf]:
            return run(operands | {old: before[n] for n, old in zip(new, state, strict=True)})

        after = when(is_taken, operands, body, before)
        return [after[n] for n in flat.makes]

    def _is_taken(self, number: int) -> jax.Array | None:
        """Whether a new state of `per_layer` is selected, and not that before; None if it always is."""
        taken = None
        for equation in self.flat.equations:
            if equation.equation.primitive.name == "select_n" and number in equation.reads[1:]:
                which, *choices = equation.reads
                if which not in self.whole or jnp.shape(self.whole[which]) != ():
                    raise ValueError(_REFUSED.format("a selection"))
                here = self.whole[which] == choices.index(number)
                number, taken = equation.makes[0], here if taken is None else taken & here
        return taken

    def _of_records(self, flat: FlatEquation) -> jax.Array:
        """A selection between two states of `per_layer`: the new one, which is the old one where it isn't taken."""
        _, *choices = flat.reads
        new = [n for n in choices if n in self._replaced]
        if len(new) != 1 or {*choices} != {new[0], self._replaced[new[0]]}:
            raise ValueError(_REFUSED.format("a selection"))
        self._records |= {*flat.makes}
        self._replaced[flat.makes[0]] = self._replaced[new[0]]
        return self.whole[new[0]]

    # --- loops ---

    def _needed(self, numbers: Sequence[int]) -> tuple[list[FlatEquation], list[int]]:
        """(The elementwise equations that some values follow from, the values that these begin with)."""
        todo, indices, roots = list(numbers), set[int](), dict[int, None]()
        while todo:
            number = todo.pop()
            i = self.flat.made_by.get(number)
            if i is not None and self.flat.avals[number].shape and self._is_elementwise(self.flat.equations[i]):
                todo += [] if i in indices else self.flat.equations[i].reads
                indices.add(i)
            elif number not in self.flat.constants or self.flat.avals[number].shape:
                roots[number] = None
        return [self.flat.equations[i] for i in sorted(indices)], list(roots)

    def _is_elementwise(self, flat: FlatEquation) -> bool:
        name = flat.equation.primitive.name
        return name in ELEMENTWISE or (name == "broadcast_in_dim" and self.flat.avals[flat.reads[0]].shape == ())

    def _loop(self, spec: PartitionSpec, targets: list[_Target]) -> list[jax.Array]:
        """Makes values by a loop over slices, on all devices: of each target the array, or the sum."""
        equations, roots = self._needed([target.number for target in targets])
        mesh = self._layout.mesh
        written = {target.into for target in targets} - {None}
        arrays = {n: self._hosted[n] if n in self._hosted else self.whole[n] for n in {*roots, *written}}
        program = _Loop(self.flat, equations, targets, frozenset(self._hosted), NamedSharding(mesh, spec))
        specs = {n: spec if jnp.shape(array) else PartitionSpec() for n, array in arrays.items()}
        results = [PartitionSpec() if target.sums else spec for target in targets]
        return on_stages(program.run, mesh, (specs,), results)(arrays)


@dataclass(frozen=True, eq=False)
class _Loop:
    """A loop over the slices of a device's part of some buffers of one shape.

    Attributes:
      flat: the jaxpr.
      equations: elementwise, in order.
      targets: the values that are made.
      hosted: the numbers of the arrays that lie on the hosts.
      sharding: of the buffers.
    """

    flat: FlatJaxpr
    equations: list[FlatEquation]
    targets: list[_Target]
    hosted: frozenset[int]
    sharding: NamedSharding

    @property
    def _shape(self) -> tuple[int, ...]:
        return self.sharding.shard_shape(self.flat.avals[self.targets[0].number].shape)

    @property
    def _cuts(self) -> Cuts:
        return Cuts.of(self._shape, max(self.flat.avals[target.number].dtype.itemsize for target in self.targets))

    @property
    def _keys(self) -> list[int]:
        """The number of the array that each target replaces; a negative one if there is none."""
        return [-1 - j if target.into is None else target.into for j, target in enumerate(self.targets)]

    def run(self, arrays: _Arrays) -> list[jax.Array]:
        """One device's part: its arrays and scalars -> of each target its part or the sum."""
        cuts, keys = self._cuts, self._keys
        arrays = {n: array.reshape(cuts.view) if array.ndim else array for n, array in arrays.items()}
        read = [n for n in arrays if n in self.hosted and n not in keys]
        begun = {key: self._begin(target, arrays) for key, target in zip(keys, self.targets, strict=True)}
        carry = {n: arrays[n] for n in read} | begun
        fixed = {n: array for n, array in arrays.items() if n not in carry}
        for count, shape, at in cuts.parts:

            def two(i: Index, fixed: _Arrays, carry: _Arrays, shape: Shape = shape, at: _At = at) -> _Arrays:
                return self._slices([at(2 * i), at(2 * i + 1)], shape, fixed, carry)

            carry = each(0, count // 2, fixed, two, carry)
            carry = self._slices([at(count - 1)] * (count % 2), shape, fixed, carry)
        whole = {key: array.reshape(self._shape) if array.ndim else array for key, array in carry.items()}
        return list(map(self._over_devices, self.targets, map(whole.__getitem__, keys)))

    def _begin(self, target: _Target, arrays: _Arrays) -> jax.Array:
        """Returns the array in which a target is made, or the sum of nothing."""
        dtype = self.flat.avals[target.number].dtype
        if target.into is not None:
            return arrays[target.into]
        if target.sums:
            return _SUMS[target.sums.primitive.name].start(dtype)
        array = jax.lax.empty(self._cuts.view, dtype)
        return to_host(array) if target.on_host and is_apart(self.sharding.mesh) else array

    def _over_devices(self, target: _Target, part: jax.Array) -> jax.Array:
        """A target of all devices: an array's own part, the sum of all."""
        names = tuple(name for entry in self.sharding.spec for name in names_in(entry))
        return _SUMS[target.sums.primitive.name].over(part, names) if target.sums and names else part

    def _slices(self, places: list[tuple[Index, ...]], shape: Shape, fixed: _Arrays, carry: _Arrays) -> _Arrays:
        """Makes slices of all targets, one place after the other; what lies on the host comes first."""
        arrays = fixed | carry
        lying = lambda array: in_order(array, self._cuts.order)
        arrived = [{n: lying(take_slice(arrays[n], at, shape)) for n in arrays if n in self.hosted} for at in places]
        for k, at in enumerate(places):
            values = self._values(arrays, arrived[k], at, shape)
            new = [values[target.number] for target in self.targets]
            # Of one array all slices are read before one is written: else a GPU's compiler copies it whole. And numbers
            # are each slice's own: else a compiler may multiply by a reciprocal that two divisions have in common.
            tied = {n: array for n, array in arrays.items() if n in self.hosted or not array.ndim}
            tied, arrived[k + 1 :], new = jax.lax.optimization_barrier((tied, arrived[k + 1 :], new))
            arrays |= tied
            for key, target, value in zip(self._keys, self.targets, new, strict=True):
                value = lying(value) if target.on_host else value
                arrays[key] = self._written(arrays[key], target.sums, value, at)
        return {n: arrays[n] for n in carry}

    def _written(self, array: jax.Array, sums: JaxprEqn | None, value: jax.Array, at: tuple[Index, ...]) -> jax.Array:
        if sums is None:
            return put_slice(array, value, at)
        (part,) = carry_out(sums, [value], sums.params | {"axes": (*range(value.ndim),)})
        return _SUMS[sums.primitive.name].add(array, part)

    def _values(self, arrays: _Arrays, arrived: _Arrays, at: tuple[Index, ...], shape: Shape) -> dict[int, Leaf]:
        """The values of one slice."""
        values: dict[int, Leaf] = {**self.flat.constants, **arrived}
        for n, array in arrays.items():
            if n not in arrived and n >= 0:
                values[n] = take_slice(array, at, shape) if array.ndim else array
        for flat in self.equations:
            operands = [values[n] for n in flat.reads]
            if flat.equation.primitive.name == "broadcast_in_dim":
                values[flat.makes[0]] = jnp.broadcast_to(operands[0], shape)
            else:
                values |= zip(flat.makes, carry_out(flat.equation, operands), strict=True)
        return values


class _Sum(NamedTuple):
    """How parts of a sum are put together.

    Attributes:
      add: two of them.
      over: those of the devices along mesh axes.
      start: a dtype -> the sum of nothing.
    """

    add: Callable[[jax.Array, jax.Array], jax.Array]
    over: Callable[[jax.Array, tuple[str, ...]], jax.Array]
    start: Callable[[np.dtype], jax.Array]


_least = lambda dtype: -jnp.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).min
_most = lambda dtype: jnp.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).max
_all = lambda reduce: lambda part, names: reduce(part.astype(jnp.int32), names) > 0
_SUMS = {
    "reduce_sum": _Sum(jnp.add, jax.lax.psum, lambda dtype: jnp.zeros((), dtype)),
    "reduce_max": _Sum(jnp.maximum, jax.lax.pmax, lambda dtype: jnp.asarray(_least(dtype), dtype)),
    "reduce_min": _Sum(jnp.minimum, jax.lax.pmin, lambda dtype: jnp.asarray(_most(dtype), dtype)),
    "reduce_and": _Sum(jnp.logical_and, _all(jax.lax.pmin), lambda dtype: jnp.ones((), dtype)),
    "reduce_or": _Sum(jnp.logical_or, _all(jax.lax.pmax), lambda dtype: jnp.zeros((), dtype)),
}
_REFUSED = (
    'offload="optimizer" takes transformations that work element by element, besides sums over whole arrays, but {!r} '
    "reads the state of tx; if that part of tx may look at one layer at a time, wrap it in jpipe.per_layer(...) "
    '(MultiSteps inside it, apply_if_finite outside), else leave "optimizer" out of offload='
)
