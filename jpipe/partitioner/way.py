"""`Way` and `DevicePlan`: how one equation is carried out on parts of arrays, and a plan for a whole jaxpr.

A *sharding* says how an array lies along each axis: as a shard, replicated, or partial. A *way* of an equation says how
its operands have to lie, how its results lie then, and what a device computes. A *plan* goes through the equations of a
jaxpr in order: it first converts operands that lie otherwise, by collectives, and then takes the equation's way. Here
tanh(y) @ w, with y partial and w split by columns:

    conversions     y: partial -> replicated                        an all_reduce
    way             tanh: replicated -> replicated
    conversions     none
    way             dot_general: replicated, Shard(1) -> Shard(1)   a device's columns of the product

A plan is made before anything is carried out (`jpipe.partitioner.choice`), and says all that devices send each other,
except for what ways send by themselves (`Way.sends_too`). `DevicePlan.run` carries it out.

A rule (`jpipe.partitioner.rules`) speaks of one axis. What rules say along all axes is joined by `way_by_rule` to one
`Way`, in the order of the axes: an axis along which an operand can't be split besides the axes before it sees the
operand whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from jpipe.jax.flat_jaxpr import FlatEquation, FlatJaxpr, aval_of
from jpipe.jax.inside import at_line_of, carry_out, scope_of
from jpipe.jax.primitives import JaxprEqn
from jpipe.partitioner.conversions import by_mesh_axis, collective_of, convert, cost_of_work, hops
from jpipe.partitioner.rule import Operation, RuleResult
from jpipe.partitioner.rules import RULES, part_params
from jpipe.partitioner.shardings import PARTIAL, REPLICATED, Axis, Shard, Sharding, is_possible, part_shape

Axes = tuple[Axis, ...]
"""The mesh axes that arrays are split over; a `Sharding` has an entry for each."""
Parts = dict[tuple[int, Sharding], jax.Array]
"""A device's part of each value so far, by the value's number in the `FlatJaxpr` and how it lies."""


@dataclass(frozen=True, eq=False)
class Way:
    """How an equation is carried out.

    Attributes:
      operands: how each operand has to lie.
      results: how each result lies then.
      run: a device's parts of the operands -> its parts of the results.
      cost: what a device computes and writes in it, and what `plans` cost (`jpipe.partitioner.conversions`).
      plans: for a loop or a branch the plans of the jaxprs inside, each with how often it runs (a `while` loop's body
        once); empty for all others.
      sends_too: whether devices may send each other something in it, besides what its plans say.
    """

    operands: tuple[Sharding, ...]
    results: tuple[Sharding, ...]
    run: Callable[..., Sequence[jax.Array]]
    cost: float = 0.0
    plans: tuple[tuple[DevicePlan, float], ...] = ()
    sends_too: bool = False

    @property
    def sends(self) -> bool:
        """Whether devices send each other anything in it."""
        return self.sends_too or any(plan.sends for plan, _ in self.plans)


class Conversion(NamedTuple):
    """A value that is converted to another sharding.

    Attributes:
      value: its number in the `FlatJaxpr`.
      now: the sharding from which it is converted.
      wanted: the sharding to which it is converted. The value stays there in its other forms too.
    """

    value: int
    now: Sharding
    wanted: Sharding


class PlannedEquation(NamedTuple):
    """An equation, how it is carried out, and the conversions before it."""

    flat: FlatEquation
    conversions: Sequence[Conversion]
    way: Way

    def unsplit_along(self, axes: Axes) -> tuple[str, ...]:
        """Lists the mesh axes along which all devices do the same, though an operand was split and had to be gathered.

        An operation without a rule counts also where an operand was a sum over devices.
        """
        has_rule = self.flat.equation.primitive.name in RULES
        lying = (*self.way.operands, *self.way.results)

        def was_gathered(i: int) -> bool:
            along_axis = [(now[i], wanted[i]) for _, now, wanted in self.conversions]
            gathered = [now for now, wanted in along_axis if wanted == REPLICATED]
            return any(isinstance(now, Shard) or (now == PARTIAL and not has_rule) for now in gathered)

        is_whole = lambda parts: all(sharding[i] == REPLICATED for sharding in lying for i in parts)
        along = [parts[0] for parts in by_mesh_axis(axes) if is_whole(parts) and any(map(was_gathered, parts))]
        return tuple(name for i in along for name in axes[i].names)


class Unsplit(NamedTuple):
    """An equation that every device carries out whole, though an operand was split.

    Attributes:
      flat: the equation.
      times: how often it runs.
      along: the mesh axes along which all devices do the same.
    """

    flat: FlatEquation
    times: float
    along: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class DevicePlan:
    """How a device carries out a jaxpr: its equations in order, and then conversions of the results.

    Attributes:
      flat: the jaxpr, of whole arrays.
      axes: what arrays are split over.
      arguments: how its arguments lie.
      equations: for each equation its way and the conversions before it.
      conversions: the conversions of the results, after all equations.
      results: how the results lie in the end.
      cost: the sum of the costs of all ways and conversions.
    """

    flat: FlatJaxpr
    axes: Axes
    arguments: tuple[Sharding, ...]
    equations: Sequence[PlannedEquation]
    conversions: Sequence[Conversion]
    results: tuple[Sharding, ...]
    cost: float

    @property
    def unsplit(self) -> list[Unsplit]:
        """The equations that every device carries out whole though an operand was split."""
        inner = [pair for planned in self.equations for pair in planned.way.plans]
        within = [one._replace(times=one.times * times) for plan, times in inner for one in plan.unsplit]
        here = [Unsplit(planned.flat, 1.0, planned.unsplit_along(self.axes)) for planned in self.equations]
        return within + [one for one in here if one.along]

    @property
    def sends(self) -> bool:
        """Whether devices send each other anything in it."""
        conversions = [*self.conversions, *[c for planned in self.equations for c in planned.conversions]]
        converts = any(collective_of(self.axes, hop) for _, *pair in conversions for hop in hops(self.axes, *pair))
        return converts or any(planned.way.sends for planned in self.equations)

    def run(self, *parts: jax.Array) -> list[jax.Array]:
        """Takes a device's parts of the arguments, and gives its parts of the results; all devices run the program."""
        parts_of: Parts = {(i, (REPLICATED,) * len(self.axes)): constant for i, constant in self.flat.constants.items()}
        parts_of |= dict(zip(zip(self.flat.arguments, self.arguments, strict=True), parts, strict=True))
        for flat, conversions, way in self.equations:
            with ExitStack() as scopes:
                for caller in flat.callers:
                    scopes.enter_context(scope_of(caller))
                with at_line_of(flat.equation, flat.callers):
                    self._convert(conversions, parts_of)
                operands = [parts_of[form] for form in zip(flat.reads, way.operands, strict=True)]
                parts_of.update(zip(zip(flat.makes, way.results, strict=True), way.run(*operands), strict=True))
        self._convert(self.conversions, parts_of)
        return [parts_of[form] for form in zip(self.flat.results, self.results, strict=True)]

    def _convert(self, conversions: Sequence[Conversion], parts_of: Parts) -> None:
        """Converts values of which a device has a part; each form of a value is converted once."""
        for value, now, wanted in conversions:
            parts_of[value, wanted] = convert(parts_of[value, now], self.axes, now, wanted)


def way_by_rule(equation: JaxprEqn, lying: Sequence[Sharding], axes: Axes, *, is_last: bool = False) -> Way:
    """Makes the way of an equation by its operation's rule.

    Args:
      equation: of whole arrays.
      lying: how its operands lie; the way may want them otherwise.
      axes: what arrays are split over.
      is_last: whether no other equation reads what it makes: then `Axis.sums_late`, along all axes.
    """
    along_axes = _apply_rule(equation, lying, axes, is_last)
    operands = tuple(tuple(along.operands[i] for along in along_axes) for i in range(len(lying)))
    results = tuple(tuple(along.results[i] for along in along_axes) for i in range(len(equation.outvars)))
    taken = [part_shape(aval_of(v).shape, s, axes) for v, s in zip(equation.invars, operands, strict=True)]
    made = [part_shape(aval_of(v).shape, s, axes) for v, s in zip(equation.outvars, results, strict=True)]

    def run(*parts: jax.Array) -> list[jax.Array]:
        params = lambda parts: part_params(equation, [np.shape(x) for x in parts], made)
        operation: Operation = lambda *parts: carry_out(equation, parts, params(parts))
        for along in along_axes:
            operation = partial(along.instead, operation) if along.instead else operation
        arrays = operation(*parts)
        assert [x.shape for x in arrays] == made, equation
        return arrays

    sends_too = any(along.instead for along in along_axes)
    return Way(operands, results, run, cost_of_work(equation, taken, made), sends_too=sends_too)


def _apply_rule(equation: JaxprEqn, lying: Sequence[Sharding], axes: Axes, is_last: bool) -> list[RuleResult]:
    """Asks the rule about each axis; along those where there is no way, operands are whole."""
    rule, shapes = RULES.get(equation.primitive.name), [aval_of(v).shape for v in (*equation.invars, *equation.outvars)]
    whole = RuleResult([REPLICATED] * len(lying), [REPLICATED] * len(equation.outvars))
    along_axes: list[RuleResult] = []
    for i, axis in enumerate(axes):
        axis = replace(axis, sums_late=True) if is_last else axis
        along = (rule(equation, [sharding[i] for sharding in lying], axis) if rule else None) or whole
        shardings = zip(*[(*one.operands, *one.results) for one in (*along_axes, along)], strict=True)
        can_lie = all(is_possible(shape, s, axes[: i + 1]) for shape, s in zip(shapes, shardings, strict=True))
        along_axes.append(along if can_lie else whole)
    return along_axes
