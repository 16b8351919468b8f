"""What a loss needs of the whole mini-batch is known before the first tick, the same on all devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jpipe
from jpipe.execution.before_ticks import by_microbatch, joined, known_to_loss
from jpipe.memory.batches import split_microbatches
from jpipe.partitioner.axes import on_stages
from jpipe.partitioner.shardings import Shard

BATCH = {"inputs": np.ones((8, 3), np.float32), "mask": np.float32([1, 1, 1, 0, 0, 1, 0, 0])}


def known_of(loss_fn, **axes):
    devices = jax.devices()[: 2 * max(axes.values(), default=1)]  # of an axis of one device nothing is split
    mesh = jpipe.make_mesh(stage=2, **axes, devices=devices)
    pipe = jpipe.Pipeline([lambda x: x, jnp.tanh], loss_fn, num_stages=2, num_microbatches=2, mesh=mesh)
    step = pipe.planner.training_step(pipe.planner.for_training(BATCH))
    run = on_stages(
        lambda batch: known_to_loss(step, batch, None),
        mesh,
        (PartitionSpec(None, tuple(axes) or None),),
        PartitionSpec(),
        lambda batch: (split_microbatches(batch, 2),),
    )
    return jax.tree.map(np.asarray, jax.jit(run)(BATCH))


@pytest.mark.parametrize("axes", [{}, {"data": 1}, {"data": 2}], ids=str)
def test_total_weights(axes):
    """Masks sum up to 4 over the mini-batch."""
    terms = lambda y, b: {"a": (jnp.sum(y), jnp.sum(b["mask"])), "b": (jnp.sum(y), 5.0)}
    assert known_of(terms, **axes) == [4, 10]
    assert known_of(lambda y, b: (jnp.sum(y), 1.0 * len(y)), **axes) == [], "shapes tell it"


@pytest.mark.parametrize("axes", [{}, {"data": 1}, {"data": 2}], ids=str)
def test_what_a_number_of_the_mini_batch_needs(axes):
    """The sum of masks is one number; the places that a sort gives are cut into micro-batches."""
    assert known_of(lambda y, b: (y[:, 0] * b["mask"]).sum() / b["mask"].sum(), **axes) == [4]
    (places,) = known_of(lambda y, b: (y[:, 0] * jnp.argsort(b["mask"]).astype(jnp.float32)).sum(), **axes)
    np.testing.assert_array_equal(places, np.argsort(BATCH["mask"], stable=True).reshape(2, 4))
    assert known_of(lambda y, b: jnp.mean(y), **axes) == []


@pytest.mark.parametrize("at", [Shard(0), Shard(1), Shard(1, 2), Shard(0, 3)])
def test_arrays_are_joined_as_they_lie(at):
    parts = np.arange(2 * 6 * 4).reshape(2, 6, 4)
    whole = np.asarray(joined(jnp.asarray(parts), at))
    blocks = [np.split(part, at.outer, at.dim) for part in parts]
    wanted = np.concatenate([blocks[m][i] for i in range(at.outer) for m in range(2)], at.dim)
    np.testing.assert_array_equal(whole, wanted)
    np.testing.assert_array_equal(by_microbatch(jnp.asarray(whole), at, 2), parts)
