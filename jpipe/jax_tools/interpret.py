"""Small jaxprs run in NumPy, operation by operation: compiling one takes a thousand times longer than running it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import jaxpr_as_fun, jaxprs_in_params

from jpipe.seam.jaxpr_types import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jpipe.seam.primitives import CALLS, NUMPY, REDUCTIONS


def interpret(closed: ClosedJaxpr, *arguments: Any) -> list[np.ndarray]:
    """The outputs of a jaxpr without random numbers or side effects.

    Operations that aren't known here are left to JAX, one by one.

    Args:
      closed: the jaxpr.
      arguments: its inputs, arrays or numbers.
    """
    with np.errstate(all="ignore"):
        return _run(closed.jaxpr, closed.consts, arguments)


def _run(jaxpr: Jaxpr, constants: Sequence[Any], arguments: Sequence[Any]) -> list[np.ndarray]:
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *arguments], strict=True))
    dtype: Callable[[Any], Any] = lambda v: v.aval.dtype
    read = lambda v: np.asarray(v.val if isinstance(v, Literal) else values[v], dtype(v))
    for equation in jaxpr.eqns:
        results = _results(equation, list(map(read, equation.invars)), jaxpr)
        values.update(zip(equation.outvars, results, strict=True))
    return list(map(read, jaxpr.outvars))


def _results(equation: JaxprEqn, operands: list[np.ndarray], jaxpr: Jaxpr) -> Sequence[Any]:
    """The results of an equation of `jaxpr`."""
    name, params = equation.primitive.name, equation.params
    if name in CALLS:
        return _run(next(iter(jaxprs_in_params(params))), _constants(params), operands)
    if name == "cond":
        branch = params["branches"][int(np.clip(operands[0], 0, len(params["branches"]) - 1))]
        return _run(branch.jaxpr, branch.consts, operands[1:])
    if name in _PLAIN:
        return [_PLAIN[name](*operands)]
    if name in _WITH_OPTIONS:
        return [_WITH_OPTIONS[name](equation, *operands)]
    inputs = list(dict.fromkeys(v for v in equation.invars if not isinstance(v, Literal)))
    values = dict(zip(equation.invars, operands, strict=True)) if inputs else {}
    alone = jaxpr.replace(constvars=[], invars=inputs, outvars=equation.outvars, eqns=[equation])
    return jaxpr_as_fun(ClosedJaxpr(alone, ()))(*(values[v] for v in inputs))


def _constants(params: dict[str, Any]) -> Sequence[Any]:
    """The constants of the jaxpr that an equation with these parameters calls."""
    return next((value.consts for value in params.values() if isinstance(value, ClosedJaxpr)), ())


def _broadcast(equation: JaxprEqn, x: np.ndarray) -> np.ndarray:
    shape, kept = equation.params["shape"], equation.params["broadcast_dimensions"]
    return np.broadcast_to(np.expand_dims(x, [d for d in range(len(shape)) if d not in kept]), shape)


def _over_axes(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    return lambda equation, x: function(x, axis=tuple(equation.params["axes"]))


_PLAIN: dict[str, Callable[..., np.ndarray]] = {
    **{name: getattr(np, numpy) for name, numpy in NUMPY.items()},
    "div": lambda a, b: np.divide(a, b) if a.dtype.kind not in "iu" else np.trunc(a / b),
    "select_n": lambda which, *cases: np.choose(which.astype(np.int32), cases),
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "one_minus_square": lambda x: 1 - x * x,
    "logistic": lambda x: 1 / (1 + np.exp(-x)),
    **dict.fromkeys(("copy", "copy_p", "stop_gradient", "optimization_barrier"), lambda x: x),
}
"""By primitive, a function of the operands; which dtype it gives doesn't matter."""

_WITH_OPTIONS: dict[str, Callable[..., np.ndarray]] = {
    "broadcast_in_dim": _broadcast,
    "convert_element_type": lambda equation, x: x.astype(equation.params["new_dtype"]),
    "integer_pow": lambda equation, x: x ** np.asarray(equation.params["y"], x.dtype),
    **dict.fromkeys(
        ("reshape", "squeeze", "expand_dims"), lambda equation, x: x.reshape(equation.outvars[0].aval.shape)
    ),
    "transpose": lambda equation, x: np.transpose(x, equation.params["permutation"]),
    "concatenate": lambda equation, *x: np.concatenate(x, equation.params["dimension"]),
    **{name: _over_axes(getattr(np, numpy)) for name, numpy in REDUCTIONS.items()},
}
"""By primitive, a function of the equation and the operands."""
