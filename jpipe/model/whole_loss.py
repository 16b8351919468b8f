"""Computes losses that are numbers of the whole mini-batch: as parts of micro-batches that add up, or at once.

`PartsOfLoss` is for losses that treat examples by themselves until they sum them up (`jpipe.partitioner.examples`). The
loss and its gradient are traced for the whole mini-batch, with its numbers, such as the divisor of a mean, and carried
out on a micro-batch. So a derivative that the user gave to a function (`jax.custom_vjp`) stays as it is.

Every other loss is computed at once, of the outputs of all micro-batches, with its gradient at them (`with_gradient`,
for `loss_over="batch"`). Each micro-batch's part is then the product of its outputs with that gradient, which has the
gradients of the loss (GradCache, Gao et al., arXiv 2101.06983).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jpipe.jax.primitives import ClosedJaxpr, shapes_of
from jpipe.jax.tracing import trace
from jpipe.jax.trees import is_float
from jpipe.partitioner.examples import Examples, Known
from jpipe.partitioner.shardings import PARTIAL, REPLICATED, Axis, AxisSharding, Partial, Shard, part_structs
from jpipe.types import Batch, Leaf, PyTree, Shapes

Terms = Callable[[PyTree, Batch, Leaf | None], list[jax.Array]]
"""(outputs, batch, random key) -> the terms of a loss, scalars."""
Arguments = tuple[Shapes, Shapes, Shapes | None]
"""The shapes of its arguments; no key in evaluation."""


@dataclass(frozen=True)
class Averaged(Partial):
    """An array of the mini-batch is the mean of what micro-batches have."""


AVERAGED = Averaged()


def whole_structs(tree: Shapes, lying: Sequence[AxisSharding], count: int) -> Shapes:
    """The shapes of arrays of a mini-batch, from those of a micro-batch and how it lies in them."""

    def whole(leaf: jax.ShapeDtypeStruct, at: AxisSharding) -> jax.ShapeDtypeStruct:
        grows = at.dim if isinstance(at, Shard) else -1
        return leaf.update(shape=tuple(n * count if d == grows else n for d, n in enumerate(leaf.shape)))

    leaves, structure = jax.tree.flatten(tree)
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

    def __init__(self, terms: Terms, of_part: Arguments, whole: Arguments, lying: Sequence[AxisSharding]):
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
        types = iter(shapes_of(self.ahead.jaxpr.outvars))
        self.shapes = [self._shape(one, types, examples.axis) for one in self.known]

    @staticmethod
    def _shape(one: Known, types: Iterator[jax.ShapeDtypeStruct], axis: Axis) -> jax.ShapeDtypeStruct:
        if one.value is None:
            return jax.ShapeDtypeStruct((), jnp.int32)
        whole = next(types)
        return whole if one.shard is None else part_structs([whole], [(one.shard,)], (axis,))[0]

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
