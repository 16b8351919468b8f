"""Computes the cotangents that the backward starts from: 1 / the weights that the loss gives, over all micro-batches.

A loss is sum_t S_t / W_t, where S_t and W_t are sums over all micro-batches of a term and of its weight. (A mean's
weight is 1, so that W_t is M.) The weights follow from the batch alone, so they are summed up before the first tick,
and each micro-batch's backward starts from 1 / W_t, as the whole model's does. Backward rules that aren't linear (a
clip, a rounding) see what they would see there, and nothing is divided at the end.

The weight of a single term may depend on the model's outputs instead. Then the backward starts from 1, and gradients
are divided by the weight after the last tick.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jpipe.jaxprs.numpy_interpreter import interpret, on_this_host
from jpipe.jaxprs.tracing import replay
from jpipe.mesh.on_stages import shapes_only
from jpipe.partitioner.choice import as_it_lies
from jpipe.partitioner.conversions import convert
from jpipe.partitioner.per_device import jaxpr_per_device
from jpipe.partitioner.shardings import replicated
from jpipe.planning.step import Step
from jpipe.seam.inside import needed_part
from jpipe.types import Batch


def loss_scales(step: Step, batch: Batch) -> Sequence[jax.Array | np.ndarray | float]:
    """The cotangents of the sums of the loss's terms: 1 / W_t, or 1 if the weight isn't known yet.

    Args:
      step: the step of training.
      batch: a device's own part of all micro-batches, `[M, b, ...]`.
    """
    loss, axes = step.loss, step.model.axes
    assert loss is not None
    if loss.weights is None:
        return [1.0]
    alone, used = needed_part(loss.weights, [True] * len(loss.terms))
    if not any(used):  # means, and counts that shapes tell: every micro-batch has the same
        with on_this_host(), np.errstate(divide="ignore"):  # without weight infinite, as on devices
            return [1 / (step.schedule.num_microbatches * weight) for weight in interpret(alone)]
    examples_at = [step.plan.request.splits.of_examples(leaf.shape[0]) for leaf in jax.tree.leaves(step.model.batch)]
    with shapes_only(step.plan.request.mesh):  # as it was traced
        local = jaxpr_per_device(loss.weights, axes, examples_at, [as_it_lies] * len(loss.terms))
    by_microbatch = jax.lax.map(replay(local.jaxpr, [0] * len(loss.terms)), batch)
    totals = zip(map(jnp.sum, by_microbatch), local.shardings, strict=True)
    return [1 / convert(total, axes, at, replicated(axes)) for total, at in totals]
