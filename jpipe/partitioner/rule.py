"""The interface of a rule: what it is told of one operation along one mesh axis, and what it answers.

A rule is asked before anything is carried out, while a plan is made (`jpipe.partitioner.choice`): for each axis, and
for each sharding of the operands that is tried. It answers how operands have to lie, and how results lie then. It moves
nothing: the plan converts operands that lie otherwise.

Most rules follow from labels, as those of an einsum: dimensions that are split together have the same label. For the
product "bd,df->bf" there are three ways to split it along an axis:

           x [b, d]     w [d, f]        x @ w [b, f]
    b      Shard(0)     replicated      Shard(0)
    d      Shard(1)     Shard(0)        partial
    f      replicated   Shard(1)        Shard(1)

`by_labels` takes the first of these that keeps an operand as it lies.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import jax

from jpipe.jaxprs.flat_jaxpr import aval_of
from jpipe.partitioner.shardings import PARTIAL, REPLICATED, Axis, AxisSharding, Shape, Shard
from jpipe.seam.primitives import JaxprEqn

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

Labels = Sequence[Hashable]
"""A label for each dimension of an array; a dimension labelled None is never split."""


def by_labels(
    operands: Sequence[Labels],
    results: Sequence[Labels],
    shardings: Sequence[AxisSharding],
    order: Sequence[int] | None = None,
) -> RuleResult | None:
    """Keeps an operand as it lies: the first that is a shard of a dimension with a label.

    Where others have that label, they are split too. Operands without it are replicated; results without it, in which
    it was summed over, are partial.

    Args:
      operands: the labels of the first operands; those behind them have none.
      results: the labels of the results.
      shardings: how each operand lies.
      order: in which operands are looked at (default: from the first on).
    """
    order = range(len(operands)) if order is None else order
    shards = [(s, operands[i][s.dim]) for i in order if isinstance(s := shardings[i], Shard)]
    chosen = next((pair for pair in shards if pair[1] is not None), None)
    if chosen is None:
        return None
    shard, label = chosen

    def split_or(labels: Labels, otherwise: AxisSharding) -> AxisSharding:
        return Shard(labels.index(label), shard.outer) if label in labels else otherwise

    labelled = [split_or(labels, REPLICATED) for labels in operands]
    others = [REPLICATED] * (len(shardings) - len(operands))
    return RuleResult([*labelled, *others], [split_or(labels, PARTIAL) for labels in results])


def on_partial(shardings: Sequence[AxisSharding], num_results: int, count: int | None = None) -> RuleResult | None:
    """Answers for a linear operation, which may be done before its operands are summed; None if none is partial.

    The first `count` operands (default: all) are summed over devices later: if one is partial, all have to be.
    """
    alike = len(shardings[:count])
    if PARTIAL not in shardings[:alike]:
        return None
    return RuleResult([PARTIAL] * alike + [REPLICATED] * (len(shardings) - alike), [PARTIAL] * num_results)


def operand_shape(equation: JaxprEqn, operand: int = 0) -> Shape:
    """Returns the whole shape of an operand."""
    return aval_of(equation.invars[operand]).shape


def result_shape(equation: JaxprEqn) -> Shape:
    """Returns the whole shape of the first result."""
    return aval_of(equation.outvars[0]).shape
