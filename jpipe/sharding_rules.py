"""What each operation of a traced layer does to shards: one function an operation, on one axis, without arrays.

A rule is told how the operands lie along one axis and answers with a `Step`: how the operation wants them to lie, and
how its results lie then. None means that it has to see whole arrays; operations without a rule do too. Operands are
converted to whatever a rule wants.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal

from jpipe.shardings import PARTIAL, REPLICATED, Axis, Partial, Placement, Shard

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


def _shape(equation: Any, operand: int = 0) -> tuple[int, ...]:
    return equation.invars[operand].aval.shape


def _size(equation: Any, operand: int) -> int:
    return math.prod(_shape(equation, operand))


def _result(equation: Any) -> tuple[int, ...]:
    return equation.outvars[0].aval.shape


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
    result = _result(equation)
    found = _shards(placements)
    if not found:
        return _partial_elementwise(equation, placements)
    chosen = placements[max(found, key=lambda i: _size(equation, i))]
    assert isinstance(chosen, Shard)
    covers = lambda shape: len(shape) == len(result) and shape[chosen.dim] == result[chosen.dim]
    wanted = [chosen if covers(_shape(equation, i)) else REPLICATED for i in range(len(placements))]
    return Step(wanted, [chosen]) if chosen in wanted else None


def _partial_elementwise(equation: Any, placements: Sequence[Placement]) -> Step | None:
    """Operations that are linear in their partial operands, which are as large as the result.

    A sum is best taken before it is broadcast.
    """
    result, partial = _result(equation), [p == PARTIAL for p in placements]
    if not any(partial) or any(part and _shape(equation, i) != result for i, part in enumerate(partial)):
        return None
    linear = _LINEAR.get(equation.primitive.name)
    return linear(equation, partial) if linear else None


def _each(equation: Any, partial: Sequence[bool]) -> Step:
    """A sum: of partial values if one of its operands is one."""
    del equation
    return Step([PARTIAL] * len(partial), [PARTIAL])


def _widened(equation: Any, partial: Sequence[bool]) -> Step | None:
    """A cast that loses nothing; integers wrap around, in each part for itself."""
    old, new = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
    floats = jnp.issubdtype(old, jnp.inexact) and jnp.issubdtype(new, jnp.inexact)
    return _each(equation, partial) if floats and jnp.promote_types(old, new) == new else None


def _multiplied(equation: Any, partial: Sequence[bool]) -> Step | None:
    """A product with what isn't partial itself."""
    del equation
    placements = [PARTIAL if part else REPLICATED for part in partial]
    return Step(placements, [PARTIAL]) if sum(partial) == 1 else None


def _divided(equation: Any, partial: Sequence[bool]) -> Step | None:
    """A quotient of floating-point numbers, whose divisor isn't zero; integer division rounds."""
    divisor = equation.invars[1]
    known = isinstance(divisor, Literal) and float(abs(divisor.val)) > 0
    floats = jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.inexact)
    return Step([PARTIAL, REPLICATED], [PARTIAL]) if floats and known and not partial[1] else None


def _selected(equation: Any, partial: Sequence[bool]) -> Step | None:
    """A choice by what isn't partial itself."""
    del equation
    return None if partial[0] else Step([REPLICATED, *[PARTIAL] * (len(partial) - 1)], [PARTIAL])


_LINEAR: dict[str, Callable[[Any, Sequence[bool]], Step | None]] = {
    **dict.fromkeys(("add", "add_any", "sub", "neg", "copy", "real", "imag", "conj", "name", "stop_gradient"), _each),
    "convert_element_type": _widened,
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
    p, shape = equation.params, _shape(equation)
    cuts = zip(p["start_indices"], p["limit_indices"], p["strides"] or (1,) * len(shape), strict=True)
    return {d: d for d, (n, cut) in enumerate(zip(shape, cuts, strict=True)) if cut == (0, n, 1)}


_WINDOW = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")


def _outside_window(equation: Any) -> list[int]:
    """The dimensions along which a window has one element and moves by one."""
    p, ndim = equation.params, len(_shape(equation))
    steps = zip(*[p.get(name) or (1,) * ndim for name in _WINDOW], strict=True)
    return [d for d, step in enumerate(steps) if set(step) == {1} and tuple(p["padding"][d]) == (0, 0)]


def _equal_dims(equation: Any) -> list[int]:
    """Where an update is as large as what it is written into."""
    return [d for d, (a, b) in enumerate(zip(_shape(equation, 0), _shape(equation, 1), strict=True)) if a == b]


def _equal_items(equation: Any) -> Sequence[int]:
    """All dimensions, where bits are read as numbers of the same width."""
    old, new = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
    return range(len(_shape(equation))) if old.itemsize == new.itemsize else ()


def broadcast_in_dim(equation: Any, placements: Sequence[Placement], axis: Axis) -> Step | None:
    """Dimensions that keep their size keep their shards."""
    first, to = placements[0], equation.params["broadcast_dimensions"]
    if isinstance(first, Shard):
        return Step(_rest([first], len(placements)), [Shard(to[first.dim], first.outer)])
    if first == PARTIAL and math.prod(_shape(equation)) == math.prod(_result(equation)):
        return Step(_rest([PARTIAL], len(placements)), [PARTIAL])
    return None


def reshape(equation: Any, placements: Sequence[Placement], axis: Axis) -> Step | None:
    """Shards stay, where the blocks along the old dimension are blocks along a new one."""
    first = placements[0]
    if first == PARTIAL:
        return Step(_rest([PARTIAL], len(placements)), [PARTIAL])
    if not isinstance(first, Shard) or equation.params.get("dimensions") is not None:
        return None
    old, new = _shape(equation), _result(equation)
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


_reduce = _along(lambda e: _but(len(_shape(e)), e.params["axes"]))


def _reduce_order(reduce: Callable[..., Any]) -> Rule:
    """The rule of a reduction that can be done in any order and more than once: of the devices' own results."""

    def rule(equation: Any, placements: Sequence[Placement], axis: Axis) -> Step | None:
        first = placements[0]
        if not isinstance(first, Shard) or first.dim not in equation.params["axes"]:
            return _reduce(equation, placements, axis)
        # By a gather, since collectives that compare may lose what is not a number.
        combine = lambda y, axis: reduce(lax.all_gather(y, axis.names), axis=0)
        return Step([first], [REPLICATED], lambda run, axis: lambda *operands: [combine(run(*operands)[0], axis)])

    return rule


def random_bits(equation: Any, placements: Sequence[Placement], axis: Axis) -> Step | None:
    """Bits of a micro-batch are made whole, so that they don't depend on the mesh, and each device takes its own."""
    shape = _result(equation)
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


# --- products ---


def _two_sided(left: Step | None, right: Step | None, left_is_larger: bool) -> Step | None:
    """What the larger operand asks for, or the only one that asks."""
    if left is None or right is None:
        return left or right
    return left if left_is_larger else right


def dot_general(equation: Any, placements: Sequence[Placement], axis: Axis) -> Step | None:
    """Contracting a split dimension gives partial sums; any other stays split."""
    contracting, batch = equation.params["dimension_numbers"]
    free = [[d for d in range(len(_shape(equation, i))) if d not in (*contracting[i], *batch[i])] for i in (0, 1)]

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

    return _two_sided(step(0), step(1), _size(equation, 0) >= _size(equation, 1))


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

    return _two_sided(step(0), step(1), _size(equation, 0) >= _size(equation, 1))


# --- look-ups ---


def gather(equation: Any, placements: Sequence[Placement], axis: Axis) -> Step | None:
    """Split indices give split results; in a split table each device looks up what it has, and zeros elsewhere."""
    d, (table, indices) = equation.params["dimension_numbers"], placements
    shape, sizes = _shape(equation), equation.params["slice_sizes"]
    loops = [i for i in range(len(_result(equation))) if i not in d.offset_dims]  # by dimension of the indices
    windows = [i for i in range(len(shape)) if i not in (*d.collapsed_slice_dims, *d.operand_batching_dims)]
    if isinstance(indices, Shard) and indices.dim < len(loops):
        result = Shard(loops[indices.dim], indices.outer)
        if indices.dim not in d.start_indices_batching_dims:
            return Step([REPLICATED, indices], [result])
        k = d.start_indices_batching_dims.index(indices.dim)
        return Step([Shard(d.operand_batching_dims[k], indices.outer), indices], [result])
    if table == PARTIAL and equation.params["mode"] != lax.GatherScatterMode.FILL_OR_DROP:
        return Step([PARTIAL, REPLICATED], [PARTIAL])
    if not isinstance(table, Shard):
        return None
    if table.dim in d.operand_batching_dims:
        k = d.start_indices_batching_dims[d.operand_batching_dims.index(table.dim)]
        return Step([table, Shard(k, table.outer)], [Shard(loops[k], table.outer)])
    if table.dim in windows and sizes[table.dim] == shape[table.dim] and table.dim not in d.start_index_map:
        return Step([table, REPLICATED], [Shard(d.offset_dims[windows.index(table.dim)], table.outer)])
    number = jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.number)
    if table.dim in d.collapsed_slice_dims and table.dim in d.start_index_map and table.outer == 1 and number:
        return Step(
            [table, REPLICATED], [PARTIAL], lambda run, axis: _own_entries(equation, run, axis, table.dim, loops)
        )
    return None


def _own_entries(equation: Any, run: Run, axis: Axis, dim: int, loops: Sequence[int]) -> Run:
    """A look-up in a device's own part of a table: zeros for the entries of others."""
    column = equation.params["dimension_numbers"].start_index_map.index(dim)
    size, ndim = _shape(equation)[dim], len(_result(equation))

    def look_up(table: Any, indices: Any) -> list[Any]:
        here, length = lax.axis_index(axis.names), size // axis.size
        indices = indices.astype(jnp.promote_types(indices.dtype, jnp.int32))  # bytes can't count a larger table
        wanted = indices[..., column]
        # What is outside of the whole table is looked up by the first device, outside of its part too.
        outside = (wanted < 0) | (wanted >= size)
        if equation.params["mode"] == lax.GatherScatterMode.CLIP:
            wanted, outside = jnp.clip(wanted, 0, size - 1), jnp.zeros_like(outside)
        own = wanted - (here * length).astype(wanted.dtype)
        valid = jnp.where(outside, here == 0, (own >= 0) & (own < length))
        own = jnp.where(outside, jnp.full_like(own, length), jnp.clip(own, 0, length - 1))
        here_in = lax.broadcasted_iota(jnp.int32, indices.shape, indices.ndim - 1) == column
        (found,) = run(table, jnp.where(here_in, own[..., None], indices))
        valid = lax.broadcast_in_dim(valid, found.shape, [i for i in range(ndim) if i in loops])
        return [jnp.where(valid, found, jnp.zeros_like(found))]

    return look_up


def _scatter(adds: bool) -> Rule:
    """The rule of writes (or additions) at indices."""

    def rule(equation: Any, placements: Sequence[Placement], axis: Axis) -> Step | None:
        d = equation.params["dimension_numbers"]
        target, indices, updates = placements
        shape, new = _shape(equation, 0), _shape(equation, 2)
        loops = [i for i in range(len(new)) if i not in d.update_window_dims]  # by dimension of the indices
        windows = [i for i in range(len(shape)) if i not in (*d.inserted_window_dims, *d.operand_batching_dims)]
        at = indices.dim if isinstance(indices, Shard) else None
        if isinstance(updates, Shard) and updates.dim in loops:
            at = loops.index(updates.dim)
        if at is not None and at < len(loops):
            outer = next(p.outer for p in (updates, indices) if isinstance(p, Shard))
            own = [Shard(at, outer), Shard(loops[at], outer)]
            if at in d.scatter_indices_batching_dims:
                k = d.operand_batching_dims[d.scatter_indices_batching_dims.index(at)]
                return Step([Shard(k, outer), *own], [Shard(k, outer)])
            return Step([PARTIAL, *own], [PARTIAL]) if adds else None
        whole = {
            dim: d.update_window_dims[k]
            for k, dim in enumerate(windows)
            if new[d.update_window_dims[k]] == shape[dim] and dim not in d.scatter_dims_to_operand_dims
        }
        chosen = target
        if isinstance(updates, Shard) and not (isinstance(target, Shard) and target.dim in whole):
            chosen = next((Shard(dim, updates.outer) for dim, u in whole.items() if u == updates.dim), REPLICATED)
        if isinstance(chosen, Shard) and chosen.dim in whole:
            return Step([chosen, REPLICATED, Shard(whole[chosen.dim], chosen.outer)], [chosen])
        if adds and PARTIAL in (target, updates):
            return Step([PARTIAL, REPLICATED, PARTIAL], [PARTIAL])
        return None

    return rule


def _on_all(function: Callable[[Any], Sequence[int]]) -> Callable[[Any], dict[int, int]]:
    return lambda equation: {d: d for d in function(equation)}


def _not(*names: str) -> Callable[[Any], list[int]]:
    """The dimensions that aren't among those of the first operand that these parameters name."""

    def dims(equation: Any) -> list[int]:
        found = [equation.params[name] for name in names]
        looked_at = itertools.chain(*[x if isinstance(x, tuple | list) else (x,) for x in found])
        ndim = len(_shape(equation))
        return sorted(set(range(ndim)) - {d % ndim for d in looked_at})

    return dims


_windowed = _on_all(_outside_window)

RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, elementwise),
    "reduce_max": _reduce_order(jnp.max),
    "reduce_min": _reduce_order(jnp.min),
    "reduce_and": _reduce_order(jnp.all),
    "reduce_or": _reduce_order(jnp.any),
    **dict.fromkeys(("reduce_prod", "reduce_xor", "argmax", "argmin"), _reduce),
    "cumsum": _along(_on_all(_not("axis")), linear=True),
    "rev": _along(_on_all(_not("dimensions")), linear=True),
    **dict.fromkeys(("cumprod", "cummax", "cummin", "cumlogsumexp"), _along(_on_all(_not("axis")))),
    "squeeze": _along(lambda e: _but(len(_shape(e)), e.params["dimensions"]), linear=True),
    "transpose": _along(lambda e: {old: new for new, old in enumerate(e.params["permutation"])}, linear=True),
    "slice": _along(_unsliced, linear=True),
    "split": _along(_on_all(_not("axis")), linear=True, results=0),
    "top_k": _along(_on_all(_not("axis")), results=0),
    "dynamic_slice": _along(
        lambda e: {d: d for d, (n, m) in enumerate(zip(_shape(e), e.params["slice_sizes"], strict=True)) if n == m},
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
    "unstack": _along(lambda e: _but(len(_shape(e)), [e.params["axis"]]), linear=True, results=0),
    **dict.fromkeys(("optimization_barrier", "device_put"), hand_through),
    "gather": gather,
    "scatter": _scatter(adds=False),
    "scatter-add": _scatter(adds=True),
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
        ends = zip(params["limit_indices"], _result(equation), results[0], strict=True)
        return params | {"limit_indices": tuple(end if old == new else new for end, old, new in ends)}
    if name == "gather":
        sizes = zip(params["slice_sizes"], _shape(equation), operands[0].shape, strict=True)
        return params | {"slice_sizes": tuple(n if old == new or n == 1 else new for n, old, new in sizes)}
    return params
