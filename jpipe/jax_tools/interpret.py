"""Small programs run in NumPy, operation by operation: compiling one takes a thousand times longer than running it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun, jaxprs_in_params


def interpret(program: ClosedJaxpr, *arguments: Any) -> list[np.ndarray]:
    """The outputs of a program without random numbers or side effects.

    Operations that aren't known here are left to JAX, one by one.
    """
    with np.errstate(all="ignore"):
        return _run(program.jaxpr, program.consts, arguments)


def _run(jaxpr: Jaxpr, constants: Any, arguments: Any) -> list[np.ndarray]:
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *arguments], strict=True))
    dtype: Callable[[Any], Any] = lambda v: v.aval.dtype
    read = lambda v: np.asarray(v.val if isinstance(v, Literal) else values[v], dtype(v))
    for equation in jaxpr.eqns:
        results = _equation(equation, list(map(read, equation.invars)), jaxpr)
        values.update(zip(equation.outvars, results, strict=True))
    return list(map(read, jaxpr.outvars))


def _equation(equation: Any, taken: list[np.ndarray], within: Jaxpr) -> list[Any]:
    name, params = equation.primitive.name, equation.params
    if name in _CALLS:
        return _run(next(iter(jaxprs_in_params(params))), _constants(params), taken)
    if name == "cond":
        chosen = params["branches"][int(np.clip(taken[0], 0, len(params["branches"]) - 1))]
        return _run(chosen.jaxpr, chosen.consts, taken[1:])
    if name in _PLAIN:
        return [_PLAIN[name](*taken)]
    if name in _WITH_OPTIONS:
        return [_WITH_OPTIONS[name](equation, *taken)]
    inputs = list(dict.fromkeys(v for v in equation.invars if not isinstance(v, Literal)))
    values = dict(zip(equation.invars, taken, strict=True)) if inputs else {}
    alone = within.replace(constvars=[], invars=inputs, outvars=equation.outvars, eqns=[equation])
    return jaxpr_as_fun(ClosedJaxpr(alone, ()))(*(values[v] for v in inputs))


def _constants(params: dict[str, Any]) -> Any:
    """Of the program that an equation calls."""
    return next((value.consts for value in params.values() if isinstance(value, ClosedJaxpr)), ())


def _broadcast(equation: Any, x: np.ndarray, *_: Any) -> np.ndarray:
    shape = equation.params["shape"]
    place = dict(zip(equation.params["broadcast_dimensions"], x.shape, strict=True))
    return np.broadcast_to(x.reshape([place.get(d, 1) for d in range(len(shape))]), shape)


def _cast(equation: Any, x: np.ndarray) -> np.ndarray:
    return x.astype(equation.params["new_dtype"])


def _reshape(equation: Any, x: np.ndarray, *_: Any) -> np.ndarray:
    return x.reshape(equation.outvars[0].aval.shape)


def _over(function: Callable) -> Callable:
    return lambda equation, x: function(x, axis=tuple(equation.params["axes"]))


_CALLS = ("jit", "remat2", "closed_call", "custom_jvp_call", "custom_vjp_call")
_PLAIN: dict[str, Callable] = {
    **dict.fromkeys(("add", "add_any"), np.add),
    "sub": np.subtract,
    "mul": np.multiply,
    "div": lambda a, b: np.divide(a, b) if a.dtype.kind not in "iu" else np.trunc(a / b),
    "rem": np.fmod,
    "max": np.maximum,
    "min": np.minimum,
    "pow": np.power,
    "neg": np.negative,
    "select_n": lambda which, *cases: np.choose(which.astype(np.int32), cases),
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "logistic": lambda x: 1 / (1 + np.exp(-x)),
    "is_finite": np.isfinite,
    "not": np.invert,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    **{name: getattr(np, name) for name in ("abs", "exp", "log", "log1p", "expm1", "sign", "sqrt", "square", "tanh")},
    **{name: getattr(np, name) for name in ("cos", "sin", "floor", "ceil")},
    **{
        "eq": np.equal,
        "ne": np.not_equal,
        "lt": np.less,
        "le": np.less_equal,
        "gt": np.greater,
        "ge": np.greater_equal,
    },
    **dict.fromkeys(("copy", "copy_p", "stop_gradient", "optimization_barrier"), lambda x: x),
}
_WITH_OPTIONS: dict[str, Callable] = {
    "broadcast_in_dim": _broadcast,
    "convert_element_type": _cast,
    "integer_pow": lambda equation, x: x ** np.asarray(equation.params["y"], x.dtype),
    **dict.fromkeys(("reshape", "squeeze", "expand_dims"), _reshape),
    "transpose": lambda equation, x: np.transpose(x, equation.params["permutation"]),
    "concatenate": lambda equation, *x: np.concatenate(x, equation.params["dimension"]),
    "reduce_sum": _over(np.sum),
    "reduce_max": _over(np.max),
    "reduce_min": _over(np.min),
    "reduce_and": _over(np.all),
    "reduce_or": _over(np.any),
}
