"""Which operations every device of a stage does whole, and their share, counted by hand."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jpipe
from jpipe.jaxprs.flops import Flops, count_flops
from jpipe.model.random_keys import key_shape
from jpipe.planning.unsplit import unsplit_in
from jpipe.terminal.progress import warn_once


def layers_of(pipe, batch):
    """(the layers as traced, as a device runs them)."""
    pipe.planner.plan_for(batch)
    traced = pipe.planner.layers(pipe.planner.for_training(batch), key_shape())
    return traced, pipe.planner.training_step(pipe.planner.for_training(batch)).layers


def make(layer, mesh):
    loss = lambda y, _: jnp.mean(jnp.square(y))
    return jpipe.Pipeline(
        [jnp.tanh, layer, jnp.tanh], loss, num_stages=2, num_microbatches=2, mesh=mesh, balance="even"
    )


def test_windows_over_a_split_dimension(make_mesh):
    """Forward; backward its cotangent is whole anyway, and takes as much."""
    batch = np.ones((8, 65536, 1), np.float32)
    warn_once.cache_clear()  # another test may have been told
    with pytest.warns(UserWarning, match="has to see whole arrays"):
        traced, layers = layers_of(make(windows, make_mesh((2, 2), ("stage", "model"))), batch)
    found = unsplit_in(traced[1], layers[1])
    assert {(one.operation, one.line.split(":")[0]) for one in found} == {("conv_general_dilated", "test_unsplit.py")}
    assert sum(one.share for one in found) == pytest.approx(0.5, abs=0.01)


def windows(x):
    x = jax.lax.with_sharding_constraint(x, PartitionSpec(None, "model"))
    kernel = jnp.ones((3, 1, 1), x.dtype)
    return jax.lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC"))


def test_a_small_layer_of_a_large_model_is_no_warning(make_mesh):
    """Half of the layer is done whole, 6 operations an element, where another layer does 6 * 2048 of each."""
    mesh = make_mesh((2, 2), ("stage", "model"))
    batch, loss = np.ones((8, 65536, 1), np.float32), lambda y, _: jnp.mean(jnp.square(y))
    weights = jnp.ones((2048, 2048), jnp.float32)

    def product(x):
        return (x.reshape(x.shape[0], -1, 2048) @ weights).reshape(x.shape)

    for layers, warns in (([jnp.tanh, windows, product], False), ([jnp.tanh, windows, jnp.tanh], True)):
        pipe = jpipe.Pipeline(layers, loss, num_stages=2, num_microbatches=2, mesh=mesh, balance="even")
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            warn_once.cache_clear()
            traced, on_device = layers_of(pipe, batch)
        assert sum(one.share for one in unsplit_in(traced[1], on_device[1])) == pytest.approx(0.5, abs=0.01)
        assert ["has to see whole arrays" in str(warning.message) for warning in given] == [True] * warns


def test_what_only_moves_elements_is_no_warning(make_mesh):
    """It was: `jnp.tile` "has to see whole arrays", and "can't be counted"; it takes no operation, and stays split."""

    def tiled(x):
        x = jax.lax.with_sharding_constraint(x, PartitionSpec(None, "model"))
        return x + jnp.tile(x[..., :1], (1, 1, x.shape[-1])) + jnp.tile(x[:, :1], (1, x.shape[1], 1))

    pipe = make(tiled, make_mesh((2, 2), ("stage", "model")))
    traced, layers = layers_of(pipe, np.ones((8, 256, 512), np.float32))  # a warning would be an error
    found = unsplit_in(traced[1], layers[1])
    assert {one.operation for one in found if one.share} <= {"reduce_sum"}
    assert sum(one.share for one in found) < 0.01
    assert count_flops(jax.make_jaxpr(lambda x: jnp.tile(x, 4))(np.ones(3))) == Flops()


def test_nothing_where_all_stays_split(make_mesh):
    split = lambda x: jnp.sin(jax.lax.with_sharding_constraint(x, PartitionSpec(None, "model")))
    traced, layers = layers_of(make(split, make_mesh((2, 2), ("stage", "model"))), np.ones((8, 16), np.float32))
    assert [unsplit_in(*pair) for pair in zip(traced, layers, strict=True)] == [[], [], []]
