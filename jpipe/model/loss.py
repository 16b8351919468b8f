"""Takes a loss's result apart, (sum, weight) or a mean, as sums over examples that are added up and divided once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jpipe.arrays.dtypes import accumulator_dtype
from jpipe.jaxprs.rewriting import uses, without_prints
from jpipe.jaxprs.tracing import trace
from jpipe.layers.base import describe
from jpipe.layers.functions import signature_of
from jpipe.model.random_keys import key_shape, loss_key
from jpipe.partitioner.user_shardings import named_axes
from jpipe.seam.inside import needed_part
from jpipe.seam.jaxpr_types import ClosedJaxpr, shapes_of
from jpipe.terminal.notices import warn_user
from jpipe.types import Batch, Leaf, PyTree, Shapes

LossFn = Callable[..., PyTree]
"""`(outputs, micro-batch)` -> the mean loss, `(loss_sum, weight_sum)`, `(loss_sum, weight_sum, metrics)`; or several
means, a dict of such means or pairs, or `(dict, metrics)`. One with a parameter `key` is given a random key too."""

OWN_METRICS = ("loss", "grad_norm", "finite")
ONLY = ""
"""The name of a loss that is one mean."""


def loss_parts(returned: PyTree) -> tuple[dict[str, PyTree], PyTree]:
    """Takes a loss function's result apart: (its terms by name, each a mean or a pair (sum, weight); its metrics)."""
    if isinstance(returned, dict):
        return returned, {}
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], dict):
        return returned
    if isinstance(returned, tuple) and len(returned) == 3:
        return {ONLY: returned[:2]}, returned[2]
    return {ONLY: returned}, {}


def loss_sums(returned: PyTree) -> list[jax.Array]:
    """Lists the sums over examples in a loss function's result: for each term, then each metric, a sum and its weight.

    A mean has weight 1. All are in the dtype of the loss's sums: a count of tokens may be too large or too fine for a
    narrow loss.
    """
    terms, metrics = loss_parts(returned)
    pairs = [_as_pair(terms[name], 1.0) for name in sorted(terms)]
    dtype = accumulator_dtype(jnp.result_type(*(jnp.asarray(total) for total, _ in pairs)))
    constant = lambda value: jax.lax.stop_gradient(jnp.asarray(value)).astype(dtype)
    metric_parts = [constant(part) for name in sorted(metrics) for part in _as_pair(metrics[name], 1.0)]
    return [*(part for total, weight in pairs for part in (jnp.asarray(total), constant(weight))), *metric_parts]


def _as_pair(value: PyTree, weight: object) -> tuple:
    """Makes a pair of a term or a metric: itself if it is a tuple, else with this weight."""
    return value if isinstance(value, tuple) else (value, weight)


@dataclass(frozen=True, eq=False)
class TracedLoss:
    """The result of a loss function for a micro-batch, traced.

    Attributes:
      function: the user's.
      of_batch: the type of a whole batch's loss.
      terms: the names of the means that it is the sum of, in the order of `loss_sums`.
      metrics: the names of its metrics, in the order of `loss_sums`.
      weights: micro-batch -> the weights of its terms, which are known before any layer runs; None if the weight of a
        single term depends on the outputs or on the key.
      is_pair: whether it returned `(loss_sum, weight_sum)` without metrics.
      needs_key: whether it draws random numbers.
      constrained: the mesh axes that sharding constraints and `shard_map`s in it name.
    """

    function: LossFn
    of_batch: jax.ShapeDtypeStruct
    terms: tuple[str, ...]
    metrics: tuple[str, ...]
    weights: ClosedJaxpr | None
    is_pair: bool
    needs_key: bool
    constrained: frozenset[str]

    def sums(self, outputs: PyTree, batch: Batch, key: Leaf | None) -> list[jax.Array]:
        """Computes the sums of a micro-batch (`loss_sums`); `key` is the last layer's, None in evaluation.

        Raises:
          ValueError: the loss can't be computed without a key.
        """
        if key is not None or "key" not in signature_of(self.function):
            return loss_sums(_called(self.function, outputs, batch, None if key is None else loss_key(key)))
        try:
            sums = loss_sums(_called(self.function, outputs, batch, None))
            if len(sums) != 2 * len((*self.terms, *self.metrics)):
                raise ValueError("it returns other terms or metrics than with one")
            return sums
        except Exception as error:
            fault = f"loss_fn {loss_name(self.function)} raised {type(error).__name__}: {error}"
            remedy = "It was called with key=None, as in evaluation; let it do without a key there, and return as much"
            raise ValueError(f"{fault}. {remedy}") from error

    def means(self, sums: list[jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Divides the sums over all micro-batches: (the loss of the whole batch, its terms and metrics by name)."""
        quotients = [total / weight for total, weight in zip(sums[::2], sums[1::2], strict=True)]
        named = dict(zip((*self.terms, *self.metrics), quotients, strict=True))
        named.pop(ONLY, None)
        return sum(quotients[1 : len(self.terms)], quotients[0]), named

    def warn_of_late_weight(self) -> None:
        """Warns of a weight that is known only after the forward: the backward can't start from 1 / weight then.

        A pair is most likely (loss, metric), and would be read as (loss_sum, weight_sum).
        """
        if self.weights is not None:
            return
        metric = "If the second value is a metric, return the loss alone, or (loss, 1.0, {'accuracy': accuracy}). "
        warn_user(
            f"loss_fn {loss_name(self.function)} returned a weight_sum that depends on the model's outputs or on its "
            f"key. {metric * self.is_pair}Such a weight isn't known before the backward. So jpipe divides gradients at "
            "the end of the step, and a backward rule that isn't linear (a jax.custom_vjp that clips or rounds) sees "
            "cotangents that are larger by the weight. Compute the weight from the batch alone to avoid this"
        )


def loss_name(function: LossFn) -> str:
    """Returns the name of a user's function, for messages."""
    inner = function.func if isinstance(function, functools.partial) else function
    return getattr(inner, "__qualname__", type(inner).__name__)


def _called(function: LossFn, outputs: PyTree, batch: Batch, key: Leaf | None) -> PyTree:
    """Calls a loss function; it gets the key if its signature has a parameter `key`."""
    return function(outputs, batch, **({"key": key} if "key" in signature_of(function) else {}))


def trace_loss(loss_fn: LossFn, outputs: Shapes, batch: Shapes) -> TracedLoss:
    """Traces a loss function at what the model gives for one micro-batch.

    Args:
      loss_fn: the user's.
      outputs: what the last layer gives, shapes.
      batch: the micro-batch, shapes `[b, ...]`.

    Raises:
      ValueError: it raised an error; or returned neither a floating-point scalar, nor a tuple of scalars and metrics,
        nor a dict of scalars and pairs of which no weight depends on the outputs.
    """
    call = functools.partial(_called, loss_fn)
    try:
        jaxpr, returned = trace(call, outputs, batch, key_shape())
    except Exception as error:
        bare = jax.tree_util.treedef_is_leaf(jax.tree.structure(batch))
        hint = "; the first batch that a pipeline sees has to be a whole one, not its inputs alone" * bare
        fault = f"loss_fn(outputs, batch) raised {type(error).__name__}: {error}"
        called = f"the outputs {describe(outputs)} and the batch {describe(batch)} of one micro-batch{hint}"
        raise ValueError(f"{fault}; it was called with {called}") from error
    terms, metrics = loss_parts(returned)
    _check_terms(returned, terms)
    _check_metrics(returned, terms, metrics)
    sums = without_prints(trace(lambda *arguments: loss_sums(call(*arguments)), outputs, batch, key_shape())[0])
    names = tuple(sorted(terms))
    return TracedLoss(
        function=loss_fn,
        of_batch=jax.ShapeDtypeStruct((), shapes_of(sums.jaxpr.outvars)[1].dtype),
        terms=names,
        metrics=tuple(sorted(metrics)),
        weights=_weights(sums, names, len(jax.tree.leaves(outputs))),
        is_pair=ONLY in terms and isinstance(returned, tuple) and len(returned) == 2,
        needs_key=uses(sums)[-1],
        constrained=named_axes(jaxpr),
    )


def _weights(sums: ClosedJaxpr, names: Sequence[str], num_outputs: int) -> ClosedJaxpr | None:
    """Traces micro-batch -> the terms' weights; None if the only term's weight depends on more than the batch.

    Args:
      sums: leaves of the outputs, of the micro-batch, random key -> `loss_sums`.
      names: of the terms.
      num_outputs: how many leaves the outputs have.

    Raises:
      ValueError: there are several terms, and a weight depends on more than the batch.
    """
    of_batch = [num_outputs <= i < len(sums.in_avals) - 1 for i in range(len(sums.in_avals))]

    def are_weights(terms: Collection[int]) -> list[bool]:
        return [i in {2 * t + 1 for t in terms} for i in range(len(sums.out_avals))]

    for t, name in enumerate(names):
        if any(used and not is_known for used, is_known in zip(uses(sums, are_weights([t])), of_batch, strict=True)):
            if len(names) == 1:
                return None
            fault = f"loss_fn returned the term {name!r} with a weight that depends on the model's outputs"
            remedy = "compute it from the batch alone, or return one pair (loss_sum, weight_sum)"
            raise ValueError(f"{fault}; {remedy}")
    return needed_part(sums, are_weights(range(len(names))), keep=of_batch)[0]


def _are_scalars(value: PyTree) -> bool:
    """Whether a term or a metric is a scalar or a pair of scalars."""
    pair = _as_pair(value, value)
    return len(pair) == 2 and all(hasattr(part, "shape") and part.shape == () for part in pair)


def _check_terms(returned: Shapes, terms: dict[str, PyTree]) -> None:
    """Checks the means that a loss function returned.

    Raises:
      ValueError: there are none, a name is no string or one of jpipe's own metrics', or a value is neither a
        floating-point scalar nor a pair of scalars of which the first is one.
    """
    if not terms or not all(isinstance(name, str) and _are_scalars(value) for name, value in terms.items()):
        raise ValueError(
            f"loss_fn returned {describe(returned)}; it has to return a scalar (the mean loss), a pair of scalars "
            "(loss_sum, weight_sum), or (loss_sum, weight_sum, metrics); or, for a loss of several means, a dict of "
            "such scalars or pairs by name, alone or as (dict, metrics)"
        )
    for name, value in terms.items():
        as_name, dtype = f" as {name!r}" if name else "", _as_pair(value, value)[0].dtype
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(f"loss_fn returned a loss of dtype {dtype}{as_name}; it has to be floating-point")
        if name in OWN_METRICS:
            raise ValueError(f"loss_fn returned a loss{as_name}, as one of jpipe's own metrics is called; rename it")


def _check_metrics(returned: Shapes, terms: dict[str, PyTree], metrics: PyTree) -> None:
    """Checks the metrics that a loss function returned.

    Raises:
      ValueError: no dict, a name that jpipe's own metrics or a term has, or a value that is neither a scalar nor a pair
        of them.
    """
    if not isinstance(metrics, dict) or not all(isinstance(name, str) for name in metrics):
        remedy = "its last part, metrics, has to be a dict with names as keys"
        raise ValueError(f"loss_fn returned {describe(returned)}; {remedy}")
    for name, value in metrics.items():
        if name in OWN_METRICS or name in terms:
            other = "a term of the loss" if name in terms else "one of jpipe's own"
            raise ValueError(f"loss_fn returned a metric called {name!r}, as {other} is; use another name")
        if not _are_scalars(value):
            remedy = "it has to be a scalar (the mean of the micro-batch) or a pair of scalars (sum, weight)"
            raise ValueError(f"loss_fn returned {describe(value)} as the metric {name!r}; {remedy}")
