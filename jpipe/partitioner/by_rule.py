"""Carries out one equation as its operation's rule says along each mesh axis.

A rule speaks of one axis. The ways along all axes are joined here to one `Way`, in the order of the axes: an axis along
which an operand can't be split besides the axes before it sees the operand whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
import numpy as np

from jpipe.jaxprs.flat_jaxpr import aval_of
from jpipe.partitioner.prices import cost_of_work
from jpipe.partitioner.rule import Operation, RuleResult
from jpipe.partitioner.rules import RULES, part_params
from jpipe.partitioner.shardings import REPLICATED, Sharding, is_possible, part_shape
from jpipe.partitioner.way import Axes, Way
from jpipe.seam.inside import carry_out
from jpipe.seam.primitives import JaxprEqn


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

    def run_on_parts(*parts: jax.Array) -> list[jax.Array]:
        return carry_out(equation, parts, part_params(equation, [np.shape(x) for x in parts], made))

    def run(*parts: jax.Array) -> list[jax.Array]:
        operation: Operation = run_on_parts
        for along in along_axes:
            operation = along.wrap(operation) if along.wrap else operation
        arrays = operation(*parts)
        assert [x.shape for x in arrays] == made, equation
        return arrays

    sends = any(along.wrap for along in along_axes)
    return Way(operands, results, run, cost_of_work(equation, taken, made), sends=sends)


def _apply_rule(equation: JaxprEqn, lying: Sequence[Sharding], axes: Axes, is_last: bool) -> list[RuleResult]:
    """Asks the rule about each axis; along those where there is no way, operands are whole."""
    rule = RULES.get(equation.primitive.name)
    whole = RuleResult([REPLICATED] * len(lying), [REPLICATED] * len(equation.outvars))
    along_axes: list[RuleResult] = []
    for i, axis in enumerate(axes):
        axis = replace(axis, sums_late=True) if is_last else axis
        along = rule(equation, [sharding[i] for sharding in lying], axis) if rule else None
        if along is None or not _is_possible(equation, [*along_axes, along], axes[: i + 1]):
            along = whole
        along_axes.append(along)
    return along_axes


def _is_possible(equation: JaxprEqn, along_axes: list[RuleResult], axes: Axes) -> bool:
    """Whether operands and results can lie so along the first axes."""
    shardings = zip(*[(*along.operands, *along.results) for along in along_axes], strict=True)
    variables = (*equation.invars, *equation.outvars)
    return all(is_possible(aval_of(v).shape, s, axes) for v, s in zip(variables, shardings, strict=True))
