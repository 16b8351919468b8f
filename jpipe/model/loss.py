"""The loss of a micro-batch, as sums over its examples that can be added up and divided once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jpipe.jax_tools.dtypes import accumulator_dtype, is_float
from jpipe.jax_tools.jaxprs import uses
from jpipe.jax_tools.tracing import trace
from jpipe.layers.base import describe
from jpipe.partitioner.user_shardings import named_axes
from jpipe.terminal.notices import warn_user
from jpipe.types import Batch, Leaf, PyTree, Shapes

LossFn = Callable[[PyTree, Batch], PyTree]
"""`(outputs, micro-batch)` -> the mean loss, `(loss_sum, weight_sum)` or `(loss_sum, weight_sum, metrics)`."""

OWN_METRICS = ("loss", "grad_norm", "finite")


def loss_sums(loss: PyTree) -> list[jax.Array]:
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


@dataclass(frozen=True)
class TracedLoss:
    """What a loss function returns for a micro-batch.

    Attributes:
      of_batch: the type of a whole batch's loss.
      metrics: the names of its metrics, in the order of `loss_sums`.
      weight_follows_outputs: whether it returned a pair whose second part depends on floating-point outputs.
      constrained: the mesh axes that sharding constraints and `shard_map`s in it name.
    """

    of_batch: jax.ShapeDtypeStruct
    metrics: tuple[str, ...]
    weight_follows_outputs: bool
    constrained: frozenset[str]

    def warn_of_moving_weight(self) -> None:
        """Warns of a pair (loss, metric) that would be read as (loss_sum, weight_sum).

        A weight counts what the batch holds; one that depends on the model's floating-point outputs is most likely
        none.
        """
        if self.weight_follows_outputs:
            warn_user(
                "loss_fn returned a pair whose second part depends on the model's outputs. It is read as (loss_sum, "
                "weight_sum): the loss is the sum of the first over all micro-batches, divided by the sum of the "
                "second, which is taken as a constant. If the second is a metric, such as an accuracy, return the loss "
                "alone, or (loss, 1.0, {'accuracy': accuracy}); if it is a weight, compute it from the batch"
            )


def trace_loss(loss_fn: LossFn, outputs: Shapes, batch: Shapes) -> TracedLoss:
    """Traces a loss function at what the model gives for one micro-batch.

    Raises:
      ValueError: it raised an error, or returned neither a floating-point scalar nor a tuple of scalars and metrics.
    """
    try:
        jaxpr, loss = trace(loss_fn, outputs, batch)
    except Exception as error:
        raise ValueError(
            f"loss_fn(outputs, batch) raised {type(error).__name__}: {error}; it was called with the outputs "
            f"{describe(outputs)} and the batch {describe(batch)} of one micro-batch (the first batch that a pipeline "
            "sees has to be a whole one, not its inputs alone)"
        ) from error
    parts = list(loss) if isinstance(loss, tuple) else [loss]
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
    needed = uses(jaxpr, [i == 1 for i in range(len(jaxpr.jaxpr.outvars))])
    of_outputs = zip(needed, jax.tree.leaves(outputs), strict=False)
    follows = len(parts) == 2 and any(need and is_float(leaf) for need, leaf in of_outputs)
    of_batch = jax.ShapeDtypeStruct((), accumulator_dtype(parts[0].dtype))
    return TracedLoss(of_batch, tuple(sorted(metrics)), follows, named_axes(jaxpr))


def _is_scalar(value: Leaf) -> bool:
    return hasattr(value, "shape") and value.shape == ()


def _check_metrics(loss: Shapes, metrics: PyTree) -> None:
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
