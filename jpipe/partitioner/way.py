"""`Way` and `DevicePlan`: how one equation is carried out on parts of arrays, and a plan for a whole jaxpr.

A plan is made before anything is traced (`jpipe.partitioner.choice`), and says all that devices send to each other:

    conversions     y: partial -> replicated        an all_reduce
    way             tanh: replicated -> replicated
    conversions     none
    way             dot_general: replicated, Shard(1) -> Shard(1)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple

import jax

from jpipe.jaxprs.flat_jaxpr import FlatEquation, FlatJaxpr
from jpipe.partitioner.conversions import collective_of, convert, hops
from jpipe.partitioner.prices import NOTHING, Cost
from jpipe.partitioner.rules import RULES
from jpipe.partitioner.shardings import (
    PARTIAL,
    REPLICATED,
    Axis,
    Shard,
    Sharding,
    by_mesh_axis,
    replicated,
)
from jpipe.seam.inside import at_line_of, scope_of

Axes = tuple[Axis, ...]
"""The mesh axes that arrays are split over; a `Sharding` has an entry for each."""


@dataclass(frozen=True, eq=False)
class Way:
    """How an equation is carried out.

    Attributes:
      operands: how its operands have to lie.
      results: how its results lie then.
      run: a device's parts of the operands -> its parts of the results.
      cost: what it takes by itself.
      plans: of the jaxprs that it holds, each with how often it is run (a `while` loop's body once).
      sends: whether devices send each other something in it, besides what its plans say.
    """

    operands: tuple[Sharding, ...]
    results: tuple[Sharding, ...]
    run: Callable[..., Sequence[jax.Array]]
    cost: Cost = field(default_factory=NOTHING.copy)
    plans: tuple[tuple[DevicePlan, float], ...] = ()
    sends: bool = False


class Conversion(NamedTuple):
    """A value that comes to lie otherwise.

    Attributes:
      value: its number.
      now: how it lies.
      wanted: how it lies after it; besides, it is still there as it was.
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
        """The mesh axes along which all devices do the same, though an operand was split and had to be gathered.

        An operation without a rule counts also where an operand was a sum over devices.
        """
        has_rule = self.flat.equation.primitive.name in RULES
        was_apart = lambda now: isinstance(now, Shard) or (now == PARTIAL and not has_rule)
        lying = (*self.way.operands, *self.way.results)
        return tuple(
            name
            for parts in by_mesh_axis(axes)
            if all(sharding[i] == REPLICATED for sharding in lying for i in parts)
            and any(was_apart(now[i]) and wanted[i] == REPLICATED for _, now, wanted in self.conversions for i in parts)
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


@dataclass(frozen=True, eq=False)
class DevicePlan:
    """How a jaxpr is carried out.

    Attributes:
      flat: the jaxpr.
      axes: what arrays are split over.
      arguments: how its arguments lie.
      equations: how each of its equations is carried out.
      conversions: those of its results.
      results: how its results lie.
      cost: what it takes.
    """

    flat: FlatJaxpr
    axes: Axes
    arguments: tuple[Sharding, ...]
    equations: tuple[PlannedEquation, ...]
    conversions: tuple[Conversion, ...]
    results: tuple[Sharding, ...]
    cost: Cost

    @property
    def unsplit(self) -> list[Unsplit]:
        """The equations that every device carries out whole though an operand was split."""
        inner = [pair for planned in self.equations for pair in planned.way.plans]
        within = [one._replace(times=one.times * times) for plan, times in inner for one in plan.unsplit]
        found = [Unsplit(planned.flat, 1.0, planned.unsplit_along(self.axes)) for planned in self.equations]
        return within + [one for one in found if one.along]

    @property
    def sends(self) -> bool:
        """Whether devices send each other anything in it."""
        conversions = [*self.conversions, *[c for planned in self.equations for c in planned.conversions]]
        if any(collective_of(self.axes, hop) for _, *pair in conversions for hop in hops(self.axes, *pair)):
            return True
        ways = [planned.way for planned in self.equations]
        return any(way.sends or any(plan.sends for plan, _ in way.plans) for way in ways)

    def run(self, *parts: jax.Array) -> list[jax.Array]:
        """A device's parts of the arguments -> its parts of the results; in a program that all devices run."""
        at_hand = {(i, replicated(self.axes)): constant for i, constant in self.flat.constants.items()}
        at_hand |= dict(zip(zip(self.flat.arguments, self.arguments, strict=True), parts, strict=True))

        def take(conversions: Sequence[Conversion], values: Sequence[int], at: Sequence[Sharding]) -> list[jax.Array]:
            for value, now, wanted in conversions:
                at_hand[value, wanted] = convert(at_hand[value, now], self.axes, now, wanted)
            return [at_hand[pair] for pair in zip(values, at, strict=True)]

        for (equation, callers, reads, makes), conversions, way in self.equations:
            with ExitStack() as scopes:
                for caller in callers:
                    scopes.enter_context(scope_of(caller))
                with at_line_of(equation, callers):
                    operands = take(conversions, reads, way.operands)
                results = way.run(*operands)
            at_hand.update(zip(zip(makes, way.results, strict=True), results, strict=True))
        return take(self.conversions, self.flat.results, self.results)
