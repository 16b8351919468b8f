"""The backward starts from one over the weights of the whole mini-batch, as the whole model's does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jpipe
from jpipe.batches.microbatches import split_microbatches
from jpipe.execution.loss_scales import loss_scales
from jpipe.mesh.on_stages import on_stages

BATCH = {"inputs": np.ones((8, 3), np.float32), "mask": np.float32([1, 1, 1, 0, 0, 1, 0, 0])}


def scales_of(loss_fn, **axes):
    devices = jax.devices()[: 2 * max(axes.values(), default=1)]  # of an axis of one device nothing is split
    mesh = jpipe.make_mesh(stage=2, **axes, devices=devices)
    pipe = jpipe.Pipeline([lambda x: x, jnp.tanh], loss_fn, num_stages=2, num_microbatches=2, mesh=mesh)
    step = pipe.planner.training_step(pipe.planner.for_training(BATCH))
    run = on_stages(
        lambda batch: loss_scales(step, batch),
        mesh,
        (PartitionSpec(None, tuple(axes) or None),),
        PartitionSpec(),
        lambda batch: (split_microbatches(batch, 2),),
    )
    return list(map(float, jax.jit(run)(BATCH)))


@pytest.mark.parametrize("axes", [{}, {"data": 2}], ids=str)
def test_they_are_one_over_each_weight(axes):
    """Masks sum up to 4 over the mini-batch, a mean counts once a micro-batch."""
    terms = lambda y, b: {"a": jnp.mean(y), "b": (jnp.sum(y), jnp.sum(b["mask"])), "c": (jnp.sum(y), 5.0)}
    assert scales_of(terms, **axes) == pytest.approx([1 / 2, 1 / 4, 1 / 10])


@pytest.mark.parametrize("axes", [{}, {"data": 1}, {"data": 2}], ids=str)
def test_a_loss_of_one_mean(axes):
    assert scales_of(lambda y, b: (jnp.sum(y), jnp.sum(jnp.where(b["mask"] > 0, 1.0, 0.0))), **axes) == [1 / 4]
    assert scales_of(lambda y, b: (jnp.sum(y), 1.0 * len(y)), **axes) == [1 / 8]
    assert scales_of(lambda y, b: jnp.mean(y), **axes) == scales_of(lambda y, b: {"a": jnp.mean(y)}, **axes) == [1 / 2]


def test_a_weight_that_follows_from_the_outputs_comes_too_late():
    with pytest.warns(UserWarning, match=r"loss_fn .*late_weight returned a weight_sum that depends on the model's"):
        assert scales_of(late_weight) == [1.0]


def late_weight(y, b):
    return jnp.sum(y), jnp.sum(y > 0)
