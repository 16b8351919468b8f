"""Computes what the loss needs of the whole mini-batch, before the ticks: sums of weights, the divisor of a mean.

That is an array for each of `TracedLoss.known`: `[M, ...]` if it is `stacked`, else one for all micro-batches. Or, for
`loss_over="batch"`, it is the loss itself with its gradient at the outputs.

On a device the examples of all micro-batches lie one micro-batch after the other, and of each it has a part. So of the
mini-batch, `[B, ...]`, it has M runs of rows: `Shard(0, outer=M)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from jpipe.jax.primitives import shapes_of
from jpipe.jax.tracing import replay
from jpipe.jax.trees import is_float
from jpipe.model.loss import TracedLoss
from jpipe.model.random_keys import Key, layer_key
from jpipe.partitioner.axes import shapes_only
from jpipe.partitioner.choice import always, as_it_lies
from jpipe.partitioner.conversions import convert
from jpipe.partitioner.examples import INDEX
from jpipe.partitioner.per_device import jaxpr_per_device
from jpipe.partitioner.shardings import PARTIAL, AxisSharding, Shard, Sharding, replicated
from jpipe.planning.step import Step
from jpipe.types import Batch, Leaf


def known_to_loss(step: Step, batch: Batch, key: Key | None) -> list[jax.Array]:
    """Computes what the loss of a step needs of the whole mini-batch.

    Args:
      step: the step.
      batch: a device's own part of all micro-batches, `[M, b, ...]`.
      key: the step's; None in evaluation.
    """
    loss, axes, count = step.loss, step.model.axes, step.schedule.num_microbatches
    if loss is None or not loss.known or loss.at_once is not None:
        return []
    lying, values = _examples_lie(step), list[Leaf]()
    if loss.numbers is not None:
        closed = loss.numbers.ahead
        whole = [always(replicated(axes))] * len(closed.out_avals)
        with shapes_only(step.plan.request.mesh):  # as it was traced
            local = jaxpr_per_device(closed, axes, [_of_all(count, at, Shard(0)) for at in lying], whole)
        values = replay(local.jaxpr, [0] * len(whole))([joined(leaf, Shard(0)) for leaf in jax.tree.leaves(batch)])
    totals = _total_weights(step, batch, key, lying) if loss.total_weights is None else []
    return listed_known(loss, count, values, totals)


def listed_known(loss: TracedLoss, count: int, values: Sequence[Leaf], totals: Sequence[Leaf]) -> list[jax.Array]:
    """Lists what the loss needs of the whole mini-batch, in the order of `TracedLoss.known`.

    Args:
      loss, count: the loss; M.
      values: the results of `PartsOfLoss.ahead`, whole.
      totals: the total weights.
    """
    of_numbers, rest = loss.numbers.known if loss.numbers else (), iter(values)
    index = jnp.arange(count, dtype=jnp.int32)
    whole = [index if one == INDEX else next(rest) for one in of_numbers]
    pairs = zip(of_numbers, whole, strict=True)
    return [
        *(x if one.shard is None or one == INDEX else by_microbatch(x, one.shard, count) for one, x in pairs),
        *totals,
    ]


def _total_weights(step: Step, batch: Batch, key: Key | None, lying: Sequence[Sharding]) -> list[jax.Array]:
    """Sums up the weights that the loss gives of each micro-batch."""
    loss, axes = step.loss, step.model.axes
    assert loss is not None
    num_terms = len(loss.terms)
    keys_at = [replicated(axes)] * (len(loss.weights.in_avals) - len(lying))
    with shapes_only(step.plan.request.mesh):
        local = jaxpr_per_device(loss.weights, axes, [*lying, *keys_at], [as_it_lies] * num_terms)
    run, last = replay(local.jaxpr, [0] * num_terms), step.model.groups[step.model.last]

    def of_part(m: jax.Array, part: Batch) -> list[Leaf]:
        keys = [layer_key(key, last.indices[0], m, of_model=last.layer.has_model_key)] if key is not None else []
        return run(part, keys[: len(keys_at)])

    microbatches = jnp.arange(step.schedule.num_microbatches, dtype=jnp.int32)
    weights = jax.lax.map(lambda at: of_part(*at), (microbatches, batch))
    totals = zip(map(jnp.sum, weights), local.shardings, strict=True)
    return [convert(total, axes, at, replicated(axes)) for total, at in totals]


def loss_at_once(
    step: Step, outputs: Sequence[jax.Array], outputs_at: Sequence[Sharding], batch: Batch, key: Key | None
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Computes a loss of the outputs of all micro-batches, and its gradient at them.

    What has no examples in it, such as a mean that the model gives, is the mean over micro-batches.

    Args:
      step: the step that the loss belongs to.
      outputs, outputs_at: the leaves of the outputs, `[M, ...]`, a device's parts; how those of a micro-batch lie.
      batch, key: as of `known_to_loss`.

    Returns:
      (sums as of `TracedLoss.parts`, for each floating-point output the gradient `[M, ...]`).
    """
    loss, axes, count = step.loss, step.model.axes, step.schedule.num_microbatches
    assert loss is not None and loss.at_once is not None
    last, whole = step.model.groups[step.model.last], replicated(axes)
    num_sums = len(loss.terms) + 2 * len(loss.metrics)
    leaves = joined_outputs(outputs, loss.lying)
    lying = [_of_all(count, at, along) for at, along in zip(outputs_at, loss.lying, strict=True)]
    examples = [joined(leaf, Shard(0)) for leaf in jax.tree.leaves(batch)]
    takes_key = len(loss.at_once.in_avals) > len(leaves) + len(examples) + num_sums
    keys = [layer_key(key, last.indices[0], 0, of_model=last.layer.has_model_key)] if key is not None else []
    floats = [i for i, leaf in enumerate(leaves) if is_float(leaf)]
    with shapes_only(step.plan.request.mesh):
        local = jaxpr_per_device(
            loss.at_once,
            axes,
            [*lying, *(_of_all(count, at, Shard(0)) for at in _examples_lie(step)), *[whole] * (takes_key + num_sums)],
            [always(whole)] * num_sums + [always(lying[i]) for i in floats],
        )
    ones = [jnp.ones((), term.dtype) for term in shapes_of(loss.at_once.jaxpr.invars[-num_sums:])]
    values = replay(local.jaxpr, [0] * len(local.jaxpr.out_avals))(leaves, examples, keys[:takes_key], ones)
    spread = lambda x, at: jnp.broadcast_to(x if at == PARTIAL else x / count, (count, *x.shape))
    gradients = [
        by_microbatch(x, at, count) if isinstance(at := loss.lying[i], Shard) else spread(x, at)
        for i, x in zip(floats, values[num_sums:], strict=True)
    ]
    return values[:num_sums], gradients


def _examples_lie(step: Step) -> list[Sharding]:
    """How each leaf of a micro-batch lies on the devices of a stage."""
    return [step.plan.request.splits.of_examples(leaf.shape[0]) for leaf in jax.tree.leaves(step.model.batch)]


def _of_all(count: int, part: Sharding, along: AxisSharding) -> Sharding:
    """How an array lies on devices in which `count` micro-batches lie `along`, if each one's lies as `part` says."""
    dim = along.dim if isinstance(along, Shard) else None
    return tuple(replace(at, outer=at.outer * count) if isinstance(at, Shard) and at.dim == dim else at for at in part)


def joined_outputs(outputs: Sequence[jax.Array], lying: Sequence[AxisSharding]) -> list[jax.Array]:
    """The leaves of the outputs of all micro-batches, `[M, ...]`, as one; of those without examples the sum or mean."""

    def whole(x: jax.Array, at: AxisSharding) -> jax.Array:
        if isinstance(at, Shard):
            return joined(x, at)
        return jnp.sum(x, 0) if at == PARTIAL else jnp.mean(x, 0) if is_float(x) else x[0]

    return list(map(whole, outputs, lying))


def joined(parts: jax.Array, at: Shard) -> jax.Array:
    """`[M, ...]`, of each micro-batch its part, to the array in which they lie as `at` says."""
    count, *shape = parts.shape
    split = parts.reshape(count, *shape[: at.dim], at.outer, -1, *shape[at.dim + 1 :])
    shape[at.dim] *= count
    return jnp.moveaxis(split, 0, at.dim + 1).reshape(shape)


def by_microbatch(whole: jax.Array, at: Shard, count: int) -> jax.Array:
    """The reverse of `joined`."""
    shape = list(whole.shape)
    split = whole.reshape(*shape[: at.dim], at.outer, count, -1, *shape[at.dim + 1 :])
    shape[at.dim] //= count
    return jnp.moveaxis(split, at.dim + 1, 0).reshape(count, *shape)
