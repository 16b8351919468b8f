"""Keyword arguments of a model: `inputs` returns `jpipe.Arguments`."""

from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jpipe
from cases import assert_close
from jpipe.layers.adapt import as_layers
from jpipe.layers.base import Context
from jpipe.layers.calls import IN_EVALUATION, IN_TRAINING, decoding, mode_arguments

BATCH = {"x": np.linspace(-1, 1, 8 * 6).reshape(8, 6), "mask": np.arange(8.0) % 3}


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


@pytest.mark.filterwarnings("ignore:Scaled holds a Dropout")  # the user turned it off
@pytest.mark.parametrize("model", [Scaled(), lambda rngs: NnxScaled(rngs)], ids=["linen", "nnx"])
@pytest.mark.usefixtures("float64")
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
    assert_close((loss, got), expected)
    assert pipe.apply(variables, BATCH).shape == (8, 6)


@pytest.mark.usefixtures("float64")
def test_the_first_layer_of_a_list_is_called_with_keywords():
    first = jpipe.Layer(lambda key, x, *, mask: jnp.ones(6), lambda w, x, *, mask: x * w * mask[:, None])
    read = lambda batch: jpipe.Arguments(batch["x"], mask=batch["mask"])
    layers = [first, nn.Dense(6, param_dtype=jnp.float64)]
    pipe = jpipe.Pipeline(layers, loss_fn, num_stages=2, num_microbatches=2, inputs=read)
    variables = pipe.init(jax.random.key(0), BATCH)
    dense = pipe.layer_variables(variables)[1]
    expected = layers[1].apply(dense, BATCH["x"] * BATCH["mask"][:, None])
    assert_close(pipe.apply(variables, BATCH), expected)


# --- signatures -------------------------------------------------------------------------------------------------------


DOCS = Path(__file__).parents[2] / "docs"


def words(x, use_running_average, deterministic, is_eval, eval_mode, inference, enable_dropout, is_train, train):
    """A call of a mode argument by each word of public code bases."""


def test_mode_arguments():
    on, off = ("enable_dropout", "is_train", "train"), ("use_running_average", "deterministic", "is_eval", "eval_mode")
    for train in (True, False):
        wanted = dict.fromkeys(on, train) | dict.fromkeys((*off, "inference"), not train)
        assert mode_arguments(words, train) == wanted
    more = lambda training, is_training, *, apply_dropout=True: 0
    assert mode_arguments(more, True) == dict.fromkeys(("training", "is_training", "apply_dropout"), True)
    assert mode_arguments(words, True, lambda name: name != "inference") == {"inference": False}
    assert mode_arguments(max, True) == {}


def test_docs_list_every_name():
    text = (DOCS / "howto" / "custom-layer.md").read_text()
    assert [name for name in IN_TRAINING + IN_EVALUATION if f"`{name}`" not in text] == []


# --- decode mode ------------------------------------------------------------------------------------------------------


TAKES = jax.ShapeDtypeStruct((2, 6, 8), jnp.float32)
SIZE, LENGTH = 3, 9


class Narrow(nnx.Module):
    """Attention in bfloat16 between float32 layers, or after a table of its own."""

    def __init__(self, rngs, embeds=False):
        self.table = nnx.Embed(11, 8, rngs=rngs) if embeds else None
        self.inner = nnx.MultiHeadAttention(2, 8, decode=False, dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, x):
        x = x if self.table is None else self.table(x)
        return x + self.inner(x)


@pytest.mark.parametrize("embeds", [False, True])
@pytest.mark.parametrize("ready", [False, True])
def test_nnx_caches_are_as_their_modules_compute(embeds, ready):
    """They once were as what their layer takes: of another dtype, of tokens."""
    layer = Narrow(nnx.Rngs(0), embeds) if ready else lambda rngs: Narrow(rngs, embeds)
    takes = jax.ShapeDtypeStruct((2, 6), jnp.int32) if embeds else TAKES
    with jax.numpy_dtype_promotion("standard"):
        found = decoding(as_layers([layer])[0], takes, SIZE, LENGTH)
    x = jnp.ones((SIZE, 1), jnp.int32) if embeds else jnp.ones((SIZE, 1, 8))
    variables = found.init((x,), Context(jax.random.key(0), False))
    with jax.numpy_dtype_promotion("standard"):
        _, new = found.apply(variables, (x,), Context(None, False))
    kinds = {(leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(new["cache"]) if leaf.ndim}
    assert kinds == {((SIZE, LENGTH, 2, 4), "bfloat16")}


class Reading(nn.Module):
    """Takes a mask from the batch; as it decodes, its cache is enough."""

    decode: bool = False

    @nn.compact
    def __call__(self, x, batch):
        mask = None if self.decode else batch["mask"][:, None]
        return x + nn.MultiHeadDotProductAttention(2, decode=self.decode)(x, mask=mask)


class Needing(nn.Module):
    """Looks for the batch as it decodes too."""

    def __call__(self, x, batch):
        return jnp.where(batch["mask"][:, :, :1], x, 0.0)


def reading(layer):
    """A pipeline with the layer, which reads the batch, its layers, variables, and a batch of zeros."""
    init = nn.initializers.normal(1.0)
    layers = [nn.Embed(7, 8, embedding_init=init), layer, nn.Dense(7, kernel_init=init)]
    loss_fn = lambda logits, batch: optax.softmax_cross_entropy_with_integer_labels(logits, batch["inputs"]).mean()
    causal = np.tril(np.ones((6, 6), bool))
    batch = {"inputs": np.zeros((4, 6), np.int32), "mask": np.broadcast_to(causal, (4, 6, 6))}
    connected, inputs = [layers[0], jpipe.reads(layer, lambda batch: batch), layers[2]], lambda batch: batch["inputs"]
    pipe = jpipe.Pipeline(connected, loss_fn, num_stages=2, num_microbatches=2, inputs=inputs, balance=[1, 2])
    return pipe, layers, pipe.init(jax.random.key(0), batch), batch


def test_a_side_input_is_none():
    pipe, layers, variables, batch = reading(Reading())
    tokens = np.random.default_rng(0).integers(0, 7, (4, 6)).astype(np.int32)
    found = np.asarray(pipe.generate(variables, tokens[:, :2].copy(), 4))
    trees = jax.device_get(pipe.layer_variables(variables))
    for place in range(2, 6):
        x = layers[1].apply(trees[1], layers[0].apply(trees[0], tokens), batch)
        tokens[:, place] = np.argmax(layers[2].apply(trees[2], x)[:, place - 1], -1)
    np.testing.assert_array_equal(found, tokens)


def test_a_layer_that_needs_its_side_input_is_named():
    pipe, _, variables, _ = reading(Needing())
    with pytest.raises(ValueError, match=r"layer 1 \(Needing\) raised TypeError"):
        pipe.generate(variables, np.zeros((2, 2), np.int32), 3)
