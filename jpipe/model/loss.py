"""The loss of a micro-batch, as sums over its examples that can be added up and divided once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jpipe.jax_tools.dtypes import accumulator_dtype, is_float
from jpipe.jax_tools.jaxprs import uses
from jpipe.jax_tools.tracing import trace
from jpipe.layers.base import describe
from jpipe.model.groups import Model, Shapes
from jpipe.terminal.notices import warn_user

LossFn = Callable[[Any, Any], Any]
"""`(outputs, micro-batch)` -> the mean loss, `(loss_sum, weight_sum)` or `(loss_sum, weight_sum, metrics)`."""

OWN_METRICS = ("loss", "grad_norm", "finite")


def loss_sums(loss: Any) -> list[jax.Array]:
    """What a loss function returned as sums over examples: [loss_sum, weight_sum, and the same of each metric].

    A mean has weight 1. All are in the dtype of the loss's sums: a count of tokens may be too large or too fine for a
    narrow loss.
    """
    parts = loss if isinstance(loss, tuple) else (loss, 1.0)
    loss, weight, metrics = parts if len(parts) == 3 else (*parts, {})
    loss_sum = jnp.asarray(loss)
    dtype = accumulator_dtype(loss_sum.dtype)
    constant = lambda value: jax.lax.stop_gradient(jnp.asarray(value)).astype(dtype)
    pairs = [value if isinstance(value, tuple) else (value, 1.0) for _, value in sorted(metrics.items())]
    return [loss_sum, constant(weight), *[constant(value) for pair in pairs for value in pair]]


def metric_names(loss_fn: LossFn | None, outputs: Shapes, batch: Shapes) -> tuple[str, ...]:
    """The names of the metrics that a loss function returns, in the order of `loss_sums`."""
    loss = None if loss_fn is None else trace(loss_fn, outputs, batch)[1]
    return tuple(sorted(loss[2])) if isinstance(loss, tuple) and len(loss) == 3 else ()


def check_loss(model: Model, loss_fn: LossFn, batch: Shapes) -> None:
    """Checks what a loss function returns for one micro-batch.

    Raises:
      ValueError: it raised an error, or returned neither a floating-point scalar nor a pair of scalars.
    """
    outputs = model.outputs
    try:
        _, loss = trace(loss_fn, outputs, batch)
    except Exception as error:
        raise ValueError(
            f"loss_fn(outputs, batch) raised {type(error).__name__}: {error}; it was called with the outputs "
            f"{describe(outputs)} and the batch {describe(batch)} of one micro-batch (the first batch that a pipeline "
            "sees has to be a whole one, not its inputs alone)"
        ) from error
    parts: Any = loss if isinstance(loss, tuple) else (loss,)
    sums, metrics = parts[:2], parts[2] if len(parts) == 3 else {}
    too_few = isinstance(loss, tuple) and len(loss) < 2
    if too_few or len(parts) > 3 or not all(map(_is_scalar, sums)):
        raise ValueError(
            f"loss_fn returned {describe(loss)}; it has to return a scalar (the mean loss), a pair of scalars "
            "(loss_sum, weight_sum), or (loss_sum, weight_sum, metrics)"
        )
    if not jnp.issubdtype(parts[0].dtype, jnp.floating):
        raise ValueError(f"loss_fn returned a loss of dtype {parts[0].dtype}; it has to be floating-point")
    _check_metrics(loss, metrics)


def warn_of_moving_weight(model: Model, loss_fn: LossFn, batch: Shapes) -> None:
    """Warns of a pair (loss, metric) that would be read as (loss_sum, weight_sum).

    A weight counts what the batch holds; one that depends on the model's floating-point outputs is most likely none.

    Args:
      model: the traced layers.
      loss_fn: a loss function that passed `check_loss`.
      batch: one micro-batch, a pytree of ShapeDtypeStructs.

    Warns:
      UserWarning: the second part depends on floating-point outputs.
    """
    outputs = model.outputs
    jaxpr, loss = trace(loss_fn, outputs, batch)
    if not isinstance(loss, tuple) or len(loss) > 2:
        return
    needed = uses(jaxpr, [i == 1 for i in range(len(jaxpr.jaxpr.outvars))])
    if any(need and is_float(leaf) for need, leaf in zip(needed, jax.tree.leaves(outputs), strict=False)):
        warn_user(
            "loss_fn returned a pair whose second part depends on the model's outputs. It is read as (loss_sum, "
            "weight_sum): the loss is the sum of the first over all micro-batches, divided by the sum of the second, "
            "which is taken as a constant. If the second is a metric, such as an accuracy, return the loss alone, "
            "or (loss, 1.0, {'accuracy': accuracy}); if it is a weight, compute it from the batch"
        )


def _is_scalar(value: Any) -> bool:
    return hasattr(value, "shape") and value.shape == ()


def _check_metrics(loss: Any, metrics: Any) -> None:
    """Checks the metrics that a loss function returned.

    Raises:
      ValueError: no dict, a name that jpipe's own metrics have, or a value that is neither a scalar nor a pair of them.
    """
    if not isinstance(metrics, dict) or not all(isinstance(name, str) for name in metrics):
        raise ValueError(
            f"loss_fn returned {describe(loss)}; its third part, metrics, has to be a dict with names as keys"
        )
    for name, value in metrics.items():
        if name in OWN_METRICS:
            raise ValueError(f"loss_fn returned a metric called {name!r}, as one of jpipe's own is; use another name")
        pair = value if isinstance(value, tuple) else (value, value)
        if len(pair) != 2 or not all(map(_is_scalar, pair)):
            raise ValueError(
                f"loss_fn returned {describe(value)} as the metric {name!r}; it has to be a scalar (the mean of the "
                "micro-batch) or a pair of scalars (sum, weight)"
            )
