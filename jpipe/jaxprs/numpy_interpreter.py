"""Runs small jaxprs in NumPy, operation by operation: to compile one takes a thousand times as long.

And the context for that: at once and on this host, whatever is being traced and whatever the mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import jax
import numpy as np
from numpy.typing import ArrayLike

from jpipe.jaxprs.flat_jaxpr import flatten
from jpipe.jaxprs.tracing import no_mesh
from jpipe.seam.inside import carry_out
from jpipe.seam.primitives import NUMPY, REDUCTIONS, ClosedJaxpr, JaxprEqn


@contextmanager
def on_this_host() -> Iterator[None]:
    """Has operations run at once on one device of this process, of the CPU if there is one."""
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # there are accelerators only
        device = jax.local_devices()[0]
    with no_mesh(), jax.ensure_compile_time_eval(), jax.transfer_guard("allow"), jax.default_device(device):
        yield


def interpret(closed: ClosedJaxpr, *arguments: ArrayLike) -> list[np.ndarray]:
    """Computes the outputs of a jaxpr without random numbers or side effects.

    Operations that aren't known here are left to JAX, one by one.

    Args:
      closed: the jaxpr.
      arguments: its inputs, arrays or numbers.
    """
    flat = flatten(closed)
    values = flat.constants | dict(zip(flat.arguments, arguments, strict=True))
    read = lambda numbers: [np.asarray(values[i], flat.avals[i].dtype) for i in numbers]
    with np.errstate(all="ignore"):
        for equation, _, reads, makes in flat.equations:
            values.update(zip(makes, _results(equation, read(reads)), strict=True))
        return read(flat.results)


def _results(equation: JaxprEqn, operands: list[np.ndarray]) -> Sequence[ArrayLike]:
    """Computes the results of an equation."""
    name, params = equation.primitive.name, equation.params
    if name == "cond":
        branch = params["branches"][int(np.clip(operands[0], 0, len(params["branches"]) - 1))]
        return interpret(branch, *operands[1:])
    if name in _PLAIN:
        return [_PLAIN[name](*operands)]
    if name in _WITH_OPTIONS:
        return [_WITH_OPTIONS[name](equation, *operands)]
    return carry_out(equation, operands)


def _broadcast(equation: JaxprEqn, x: np.ndarray) -> np.ndarray:
    shape, kept = equation.params["shape"], equation.params["broadcast_dimensions"]
    return np.broadcast_to(np.expand_dims(x, tuple(d for d in range(len(shape)) if d not in kept)), shape)


def _over_axes(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    return lambda equation, x: function(x, axis=tuple(equation.params["axes"]))


_PLAIN: dict[str, Callable[..., np.ndarray]] = {
    **{name: getattr(np, numpy) for name, numpy in NUMPY.items()},
    "div": lambda a, b: np.divide(a, b) if a.dtype.kind not in "iu" else np.trunc(a / b),
    "select_n": lambda which, *cases: np.choose(which.astype(np.int32), cases),
    "rsqrt": lambda x: 1 / np.sqrt(x),
    **dict.fromkeys(("copy", "copy_p", "stop_gradient", "optimization_barrier"), lambda x: x),
}
"""A function of the operands for each primitive; which dtype it gives doesn't matter."""

_WITH_OPTIONS: dict[str, Callable[..., np.ndarray]] = {
    "broadcast_in_dim": _broadcast,
    "convert_element_type": lambda equation, x: x.astype(equation.params["new_dtype"]),
    "integer_pow": lambda equation, x: x ** np.asarray(equation.params["y"], x.dtype),
    **dict.fromkeys(("reshape", "squeeze"), lambda equation, x: x.reshape(equation.outvars[0].aval.shape)),
    "transpose": lambda equation, x: np.transpose(x, equation.params["permutation"]),
    "concatenate": lambda equation, *x: np.concatenate(x, equation.params["dimension"]),
    **{name: _over_axes(getattr(np, numpy)) for name, numpy in REDUCTIONS.items()},
}
"""A function of the equation and the operands for each primitive."""
