"""The rules of matrix products and convolutions: a split sum gives partial sums, the rest stays split."""

from __future__ import annotations

from collections.abc import Sequence

from jpipe.partitioner.rule import Labels, RuleResult, by_labels, operand_shape, operand_size
from jpipe.partitioner.shardings import Axis, AxisSharding
from jpipe.seam.jaxpr_types import JaxprEqn


def dot_general(equation: JaxprEqn, shardings: Sequence[AxisSharding], axis: Axis) -> RuleResult | None:
    """A product of two arrays; its result has the dimensions (batch, free of the left, free of the right).

    The left operand's dimensions are labelled (0, dim), the right one's (1, dim), or as those on the left that they are
    paired with.
    """
    contracting, batch = equation.params["dimension_numbers"]
    left, right = ([(i, dim) for dim in range(len(operand_shape(equation, i)))] for i in (0, 1))
    for pairs in (contracting, batch):
        for on_left, on_right in zip(*pairs, strict=True):
            right[on_right] = left[on_left]
    shared = [label for label in left if label in right]
    batched = [left[dim] for dim in batch[0]]
    return _of_larger(equation, left, right, batched + [x for x in left + right if x not in shared], shardings)


def conv_general_dilated(equation: JaxprEqn, shardings: Sequence[AxisSharding], axis: Axis) -> RuleResult | None:
    """A convolution of images with a kernel.

    Examples and output features stay split; input features are summed over, which gives partial sums. Pixels are never
    split. The dimension numbers are (examples, features, ...) of the images and of the result, and (output features,
    input features, ...) of the kernel.
    """
    p, ndim = equation.params, len(operand_shape(equation))
    one_group, one_batch = p["feature_group_count"] == 1, p["batch_group_count"] == 1
    examples, taken = "examples" if one_batch else None, "taken" if one_group else None
    features = "features" if one_group and one_batch else None
    images, kernel, result = p["dimension_numbers"]
    labels = lambda dims, first, second: [{dims[0]: first, dims[1]: second}.get(dim) for dim in range(ndim)]
    left, right = labels(images, examples, taken), labels(kernel, features, taken)
    return _of_larger(equation, left, right, labels(result, examples, features), shardings)


def _of_larger(
    equation: JaxprEqn, left: Labels, right: Labels, result: Labels, shardings: Sequence[AxisSharding]
) -> RuleResult | None:
    """The result that keeps the larger of two operands as it lies, or the only one that can be kept."""
    order = (0, 1) if operand_size(equation, 0) >= operand_size(equation, 1) else (1, 0)
    return by_labels([left, right], [result], shardings, order)
