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
from functools import partial
from typing import NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jpipe.jax.flat_jaxpr import FlatEquation, FlatJaxpr, flatten
from jpipe.jax.in_place import Index, each, is_apart, put_slice, take_slice, to_host, when
from jpipe.jax.inside import carry_out
from jpipe.jax.primitives import ELEMENTWISE, ClosedJaxpr, JaxprEqn
from jpipe.memory.buffers import in_order
from jpipe.memory.layout import HostSlices, Layout, StageTree, may_go
from jpipe.mesh.axes import on_stages
from jpipe.partitioner.shardings import Shape, names_in
from jpipe.training.optimizers import update_with_loss
from jpipe.training.per_layer import PROGRAM
from jpipe.types import Leaf, PyTree

_Arrays = dict[int, jax.Array]
"""Arrays by the number of the value."""
_Slice = tuple[tuple[Index], tuple[Index, ...]]
"""(Its index among all slices, the index at which it begins)."""
_Place = Callable[[Index], _Slice]
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
    """Whether an optimiser's state for these parameters lies on the hosts; never for a tree that is no pipeline's."""
    return isinstance(params, StageTree) and params.layout.state_on_hosts


def initial(tx: optax.GradientTransformation, params: StageTree) -> PyTree:
    """Makes the state of an optimiser for these parameters."""
    if not state_is_on_hosts(params):
        return tx.init(params)
    places = _places_of(jax.eval_shape(tx.init, params), params.layout)
    return _by_slices(tx.init, params.layout, (params,), _places_of(params), places, replaces=False)


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
      sums: the equation that adds it up, if that is wanted: then the loop makes an array of the sums of all slices.
    """

    number: int
    into: int | None = None
    on_host: bool = False
    sums: JaxprEqn | None = None


class _Update:
    """Evaluates the equations of an update: some values whole, some only a slice at a time.

    Attributes:
      flat: the jaxpr.
      arrays: by number the values that lie somewhere as arrays: on the hosts, if they are in `sliced`.
      sliced: the values that are on the device a slice at a time alone, each with the mesh axes that split it.
    """

    def __init__(self, closed: ClosedJaxpr, leaves: Sequence[jax.Array], places: Sequence[Place], layout: Layout):
        is_program = lambda equation: equation.params.get("name") == PROGRAM
        self.flat = flatten(closed, keeps=is_program, selects=True)
        self._layout, self._is_program = layout, is_program
        self.arrays: dict[int, Leaf] = {**self.flat.constants, **dict(zip(self.flat.arguments, leaves, strict=True))}
        placed = list(zip(self.flat.arguments, places, strict=True))
        self.sliced = {number: place.spec for number, place in placed if place.where == SLICES}
        # By state of `per_layer`, the one that it replaces; one that came in as an argument stands for itself.
        self._replaced = {number: number for number, place in placed if place.where == RECORDS}
        for equation in self.flat.equations:
            self._visit(equation)

    def results(self, wanted: Sequence[tuple[int, int | None, Place]]) -> list[Leaf]:
        """The arrays of some values: `(number, the argument that it replaces, where it is to lie)`."""
        loops: dict[tuple[tuple[int, ...], PartitionSpec], dict[int, _Target]] = {}
        for i, (number, into, place) in enumerate(wanted):
            is_kept = number == into and number in self.arrays  # its array stays as it is
            if (place.where == SLICES or number in self.sliced) and not is_kept:
                key = self.flat.avals[number].shape, place.spec
                loops.setdefault(key, {})[i] = _Target(number, into, place.where == SLICES)
        made: dict[int, Leaf] = {}
        for (_, spec), targets in loops.items():
            made |= zip(targets, self._loop(spec, list(targets.values())), strict=True)
        return [made[i] if i in made else jnp.asarray(self.arrays[n]) for i, (n, _, _) in enumerate(wanted)]

    def _visit(self, flat: FlatEquation) -> None:
        """Computes an equation whole, if its operands are known; one that is elementwise waits until it is wanted."""
        equation, specs = flat.equation, {self.sliced[n] for n in flat.reads if n in self.sliced}
        name, shape = equation.primitive.name, self.flat.avals[flat.makes[0]].shape if flat.makes else ()
        if self._is_program(equation):
            for number in {*flat.reads} & {*self.sliced}:
                (self.arrays[number],) = self._loop(self.sliced[number], [_Target(number)])
                del self.sliced[number]
            results = self._of_program(flat)
        elif name == "select_n" and not self._replaced.keys().isdisjoint(flat.reads):
            results = [self._of_records(flat)]
        elif not specs:
            results = carry_out(equation, [self.arrays[n] for n in flat.reads])
        elif name in ELEMENTWISE:
            (spec,) = specs  # all operands are split alike
            self.sliced[flat.makes[0]] = spec
            return
        elif name in _SUMS and shape == ():
            (operand,), (spec,) = flat.reads, specs
            (sums,) = self._loop(spec, [_Target(operand, sums=equation)])
            results = carry_out(equation, [sums], equation.params | {"axes": (0,)})
        else:
            raise ValueError(_REFUSED.format(name))
        self.arrays |= zip(flat.makes, results, strict=True)

    def _of_program(self, flat: FlatEquation) -> list[jax.Array]:
        """The results of `per_layer`, whose state is replaced in place: of a branch, only if that branch is taken."""
        state = [n for n in flat.reads if n in self._replaced]
        new = flat.makes[len(flat.makes) - len(state) :]
        self._replaced |= zip(new, state, strict=True)
        operands = {n: self.arrays[n] for n in flat.reads}
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
                if which not in self.arrays or jnp.shape(self.arrays[which]) != ():
                    raise ValueError(_REFUSED.format("a selection"))
                here = self.arrays[which] == choices.index(number)
                number, taken = equation.makes[0], here if taken is None else taken & here
        return taken

    def _of_records(self, flat: FlatEquation) -> jax.Array:
        """A selection between two states of `per_layer`: the new one, which is the old one where it isn't taken."""
        _, *choices = flat.reads
        new = next((n for n in choices if self._replaced.get(n, n) != n), None)
        if new is None or {*choices} != {new, self._replaced[new]}:
            raise ValueError(_REFUSED.format("a selection"))
        self._replaced[flat.makes[0]] = self._replaced[new]
        return self.arrays[new]

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
        arrays = {n: self.arrays[n] for n in {*roots, *written}}
        hosted = frozenset(self.arrays.keys() & self.sliced.keys())
        program = _Loop(self.flat, equations, targets, hosted, NamedSharding(mesh, spec))
        specs = {n: spec if jnp.shape(array) else PartitionSpec() for n, array in arrays.items()}
        names = tuple(name for entry in spec for name in names_in(entry))
        results = [PartitionSpec(names) if target.sums else spec for target in targets]
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
    def _host_slices(self) -> HostSlices:
        return HostSlices.of(self._shape, max(self.flat.avals[target.number].dtype.itemsize for target in self.targets))

    @property
    def _keys(self) -> list[int]:
        """The number of the array that each target replaces; a negative one if there is none."""
        return [-1 - j if target.into is None else target.into for j, target in enumerate(self.targets)]

    def run(self, arrays: _Arrays) -> list[jax.Array]:
        """One device's part: its arrays and scalars -> of each target its part, or the sums of its slices."""
        slices, keys, before = self._host_slices, self._keys, 0
        arrays = {n: array.reshape(slices.view) if array.ndim else array for n, array in arrays.items()}
        read = [n for n in arrays if n in self.hosted and n not in keys]
        begun = {key: self._begin(target, arrays) for key, target in zip(keys, self.targets, strict=True)}
        carry = {n: arrays[n] for n in read} | begun
        fixed = {n: array for n, array in arrays.items() if n not in carry}
        for count, shape, at in slices.parts:
            place = lambda i, at=at, before=before: ((before + i,), at(i))

            def two(i: Index, fixed: _Arrays, carry: _Arrays, shape: Shape = shape, place: _Place = place) -> _Arrays:
                return self._slices([place(2 * i), place(2 * i + 1)], shape, fixed, carry)

            carry = each(0, count // 2, fixed, two, carry)
            carry = self._slices([place(count - 1)] * (count % 2), shape, fixed, carry)
            before += count
        pairs = zip(keys, self.targets, strict=True)
        return [carry[key] if target.sums else carry[key].reshape(self._shape) for key, target in pairs]

    def _begin(self, target: _Target, arrays: _Arrays) -> jax.Array:
        """Returns the array in which a target is made."""
        if target.into is not None:
            return arrays[target.into]
        shape = (sum(count for count, *_ in self._host_slices.parts),) if target.sums else self._host_slices.view
        array = jax.lax.empty(shape, self.flat.avals[target.number].dtype)
        return to_host(array) if target.on_host and is_apart(self.sharding.mesh) else array

    def _slices(self, places: list[_Slice], shape: Shape, fixed: _Arrays, carry: _Arrays) -> _Arrays:
        """Makes slices of all targets, one place after the other; what lies on the host comes first."""
        arrays = fixed | carry
        lying = lambda array: in_order(array, self._host_slices.order)
        arrived = [{n: lying(take_slice(arrays[n], at, shape)) for n in arrays if n in self.hosted} for _, at in places]
        for k, (index, at) in enumerate(places):
            values = self._values(arrays, arrived[k], at, shape)
            new = [values[target.number] for target in self.targets]
            # Of one array all slices are read before one is written: else a GPU's compiler copies it whole. And numbers
            # are each slice's own: else a compiler may multiply by a reciprocal that two divisions have in common.
            tied = {n: array for n, array in arrays.items() if n in self.hosted or not array.ndim}
            tied, arrived[k + 1 :], new = jax.lax.optimization_barrier((tied, arrived[k + 1 :], new))
            arrays |= tied
            for key, target, value in zip(self._keys, self.targets, new, strict=True):
                value = lying(value) if target.on_host else value
                if target.sums:
                    params = target.sums.params | {"axes": (*range(value.ndim),)}
                    (value,) = carry_out(target.sums, [value], params)
                arrays[key] = put_slice(arrays[key], *((value[None], index) if target.sums else (value, at)))
        return {n: arrays[n] for n in carry}

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


_SUMS = frozenset({"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or"})
"""Sums of whole arrays: sums of what slices give, too."""
_REFUSED = (
    'offload="optimizer" takes transformations that work element by element, besides sums over whole arrays, but {!r} '
    "reads the state of tx; if that part of tx may look at one layer at a time, wrap it in jpipe.per_layer(...) "
    '(MultiSteps inside it, apply_if_finite outside), else leave "optimizer" out of offload='
)
