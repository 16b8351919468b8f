"""What a rule for one operation is told and what it answers; the rules themselves are in `jpipe.partitioner.rules`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import jax
from jax.core import ShapedArray

from jpipe.partitioner.shardings import REPLICATED, Axis, AxisSharding, Shape
from jpipe.seam.jaxpr_types import JaxprEqn, Literal, Var

Operation = Callable[..., list[jax.Array]]
"""A device's parts of an equation's operands -> its parts of the results."""


class RuleResult(NamedTuple):
    """How an equation is carried out along one axis.

    Attributes:
      operands: how each operand has to lie along the axis.
      results: how each result then lies along the axis.
      wrap: (the equation on a device's parts) -> what a device does instead; None if it does just that.
    """

    operands: Sequence[AxisSharding]
    results: Sequence[AxisSharding]
    wrap: Callable[[Operation], Operation] | None = None


Rule = Callable[[JaxprEqn, Sequence[AxisSharding], Axis], RuleResult | None]
"""(equation on whole arrays, how each operand lies along one axis, that axis) -> how it is carried out along the axis.

The answer may want operands to lie otherwise than they do; they are converted. None means that the operation has to see
whole arrays: all operands replicated.
"""


def rest_replicated(first: Sequence[AxisSharding], count: int) -> list[AxisSharding]:
    """How `count` operands lie of which the first lie so and all others are replicated."""
    return [*first, *[REPLICATED] * (count - len(first))]


def aval_of(variable: Var | Literal) -> ShapedArray:
    """The whole shape and the dtype of an operand or a result."""
    return cast(ShapedArray, variable.aval)


def operand_shape(equation: JaxprEqn, operand: int = 0) -> Shape:
    """The whole shape of an operand."""
    return aval_of(equation.invars[operand]).shape


def operand_size(equation: JaxprEqn, operand: int) -> int:
    """The number of elements of a whole operand."""
    return math.prod(operand_shape(equation, operand))


def result_shape(equation: JaxprEqn) -> Shape:
    """The whole shape of the first result."""
    return aval_of(equation.outvars[0]).shape
