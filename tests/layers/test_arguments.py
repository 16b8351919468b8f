"""Keyword arguments of a model: `inputs` returns `jpipe.Arguments`."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jpipe

BATCH = {"x": np.linspace(-1, 1, 8 * 6).reshape(8, 6), "mask": np.arange(8.0) % 3}


@pytest.fixture(scope="module", autouse=True)
def float64():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


class Scaled(nn.Module):
    """A model with keywords: an array, and values that Python branches on."""

    @nn.compact
    def __call__(self, x, *, mask, activation="relu", double=False, deterministic=False):
        for _ in range(3):
            y = nn.Dense(6, param_dtype=jnp.float64)(x)
            y = nn.gelu(y) if activation == "gelu" else nn.relu(y)
            x = x + nn.Dropout(0.5, deterministic=deterministic)(y)
        return x * mask[:, None] * (2 if double else 1)


class NnxScaled(nnx.Module):
    """The same in nnx, of one layer and without dropout."""

    def __init__(self, rngs):
        self.first = nnx.Linear(6, 6, param_dtype=jnp.float64, rngs=rngs)
        self.second = nnx.Linear(6, 6, param_dtype=jnp.float64, rngs=rngs)

    def __call__(self, x, *, mask, double=False):
        return self.second(nnx.relu(self.first(x))) * mask[:, None] * (2 if double else 1)


def loss_fn(outputs, batch):
    return (outputs**2).mean()


def test_arrays_are_data_and_other_values_stay():
    arguments = jpipe.Arguments(jnp.ones(2), [None, "gelu"], mask=jnp.zeros(3), scale=0.5)
    assert [leaf.shape for leaf in jax.tree.leaves(arguments)] == [(2,), (3,)]
    positional, keywords = jax.tree.map(lambda leaf: leaf.shape, arguments).both
    assert positional == ((2,), [None, "gelu"]) and keywords == {"mask": (3,), "scale": 0.5}
    assert repr(jax.tree.map(lambda leaf: 0, arguments)) == "Arguments(0, [None, 'gelu'], mask=0, scale=0.5)"


@pytest.mark.filterwarnings("ignore:Scaled holds a Dropout")  # the user turned it off
@pytest.mark.parametrize("model", [Scaled(), lambda rngs: NnxScaled(rngs)], ids=["linen", "nnx"])
def test_a_model_is_called_with_keywords(model):
    more = {"activation": "gelu", "deterministic": True} if isinstance(model, nn.Module) else {}
    keywords = lambda batch: {"mask": batch["mask"], "double": True, **more}
    read = lambda batch: jpipe.Arguments(batch["x"], **keywords(batch))
    pipe = jpipe.Pipeline(model, loss_fn, num_stages=2, num_microbatches=2, inputs=read)
    key = jax.random.key(0)
    variables = pipe.init(key, BATCH)
    (loss, _), grads = pipe.value_and_grad(variables, BATCH, key)

    def plain(params):
        if isinstance(model, nn.Module):
            return loss_fn(model.apply({"params": params}, BATCH["x"], **keywords(BATCH)), BATCH)
        module = model(nnx.Rngs(0))
        nnx.update(module, params)
        return loss_fn(module(BATCH["x"], **keywords(BATCH)), BATCH)

    expected = jax.jit(jax.value_and_grad(plain))(pipe.model_variables(variables)["params"])
    got = pipe.model_variables({"params": grads})["params"]
    for one, other in zip(jax.tree.leaves((loss, got)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)
    assert pipe.apply(variables, BATCH).shape == (8, 6)


def test_the_first_layer_of_a_list_is_called_with_keywords():
    first = jpipe.Layer(lambda key, x, *, mask: jnp.ones(6), lambda w, x, *, mask: x * w * mask[:, None])
    read = lambda batch: jpipe.Arguments(batch["x"], mask=batch["mask"])
    layers = [first, nn.Dense(6, param_dtype=jnp.float64)]
    pipe = jpipe.Pipeline(layers, loss_fn, num_stages=2, num_microbatches=2, inputs=read)
    variables = pipe.init(jax.random.key(0), BATCH)
    dense = pipe.layer_variables(variables)[1]
    expected = layers[1].apply(dense, BATCH["x"] * BATCH["mask"][:, None])
    np.testing.assert_allclose(pipe.apply(variables, BATCH), expected, rtol=1e-12)
