"""Counts the FLOPs of a traced function on its jaxpr, so that no compiler and no device is needed.

The operations that decide a cut are counted as XLA counts them (`HloCostAnalysis`): a product of matrices takes
2*M*N*K, a convolution what its window meets outside of the padding. Moving elements takes nothing, and anything else
one an element, be it a sum or a Bessel function. Where the compiler takes the body of a loop once, here a `scan` takes
it as often as it runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from jax.extend.core import jaxprs_in_params

from jpipe.jax.inside import needed_part
from jpipe.jax.primitives import FREE, ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, is_by_element


def count_flops(closed: ClosedJaxpr) -> float:
    """Counts the FLOPs of a jaxpr, without the equations that its outputs don't need.

    `scan` takes its body times its length, `cond` the larger branch, a `while` loop one trip, a Pallas kernel its
    `cost_estimate` or, without one, its jaxpr at every point of its grid, an operation that isn't known one an element.
    Operations on integers count too, as they do for the compiler.

    >>> import jax
    >>> x = jax.ShapeDtypeStruct((8, 16), "float32")
    >>> count_flops(jax.make_jaxpr(lambda x: jax.numpy.tanh(x @ x.T))(x))  # 8*8 sums of 16 products, 8*8 tanh
    2112.0
    """
    return _count(needed_part(closed, [True] * len(closed.jaxpr.outvars))[0])


def _count(jaxpr: ClosedJaxpr | Jaxpr) -> float:
    return sum(map(flops_of, jaxpr.eqns), 0.0)


def flops_of(equation: JaxprEqn) -> float:
    """The FLOPs of an equation; one an element of what isn't known here."""
    name = equation.primitive.name
    if name in FREE:
        return 0.0
    if name in _BY_NAME:
        return float(_BY_NAME[name](equation))
    is_call = next(iter(jaxprs_in_params(equation.params)), None) is not None and not is_by_element(name)
    return _call(equation) if is_call else float(_elements(equation))


def _shape(v: Var | Literal) -> tuple[int, ...]:
    return getattr(v.aval, "shape", ())


def _size(v: Var | Literal) -> int:
    return math.prod(_shape(v))


# --- one an element ---------------------------------------------------------------------------------------------------


def _elements(equation: JaxprEqn) -> int:
    """Elements of the result; of what is summed up or added to another array, of that."""
    name, results = equation.primitive.name, max(map(_size, equation.outvars), default=0)
    if "window_dimensions" in equation.params:  # pooling, and its gradient: as often as an element meets a window
        return min(results, _size(equation.invars[0])) * math.prod(equation.params["window_dimensions"])
    if name.startswith("scatter"):
        return _size(equation.invars[2])
    return _size(equation.invars[0]) if name.startswith(("argmax", "argmin", "reduce")) else results


# --- products ---------------------------------------------------------------------------------------------------------


def _dot(equation: JaxprEqn) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    shape = _shape(equation.invars[0])
    return 2 * _size(equation.outvars[0]) * math.prod(shape[d] for d in contracted)


def _ragged_dot(equation: JaxprEqn) -> int:
    """Every row meets the matrix of its own group."""
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batched) = numbers.dot_dimension_numbers
    taken = {*contracted, *batched, *numbers.rhs_group_dimensions}
    columns = [size for d, size in enumerate(_shape(equation.invars[1])) if d not in taken]
    return 2 * _size(equation.invars[0]) * math.prod(columns)


def _conv(equation: JaxprEqn) -> int:
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


def _fft(equation: JaxprEqn) -> int:
    size = max(_size(equation.invars[0]), _size(equation.outvars[0]))
    return 8 * size * math.prod(length.bit_length() - 1 for length in equation.params["fft_lengths"])


# --- jaxprs in jaxprs -------------------------------------------------------------------------------------------------


def _call(equation: JaxprEqn) -> float:
    """`jit`, `checkpoint`, `custom_vjp` and others take what the jaxprs in their parameters take."""
    return sum(map(_count, jaxprs_in_params(equation.params)), 0.0)


def _pallas(equation: JaxprEqn) -> float:
    """A kernel takes what its author estimates; without that, its program at each step of its grid."""
    estimate = equation.params.get("cost_estimate")
    if estimate is not None:
        return float(estimate.flops)
    grid = getattr(equation.params.get("grid_mapping"), "grid", ())
    return math.prod(size for size in grid if isinstance(size, int)) * _call(equation)


def _shard_map(equation: JaxprEqn) -> float:
    """The work of all devices: one shard's, times the number of shards."""
    shape = equation.params["mesh"].shape
    return _call(equation) * math.prod(shape[name] for name in equation.params["newly_manual_axes"])


_BY_NAME: dict[str, Callable[[JaxprEqn], float]] = {
    "dot_general": _dot,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _conv,
    "cholesky": lambda equation: _size(equation.outvars[0]) * _shape(equation.outvars[0])[-1] / 3,
    "triangular_solve": lambda equation: _size(equation.outvars[0]) * _shape(equation.invars[0])[-1],
    "fft": _fft,
    "scan": lambda equation: _call(equation) * equation.params["length"],
    "cond": lambda equation: max(map(_count, equation.params["branches"])),
    "pallas_call": _pallas,
    "shard_map": _shard_map,
    "custom_linear_solve": lambda equation: _count(equation.params["jaxprs"].solve),
}
"""The FLOPs of operations by their names; of a `while` loop one trip is counted, as of any call."""
