"""What products and convolutions do to shards: what is summed over gives partial sums, the rest stays split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jpipe.sharding.rule import Step, shape_of, size_of
from jpipe.sharding.shardings import PARTIAL, REPLICATED, Axis, Placement, Shard


def _two_sided(left: Step | None, right: Step | None, left_is_larger: bool) -> Step | None:
    """What the larger operand asks for, or the only one that asks."""
    if left is None or right is None:
        return left or right
    return left if left_is_larger else right


def dot_general(equation: Any, placements: Sequence[Placement], axis: Axis) -> Step | None:
    """Contracting a split dimension gives partial sums; any other stays split."""
    contracting, batch = equation.params["dimension_numbers"]
    free = [[d for d in range(len(shape_of(equation, i))) if d not in (*contracting[i], *batch[i])] for i in (0, 1)]

    def step(i: int) -> Step | None:
        """What follows if operand i stays as it is."""
        mine = placements[i]
        if not isinstance(mine, Shard):
            return None
        pair = lambda other: [mine, other] if i == 0 else [other, mine]
        if mine.dim in contracting[i]:
            other = contracting[1 - i][contracting[i].index(mine.dim)]
            return Step(pair(Shard(other, mine.outer)), [PARTIAL])
        if mine.dim in batch[i]:
            k = batch[i].index(mine.dim)
            return Step(pair(Shard(batch[1 - i][k], mine.outer)), [Shard(k, mine.outer)])
        at = len(batch[0]) + i * len(free[0]) + free[i].index(mine.dim)
        return Step(pair(REPLICATED), [Shard(at, mine.outer)])

    return _two_sided(step(0), step(1), size_of(equation, 0) >= size_of(equation, 1))


def conv_general_dilated(equation: Any, placements: Sequence[Placement], axis: Axis) -> Step | None:
    """As products: examples and output features stay split, input features are summed over."""
    p = equation.params
    inputs, kernel, outputs = p["dimension_numbers"]
    features, batches = p["feature_group_count"] == 1, p["batch_group_count"] == 1

    def step(i: int) -> Step | None:
        mine = placements[i]
        if not isinstance(mine, Shard):
            return None
        if mine.dim == (inputs, kernel)[i][1] and features:
            return Step([Shard(inputs[1], mine.outer), Shard(kernel[1], mine.outer)], [PARTIAL])
        if i == 0 and mine.dim == inputs[0] and batches:
            return Step([mine, REPLICATED], [Shard(outputs[0], mine.outer)])
        if i == 1 and mine.dim == kernel[0] and features and batches:
            return Step([REPLICATED, mine], [Shard(outputs[1], mine.outer)])
        return None

    return _two_sided(step(0), step(1), size_of(equation, 0) >= size_of(equation, 1))
