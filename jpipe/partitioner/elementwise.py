"""The rule of elementwise operations: shards stay, and linear operations leave partial sums partial."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax.numpy as jnp

from jpipe.jaxprs.flat_jaxpr import aval_of
from jpipe.partitioner.rule import RuleResult, by_labels, operand_shape, result_shape, where_equal
from jpipe.partitioner.shardings import PARTIAL, REPLICATED, Axis, AxisSharding
from jpipe.seam.jaxpr_types import JaxprEqn, Literal


def elementwise(equation: JaxprEqn, shardings: Sequence[AxisSharding], axis: Axis) -> RuleResult | None:
    """The result lies as the largest operand that is a shard; operands that are broadcast to it are replicated.

    Without a shard, a result that is linear in partial operands is partial. Those have to be as large as the result: a
    sum is best taken before it is broadcast.
    """
    shape, shapes = result_shape(equation), [operand_shape(equation, i) for i in range(len(shardings))]
    labels = [where_equal(s, shape) if len(s) == len(shape) else [None] * len(s) for s in shapes]
    largest_first = sorted(range(len(shapes)), key=lambda i: -math.prod(shapes[i]))
    split = by_labels(labels, [range(len(shape))], shardings, largest_first)
    partial = [s == PARTIAL for s in shardings]
    linear = _LINEAR.get(equation.primitive.name)
    partial_shapes = {s for s, is_partial in zip(shapes, partial, strict=True) if is_partial}
    return linear(equation, partial, axis) if linear and not split and partial_shapes == {shape} else split


def _sum(equation: JaxprEqn, partial: Sequence[bool], axis: Axis) -> RuleResult:
    """A sum of all operands, or a linear function of one: operands that aren't partial are made so."""
    return RuleResult([PARTIAL] * len(partial), [PARTIAL])


def _cast(equation: JaxprEqn, partial: Sequence[bool], axis: Axis) -> RuleResult | None:
    """The rule of casts: sums stay partial in a cast of floating-point numbers to a type as wide in range as float32.

    Over data axes they do in a cast to narrower types too.

    A gradient of narrow parameters is rounded on each device, as it is for each micro-batch, rather than summed at each
    of them. Otherwise the sum is taken first: what is cast is often used besides, as by a norm and the residual
    connection around it, and would be added up twice, once in the wider type. Integers wrap around in each part.
    """
    old, new = aval_of(equation.invars[0]).dtype, aval_of(equation.outvars[0]).dtype
    floats = jnp.issubdtype(old, jnp.inexact) and jnp.issubdtype(new, jnp.inexact)
    as_large = floats and jnp.finfo(new).maxexp >= jnp.finfo(jnp.float32).maxexp
    widens = floats and jnp.finfo(new).bits >= jnp.finfo(old).bits
    return _sum(equation, partial, axis) if as_large and (axis.is_data or (axis.sums_late and widens)) else None


def _product(equation: JaxprEqn, partial: Sequence[bool], axis: Axis) -> RuleResult | None:
    """A product of one partial sum with what all devices have; the product of two sums isn't the sum of products."""
    operands = [PARTIAL if is_partial else REPLICATED for is_partial in partial]
    return RuleResult(operands, [PARTIAL]) if sum(partial) == 1 else None


def _quotient(equation: JaxprEqn, partial: Sequence[bool], axis: Axis) -> RuleResult | None:
    """A quotient of floating-point numbers by a constant other than zero; integer division rounds."""
    divisor = equation.invars[1]
    not_zero = isinstance(divisor, Literal) and float(abs(divisor.val)) > 0
    floats = jnp.issubdtype(aval_of(equation.outvars[0]).dtype, jnp.inexact)
    return RuleResult([PARTIAL, REPLICATED], [PARTIAL]) if floats and not_zero and not partial[1] else None


def _choice(equation: JaxprEqn, partial: Sequence[bool], axis: Axis) -> RuleResult | None:
    """A choice among partial sums by a condition that all devices have."""
    return None if partial[0] else RuleResult([REPLICATED, *[PARTIAL] * (len(partial) - 1)], [PARTIAL])


_LINEAR: dict[str, Callable[[JaxprEqn, Sequence[bool], Axis], RuleResult | None]] = {
    **dict.fromkeys(("add", "add_any", "sub", "neg", "copy", "real", "imag", "conj", "name", "stop_gradient"), _sum),
    "convert_element_type": _cast,
    "mul": _product,
    "div": _quotient,
    "select_n": _choice,
}
"""Operation -> (equation, which operands are partial, axis) -> how it is carried out on partial sums."""
