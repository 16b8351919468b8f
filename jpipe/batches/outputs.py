"""Finds where the batch lies in a model's outputs, and joins the outputs of micro-batches along it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jpipe.arrays.trees import named_leaves
from jpipe.mesh.splits import Splits
from jpipe.model.groups import LayerGroup
from jpipe.partitioner.shardings import Shard
from jpipe.types import Shapes

_HALVES = "examples"


def in_halves(mesh: Mesh) -> Splits:
    """Splits over two devices, each of which has half of the examples and all weights, for layers of this mesh."""
    sizes = (1,) * len(mesh.axis_names) + (2,)
    return Splits(AbstractMesh(sizes, (*mesh.axis_names, _HALVES)), (_HALVES,))


def output_axes(outputs: Shapes, doubled: LayerGroup | None, size: int) -> tuple[int, ...]:
    """The batch axis of each leaf of a model's outputs.

    It is the one axis that is twice as long for micro-batches of twice the size. If it holds examples and more, such as
    their places, `[b * T]`, the rows of an example have to lie together: half of the examples has to be half of it. A
    leaf without a batch axis may begin with an axis of 1, and then gives one row for each micro-batch.

    Args:
      outputs: those of a micro-batch of b examples, as shapes.
      doubled: the last layer for a micro-batch of 2b, `in_halves`; None if the model takes no other size than b. Then
        the batch axis is the only one of length b.
      size: b.

    Raises:
      ValueError: a leaf has no batch axis, or several, or one in which examples lie apart; path, shape and remedy are
        named.
    """
    leaves, axes = named_leaves("outputs", outputs), []
    as_if = [[2 * n if n == size else n for n in leaf.shape] for _, leaf in leaves]
    shapes = as_if if doubled is None else [leaf.shape for leaf in jax.tree.leaves(doubled.gives)]
    shardings = [()] * len(leaves) if doubled is None else doubled.gives_at
    for (name, leaf), twice, sharding in zip(leaves, shapes, shardings, strict=True):
        growing = [d for d, (n, new) in enumerate(zip(leaf.shape, twice, strict=True)) if n != new]
        fault = ""
        if not growing or any(twice[d] != 2 * leaf.shape[d] for d in growing):
            fault = "no axis is the batch"
        elif len(growing) > 1:
            fault = f"the axes {growing} may each be the batch"
        elif leaf.shape[growing[0]] != size and tuple(sharding) != (Shard(growing[0], 1),):
            fault = f"examples are mixed with something else in axis {growing[0]}"
        if fault and (growing or leaf.shape[:1] != (1,)):
            raise ValueError(
                f"{name} has the shape {leaf.shape} for micro-batches of {size} examples, in which {fault}, so that "
                "the outputs of micro-batches can't be joined. Give the batch an axis of its own; return a mean or a "
                "sum among the loss's metrics instead; or let the output begin with an axis of one, as x[None], to "
                "get a row for each micro-batch"
            )
        axes.append(growing[0] if growing else 0)
    return tuple(axes)


def join_microbatches(leaf: jax.Array, axis: int = 0) -> jax.Array:
    """`[M, ..., B/M, ...]` to `[..., B, ...]`: the outputs of micro-batches joined along their batch axis."""
    rest = leaf.shape[1:]
    whole = (*rest[:axis], leaf.shape[0] * rest[axis], *rest[axis + 1 :])
    return jnp.reshape(jnp.moveaxis(leaf, 0, axis), whole)
