"""What each operation of a traced layer does to shards: one function an operation, on one axis, without arrays.

A rule is told how the operands lie along one axis and answers with a `Step`: how the operation wants them to lie, and
how its results lie then. None means that it has to see whole arrays; operations without a rule do too. Operands are
converted to whatever a rule wants.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal

from jpipe.sharding.lookups import gather, scatter
from jpipe.sharding.products import conv_general_dilated, dot_general
from jpipe.sharding.rule import Rule, Run, Step, result_of, shape_of, size_of
from jpipe.sharding.shardings import PARTIAL, REPLICATED, Axis, Partial, Placement, Shard


def _shards(placements: Sequence[Placement]) -> list[int]:
    """The operands that are shards."""
    return [i for i, p in enumerate(placements) if isinstance(p, Shard)]


def _rest(first: Sequence[Placement], count: int) -> list[Placement]:
    return [*first, *[REPLICATED] * (count - len(first))]


# --- elementwise ---

_NAMES = """
abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp
clz complex conj convert_element_type copy cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor
ge gt igamma igamma_grad_a igammac imag integer_pow is_finite le le_to lgamma log log1p logistic lt lt_to max min mul
mulhi name ne neg nextafter not or polygamma population_count pow real reduce_precision regularized_incomplete_beta rem
round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub
tan tanh xor zeta
"""
ELEMENTWISE = frozenset(_NAMES.split())


def elementwise(equation: Any, placements: Sequence[Placement], axis: Axis) -> Step | None:
    """Results lie as the largest operand that is a shard; sums of partial values stay partial."""
    result = result_of(equation)
    found = _shards(placements)
    if not found:
        return _partial_elementwise(equation, placements, axis)
    chosen = placements[max(found, key=lambda i: size_of(equation, i))]
    assert isinstance(chosen, Shard)
    covers = lambda shape: len(shape) == len(result) and shape[chosen.dim] == result[chosen.dim]
    wanted = [chosen if covers(shape_of(equation, i)) else REPLICATED for i in range(len(placements))]
    return Step(wanted, [chosen]) if chosen in wanted else None


def _partial_elementwise(equation: Any, placements: Sequence[Placement], axis: Axis) -> Step | None:
    """Operations that are linear in their partial operands, which are as large as the result.

    A sum is best taken before it is broadcast.
    """
    result, partial = result_of(equation), [p == PARTIAL for p in placements]
    if not any(partial) or any(part and shape_of(equation, i) != result for i, part in enumerate(partial)):
        return None
    linear = _LINEAR.get(equation.primitive.name)
    return linear(equation, partial, axis) if linear else None


def _each(equation: Any, partial: Sequence[bool], axis: Axis) -> Step:
    """A sum: of partial values if one of its operands is one."""
    del equation, axis
    return Step([PARTIAL] * len(partial), [PARTIAL])


def _cast(equation: Any, partial: Sequence[bool], axis: Axis) -> Step | None:
    """A cast of floating-point numbers that loses nothing; integers wrap around, in each part for itself.

    Over examples also one to a narrower type with as large numbers: a gradient of narrow parameters is rounded on each
    device, as it is for each micro-batch, rather than summed at each of them.
    """
    old, new = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
    if not (jnp.issubdtype(old, jnp.inexact) and jnp.issubdtype(new, jnp.inexact)):
        return None
    widens = jnp.promote_types(old, new) == new
    ample = jnp.finfo(new).maxexp >= jnp.finfo(jnp.float32).maxexp
    return _each(equation, partial, axis) if widens or (axis.of_examples and ample) else None


def _multiplied(equation: Any, partial: Sequence[bool], axis: Axis) -> Step | None:
    """A product with what isn't partial itself."""
    del equation, axis
    placements = [PARTIAL if part else REPLICATED for part in partial]
    return Step(placements, [PARTIAL]) if sum(partial) == 1 else None


def _divided(equation: Any, partial: Sequence[bool], axis: Axis) -> Step | None:
    """A quotient of floating-point numbers, whose divisor isn't zero; integer division rounds."""
    del axis
    divisor = equation.invars[1]
    known = isinstance(divisor, Literal) and float(abs(divisor.val)) > 0
    floats = jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.inexact)
    return Step([PARTIAL, REPLICATED], [PARTIAL]) if floats and known and not partial[1] else None


def _selected(equation: Any, partial: Sequence[bool], axis: Axis) -> Step | None:
    """A choice by what isn't partial itself."""
    del equation, axis
    return None if partial[0] else Step([REPLICATED, *[PARTIAL] * (len(partial) - 1)], [PARTIAL])


_LINEAR: dict[str, Callable[[Any, Sequence[bool], Axis], Step | None]] = {
    **dict.fromkeys(("add", "add_any", "sub", "neg", "copy", "real", "imag", "conj", "name", "stop_gradient"), _each),
    "convert_element_type": _cast,
    "mul": _multiplied,
    "div": _divided,
    "select_n": _selected,
}


# --- dimensions that an operation doesn't look into ---


def _along(dims_of: Callable[[Any], dict[int, int]], linear: bool = False, results: int = 1) -> Rule:
    """The rule of an operation of one operand (and indices or scalars behind it) that leaves some dimensions alone.

    Args:
      dims_of: equation -> {dimension of the operand that it leaves alone: the result's dimension}.
      linear: whether sums go through it.
      results: how many there are, all alike; 0 for as many as the equation has.
    """

    def rule(equation: Any, placements: Sequence[Placement], axis: Axis) -> Step | None:
        count, first = results or len(equation.outvars), placements[0]
        if isinstance(first, Partial) and linear:
            return Step(_rest([PARTIAL], len(placements)), [PARTIAL] * count)
        if not isinstance(first, Shard):
            return None
        to = dims_of(equation).get(first.dim)
        if to is None:
            return None
        return Step(_rest([first], len(placements)), [Shard(to, first.outer)] * count)

    return rule


def _alike(dims_of: Callable[[Any], Sequence[int]], linear: bool = False, count: int | None = None) -> Rule:
    """The rule of an operation of several operands that have to lie alike, along dimensions that it leaves alone.

    Args:
      dims_of: equation -> the dimensions of operands and results.
      linear: whether sums go through it.
      count: how many operands that is (default: all); the others are replicated.
    """

    def rule(equation: Any, placements: Sequence[Placement], axis: Axis) -> Step | None:
        mine, results = placements[:count], len(equation.outvars)
        allowed = dims_of(equation)
        found = [p for p in mine if isinstance(p, Shard) and p.dim in allowed]
        if found:
            return Step(_rest([found[0]] * len(mine), len(placements)), [found[0]] * results)
        if linear and PARTIAL in mine:
            return Step(_rest([PARTIAL] * len(mine), len(placements)), [PARTIAL] * results)
        return None

    return rule


def _but(ndim: int, removed: Sequence[int]) -> dict[int, int]:
    """{dimension: its number once others are removed}."""
    kept = [d for d in range(ndim) if d not in removed]
    return {d: i for i, d in enumerate(kept)}


def _unsliced(equation: Any) -> dict[int, int]:
    p, shape = equation.params, shape_of(equation)
    cuts = zip(p["start_indices"], p["limit_indices"], p["strides"] or (1,) * len(shape), strict=True)
    return {d: d for d, (n, cut) in enumerate(zip(shape, cuts, strict=True)) if cut == (0, n, 1)}


_WINDOW = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")


def _outside_window(equation: Any) -> list[int]:
    """The dimensions along which a window has one element and moves by one."""
    p, ndim = equation.params, len(shape_of(equation))
    steps = zip(*[p.get(name) or (1,) * ndim for name in _WINDOW], strict=True)
    return [d for d, step in enumerate(steps) if set(step) == {1} and tuple(p["padding"][d]) == (0, 0)]


def _equal_dims(equation: Any) -> list[int]:
    """Where an update is as large as what it is written into."""
    return [d for d, (a, b) in enumerate(zip(shape_of(equation, 0), shape_of(equation, 1), strict=True)) if a == b]


def _equal_items(equation: Any) -> Sequence[int]:
    """All dimensions, where bits are read as numbers of the same width."""
    old, new = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
    return range(len(shape_of(equation))) if old.itemsize == new.itemsize else ()


def broadcast_in_dim(equation: Any, placements: Sequence[Placement], axis: Axis) -> Step | None:
    """Dimensions that keep their size keep their shards."""
    first, to = placements[0], equation.params["broadcast_dimensions"]
    if isinstance(first, Shard):
        return Step(_rest([first], len(placements)), [Shard(to[first.dim], first.outer)])
    if first == PARTIAL and math.prod(shape_of(equation)) == math.prod(result_of(equation)):
        return Step(_rest([PARTIAL], len(placements)), [PARTIAL])
    return None


def reshape(equation: Any, placements: Sequence[Placement], axis: Axis) -> Step | None:
    """Shards stay, where the blocks along the old dimension are blocks along a new one."""
    first = placements[0]
    if first == PARTIAL:
        return Step(_rest([PARTIAL], len(placements)), [PARTIAL])
    if not isinstance(first, Shard) or equation.params.get("dimensions") is not None:
        return None
    old, new = shape_of(equation), result_of(equation)
    if 0 in old:
        return None
    before = math.prod(old[: first.dim]) * first.outer  # elements are numbered [before, axis.size, rest]
    passed = 1
    for dim, size in enumerate(new):
        if before % passed == 0 and size % (before // passed * axis.size) == 0:
            return Step(_rest([first], len(placements)), [Shard(dim, before // passed)])
        passed *= size
    return None


def reduce_sum(equation: Any, placements: Sequence[Placement], axis: Axis) -> Step | None:
    """Over a split dimension: partial sums."""
    first, axes = placements[0], equation.params["axes"]
    if first == PARTIAL or (isinstance(first, Shard) and first.dim in axes):
        return Step([first], [PARTIAL])
    return _reduce(equation, placements, axis)


_reduce = _along(lambda e: _but(len(shape_of(e)), e.params["axes"]))


def _reduce_order(reduce: Callable[..., Any]) -> Rule:
    """The rule of a reduction that can be done in any order and more than once: of the devices' own results."""

    def rule(equation: Any, placements: Sequence[Placement], axis: Axis) -> Step | None:
        first = placements[0]
        if not isinstance(first, Shard) or first.dim not in equation.params["axes"]:
            return _reduce(equation, placements, axis)
        # By a gather, since collectives that compare may lose what is not a number.
        combine = lambda y, axis: reduce(lax.all_gather(y, axis.names), (0,))
        return Step([first], [REPLICATED], lambda run, axis: lambda *operands: [combine(run(*operands)[0], axis)])

    return rule


def random_bits(equation: Any, placements: Sequence[Placement], axis: Axis) -> Step | None:
    """Bits of a micro-batch are made whole, so that they don't depend on the mesh, and each device takes its own."""
    shape = result_of(equation)
    if not axis.of_examples or not shape or shape[0] % axis.size or placements[0] != REPLICATED:
        return None

    def around(run: Run, axis: Axis) -> Run:
        length = shape[0] // axis.size
        start = lax.axis_index(axis.names) * length
        return lambda *operands: [lax.dynamic_slice_in_dim(x, start, length) for x in run(*operands)]

    return Step([REPLICATED], [Shard(0)], around)


def stack(equation: Any, placements: Sequence[Placement], axis: Axis) -> Step | None:
    """As a concatenation, with a new dimension."""
    new, found = equation.params["axis"], [p for p in placements if isinstance(p, Shard)]
    if found:
        to = found[0].dim + (found[0].dim >= new)
        return Step([found[0]] * len(placements), [Shard(to, found[0].outer)])
    return Step([PARTIAL] * len(placements), [PARTIAL]) if PARTIAL in placements else None


def hand_through(equation: Any, placements: Sequence[Placement], axis: Axis) -> Step | None:
    """Hands everything through."""
    return Step(list(placements), list(placements))


def _on_all(function: Callable[[Any], Sequence[int]]) -> Callable[[Any], dict[int, int]]:
    return lambda equation: {d: d for d in function(equation)}


def _not(*names: str) -> Callable[[Any], list[int]]:
    """The dimensions that aren't among those of the first operand that these parameters name."""

    def dims(equation: Any) -> list[int]:
        found = [equation.params[name] for name in names]
        looked_at = itertools.chain(*[x if isinstance(x, tuple | list) else (x,) for x in found])
        ndim = len(shape_of(equation))
        return sorted(set(range(ndim)) - {d % ndim for d in looked_at})

    return dims


_windowed = _on_all(_outside_window)

RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, elementwise),
    "reduce_max": _reduce_order(lax.reduce_max),
    "reduce_min": _reduce_order(lax.reduce_min),
    "reduce_and": _reduce_order(lax.reduce_and),
    "reduce_or": _reduce_order(lax.reduce_or),
    **dict.fromkeys(("reduce_prod", "reduce_xor", "argmax", "argmin"), _reduce),
    "cumsum": _along(_on_all(_not("axis")), linear=True),
    "rev": _along(_on_all(_not("dimensions")), linear=True),
    **dict.fromkeys(("cumprod", "cummax", "cummin", "cumlogsumexp"), _along(_on_all(_not("axis")))),
    "squeeze": _along(lambda e: _but(len(shape_of(e)), e.params["dimensions"]), linear=True),
    "transpose": _along(lambda e: {old: new for new, old in enumerate(e.params["permutation"])}, linear=True),
    "slice": _along(_unsliced, linear=True),
    "split": _along(_on_all(_not("axis")), linear=True, results=0),
    "top_k": _along(_on_all(_not("axis")), results=0),
    "dynamic_slice": _along(
        lambda e: {d: d for d, (n, m) in enumerate(zip(shape_of(e), e.params["slice_sizes"], strict=True)) if n == m},
        linear=True,
    ),
    "dynamic_update_slice": _alike(_equal_dims, linear=True, count=2),
    "concatenate": _alike(_not("dimension"), linear=True),
    "sort": _alike(_not("dimension")),
    "pad": _along(lambda e: {d: d for d, c in enumerate(e.params["padding_config"]) if tuple(c) == (0, 0, 0)}),
    "reduce_window_sum": _along(_windowed, linear=True),
    **dict.fromkeys(("reduce_window_max", "reduce_window_min"), _along(_windowed)),
    "bitcast_convert_type": _along(lambda e: {d: d for d in _equal_items(e)}),
    "select_and_scatter_add": _alike(_outside_window),
    "select_and_gather_add": _alike(_outside_window),
    "dot_general": dot_general,
    "conv_general_dilated": conv_general_dilated,
    "broadcast_in_dim": broadcast_in_dim,
    "reshape": reshape,
    "reduce_sum": reduce_sum,
    "random_bits": random_bits,
    "stack": stack,
    "unstack": _along(lambda e: _but(len(shape_of(e)), [e.params["axis"]]), linear=True, results=0),
    **dict.fromkeys(("optimization_barrier", "device_put"), hand_through),
    "gather": gather,
    "scatter": scatter(adds=False),
    "scatter-add": scatter(adds=True),
}


# --- parameters that name sizes ---


def local_params(equation: Any, operands: Sequence[Any], results: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    """The parameters of an equation for a device's own operands.

    Args:
      equation: of whole arrays.
      operands: a device's parts.
      results: the shapes of the device's parts of the results.
    """
    # What tells a compiler how to split results is of no use to a device.
    told = {name: None for name in ("sharding", "out_sharding") if name in equation.params}
    name, params = equation.primitive.name, equation.params | told
    if name == "broadcast_in_dim":
        return params | {"shape": results[0]}
    if name == "reshape":
        return params | {"new_sizes": results[0]}
    if name == "dynamic_slice":
        return params | {"slice_sizes": results[0]}
    if name == "slice":
        ends = zip(params["limit_indices"], result_of(equation), results[0], strict=True)
        return params | {"limit_indices": tuple(end if old == new else new for end, old, new in ends)}
    if name == "gather":
        sizes = zip(params["slice_sizes"], shape_of(equation), operands[0].shape, strict=True)
        return params | {"slice_sizes": tuple(n if old == new or n == 1 else new for n, old, new in sizes)}
    return params
