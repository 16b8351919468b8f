"""What a rule for shards is told and answers: see `jpipe.sharding.rules`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jpipe.sharding.shardings import Axis, Placement

Run = Callable[..., list[Any]]


class Step(NamedTuple):
    """How an operation is carried out along one axis.

    Attributes:
      wanted: how each operand has to lie.
      given: how each result then lies.
      around: (what runs the operation on local operands, axis) -> what to run instead.
    """

    wanted: Sequence[Placement]
    given: Sequence[Placement]
    around: Callable[[Run, Axis], Run] | None = None


Rule = Callable[[Any, Sequence[Placement], Axis], Step | None]


def shape_of(equation: Any, operand: int = 0) -> tuple[int, ...]:
    """The whole shape of an operand."""
    return equation.invars[operand].aval.shape


def size_of(equation: Any, operand: int) -> int:
    """The elements of an operand."""
    return math.prod(shape_of(equation, operand))


def result_of(equation: Any) -> tuple[int, ...]:
    """The whole shape of the first result."""
    return equation.outvars[0].aval.shape
