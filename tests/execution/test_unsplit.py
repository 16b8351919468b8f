"""Which operations every device of a stage does whole, and their share, counted by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jpipe
from jpipe.execution.unsplit import unsplit_in
from jpipe.jax_tools.random_keys import key_shape


def layers_of(pipe, batch):
    """(the layers as traced, as a device runs them)."""
    pipe.planner.plan_for(batch)
    traced = pipe.planner.layers(pipe.planner.for_training(batch), key_shape())
    return traced, pipe.planner.training_step(batch).layers


def make(layer, mesh):
    loss = lambda y, _: jnp.mean(jnp.square(y))
    return jpipe.Pipeline(
        [jnp.tanh, layer, jnp.tanh], loss, num_stages=2, num_microbatches=2, mesh=mesh, balance="even"
    )


def test_windows_over_a_split_dimension(make_mesh):
    """Forward; backward its cotangent is whole anyway, and takes as much."""

    def windows(x):
        x = jax.lax.with_sharding_constraint(x, PartitionSpec(None, "model"))
        kernel = jnp.ones((3, 1, 1), x.dtype)
        return jax.lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC"))

    batch = np.ones((8, 65536, 1), np.float32)
    with pytest.warns(UserWarning, match="has to see whole arrays"):
        traced, layers = layers_of(make(windows, make_mesh((2, 2), ("stage", "model"))), batch)
    found = unsplit_in(traced[1], layers[1])
    assert {(one.operation, one.line.split(":")[0]) for one in found} == {("conv_general_dilated", "test_unsplit.py")}
    assert sum(one.share for one in found) == pytest.approx(0.5, abs=0.01)


def test_nothing_where_all_stays_split(make_mesh):
    split = lambda x: jnp.sin(jax.lax.with_sharding_constraint(x, PartitionSpec(None, "model")))
    traced, layers = layers_of(make(split, make_mesh((2, 2), ("stage", "model"))), np.ones((8, 16), np.float32))
    assert [unsplit_in(*pair) for pair in zip(traced, layers, strict=True)] == [[], [], []]
