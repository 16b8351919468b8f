"""Finds where the batch lies in a model's outputs, and joins the outputs of micro-batches along it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jpipe.types import Shapes


def output_axes(outputs: Shapes, doubled: Shapes | None, size: int) -> tuple[int, ...]:
    """The batch axis of each leaf of a model's outputs.

    It is the one axis that is twice as long for micro-batches of twice the size. A leaf without one may begin with an
    axis of 1, and then gives one row for each micro-batch.

    Args:
      outputs: of a micro-batch of b examples.
      doubled: of one of 2b; None if the model takes no other size than b. Then the batch axis is the only one of
        length b.
      size: b.

    Raises:
      ValueError: a leaf has no batch axis, or several; its path, shape and the remedy are named.
    """
    leaves, axes = jax.tree_util.tree_leaves_with_path(outputs), []
    as_if = [[2 * n if n == size else n for n in leaf.shape] for _, leaf in leaves]
    shapes = as_if if doubled is None else [leaf.shape for leaf in jax.tree.leaves(doubled)]
    for (path, leaf), twice in zip(leaves, shapes, strict=True):
        found = [d for d, (n, new) in enumerate(zip(leaf.shape, twice, strict=True)) if n != new]
        if any(twice[d] != 2 * leaf.shape[d] for d in found):
            found = []
        elif not found and leaf.shape[:1] == (1,):
            found = [0]
        if len(found) != 1:
            raise ValueError(
                f"outputs{jax.tree_util.keystr(path)} has the shape {leaf.shape} for micro-batches of {size} examples, "
                f"in which {'no axis is' if not found else f'the axes {found} may each be'} the batch, so that the "
                "outputs of micro-batches can't be joined. Return a mean or a sum among the loss's metrics instead; or "
                "let it begin with an axis of one, as x[None], to get a row for each micro-batch"
            )
        axes.append(found[0])
    return tuple(axes)


def join_microbatches(leaf: jax.Array, axis: int = 0) -> jax.Array:
    """`[M, ..., B/M, ...]` to `[..., B, ...]`: the outputs of micro-batches joined along their batch axis."""
    rest = leaf.shape[1:]
    whole = (*rest[:axis], leaf.shape[0] * rest[axis], *rest[axis + 1 :])
    return jnp.reshape(jnp.moveaxis(leaf, 0, axis), whole)
