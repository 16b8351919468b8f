"""What each operation of a traced layer does to shards: the table `RULES`, by the name of the primitive.

A rule takes an equation on whole arrays, how each operand lies along one axis of the mesh, and that axis. It answers
with a `RuleResult`: how the operands have to lie along the axis (they are converted to that) and how the results lie
then. None means that the operation has to see whole arrays; so do operations without a rule. No arrays are needed for
that.

Rules of elementwise operations, products and look-ups have files of their own; here are those of operations on
dimensions, most of which leave some dimensions alone and may be carried out on shards of these.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from jpipe.partitioner.elementwise import elementwise
from jpipe.partitioner.lookups import gather, scatter
from jpipe.partitioner.products import conv_general_dilated, dot_general
from jpipe.partitioner.rule_result import (
    Operation,
    Rule,
    RuleResult,
    aval_of,
    operand_shape,
    rest_replicated,
    result_shape,
)
from jpipe.partitioner.shardings import PARTIAL, REPLICATED, Axis, AxisSharding, Shape, Shard
from jpipe.seam.jaxpr_types import JaxprEqn
from jpipe.seam.primitives import ELEMENTWISE

# --- rules from the dimensions that an operation leaves alone ---


def _along(dims_of: Callable[[JaxprEqn], dict[int, int]], linear: bool = False, results: int = 1) -> Rule:
    """The rule of an operation of one operand (and indices or scalars behind it) that leaves some dimensions alone.

    Args:
      dims_of: equation -> {dimension of the operand that it leaves alone: the result's dimension}.
      linear: whether the operation may be carried out on partial sums.
      results: how many results there are, all alike; 0 for as many as the equation has.
    """

    def rule(equation: JaxprEqn, shardings: Sequence[AxisSharding], axis: Axis) -> RuleResult | None:
        first, count = shardings[0], results or len(equation.outvars)
        if first == PARTIAL and linear:
            return RuleResult(rest_replicated([PARTIAL], len(shardings)), [PARTIAL] * count)
        dim = dims_of(equation).get(first.dim) if isinstance(first, Shard) else None
        if not isinstance(first, Shard) or dim is None:
            return None
        return RuleResult(rest_replicated([first], len(shardings)), [Shard(dim, first.outer)] * count)

    return rule


def _alike(dims_of: Callable[[JaxprEqn], Sequence[int]], linear: bool = False, count: int | None = None) -> Rule:
    """The rule of an operation of several operands that have to lie alike, along dimensions that it leaves alone.

    Args:
      dims_of: equation -> the dimensions of operands and results that it leaves alone.
      linear: whether the operation may be carried out on partial sums.
      count: how many operands have to lie alike, from the first on (default: all); the others are replicated.
    """

    def rule(equation: JaxprEqn, shardings: Sequence[AxisSharding], axis: Axis) -> RuleResult | None:
        alike, dims = shardings[:count], dims_of(equation)
        shared = next((s for s in alike if isinstance(s, Shard) and s.dim in dims), None)
        if shared is None and linear and PARTIAL in alike:
            shared = PARTIAL
        if shared is None:
            return None
        return RuleResult(rest_replicated([shared] * len(alike), len(shardings)), [shared] * len(equation.outvars))

    return rule


def _without(removed: Callable[[JaxprEqn], Sequence[int]]) -> Callable[[JaxprEqn], dict[int, int]]:
    """Equation -> {each dimension of the operand: its number once some are removed}."""

    def dims(equation: JaxprEqn) -> dict[int, int]:
        kept = [dim for dim in range(len(operand_shape(equation))) if dim not in removed(equation)]
        return {dim: i for i, dim in enumerate(kept)}

    return dims


def _staying(dims_of: Callable[[JaxprEqn], Sequence[int]]) -> Callable[[JaxprEqn], dict[int, int]]:
    """Equation -> {dimension: the same dimension}, of some dimensions."""
    return lambda equation: {dim: dim for dim in dims_of(equation)}


def _other_than(*names: str) -> Callable[[JaxprEqn], list[int]]:
    """Equation -> the dimensions of the first operand other than those that these parameters name."""

    def dims(equation: JaxprEqn) -> list[int]:
        values = [equation.params[name] for name in names]
        named = itertools.chain(*[x if isinstance(x, tuple | list) else (x,) for x in values])
        ndim = len(operand_shape(equation))
        return sorted(set(range(ndim)) - {dim % ndim for dim in named})

    return dims


def _unsliced(equation: JaxprEqn) -> list[int]:
    """The dimensions of which a `slice` takes all elements."""
    p, shape = equation.params, operand_shape(equation)
    cuts = zip(p["start_indices"], p["limit_indices"], p["strides"] or (1,) * len(shape), strict=True)
    return [dim for dim, (n, cut) in enumerate(zip(shape, cuts, strict=True)) if cut == (0, n, 1)]


def _wholly_sliced(equation: JaxprEqn) -> list[int]:
    """The dimensions of which a `dynamic_slice` takes all elements."""
    sizes = zip(operand_shape(equation), equation.params["slice_sizes"], strict=True)
    return [dim for dim, (n, size) in enumerate(sizes) if n == size]


def _wholly_updated(equation: JaxprEqn) -> list[int]:
    """The dimensions along which an update is as large as what it is written into."""
    sizes = zip(operand_shape(equation, 0), operand_shape(equation, 1), strict=True)
    return [dim for dim, (n, size) in enumerate(sizes) if n == size]


def _unpadded(equation: JaxprEqn) -> list[int]:
    return [dim for dim, padding in enumerate(equation.params["padding_config"]) if tuple(padding) == (0, 0, 0)]


_WINDOW = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")


def _outside_window(equation: JaxprEqn) -> list[int]:
    """The dimensions along which a window has one element and moves by one."""
    p, ndim = equation.params, len(operand_shape(equation))
    sizes = zip(*[p.get(name) or (1,) * ndim for name in _WINDOW], strict=True)
    return [dim for dim, of_dim in enumerate(sizes) if set(of_dim) == {1} and tuple(p["padding"][dim]) == (0, 0)]


def _if_as_wide(equation: JaxprEqn) -> Sequence[int]:
    """All dimensions, where bits are read as numbers of the same width; else none."""
    old, new = aval_of(equation.invars[0]).dtype, aval_of(equation.outvars[0]).dtype
    return range(len(operand_shape(equation))) if old.itemsize == new.itemsize else ()


# --- rules of single operations ---


def broadcast_in_dim(equation: JaxprEqn, shardings: Sequence[AxisSharding], axis: Axis) -> RuleResult | None:
    """Dimensions keep their shards: only one of a single element is made larger, and that isn't split."""
    first, dims = shardings[0], equation.params["broadcast_dimensions"]
    if isinstance(first, Shard):
        return RuleResult(rest_replicated([first], len(shardings)), [Shard(dims[first.dim], first.outer)])
    if first == PARTIAL and math.prod(operand_shape(equation)) == math.prod(result_shape(equation)):
        return RuleResult(rest_replicated([PARTIAL], len(shardings)), [PARTIAL])
    return None


def reshape(equation: JaxprEqn, shardings: Sequence[AxisSharding], axis: Axis) -> RuleResult | None:
    """Shards stay, where the blocks along the old dimension are blocks along a new one."""
    first, old = shardings[0], operand_shape(equation)
    if first == PARTIAL:
        return RuleResult(rest_replicated([PARTIAL], len(shardings)), [PARTIAL])
    if not isinstance(first, Shard) or equation.params.get("dimensions") is not None or 0 in old:
        return None
    before = math.prod(old[: first.dim]) * first.outer  # all elements are seen as [before, axis.size, rest]
    passed = 1  # the product of the new dimensions in front of `dim`
    for dim, size in enumerate(result_shape(equation)):
        if before % passed == 0 and size % (before // passed * axis.size) == 0:
            return RuleResult(rest_replicated([first], len(shardings)), [Shard(dim, before // passed)])
        passed *= size
    return None


_reduce = _along(_without(lambda equation: equation.params["axes"]))


def reduce_sum(equation: JaxprEqn, shardings: Sequence[AxisSharding], axis: Axis) -> RuleResult | None:
    """Over a split dimension: partial sums."""
    first = shardings[0]
    if first == PARTIAL or (isinstance(first, Shard) and first.dim in equation.params["axes"]):
        return RuleResult([first], [PARTIAL])
    return _reduce(equation, shardings, axis)


def _reduce_again(reduce: Callable[[jax.Array, Sequence[int]], jax.Array]) -> Rule:
    """The rule of a reduction that can be done in any order and more than once, such as a maximum.

    Over a split dimension each device reduces its part, and then the results of all devices.
    """

    def rule(equation: JaxprEqn, shardings: Sequence[AxisSharding], axis: Axis) -> RuleResult | None:
        first = shardings[0]
        if not isinstance(first, Shard) or first.dim not in equation.params["axes"]:
            return _reduce(equation, shardings, axis)
        # By a gather, since collectives that compare may lose what is not a number.
        combine = lambda x: reduce(lax.all_gather(x, axis.names), (0,))
        return RuleResult([first], [REPLICATED], lambda operation: lambda x: [combine(operation(x)[0])])

    return rule


def random_bits(equation: JaxprEqn, shardings: Sequence[AxisSharding], axis: Axis) -> RuleResult | None:
    """Bits of a micro-batch are made whole, so that they don't depend on the mesh, and each device takes its own."""
    shape = result_shape(equation)
    if not axis.of_examples or not shape or shape[0] % axis.size or shardings[0] != REPLICATED:
        return None

    def wrap(operation: Operation) -> Operation:
        length = shape[0] // axis.size
        start = lax.axis_index(axis.names) * length
        return lambda *operands: [lax.dynamic_slice_in_dim(x, start, length) for x in operation(*operands)]

    return RuleResult([REPLICATED], [Shard(0)], wrap)


def stack(equation: JaxprEqn, shardings: Sequence[AxisSharding], axis: Axis) -> RuleResult | None:
    """As a concatenation of arrays that lie alike, but along a new dimension."""
    new, shard = equation.params["axis"], next((s for s in shardings if isinstance(s, Shard)), None)
    if shard:
        return RuleResult([shard] * len(shardings), [Shard(shard.dim + (shard.dim >= new), shard.outer)])
    return RuleResult([PARTIAL] * len(shardings), [PARTIAL]) if PARTIAL in shardings else None


def identity(equation: JaxprEqn, shardings: Sequence[AxisSharding], axis: Axis) -> RuleResult | None:
    """Each result lies as the operand that it is."""
    return RuleResult(list(shardings), list(shardings))


RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, elementwise),
    "reduce_max": _reduce_again(lax.reduce_max),
    "reduce_min": _reduce_again(lax.reduce_min),
    "reduce_and": _reduce_again(lax.reduce_and),
    "reduce_or": _reduce_again(lax.reduce_or),
    **dict.fromkeys(("reduce_prod", "reduce_xor", "argmax", "argmin"), _reduce),
    "cumsum": _along(_staying(_other_than("axis")), linear=True),
    "rev": _along(_staying(_other_than("dimensions")), linear=True),
    **dict.fromkeys(("cumprod", "cummax", "cummin", "cumlogsumexp"), _along(_staying(_other_than("axis")))),
    "squeeze": _along(_without(lambda equation: equation.params["dimensions"]), linear=True),
    "transpose": _along(lambda e: {old: new for new, old in enumerate(e.params["permutation"])}, linear=True),
    "slice": _along(_staying(_unsliced), linear=True),
    "split": _along(_staying(_other_than("axis")), linear=True, results=0),
    "top_k": _along(_staying(_other_than("axis")), results=0),
    "dynamic_slice": _along(_staying(_wholly_sliced), linear=True),
    "dynamic_update_slice": _alike(_wholly_updated, linear=True, count=2),
    "concatenate": _alike(_other_than("dimension"), linear=True),
    "sort": _alike(_other_than("dimension")),
    "pad": _along(_staying(_unpadded)),
    "reduce_window_sum": _along(_staying(_outside_window), linear=True),
    **dict.fromkeys(("reduce_window_max", "reduce_window_min"), _along(_staying(_outside_window))),
    "bitcast_convert_type": _along(_staying(_if_as_wide)),
    "select_and_scatter_add": _alike(_outside_window),
    "select_and_gather_add": _alike(_outside_window),
    "dot_general": dot_general,
    "conv_general_dilated": conv_general_dilated,
    "broadcast_in_dim": broadcast_in_dim,
    "reshape": reshape,
    "reduce_sum": reduce_sum,
    "random_bits": random_bits,
    "stack": stack,
    "unstack": _along(_without(lambda equation: [equation.params["axis"]]), linear=True, results=0),
    **dict.fromkeys(("optimization_barrier", "device_put"), identity),
    "gather": gather,
    "scatter": scatter(adds=False),
    "scatter-add": scatter(adds=True),
}
"""The name of a primitive -> its rule."""


# --- parameters of an equation that name sizes ---


def local_params(equation: JaxprEqn, operands: Sequence[Shape], results: Sequence[Shape]) -> dict[str, Any]:
    """The parameters of an equation as a device needs them for its parts of the operands.

    Args:
      equation: of whole arrays.
      operands: the shapes of the device's parts of the operands.
      results: the shapes of the device's parts of the results.
    """
    # What tells a compiler how to split results is of no use to a device.
    unsplit = dict.fromkeys({"sharding", "out_sharding"} & equation.params.keys())
    name, params = equation.primitive.name, {**equation.params, **unsplit}
    if name == "broadcast_in_dim":
        return params | {"shape": results[0]}
    if name == "reshape":
        return params | {"new_sizes": results[0]}
    if name == "dynamic_slice":
        return params | {"slice_sizes": results[0]}
    if name == "slice":
        ends = zip(params["limit_indices"], result_shape(equation), results[0], strict=True)
        return params | {"limit_indices": tuple(end if old == new else new for end, old, new in ends)}
    if name == "gather":
        sizes = zip(params["slice_sizes"], operand_shape(equation), operands[0], strict=True)
        return params | {"slice_sizes": tuple(n if old == new or n == 1 else new for n, old, new in sizes)}
    return params
