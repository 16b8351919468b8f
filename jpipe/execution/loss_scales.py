"""What the gradients of a loss of several means are scaled by.

Such a loss is sum_t S_t / W_t, where S_t and W_t are sums over all micro-batches of a term and of its weight. So the
gradients of the terms have to be scaled by their own weights before they are added up, and the weights, which follow
from the batch alone, are summed up before the first tick. A loss of one mean needs none of that: its gradients are
divided at the end.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jpipe.execution.step import Step
from jpipe.jax_tools.tracing import replay
from jpipe.partitioner.choice import as_it_lies
from jpipe.partitioner.conversions import convert
from jpipe.partitioner.per_device import jaxpr_per_device
from jpipe.partitioner.shardings import replicated
from jpipe.types import Batch


def loss_scales(step: Step, batch: Batch) -> Sequence[jax.Array | float]:
    """The cotangents of the sums of the loss's terms: of several 1 / W_t; of one 1, since its gradients are divided.

    Args:
      step: the step of training.
      batch: a device's own part of all micro-batches, `[M, b, ...]`.
    """
    loss, axes = step.loss, step.model.axes
    assert loss is not None
    if loss.weights is None:
        return [1.0]
    given = [step.plan.request.splits.of_examples(leaf.shape[0]) for leaf in jax.tree.leaves(step.model.batch)]
    local = jaxpr_per_device(loss.weights, axes, given, [as_it_lies] * len(loss.terms))
    by_microbatch = jax.lax.map(replay(local.jaxpr, [0] * len(loss.terms)), batch)
    known = zip(map(jnp.sum, by_microbatch), local.shardings, strict=True)
    return [1 / convert(total, axes, own, replicated(axes)) for total, own in known]
