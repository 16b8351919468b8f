"""Finds where the batch lies in a model's outputs, and joins the outputs of micro-batches along it."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jpipe.jax.trees import named_leaves
from jpipe.mesh.splits import Splits
from jpipe.model.groups import LayerGroup
from jpipe.partitioner.shardings import REPLICATED, AxisSharding, Shard
from jpipe.types import Shapes

_HALVES = "examples"


def in_halves(mesh: Mesh) -> Splits:
    """Splits over two devices, each of which has half of the examples and all weights, for layers of this mesh."""
    sizes = (1,) * len(mesh.axis_names) + (2,)
    return Splits(AbstractMesh(sizes, (*mesh.axis_names, _HALVES)), (_HALVES,))


def output_axes(
    outputs: Shapes, doubled: LayerGroup | None, size: int, lying: Sequence[AxisSharding] | None = None
) -> tuple[int, ...]:
    """The batch axis of each leaf of a model's outputs.

    It is the one axis that is twice as long for micro-batches of twice the size. If it holds examples and more, such as
    their places, `[b * T]`, the rows of an example have to lie together: half of the examples has to be half of it. A
    leaf without a batch axis may begin with an axis of 1, and then gives one row for each micro-batch.

    Args:
      outputs: those of a micro-batch of b examples, as shapes.
      doubled: the last layer for a micro-batch of 2b, `in_halves`; None if the model takes no other size than b.
      size: b.
      lying: how examples lie in each leaf, as the layers' operations say; None if they don't say it for certain.

    Raises:
      ValueError: a leaf has no batch axis, or several, or one in which examples lie apart; path, shape and remedy are
        named. Or neither `doubled` nor `lying` tells.
    """
    leaves, axes = named_leaves("outputs", outputs), []
    if doubled is None and lying is None:
        raise ValueError(f"the model can't be traced for {2 * size} examples; let it take batches of any size")
    halves = [at[:1] for at in doubled.gives_at] if doubled else [(at,) for at in lying or ()]
    for i, (name, leaf) in enumerate(leaves):
        at, growing = (*halves[i], REPLICATED)[0], _growing(leaf, i, doubled, lying)
        fault = "" if len(growing) == 1 else f"the axes {growing} may each be the batch" if growing else _NO_AXIS
        if doubled and any(jax.tree.leaves(doubled.gives)[i].shape[d] != 2 * leaf.shape[d] for d in growing):
            fault = _NO_AXIS
        elif not fault and leaf.shape[growing[0]] != size and at != Shard(growing[0], 1):
            fault = f"examples are mixed with something else in axis {growing[0]}"
        if fault and (growing or leaf.shape[:1] != (1,)):
            raise ValueError(
                f"{name} has the shape {leaf.shape} for micro-batches of {size} examples, in which {fault}. Give the "
                "batch an axis of its own, return means as the loss's metrics, or x[None] for a row of each micro-batch"
            )
        axes.append(growing[0] if growing else 0)
    return tuple(axes)


_NO_AXIS = "no axis is the batch"


def _growing(leaf: Shapes, i: int, doubled: LayerGroup | None, lying: Sequence[AxisSharding] | None) -> list[int]:
    """The axes of output i that grow with the batch."""
    if doubled is not None:
        twice = jax.tree.leaves(doubled.gives)[i].shape
        return [d for d, (n, new) in enumerate(zip(leaf.shape, twice, strict=True)) if n != new]
    return [at.dim for at in (lying or ())[i : i + 1] if isinstance(at, Shard)]


def lying_by_shapes(
    outputs: Shapes, doubled: LayerGroup | None, lying: Sequence[AxisSharding], size: int
) -> list[AxisSharding]:
    """How a micro-batch lies in the outputs of all, where a layer couples examples, so that shapes have to confirm it.

    Args:
      outputs, doubled, size: as of `output_axes`.
      lying: as the layers' operations say.

    Raises:
      ValueError: several axes of a leaf grow with the batch: the model makes pairs of examples.
    """
    found = list(lying)
    for i, (name, leaf) in enumerate(named_leaves("outputs", outputs)):
        growing, at = _growing(leaf, i, doubled, lying), lying[i]
        if len(growing) > 1:
            raise ValueError(
                f"{name} has the shape {leaf.shape}, of which {growing} grow with the batch: the model makes pairs of "
                "the examples of a micro-batch alone. Return the embeddings, make pairs of them in the loss, and pass "
                'loss_over="batch" to jpipe.Pipeline'
            )
        if not (isinstance(at, Shard) and [at.dim] == growing):
            by_halves = doubled.gives_at[i][:1] if doubled is not None else ()
            own = Shard(growing[0]) if growing and leaf.shape[growing[0]] == size else REPLICATED
            found[i] = own if not by_halves or not isinstance(by_halves[0], Shard) else by_halves[0]
    return found


def join_microbatches(leaf: jax.Array, axis: int = 0) -> jax.Array:
    """`[M, ..., B/M, ...]` to `[..., B, ...]`: the outputs of micro-batches joined along their batch axis."""
    rest = leaf.shape[1:]
    whole = (*rest[:axis], leaf.shape[0] * rest[axis], *rest[axis + 1 :])
    return jnp.reshape(jnp.moveaxis(leaf, 0, axis), whole)
