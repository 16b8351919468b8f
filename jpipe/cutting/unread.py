"""Finds the outputs of a model that its loss doesn't read: what modules return besides, such as each block's values.

No stage carries them to the last one. There they are None, and the loss, which may look at them but uses nothing of
them, sees zeros.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import suppress

import jax
import jax.numpy as jnp

from jpipe.jax.tracing import trace, uses
from jpipe.layers.functions import signature_of
from jpipe.model.loss import LossFn
from jpipe.model.random_keys import key_shape
from jpipe.types import Batch, PyTree, Shapes


def outputs_read(loss_fn: LossFn | None, outputs: Shapes, batch: Shapes) -> tuple[bool, ...]:
    """For each leaf of a model's outputs, whether a loss reads it, in training or in evaluation.

    All count as read without a loss, or if the loss fails, which is told elsewhere, or if it reads none.

    Args:
      loss_fn: the user's.
      outputs, batch: for one micro-batch.
    """
    read = [loss_fn is None] * len(jax.tree.leaves(outputs))

    def call(outputs: PyTree, batch: Batch, key: jax.Array | None) -> PyTree:
        return loss_fn and loss_fn(outputs, batch, **({"key": key} if "key" in signature_of(loss_fn) else {}))

    with suppress(Exception):
        for key in (key_shape(), None):
            reads = uses(trace(call, outputs, batch, key)[0])
            read = [a or b for a, b in zip(read, reads, strict=False)]
    return tuple(read) if any(read) else (True,) * len(read)


def without_unread(outputs: Shapes, read: Sequence[bool]) -> Shapes:
    """A model's outputs with None for each leaf that isn't read."""
    leaves, structure = jax.tree.flatten(outputs)
    pairs = zip(leaves, read, strict=True)
    return jax.tree.unflatten(structure, [leaf if is_read else None for leaf, is_read in pairs])


def with_zeros(loss_fn: LossFn, outputs: Shapes, shapes: Shapes, read: Sequence[bool]) -> LossFn:
    """A loss that takes outputs with None for each leaf that isn't read.

    Args:
      loss_fn: the user's.
      outputs, shapes: all outputs for one micro-batch, and that micro-batch.
      read: for each leaf of the outputs, whether it is read.

    Raises:
      ValueError: it reads others at these shapes.
    """
    if all(read):
        return loss_fn
    if any(now and not then for now, then in zip(outputs_read(loss_fn, outputs, shapes), read, strict=True)):
        raise ValueError(
            "loss_fn reads outputs of the model, of a batch of these shapes, that it didn't read of the first one; "
            "let it read the same for all shapes"
        )

    @functools.wraps(loss_fn)
    def loss(given: PyTree, batch: Batch, **options: object) -> PyTree:
        kept, size = iter(jax.tree.leaves(given)), jax.tree.leaves(shapes)[0].shape[0]
        ratio = jax.tree.leaves(batch)[0].shape[0] // size  # of a whole mini-batch the zeros are as many
        rows = lambda shape: (ratio * size, *shape[1:]) if shape[:1] == (size,) else shape
        pairs = zip(jax.tree.leaves(outputs), read, strict=True)
        leaves = [next(kept) if is_read else jnp.zeros(rows(leaf.shape), leaf.dtype) for leaf, is_read in pairs]
        return loss_fn(jax.tree.unflatten(jax.tree.structure(outputs), leaves), batch, **options)

    return loss
