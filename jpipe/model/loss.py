"""A user's loss function: what it may return, and how the parts of micro-batches make up the loss of the mini-batch.

A loss that treats examples by themselves until it sums them up (`jpipe.partitioner.examples`) is traced with its
gradient for the whole mini-batch, and carried out on a micro-batch (`PartsOfLoss`). So a derivative that the user gave
to a function (`jax.custom_vjp`) stays as it is. Others are computed at once (`with_gradient`), of the outputs of all
micro-batches. Each micro-batch's part is then the product of its outputs with that gradient (GradCache, Gao et al.,
arXiv 2101.06983).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jpipe.jax.inside import needed_part
from jpipe.jax.primitives import ClosedJaxpr, shapes_of
from jpipe.jax.tracing import interpret, trace, uses, without_prints
from jpipe.jax.trees import accumulator_dtype, is_float
from jpipe.layers.base import describe
from jpipe.layers.calls import signature_of
from jpipe.model.random_keys import key_shape, loss_key
from jpipe.partitioner.examples import INDEX, CouplesError, Examples
from jpipe.partitioner.per_device import named_axes
from jpipe.partitioner.shardings import PARTIAL, REPLICATED, AxisSharding, Partial, Shard, part_structs
from jpipe.types import Batch, Leaf, PyTree, Shapes

Terms = Callable[[PyTree, Batch, Leaf | None], list[jax.Array]]
"""(outputs, batch, random key) -> the terms of a loss, scalars."""
LossShapes = tuple[Shapes, Shapes, Shapes | None]
"""The shapes of its arguments; no key in evaluation."""


@dataclass(frozen=True)
class Averaged(Partial):
    """An array of the mini-batch is the mean of what micro-batches have."""


AVERAGED = Averaged()


def whole_structs(tree: Shapes, lying: Sequence[AxisSharding], count: int) -> Shapes:
    """The shapes of arrays of a mini-batch, from those of a micro-batch and how it lies in them."""
    leaves, structure = jax.tree.flatten(tree)
    times = lambda dim, at: count if isinstance(at, Shard) and at.dim == dim else 1
    whole = lambda leaf, at: leaf.update(shape=tuple(n * times(dim, at) for dim, n in enumerate(leaf.shape)))
    return jax.tree.unflatten(structure, list(map(whole, leaves, lying)))


def with_gradient(terms: Terms, outputs: Shapes, batch: Shapes, key: Shapes | None) -> ClosedJaxpr:
    """Traces the terms of a loss with their gradient.

    Returns:
      outputs, batch, key, a cotangent for each term -> the terms, the gradients at floating-point outputs; all flat.
    """
    structure = jax.tree.structure(outputs)

    def run(leaves: list[Leaf], batch: Batch, key: Leaf | None, cotangents: list[Leaf]) -> tuple[PyTree, PyTree]:
        def of_floats(floats: list[Leaf]) -> list[jax.Array]:
            rest = iter(floats)
            mixed = [next(rest) if is_float(leaf) else leaf for leaf in leaves]
            return terms(jax.tree.unflatten(structure, mixed), batch, key)

        values, vjp = jax.vjp(of_floats, list(filter(is_float, leaves)))
        return values, vjp(cotangents)

    cotangents = [jax.ShapeDtypeStruct((), v.dtype) for v in trace(terms, outputs, batch, key)[1]]
    return trace(run, jax.tree.leaves(outputs), batch, key, cotangents)[0]


class PartsOfLoss:
    """Terms of a loss as sums of a part for each micro-batch.

    Args:
      terms: the user's.
      of_part, whole: the shapes of outputs, batch and random key (None in evaluation) of a micro-batch, and of all.
      lying: how a micro-batch lies in each leaf of all outputs.

    Attributes:
      known: what a micro-batch needs of the whole mini-batch.
      shapes: the shapes of its values of these.
      ahead: leaves of the mini-batch -> these but for the micro-batch's index, whole.

    Raises:
      CouplesError: an equation couples examples.
    """

    def __init__(self, terms: Terms, of_part: LossShapes, whole: LossShapes, lying: Sequence[AxisSharding]):
        leaves, (outputs, batch, key) = jax.tree.leaves(of_part[1]), whole
        count, late = jax.tree.leaves(batch)[0].shape[0] // leaves[0].shape[0], [True] * len(lying)
        at = [*(PARTIAL if at == AVERAGED else at for at in lying), *[Shard(0)] * len(leaves)]
        keys = [REPLICATED] * (key is not None)
        late += [False] * len(leaves) + [True] * len(keys)
        # First the terms alone, so that what couples is named by a line of the loss, and not of its gradient.
        closed, values = trace(terms, *whole)
        Examples(closed, count, at + keys, late, strict=True)
        others = [REPLICATED] * len(values), [True] * len(values)
        closed = with_gradient(terms, *whole)
        examples = Examples(closed, count, at + keys + others[0], late + others[1], strict=True)
        of_terms, of_outputs = examples.flat.results[: len(values)], examples.flat.results[len(values) :]
        floats = [s for s, leaf in zip(at, jax.tree.leaves(outputs), strict=False) if is_float(leaf)]
        forms = [{REPLICATED: PARTIAL, PARTIAL: REPLICATED}.get(s, s) for s in floats]
        self._value = examples.function([(n, PARTIAL) for n in of_terms], shows=True)
        self._gradient = examples.function(list(zip(of_outputs, forms, strict=True)))
        self._zeros, self._count, self._lying = [0.0] * len(values), count, lying
        self.known, self.ahead = tuple(examples.known), examples.ahead()
        index, types = jax.ShapeDtypeStruct((), jnp.int32), iter(shapes_of(self.ahead.jaxpr.outvars))
        whole_known = [index if one == INDEX else next(types) for one in self.known]
        known_at = [(REPLICATED if one == INDEX else one.shard or REPLICATED,) for one in self.known]
        self.shapes = part_structs(whole_known, known_at, (examples.axis,))

    def __call__(self, outputs: PyTree, batch: Batch, key: Leaf | None, known: Sequence[Leaf]) -> list[jax.Array]:
        """Computes a micro-batch's parts of the terms."""
        share = lambda leaf, at: leaf / self._count if at == AVERAGED and is_float(leaf) else leaf
        leaves = list(map(share, jax.tree.leaves(outputs), self._lying))
        others = [*filter(lambda leaf: not is_float(leaf), leaves), *jax.tree.leaves((batch, key))]

        def given(floats: list[Leaf], others: list[Leaf]) -> list[Leaf]:
            chosen, rest = iter(floats), iter(others)
            return [*(next(chosen if is_float(leaf) else rest) for leaf in leaves), *rest]

        # All that the backward reads is handed to it: it is traced apart.
        @jax.custom_vjp
        def parts(floats: list[Leaf], others: list[Leaf], known: list[Leaf]) -> list[Leaf]:
            return self._value([*given(floats, others), *self._zeros], known)

        def backward(residuals: tuple, cotangents: list[Leaf]) -> tuple[list[Leaf], None, None]:
            floats, others, known = residuals
            return self._gradient([*given(floats, others), *cotangents], known), None, None

        parts.defvjp(lambda *arguments: (parts(*arguments), arguments), backward)
        return parts(list(filter(is_float, leaves)), others, list(known))


LossFn = Callable[..., PyTree]
"""`(outputs, batch)` -> the loss, `(loss_sum, weight_sum)`, `(loss_sum, weight_sum, metrics)`; or a dict of losses or
pairs, whose sum is the loss, or `(dict, metrics)`. One with a parameter `key` is given a random key too."""

OWN_METRICS = ("loss", "grad_norm", "finite")
ONLY = ""
"""The name of a loss of one term."""
OVER = (None, "batch", "microbatch")
"""What a loss may be taken over (`loss_over`): by default a number is the mini-batch's, and is shown to be its sum over
micro-batches; or it is computed of all outputs at once; or each micro-batch has its own."""


def loss_parts(returned: PyTree) -> tuple[dict[str, PyTree], PyTree]:
    """Takes a loss function's result apart: (its terms by name, each a number or a pair (sum, weight); its metrics)."""
    if isinstance(returned, dict):
        return returned, {}
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], dict):
        return returned
    if isinstance(returned, tuple) and len(returned) == 3:
        return {ONLY: returned[:2]}, returned[2]
    return {ONLY: returned}, {}


def _as_pair(value: PyTree, weight: object = 1.0) -> tuple:
    """Makes a pair of a term or a metric: itself if it is a tuple, else with this weight."""
    return value if isinstance(value, tuple) else (value, weight)


@dataclass(frozen=True, eq=False, kw_only=True)
class TracedLoss:
    """The loss that follows the last layer, traced at the shapes of a micro-batch, in training or in evaluation.

    It is a sum of terms, and each term a sum of parts, one for each micro-batch. So the backward starts from 1.

    - A number of the mini-batch has the parts that `numbers` computes.
    - A pair (sum, weight) has as part the sum, divided by the weights of all micro-batches. These are known before any
      layer runs. (Where each micro-batch has a loss of its own, its weight is 1.)
    - A loss `at_once` has as part the product of a micro-batch's outputs with the loss's gradient at them.

    Attributes:
      function: the user's.
      of_batch: the type of a whole batch's loss.
      terms: the names of its terms.
      metrics: the names of its metrics.
      weights: micro-batch, random key (none in evaluation) -> the weights of all terms.
      total_weights: these, over all micro-batches, if they follow from shapes alone; else None.
      number_terms: the names of the terms that are numbers of the mini-batch.
      numbers: these terms by micro-batch; None if there are none.
      at_once: outputs, mini-batch, random key -> `sums_at_once`, then the gradients at floating-point outputs; None if
        the loss isn't taken so.
      known: the shapes of what a micro-batch needs of the whole mini-batch.
      lying: how a micro-batch lies in each leaf of the outputs of all of them.
      needs_key: whether it draws random numbers.
      constrained: the mesh axes that sharding constraints and `shard_map`s in it name.
    """

    function: LossFn
    of_batch: jax.ShapeDtypeStruct
    terms: tuple[str, ...]
    metrics: tuple[str, ...]
    weights: ClosedJaxpr
    total_weights: list[float] | None
    number_terms: tuple[str, ...] = ()
    numbers: PartsOfLoss | None = None
    at_once: ClosedJaxpr | None = None
    known: Sequence[jax.ShapeDtypeStruct] = ()
    lying: Sequence[AxisSharding] = ()
    needs_key: bool
    constrained: frozenset[str]

    @property
    def takes_key(self) -> bool:
        """Whether its signature has a parameter `key`."""
        return "key" in signature_of(self.function)

    @property
    def stacked(self) -> list[bool]:
        """For each of `known`, whether each micro-batch has a part of its own."""
        of_numbers = [one.shard is not None for one in self.numbers.known] if self.numbers else []
        rest = len(self.known) - len(of_numbers)
        return [*of_numbers, *[self.at_once is not None] * rest]

    @property
    def num_differentiated(self) -> int:
        """How many of the results of `parts`, the first ones, make up the loss."""
        return len(self.terms) if self.at_once is None else 1

    def parts(self, outputs: PyTree, batch: Batch, known: Sequence[Leaf], key: Leaf | None) -> list[jax.Array]:
        """Computes a micro-batch's part of each term, then a sum and a weight for each metric.

        Args:
          outputs, batch: of the micro-batch.
          known: its values of `known`.
          key: the last layer's; None in evaluation.
        """
        if self.at_once is not None:
            floats = filter(is_float, jax.tree.leaves(outputs))
            products = [jnp.sum(gradient * leaf) for gradient, leaf in zip(known, floats, strict=True)]
            return [jnp.sum(jnp.stack([product.astype(self.of_batch.dtype) for product in products]))]
        if self.number_terms == self.terms and not self.metrics:
            parts, metrics = {}, {}
        else:
            terms, metrics = loss_parts(call_loss(self.function, outputs, batch, key))
            totals = known[-len(self.terms) :] if self.total_weights is None else self.total_weights
            weighted = zip(self.terms, totals, strict=True)
            parts = {name: self._quotient(_as_pair(terms[name])[0], total) for name, total in weighted}
        if self.numbers is not None:
            keys = key if self.takes_key else None
            parts |= dict(zip(self.number_terms, self.numbers(outputs, batch, keys, known), strict=True))
        return [*(parts[name] for name in self.terms), *self._constants(metrics)]

    def sums_at_once(self, outputs: PyTree, batch: Batch, key: Leaf | None) -> list[jax.Array]:
        """Computes each term, then a sum and a weight for each metric, of a whole mini-batch."""
        terms, metrics = loss_parts(call_loss(self.function, outputs, batch, key))
        return [*(self._quotient(*_as_pair(terms[name])) for name in self.terms), *self._constants(metrics)]

    def _quotient(self, total: Leaf, weight: Leaf) -> jax.Array:
        return jnp.asarray(total).astype(self.of_batch.dtype) * (1 / jnp.asarray(weight).astype(self.of_batch.dtype))

    def _constants(self, metrics: PyTree) -> list[jax.Array]:
        """A sum and a weight for each metric, in the dtype of the loss's sums; nothing is differentiated by them."""
        pairs = [part for name in sorted(metrics) for part in _as_pair(metrics[name])]
        return [jax.lax.stop_gradient(jnp.asarray(part)).astype(self.of_batch.dtype) for part in pairs]

    def means(self, sums: Sequence[jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
        """From the sums of all `parts`: (the whole batch's loss, its terms and metrics by name)."""
        terms, pairs = sums[: len(self.terms)], sums[len(self.terms) :]
        quotients = [total / weight for total, weight in zip(pairs[::2], pairs[1::2], strict=True)]
        named = dict(zip((*self.terms, *self.metrics), (*terms, *quotients), strict=True))
        named.pop(ONLY, None)
        return sum(terms[1:], terms[0]), named


def loss_name(function: LossFn) -> str:
    """Returns the name of a user's function, for messages."""
    inner = function.func if isinstance(function, functools.partial) else function
    return getattr(inner, "__qualname__", type(inner).__name__)


def call_loss(function: LossFn, outputs: PyTree, batch: Batch, key: Leaf | None) -> PyTree:
    """Calls a loss function. If its signature has a parameter `key`, it gets one made of the last layer's."""
    keys = {"key": None if key is None else loss_key(key)} if "key" in signature_of(function) else {}
    return function(outputs, batch, **keys)


def trace_loss(
    loss_fn: LossFn,
    outputs: Shapes,
    batch: Shapes,
    *,
    lying: Sequence[AxisSharding] = (),
    count: int = 1,
    over: str | None = None,
    with_key: bool = True,
) -> TracedLoss:
    """Traces a loss function at what the model gives for one micro-batch.

    Args:
      loss_fn: the user's.
      outputs: what the last layer gives, shapes.
      batch: the micro-batch, shapes `[b, ...]`.
      lying: how a micro-batch lies in each leaf of the outputs of all of them; empty if each has a loss of its own.
      count: M, the number of micro-batches.
      over: one of `OVER`.
      with_key: whether it gets a random key, if it takes one.

    Raises:
      ValueError: it raised an error; or returned neither a floating-point scalar, nor a tuple of scalars and metrics,
        nor a dict of scalars and pairs; or a weight depends on the outputs; or it couples examples.
    """
    takes_key = with_key and "key" in signature_of(loss_fn)
    call, key = functools.partial(call_loss, loss_fn), key_shape() if takes_key else None
    with _telling(loss_fn, "one micro-batch", outputs, batch, key):
        jaxpr, returned = trace(call, outputs, batch, key)
    terms, metrics = loss_parts(returned)
    _check_terms(returned, terms)
    _check_metrics(returned, terms, metrics)
    names = tuple(sorted(terms))
    dtype = accumulator_dtype(jnp.result_type(*(_as_pair(terms[name])[0].dtype for name in names)))
    weights, by_shapes = _weights(loss_fn, (outputs, batch, key), names, dtype)
    totals = None if by_shapes is None else [count * weight for weight in by_shapes]
    loss = TracedLoss(
        function=loss_fn,
        of_batch=jax.ShapeDtypeStruct((), dtype),
        terms=names,
        metrics=tuple(sorted(metrics)),
        weights=weights,
        total_weights=totals,
        needs_key=key is not None and uses(without_prints(jaxpr))[-1],
        constrained=named_axes(jaxpr),
        lying=lying,
    )
    with_totals = lambda loss: loss if totals else replace(loss, known=[*loss.known, *[loss.of_batch] * len(names)])
    if not lying:
        return with_totals(loss)
    by_rows = [Shard(0)] * len(jax.tree.leaves(batch))
    whole = whole_structs(outputs, lying, count), whole_structs(batch, by_rows, count), key
    if over == "batch":
        with _telling(loss_fn, "the whole mini-batch", *whole):
            at_once = with_gradient(loss.sums_at_once, *whole)
        return replace(loss, at_once=at_once, known=list(filter(is_float, jax.tree.leaves(outputs))))
    has_weight_1 = isinstance(returned, tuple) and len(returned) == 3 and by_shapes == [1.0]
    # Or each example has the weight 1, and a micro-batch has one.
    is_number = has_weight_1 and _weights(loss_fn, whole, names, dtype)[1] == [1.0]
    number_terms = tuple(name for name in names if is_number or not isinstance(terms[name], tuple))
    return with_totals(_in_parts(loss, number_terms, (outputs, batch, key), whole) if number_terms else loss)


def _in_parts(loss: TracedLoss, number_terms: tuple[str, ...], of_part: LossShapes, whole: LossShapes) -> TracedLoss:
    """The same loss, of which some terms are numbers of the mini-batch; arguments as of `trace_loss`.

    Raises:
      ValueError: it couples examples.
    """

    def terms_of(outputs: PyTree, batch: Batch, key: Leaf | None) -> list[jax.Array]:
        terms, _ = loss_parts(call_loss(loss.function, outputs, batch, key))
        return [_as_pair(terms[name])[0] for name in number_terms]

    try:
        with _telling(loss.function, "the whole mini-batch", *whole):
            parts = PartsOfLoss(terms_of, of_part, whole, loss.lying)
    except CouplesError as error:
        raise ValueError(
            f"loss_fn {loss_name(loss.function)} couples the examples of the mini-batch: {error.args[0]}. Pass "
            'loss_over="batch" to jpipe.Pipeline, which is exact; or return (loss_sum, weight_sum), for the sums of '
            'micro-batches; or pass loss_over="microbatch", for the mean of their own losses'
        ) from None
    return replace(loss, number_terms=number_terms, numbers=parts, known=parts.shapes)


@contextmanager
def _telling(function: LossFn, of: str, outputs: Shapes, batch: Shapes, key: Shapes | None) -> Iterator[None]:
    """Calls a user's loss function; what it raises is told with what it was called with.

    Raises:
      ValueError: for any error but a `CouplesError`.
    """
    try:
        yield
    except CouplesError:
        raise
    except Exception as error:
        fault = f"loss_fn(outputs, batch) raised {type(error).__name__}: {error}"
        if key is None and "key" in signature_of(function):
            remedy = "return as much there, or pass key= to pipe.evaluate"
            raise ValueError(f"{fault}. It was called with key=None, as in evaluation; {remedy}") from error
        hint = "; the first batch has to be a whole one" * jax.tree_util.treedef_is_leaf(jax.tree.structure(batch))
        called = f"the outputs {describe(outputs)} and the batch {describe(batch)} of {of}{hint}"
        raise ValueError(f"{fault}; it was called with {called}") from error


def _weights(
    loss_fn: LossFn, arguments: LossShapes, names: Sequence[str], dtype: jnp.dtype
) -> tuple[ClosedJaxpr, list[float] | None]:
    """Traces (micro-batch, random key -> the terms' weights); also their numbers, if shapes alone tell them.

    Raises:
      ValueError: a weight depends on the outputs.
    """

    def weights_of(*arguments: PyTree) -> list[jax.Array]:
        terms, _ = loss_parts(call_loss(loss_fn, *arguments))
        return [jnp.asarray(_as_pair(terms[name])[1]).astype(dtype) for name in names]

    closed = without_prints(trace(weights_of, *arguments)[0])
    num_outputs = len(jax.tree.leaves(arguments[0]))
    for i, name in enumerate(names):
        if any(uses(closed, [j == i for j in range(len(names))])[:num_outputs]):
            what = f"the term {name!r} with a weight" if name else "a weight_sum"
            raise ValueError(
                f"loss_fn {loss_name(loss_fn)} returned {what} that depends on the model's outputs; compute it from "
                "the batch, or if it is a metric, return the loss alone, or (loss, 1.0, {'accuracy': accuracy})"
            )
    of_batch = [i >= num_outputs for i in range(len(closed.in_avals))]
    weights, _ = needed_part(closed, [True] * len(names), keep=of_batch)
    alone, used = needed_part(weights, [True] * len(names))
    return weights, None if any(used) else [float(weight) for weight in interpret(alone)]


def _are_scalars(value: PyTree) -> bool:
    """Whether a term or a metric is a scalar or a pair of scalars."""
    pair = _as_pair(value, value)
    return len(pair) == 2 and all(hasattr(part, "shape") and part.shape == () for part in pair)


def _check_terms(returned: Shapes, terms: dict[str, PyTree]) -> None:
    """Checks the means that a loss function returned: floating-point scalars, or pairs of scalars, with fit names."""
    if not terms or not all(isinstance(name, str) and _are_scalars(value) for name, value in terms.items()):
        raise ValueError(
            f"loss_fn returned {describe(returned)}; return a scalar (the mean loss), (loss_sum, weight_sum) or "
            "(loss_sum, weight_sum, metrics), or a dict of such scalars or pairs by name, alone or as (dict, metrics)"
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
        raise ValueError(f"loss_fn returned {describe(returned)}; its last part, metrics, has to be a dict by name")
    for name, value in metrics.items():
        if name in OWN_METRICS or name in terms:
            raise ValueError(f"loss_fn returned a metric called {name!r}, as a term or one of jpipe's is; rename it")
        if not _are_scalars(value):
            raise ValueError(f"loss_fn gave {describe(value)} as the metric {name!r}; give a scalar or (sum, weight)")
