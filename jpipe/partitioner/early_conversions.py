"""Finds values of a plan that are better converted before any equation reads them.

Choosing goes through the equations in order, and sees one reader at a time. What pays only for several readers
together, or for one far behind, shows in a finished plan. Each function here looks for one such case in a plan, and
returns changes to try: how some values are to lie before their first reader. `jpipe.partitioner.choice` makes a plan
with each change, and keeps it if it is cheaper. In the rows of benchmarks/axes.py, at their default sizes, the plans of
a row together would send without them: by `summed_twice` 156 MiB and not 132 (sequence), by `summed_wide` 1,248 MiB and
not 936 (fsdp-use).
"""

from __future__ import annotations

from jpipe.partitioner.lookups import dims_of_entries
from jpipe.partitioner.prices import itemsize
from jpipe.partitioner.rule import operand_shape
from jpipe.partitioner.shardings import PARTIAL, REPLICATED, Shard, Sharding, is_possible
from jpipe.partitioner.way import Conversion, DevicePlan, PlannedEquation

Early = dict[int, Sharding]
"""The number of a value -> how it is to lie before any equation reads it."""


def summed_twice(plan: DevicePlan) -> list[Early]:
    """Finds partial values of which one reader takes the sum, and another goes on with the partial values.

    The other reader's result is summed later, which sends as much again. The change is one sum before both.
    """
    sums = {c.value: c.wanted for e in plan.equations for c in e.conversions if PARTIAL in c.now}
    operands = [pair for e in plan.equations for pair in zip(e.flat.reads, e.way.operands, strict=True)]
    passed_on = {value for value, sharding in operands if PARTIAL in sharding}
    return [{value: sharding} for value, sharding in sums.items() if value in passed_on and PARTIAL not in sharding]


def summed_wide(plan: DevicePlan) -> list[Early]:
    """Finds partial values that are cast to a wider type and then summed as results of the jaxpr.

    Such values are gradients of parameters that a layer casts to another dtype to compute. The change is to sum all of
    them before their casts.
    """
    sums = {c.value: c.wanted for c in plan.conversions if _takes_a_sum(c)}
    casts = [e.flat for e in plan.equations if e.flat.equation.primitive.name == "convert_element_type"]
    early: Early = {}
    for (narrow,), (wide,) in [(cast.reads, cast.makes) for cast in casts]:
        if wide in sums and itemsize(plan.flat.avals[narrow].dtype) < itemsize(plan.flat.avals[wide].dtype):
            early[narrow] = sums[wide]
    return [early] if early else []


def _takes_a_sum(conversion: Conversion) -> bool:
    return any(a == PARTIAL and b != PARTIAL for a, b in zip(conversion.now, conversion.wanted, strict=True))


def added_to_whole(plan: DevicePlan) -> list[Early]:
    """Finds constants, such as the zeros of a table's gradient, to which every device adds all entries.

    The change is a split constant: each device has a part, and adds what belongs there.
    """
    constants = {e.flat.makes[0] for e in _called(plan, "broadcast_in_dim") if not operand_shape(e.flat.equation)}
    changes: list[Early] = []
    for flat, _, way in _called(plan, "scatter-add"):
        value, lying, shape = flat.reads[0], way.operands[0], operand_shape(flat.equation)
        for i in [i for i, along in enumerate(lying) if along == REPLICATED and value in constants]:
            split = [(*lying[:i], Shard(dim), *lying[i + 1 :]) for dim in dims_of_entries(flat.equation)]
            changes += [{value: sharding} for sharding in split if is_possible(shape, sharding, plan.axes)]
    return changes


def _called(plan: DevicePlan, name: str) -> list[PlannedEquation]:
    """Lists the equations of a primitive."""
    return [e for e in plan.equations if e.flat.equation.primitive.name == name]
