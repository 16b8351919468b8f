"""FLOPs: what a traced function takes, counted on its jaxpr, so that no compiler and no device is needed.

Counted as XLA counts them (`HloCostAnalysis`): a product of matrices takes 2*M*N*K, a convolution what its window meets
outside of the padding, anything elementwise 1 an element, and moving elements nothing. Transcendental functions are
counted apart. Where the compiler takes the body of a loop once, here a `scan` takes it as often as it runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend.core import jaxprs_in_params

from jpipe.seam.inside import scan_counts
from jpipe.seam.jaxpr_types import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var


@dataclass(frozen=True)
class Flops:
    """What a jaxpr, or a part of one, takes.

    Attributes:
      flops: floating-point operations; those on integers count too, as they do for the compiler.
      transcendentals: exponentials, logarithms, roots, trigonometric functions, powers.
      unknown: what couldn't be counted, each as a text such as "a while loop ...".
    """

    flops: float = 0.0
    transcendentals: float = 0.0
    unknown: frozenset[str] = frozenset()

    def __add__(self, other: Flops) -> Flops:
        return Flops(
            self.flops + other.flops, self.transcendentals + other.transcendentals, self.unknown | other.unknown
        )

    def __mul__(self, times: float) -> Flops:
        return Flops(times * self.flops, times * self.transcendentals, self.unknown)


def count_flops(closed: ClosedJaxpr) -> Flops:
    """What a jaxpr takes, without the equations that its outputs don't need.

    `scan` takes its body times its length, `cond` the larger branch, a `while` loop one trip (and is named as unknown),
    a Pallas kernel its `cost_estimate` or, without one, its jaxpr at every point of its grid (named as unknown).
    A cumulative sum takes 1 an element and not the compiler's square of the length.

    >>> x = jax.ShapeDtypeStruct((8, 16), "float32")
    >>> count_flops(jax.make_jaxpr(lambda x: jax.numpy.tanh(x @ x.T))(x))
    Flops(flops=2048.0, transcendentals=64.0, unknown=frozenset())
    """
    return _count_all(closed)


def _count(jaxpr: Jaxpr, needed: Sequence[bool]) -> Flops:
    """What a jaxpr takes of which only some outputs are needed: `needed` says which."""
    total = Flops()
    live = {v for v, need in zip(jaxpr.outvars, needed, strict=True) if need and not isinstance(v, Literal)}
    for equation in reversed(jaxpr.eqns):
        outputs = [v in live for v in equation.outvars]
        if any(outputs) or equation.effects:
            total += _count_equation(equation, outputs)
            live.update(v for v in equation.invars if not isinstance(v, Literal))
    return total


def _count_equation(equation: JaxprEqn, needed: Sequence[bool]) -> Flops:
    name = equation.primitive.name
    if name in _MOVES:
        return Flops()
    if name in _CONTROL:
        return _CONTROL[name](equation, needed)
    if name in _FLOPS:
        return Flops(float(_FLOPS[name](equation)))
    size = float(_size(equation.outvars[0])) if equation.outvars else 0.0
    if name in _EACH:
        flops, transcendentals = _EACH[name]
        return Flops(flops * size, transcendentals * size)
    if next(iter(jaxprs_in_params(equation.params)), None) is not None:
        return _call(equation, needed)
    return Flops(size, 0.0, frozenset([f"an operation {name!r} that can't be counted"]))


def _shape(v: Var | Literal) -> tuple[int, ...]:
    return getattr(v.aval, "shape", ())


def _size(v: Var | Literal) -> int:
    return math.prod(_shape(v))


def _dtype(v: Any) -> Any:
    return v.aval.dtype


def _jaxpr_of(jaxpr: ClosedJaxpr | Jaxpr) -> Jaxpr:
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def _count_all(jaxpr: ClosedJaxpr | Jaxpr) -> Flops:
    return _count(_jaxpr_of(jaxpr), [True] * len(_jaxpr_of(jaxpr).outvars))


# --- jaxprs in jaxprs -------------------------------------------------------------------------------------------------


def _call(equation: JaxprEqn, needed: Sequence[bool]) -> Flops:
    """`jit`, `checkpoint`, `custom_vjp` and others take what the jaxprs in their parameters take."""
    total = Flops()
    for called in jaxprs_in_params(equation.params):
        same = len(called.outvars) == len(needed)
        total += _count(called, needed if same else [True] * len(called.outvars))
    return total


def _scan(equation: JaxprEqn, needed: Sequence[bool]) -> Flops:
    carry = scan_counts(equation)[1]
    trip = _count(_jaxpr_of(equation.params["jaxpr"]), [True] * carry + list(needed[carry:]))
    return trip * equation.params["length"]


def _while(equation: JaxprEqn, needed: Sequence[bool]) -> Flops:
    del needed
    note = Flops(unknown=frozenset(["a while loop, of which one trip is counted"]))
    return _count_all(equation.params["cond_jaxpr"]) + _count_all(equation.params["body_jaxpr"]) + note


def _cond(equation: JaxprEqn, needed: Sequence[bool]) -> Flops:
    branches = [_count(_jaxpr_of(branch), needed) for branch in equation.params["branches"]]
    largest = max(branches, key=lambda branch: (branch.flops, branch.transcendentals))
    return largest + Flops(unknown=frozenset().union(*(branch.unknown for branch in branches)))


def _pallas(equation: JaxprEqn, needed: Sequence[bool]) -> Flops:
    del needed
    estimate = equation.params.get("cost_estimate")
    if estimate is not None:
        return Flops(float(estimate.flops), float(estimate.transcendentals))
    grid: tuple[Any, ...] = getattr(equation.params.get("grid_mapping"), "grid", (None,))
    points = math.prod(grid) if all(isinstance(size, int) for size in grid) else 1
    kernel = _count_all(equation.params["jaxpr"]) * points
    note = "a Pallas kernel without cost_estimate, counted by its program and grid"
    return Flops(kernel.flops, kernel.transcendentals, frozenset([note]))


def _shard_map(equation: JaxprEqn, needed: Sequence[bool]) -> Flops:
    """The work of all devices: one shard's, times the number of shards."""
    shape = equation.params["mesh"].shape
    return _call(equation, needed) * math.prod(shape[name] for name in equation.params["newly_manual_axes"])


def _linear_solve(equation: JaxprEqn, needed: Sequence[bool]) -> Flops:
    del needed
    return _count_all(equation.params["jaxprs"].solve)


_CONTROL: dict[str, Callable[[JaxprEqn, Sequence[bool]], Flops]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "pallas_call": _pallas,
    "shard_map": _shard_map,
    "custom_linear_solve": _linear_solve,
    "eval_jaxpr": _call,
}


# --- products ---------------------------------------------------------------------------------------------------------


def _dot(equation: JaxprEqn) -> float:
    (contracted, _), _ = equation.params["dimension_numbers"]
    shape = _shape(equation.invars[0])
    return 2 * _size(equation.outvars[0]) * math.prod(shape[d] for d in contracted)


def _ragged_dot(equation: JaxprEqn) -> float:
    """Every row meets the matrix of its own group."""
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batched) = numbers.dot_dimension_numbers
    taken = {*contracted, *batched, *numbers.rhs_group_dimensions}
    columns = [size for d, size in enumerate(_shape(equation.invars[1])) if d not in taken]
    return 2 * _size(equation.invars[0]) * math.prod(columns)


def _conv(equation: JaxprEqn) -> float:
    params, (left, right) = equation.params, map(_shape, equation.invars[:2])
    numbers = params["dimension_numbers"]
    (batch, _, *space), (out, into, *window) = numbers.lhs_spec, numbers.rhs_spec
    result = [_shape(equation.outvars[0])[d] for d in numbers.out_spec[2:]]
    options = [params[name] for name in ("window_strides", "padding", "lhs_dilation", "rhs_dilation")]
    dimensions = zip(space, window, result, *options, strict=True)
    met = math.prod(_met(left[d], right[w], size, *of_d) for d, w, size, *of_d in dimensions)
    return 2 * right[out] * right[into] * (left[batch] // params["batch_group_count"]) * met


def _met(
    size: int, window: int, result: int, stride: int, padding: tuple[int, int], dilation: int, window_dilation: int
) -> int:
    """How often an entry of the window meets an element, and no padding, along one dimension, over all results.

    Args:
      size: the length of the input.
      window: the length of the window.
      result: the length of the result.
      stride: from one result to the next.
      padding: before and behind the input.
      dilation: from one element to the next.
      window_dilation: from one entry of the window to the next.
    """
    index = np.arange(result)[:, None] * stride + np.arange(window) * window_dilation - padding[0]
    return int(np.count_nonzero((index >= 0) & (index < (size - 1) * dilation + 1) & (index % dilation == 0)))


# --- reductions -------------------------------------------------------------------------------------------------------


def _reduced(equation: JaxprEqn, each: float = 1.0) -> float:
    return each * (_size(equation.invars[0]) - _size(equation.outvars[0]))


def _reduce(equation: JaxprEqn) -> float:
    return _reduced(equation, _count_all(equation.params["jaxpr"]).flops)


def _windows(equation: JaxprEqn) -> float:
    return _size(equation.outvars[0]) * (math.prod(equation.params["window_dimensions"]) - 1)


def _reduce_window(equation: JaxprEqn) -> float:
    return _windows(equation) * _count_all(equation.params["jaxpr"]).flops


def _select_and_scatter(equation: JaxprEqn) -> float:
    """For each element of a window but one a comparison, and an addition."""
    return _size(equation.invars[0]) * math.prod(equation.params["window_dimensions"])


def _scatter(equation: JaxprEqn) -> float:
    return _size(equation.invars[2])


def _gather(equation: JaxprEqn) -> float:
    """Moving is free, but where indices may be out of bounds each takes two comparisons, and each element a choice."""
    fills = equation.params["mode"] == jax.lax.GatherScatterMode.FILL_OR_DROP
    return 3 * _size(equation.invars[1]) + _size(equation.outvars[0]) if fills else 0


def _sort(equation: JaxprEqn) -> float:
    size = _size(equation.invars[0])
    return size * max(0, size - 1).bit_length()


# --- others -----------------------------------------------------------------------------------------------------------


def _convert(equation: JaxprEqn) -> float:
    (operand,), (result,) = equation.invars, equation.outvars
    return 0 if _dtype(operand) == _dtype(result) else _size(result)


def _integer_pow(equation: JaxprEqn) -> float:
    """The products of raising to a power by repeated squaring, and a division if it is negative."""
    power = abs(equation.params["y"])
    products = 0 if power < 2 else power.bit_length() - 1 + power.bit_count() - 1
    return (products + (equation.params["y"] < 0)) * _size(equation.outvars[0])


def _random_bits(equation: JaxprEqn) -> float:
    """A hash an element, unless the generator is the hardware's."""
    hashed = "fry" in str(_dtype(equation.invars[0]))
    return (THREEFRY if hashed else 1) * _size(equation.outvars[0])


def _keys(equation: JaxprEqn) -> float:
    return THREEFRY * max(1, _size(equation.outvars[0]))


def _fft(equation: JaxprEqn) -> float:
    size = max(_size(equation.invars[0]), _size(equation.outvars[0]))
    return 8 * size * math.prod(length.bit_length() - 1 for length in equation.params["fft_lengths"])


def _cholesky(equation: JaxprEqn) -> float:
    return _size(equation.outvars[0]) * _shape(equation.outvars[0])[-1] / 3


def _triangular_solve(equation: JaxprEqn) -> float:
    return _size(equation.outvars[0]) * _shape(equation.invars[0])[-1]


THREEFRY = 117
"""Operations for one random number: 20 rounds of Threefry-2x32 of five each, and 17 to mix in keys."""

_FLOPS: dict[str, Callable[[JaxprEqn], float]] = {
    "dot_general": _dot,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _conv,
    **dict.fromkeys((f"reduce_{name}" for name in ("sum", "max", "min", "prod", "and", "or", "xor")), _reduced),
    **dict.fromkeys(("argmax", "argmin"), lambda equation: _reduced(equation, 9.0)),
    "reduce": _reduce,
    "reduce_window": _reduce_window,
    **dict.fromkeys((f"reduce_window_{name}" for name in ("sum", "max", "min")), _windows),
    "select_and_gather_add": _windows,
    **dict.fromkeys(("select_and_scatter_add", "select_and_scatter"), _select_and_scatter),
    **dict.fromkeys((f"scatter{name}" for name in ("-add", "_add", "-sub", "-mul", "_mul", "-min", "-max")), _scatter),
    **dict.fromkeys(("scatter_min", "scatter_max"), _scatter),
    "gather": _gather,
    "sort": _sort,
    "convert_element_type": _convert,
    "integer_pow": _integer_pow,
    "random_bits": _random_bits,
    **dict.fromkeys(("random_fold_in", "random_split", "random_seed"), _keys),
    "threefry2x32": _keys,
    "fft": _fft,
    "cholesky": _cholesky,
    "triangular_solve": _triangular_solve,
}


def _each(names: str, flops: float = 1.0, transcendentals: float = 0.0) -> Iterable[tuple[str, tuple[float, float]]]:
    return [(name, (flops, transcendentals)) for name in names.split()]


_ONE = """
abs accum_grad_in_ref add add_any addupdate and approx_top_k ceil clamp clz complex conj copysign cummax cummin
cumprod cumsum div eq eq_to floor ge gt imag is_finite le le_to lt lt_to max min mul mul_no_nan mulhi ne neg
nextafter not or pmax pmin population_count psum psum2 psum_invariant psum_invariant_start psum_start real
reciprocal reduce_precision reduce_scatter reduce_scatter_start rem rng_bit_generator rng_uniform round select_n
shift_left shift_right_arithmetic shift_right_logical sign square sub top_k tridiagonal_solve unreduced_psum
unreduced_reduce_scatter xor
"""
_TRANSCENDENTAL = "atan atan2 cbrt cos erf exp expm1 log log1p pow rsqrt sin sqrt tan tanh"
_EACH: dict[str, tuple[float, float]] = dict(
    [
        *_each(_ONE),
        *_each(_TRANSCENDENTAL, 0, 1),
        # Made of others, as the compiler has them.
        *_each("exp2 log2", 1, 1),
        *_each("one_minus_square", 2, 0),
        *_each("logistic", 3, 1),
        *_each("acos", 3, 2),
        *_each("asin", 5, 2),
        *_each("asinh", 11, 3),
        *_each("acosh", 7, 4),
        *_each("atanh", 6, 2),
        *_each("sinh", 10, 3),
        *_each("cosh", 3, 2),
        *_each("erf_inv", 37, 2),
        *_each("erfc", 62, 1),
        *_each("lgamma", 53, 4),
        *_each("digamma", 73, 3),
        *_each("bessel_i0e bessel_i1e", 83, 1),
        *_each("cumlogsumexp", 6, 2),
    ]
)

_MOVED = """
after_all all_gather all_gather_done all_gather_invariant all_gather_reduced all_gather_start all_to_all
all_to_all_done all_to_all_start axis_index bitcast_convert_type broadcast_in_dim broadcast_to check concatenate
copy copy_p create_token dce_sink debug_callback debug_print delay device_put dim_as_value dimension_size
dynamic_slice dynamic_update_slice empty empty2 empty_ref expand_dims free_ref freeze from_edtype get
inspect_sharding io_callback iota iota_2x32_shape layout_constraint lu_pivots_to_permutation masked_load masked_swap
mesh_cast multiple_of name new_ref num_programs optimization_barrier pad pbroadcast pbroadcast_done pbroadcast_start
pin platform_index ppermute ppermute_done ppermute_start precv preduced program_id psend psum_done pure_callback
pvary ragged_all_to_all random_clone random_unwrap random_wrap reduce_scatter_done reduced_vary_cast_p reshape
reshard rev scatter semaphore_read semaphore_signal semaphore_wait shape_assertion sharding_constraint slice split
squeeze stack stop_gradient swap tie tile to_edtype transpose unpin unreduced_cast unstack vary_unreduced_cast_p
with_memory_space_constraint zeros_like
"""
_MOVES = frozenset(_MOVED.split())
