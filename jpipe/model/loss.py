"""The loss of a micro-batch, as sums over its examples that can be added up and divided once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jpipe.jax_tools.dtypes import accumulator_dtype, is_float
from jpipe.jax_tools.jaxprs import uses, without_prints
from jpipe.jax_tools.tracing import trace
from jpipe.layers.base import describe
from jpipe.partitioner.user_shardings import named_axes
from jpipe.seam.inside import needed_part
from jpipe.seam.jaxpr_types import ClosedJaxpr, shapes_of
from jpipe.terminal.notices import warn_user
from jpipe.types import Batch, Leaf, PyTree, Shapes

LossFn = Callable[[PyTree, Batch], PyTree]
"""`(outputs, micro-batch)` -> the mean loss, `(loss_sum, weight_sum)`, `(loss_sum, weight_sum, metrics)`; or several
means, a dict of such means or pairs, or `(dict, metrics)`."""

OWN_METRICS = ("loss", "grad_norm", "finite")
ONLY = ""
"""The name of a loss that is one mean."""


def loss_parts(returned: PyTree) -> tuple[dict[str, PyTree], PyTree]:
    """What a loss function returned: (its terms by name, each a mean or a pair (sum, weight); its metrics)."""
    if isinstance(returned, dict):
        return returned, {}
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], dict):
        return returned
    if isinstance(returned, tuple) and len(returned) == 3:
        return {ONLY: returned[:2]}, returned[2]
    return {ONLY: returned}, {}


def loss_sums(returned: PyTree) -> list[jax.Array]:
    """What a loss function returned as sums over examples: of each term a sum and its weight, and so of each metric.

    A mean has weight 1. All are in the dtype of the loss's sums: a count of tokens may be too large or too fine for a
    narrow loss.
    """
    terms, metrics = loss_parts(returned)
    as_pair = lambda value: value if isinstance(value, tuple) else (value, 1.0)
    pairs = [(jnp.asarray(total), weight) for total, weight in (as_pair(terms[name]) for name in sorted(terms))]
    dtype = accumulator_dtype(jnp.result_type(*(total for total, _ in pairs)))
    constant = lambda value: jax.lax.stop_gradient(jnp.asarray(value)).astype(dtype)
    measured = [constant(part) for name in sorted(metrics) for part in as_pair(metrics[name])]
    return [*(part for total, weight in pairs for part in (total, constant(weight))), *measured]


@dataclass(frozen=True, eq=False)
class TracedLoss:
    """What a loss function returns for a micro-batch.

    Attributes:
      function: the user's.
      of_batch: the type of a whole batch's loss.
      terms: the names of the means that it is the sum of, in the order of `loss_sums`.
      metrics: the names of its metrics, in the order of `loss_sums`.
      weights: micro-batch -> the weights of its terms, if there are several.
      weight_follows_outputs: whether it returned a pair whose second part depends on floating-point outputs.
      constrained: the mesh axes that sharding constraints and `shard_map`s in it name.
    """

    function: LossFn
    of_batch: jax.ShapeDtypeStruct
    terms: tuple[str, ...]
    metrics: tuple[str, ...]
    weights: ClosedJaxpr | None
    weight_follows_outputs: bool
    constrained: frozenset[str]

    def sums(self, outputs: PyTree, batch: Batch) -> list[jax.Array]:
        """The sums of a micro-batch (`loss_sums`)."""
        return loss_sums(self.function(outputs, batch))

    def means(self, sums: list[jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
        """(the loss of the whole batch, its terms and metrics by name), from the sums over all micro-batches."""
        found = [total / weight for total, weight in zip(sums[::2], sums[1::2], strict=True)]
        named = dict(zip((*self.terms, *self.metrics), found, strict=True))
        named.pop(ONLY, None)
        return sum(found[1 : len(self.terms)], found[0]), named

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
      ValueError: it raised an error; or returned neither a floating-point scalar, nor a tuple of scalars and metrics,
        nor a dict of scalars and pairs of which no weight depends on the outputs.
    """
    try:
        jaxpr, returned = trace(loss_fn, outputs, batch)
    except Exception as error:
        raise ValueError(
            f"loss_fn(outputs, batch) raised {type(error).__name__}: {error}; it was called with the outputs "
            f"{describe(outputs)} and the batch {describe(batch)} of one micro-batch (the first batch that a pipeline "
            "sees has to be a whole one, not its inputs alone)"
        ) from error
    terms, metrics = loss_parts(returned)
    _check_terms(returned, terms)
    _check_metrics(returned, terms, metrics)
    sums = without_prints(trace(lambda outputs, batch: loss_sums(loss_fn(outputs, batch)), outputs, batch)[0])
    names, leaves = tuple(sorted(terms)), jax.tree.leaves(outputs)
    of_weight = lambda t: [i == 2 * t + 1 for i in range(len(sums.out_avals))]
    follows = [uses(sums, of_weight(t))[: len(leaves)] for t in range(len(names))]
    is_pair = ONLY in terms and isinstance(returned, tuple) and len(returned) == 2
    of_floats = any(on and is_float(leaf) for on, leaf in zip(follows[0], leaves, strict=True))
    return TracedLoss(
        function=loss_fn,
        of_batch=jax.ShapeDtypeStruct((), shapes_of(sums.jaxpr.outvars)[1].dtype),
        terms=names,
        metrics=tuple(sorted(metrics)),
        weights=_weights(sums, names, follows) if len(names) > 1 else None,
        weight_follows_outputs=is_pair and of_floats,
        constrained=named_axes(jaxpr),
    )


def _weights(sums: ClosedJaxpr, names: Sequence[str], follows: Sequence[Sequence[bool]]) -> ClosedJaxpr:
    """Micro-batch -> the weights of several terms, which have to be known before any of them has a gradient.

    Args:
      sums: outputs, micro-batch -> `loss_sums`.
      names: of the terms.
      follows: for each term, of which leaves of the outputs its weight is a function.

    Raises:
      ValueError: it is one of any.
    """
    for name, outputs in zip(names, follows, strict=True):
        if any(outputs):
            raise ValueError(
                f"loss_fn returned the term {name!r} with a weight that depends on the model's outputs. The weights of "
                "several terms have to follow from the batch alone, since the gradients of each are divided by its own "
                "before they are added up; compute it from the batch, or return one pair (loss_sum, weight_sum)"
            )
    is_weight = [i < 2 * len(names) and i % 2 == 1 for i in range(len(sums.out_avals))]
    needed = [i >= len(follows[0]) for i in range(len(sums.in_avals))]
    return needed_part(sums, is_weight, keep=needed)[0]


def _is_scalar(value: Leaf) -> bool:
    return hasattr(value, "shape") and value.shape == ()


def _check_terms(returned: Shapes, terms: dict[str, PyTree]) -> None:
    """Checks the means that a loss function returned.

    Raises:
      ValueError: there are none, a name is no string or one of jpipe's own metrics', or a value is neither a
        floating-point scalar nor a pair of scalars of which the first is one.
    """
    pairs = {name: value if isinstance(value, tuple) else (value, value) for name, value in terms.items()}
    fits = [isinstance(name, str) and len(pair) == 2 and all(map(_is_scalar, pair)) for name, pair in pairs.items()]
    if not fits or not all(fits):
        raise ValueError(
            f"loss_fn returned {describe(returned)}; it has to return a scalar (the mean loss), a pair of scalars "
            "(loss_sum, weight_sum), or (loss_sum, weight_sum, metrics); or, for a loss of several means, a dict of "
            "such scalars or pairs by name, alone or as (dict, metrics)"
        )
    for name, (total, _) in pairs.items():
        of = f" as {name!r}" if name else ""
        if not jnp.issubdtype(total.dtype, jnp.floating):
            raise ValueError(f"loss_fn returned a loss of dtype {total.dtype}{of}; it has to be floating-point")
        if name in OWN_METRICS:
            raise ValueError(f"loss_fn returned a loss{of}, as one of jpipe's own metrics is called; use another name")


def _check_metrics(returned: Shapes, terms: dict[str, PyTree], metrics: PyTree) -> None:
    """Checks the metrics that a loss function returned.

    Raises:
      ValueError: no dict, a name that jpipe's own metrics or a term has, or a value that is neither a scalar nor a pair
        of them.
    """
    if not isinstance(metrics, dict) or not all(isinstance(name, str) for name in metrics):
        raise ValueError(
            f"loss_fn returned {describe(returned)}; its last part, metrics, has to be a dict with names as keys"
        )
    for name, value in metrics.items():
        if name in OWN_METRICS or name in terms:
            other = "a term of the loss" if name in terms else "one of jpipe's own"
            raise ValueError(f"loss_fn returned a metric called {name!r}, as {other} is; use another name")
        pair = value if isinstance(value, tuple) else (value, value)
        if len(pair) != 2 or not all(map(_is_scalar, pair)):
            raise ValueError(
                f"loss_fn returned {describe(value)} as the metric {name!r}; it has to be a scalar (the mean of the "
                "micro-batch) or a pair of scalars (sum, weight)"
            )
