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
except for what ways send by themselves (`Way.sends`). `DevicePlan.run` carries it out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import jax

from jpipe.jaxprs.flat_jaxpr import FlatEquation, FlatJaxpr
from jpipe.partitioner.conversions import collective_of, convert, hops
from jpipe.partitioner.prices import NOTHING, Cost
from jpipe.partitioner.rules import RULES
from jpipe.partitioner.shardings import PARTIAL, REPLICATED, Axis, Shard, Sharding, by_mesh_axis, replicated
from jpipe.seam.inside import at_line_of, scope_of

Axes = tuple[Axis, ...]
"""The mesh axes that arrays are split over; a `Sharding` has an entry for each."""
Form = tuple[int, Sharding]
"""A value as it lies on devices: its number in the `FlatJaxpr`, and a sharding."""


@dataclass(frozen=True, eq=False)
class Way:
    """How an equation is carried out.

    Attributes:
      operands: how each operand has to lie.
      results: how each result lies then.
      run: a device's parts of the operands -> its parts of the results.
      cost: what a device computes and writes in it, and what `plans` cost (`jpipe.partitioner.prices`).
      plans: for a loop or a branch the plans of the jaxprs inside, each with how often it runs (a `while` loop's body
        once); empty for all others.
      sends: whether devices send each other something in it, besides what its plans say.
    """

    operands: tuple[Sharding, ...]
    results: tuple[Sharding, ...]
    run: Callable[..., Sequence[jax.Array]]
    cost: Cost = field(default_factory=NOTHING.copy)
    plans: tuple[tuple[DevicePlan, float], ...] = ()
    sends: bool = False


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
    conversions: tuple[Conversion, ...]
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

        return tuple(
            name
            for parts in by_mesh_axis(axes)
            if all(sharding[i] == REPLICATED for sharding in lying for i in parts) and any(map(was_gathered, parts))
            for name in axes[parts[0]].names
        )


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


class Region(Protocol):
    """Equations that are carried out together, beside transfers (`jpipe.partitioner.rings`).

    Attributes:
      equations: the equations.
      takes: the forms that have to be made before.
      gives: the forms that it makes for others.
    """

    @property
    def equations(self) -> Sequence[PlannedEquation]: ...
    @property
    def takes(self) -> Sequence[Form]: ...
    @property
    def gives(self) -> Sequence[Form]: ...

    def run(self, at_hand: Mapping[Form, jax.Array]) -> Mapping[Form, jax.Array]:
        """Carries them out: a device's parts of `takes` -> its parts of `gives`."""
        ...


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
      regions: equations that are carried out together; all others one by one.
    """

    flat: FlatJaxpr
    axes: Axes
    arguments: tuple[Sharding, ...]
    equations: tuple[PlannedEquation, ...]
    conversions: tuple[Conversion, ...]
    results: tuple[Sharding, ...]
    cost: Cost
    regions: tuple[Region, ...] = ()

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
        if any(collective_of(self.axes, hop) for _, *pair in conversions for hop in hops(self.axes, *pair)):
            return True
        ways = [planned.way for planned in self.equations]
        return any(way.sends or any(plan.sends for plan, _ in way.plans) for way in ways)

    def run(self, *parts: jax.Array) -> list[jax.Array]:
        """Takes a device's parts of the arguments, and gives its parts of the results; all devices run the program."""
        return _Run(self, parts).results()


class _Run:
    """One device's run of a plan.

    Attributes:
      plan: the plan.
      at_hand: the device's part of each form; each form of a value is converted once.
    """

    def __init__(self, plan: DevicePlan, parts: Sequence[jax.Array]):
        self.plan = plan
        self.at_hand: dict[Form, jax.Array] = {(i, replicated(plan.axes)): x for i, x in plan.flat.constants.items()}
        self.at_hand |= dict(zip(zip(plan.flat.arguments, plan.arguments, strict=True), parts, strict=True))
        self._region_of = {form: region for region in plan.regions for form in region.gives}
        self._in_regions = {id(planned) for region in plan.regions for planned in region.equations}
        self._maker = {form: planned for planned in plan.equations for form in _made(planned)}
        self._conversion = {
            (c.value, c.wanted): c for c in (*(c for e in plan.equations for c in e.conversions), *plan.conversions)
        }

    def results(self) -> list[jax.Array]:
        """Carries out all equations in order; a region, where the first of its results is read."""
        plan = self.plan
        for planned in plan.equations:
            if id(planned) not in self._in_regions:
                self._carry_out(planned)
        self._convert(plan.conversions)
        return [self._need(form) for form in zip(plan.flat.results, plan.results, strict=True)]

    def _carry_out(self, planned: PlannedEquation) -> None:
        (equation, callers, reads, _), conversions, way = planned
        made = _made(planned)
        if all(form in self.at_hand for form in made) and made:
            return  # a region read it before
        with ExitStack() as scopes:
            for caller in callers:
                scopes.enter_context(scope_of(caller))
            with at_line_of(equation, callers):
                self._convert(conversions)
                operands = [self._need(form) for form in zip(reads, way.operands, strict=True)]
            results = way.run(*operands)
        self.at_hand.update(zip(made, results, strict=True))

    def _convert(self, conversions: Sequence[Conversion]) -> None:
        """Does conversions; not those within regions."""
        for value, now, wanted in conversions:
            if (value, wanted) not in self._region_of and (value, wanted) not in self.at_hand:
                self.at_hand[value, wanted] = convert(self._need((value, now)), self.plan.axes, now, wanted)

    def _need(self, form: Form) -> jax.Array:
        """The device's part of a form; what makes it runs first, if it hasn't."""
        if form in self.at_hand:
            return self.at_hand[form]
        if form in self._region_of:
            region = self._region_of[form]
            for taken in region.takes:
                self._need(taken)
            self.at_hand.update(region.run(self.at_hand))
        elif form in self._maker:
            self._carry_out(self._maker[form])
        else:
            self._convert([self._conversion[form]])
        return self.at_hand[form]


def _made(planned: PlannedEquation) -> list[Form]:
    """The forms that an equation makes."""
    return list(zip(planned.flat.makes, planned.way.results, strict=True))
