"""The rules of matrix products and convolutions: what is summed over gives partial sums, the rest stays split.

A rule takes an equation, how each operand lies along one axis, and the axis; it says how the operands have to lie and
how the result lies then, or None if they have to be whole (`jpipe.sharding.rule.Rule`).
"""

from __future__ import annotations

from collections.abc import Sequence

from jpipe.partitioner.rule_result import RuleResult, operand_shape, operand_size
from jpipe.partitioner.shardings import PARTIAL, REPLICATED, Axis, AxisSharding, Shard
from jpipe.seam.jaxpr_types import JaxprEqn


def dot_general(equation: JaxprEqn, shardings: Sequence[AxisSharding], axis: Axis) -> RuleResult | None:
    """A product of two arrays; its result has the dimensions (batch, free of the left, free of the right).

    Contracting a split dimension gives partial sums; any other dimension stays split.
    """
    contracting, batch = equation.params["dimension_numbers"]
    ndims = [len(operand_shape(equation, i)) for i in (0, 1)]
    free = [[d for d in range(ndims[i]) if d not in (*contracting[i], *batch[i])] for i in (0, 1)]

    def keeping(i: int) -> RuleResult | None:
        """What follows if operand i stays as it is."""
        own = shardings[i]
        if not isinstance(own, Shard):
            return None
        pair = lambda other: [own, other] if i == 0 else [other, own]
        if own.dim in contracting[i]:
            dim = contracting[1 - i][contracting[i].index(own.dim)]
            return RuleResult(pair(Shard(dim, own.outer)), [PARTIAL])
        if own.dim in batch[i]:
            k = batch[i].index(own.dim)
            return RuleResult(pair(Shard(batch[1 - i][k], own.outer)), [Shard(k, own.outer)])
        dim = len(batch[0]) + i * len(free[0]) + free[i].index(own.dim)
        return RuleResult(pair(REPLICATED), [Shard(dim, own.outer)])

    return _of_larger(equation, keeping(0), keeping(1))


def conv_general_dilated(equation: JaxprEqn, shardings: Sequence[AxisSharding], axis: Axis) -> RuleResult | None:
    """A convolution of images with a kernel.

    Examples and output features stay split; input features are summed over, which gives partial sums. Pixels are never
    split. The dimension numbers are (examples, features, ...) of the images and of the result, and (output features,
    input features, ...) of the kernel.
    """
    images, kernel, result = equation.params["dimension_numbers"]
    one_group, one_batch = equation.params["feature_group_count"] == 1, equation.params["batch_group_count"] == 1

    def keeping(i: int) -> RuleResult | None:
        """What follows if operand i stays as it is."""
        own = shardings[i]
        if not isinstance(own, Shard):
            return None
        if own.dim == (images, kernel)[i][1] and one_group:
            return RuleResult([Shard(images[1], own.outer), Shard(kernel[1], own.outer)], [PARTIAL])
        if i == 0 and own.dim == images[0] and one_batch:
            return RuleResult([own, REPLICATED], [Shard(result[0], own.outer)])
        if i == 1 and own.dim == kernel[0] and one_group and one_batch:
            return RuleResult([REPLICATED, own], [Shard(result[1], own.outer)])
        return None

    return _of_larger(equation, keeping(0), keeping(1))


def _of_larger(equation: JaxprEqn, left: RuleResult | None, right: RuleResult | None) -> RuleResult | None:
    """What keeps the larger of two operands as it is, or the only one that can be kept."""
    if left is None or right is None:
        return left or right
    return left if operand_size(equation, 0) >= operand_size(equation, 1) else right
