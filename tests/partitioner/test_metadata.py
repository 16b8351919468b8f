"""Partitioning metadata that this mesh doesn't have, or that splits nothing, changes nothing."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jpipe
from cases import assert_close, assert_equal, run_layers

X = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)


def dense(names=None):
    init = nn.initializers.lecun_normal()
    return nn.Dense(8, use_bias=False, kernel_init=init if names is None else nn.with_partitioning(init, names))


def pipeline(layers, **options):
    return jpipe.Pipeline(layers, lambda y, _: jnp.mean(y), num_microbatches=2, balance="even", **options)


@pytest.mark.parametrize(("num_stages", "names"), [(2, (None, None)), (1, (None, "model")), (2, ("fsdp", "tp"))])
def test_leaves_of_one_shape_with_and_without_metadata(num_stages, names):
    """A regression: leaves of specs without any axis of the mesh had a buffer of their own, but of the same name.

    Both layers then had the same parameters, silently; `from_layer_variables` raised an IndexError.
    """
    layers = [dense(names), dense(), dense(names), dense()]
    pipe, plain = (pipeline(some, num_stages=num_stages) for some in (layers, [dense() for _ in layers]))
    key = jax.random.key(0)
    trees = pipe.layer_variables(pipe.init(key, X))
    expected = plain.layer_variables(plain.init(key, X))
    unboxed = jax.device_get(nn.meta.unbox(trees))
    assert_equal(unboxed, jax.device_get(expected), "variables")
    assert_equal(pipe.layer_variables(pipe.from_layer_variables(trees)), trees, "there and back")


class Constrained(nn.Module):
    """Says how its activations are split, at initialisation too."""

    @nn.compact
    def __call__(self, x):
        return jax.lax.with_sharding_constraint(nn.Dense(8)(x), PartitionSpec("data", None))


@pytest.mark.parametrize("explicit", [False, True])
def test_a_linen_layer_that_constrains_its_activations(make_mesh, explicit):
    """A regression: `init` was traced without the mesh that the constraint names."""
    mesh = make_mesh((2, 2), ("stage", "data"), explicit=explicit)
    pipe = pipeline([Constrained(), Constrained()], num_stages=2, mesh=mesh)
    plain = pipeline([nn.Dense(8), nn.Dense(8)], num_stages=2)
    variables = pipe.init(jax.random.key(0), X)
    found = [{"params": tree["params"]["Dense_0"]} for tree in pipe.layer_variables(variables)]
    assert_close(pipe.apply(variables, X), plain.apply(plain.from_layer_variables(found, X), X), "outputs")


def test_boxes_come_out_and_need_not_go_in():
    """As `module.init` gives them; `nn.unbox` takes them off, and values from elsewhere have none."""
    names = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
    layers = [nn.Dense(8, kernel_init=names) for _ in range(2)]
    pipe = pipeline(layers, num_stages=2)
    trees = jax.device_get(pipe.layer_variables(pipe.init(jax.random.key(0), X)))
    of_flax = layers[0].init(jax.random.key(0), X)
    assert jax.tree.structure(trees[0]) == jax.tree.structure(of_flax)
    assert isinstance(trees[0]["params"]["kernel"], nn.LogicallyPartitioned)
    bare = nn.unbox(trees)
    assert isinstance(bare[0]["params"]["kernel"], np.ndarray)
    assert_equal(jax.device_get(pipe.layer_variables(pipe.from_layer_variables(bare))), trees, "there and back")
    assert_close(pipe.apply(pipe.from_layer_variables(bare), X), run_layers(layers, bare, X), "outputs")
