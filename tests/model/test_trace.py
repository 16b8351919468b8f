"""Tracing a model: whose layers need a key, and which dropout is off."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jpipe
from jpipe.layers.adapt import as_layers
from jpipe.model.trace import trace_model
from jpipe.processes.progress import warn_once

X = jax.ShapeDtypeStruct((2, 4), jnp.float32)


def trace(layers, inputs=X):
    return trace_model(as_layers(layers), lambda batch: batch, inputs)


class Told(nn.Module):
    """A block with dropout, told its mode by an argument of a name that jpipe knows, or doesn't know."""

    rate: float = 0.25

    @nn.compact
    def __call__(self, x, enable_dropout=False):
        return nn.Dropout(self.rate)(nn.Dense(4)(x), deterministic=not enable_dropout)


class AsksForAStream(nn.Module):
    """Raises no error without a key: it does something else."""

    @nn.compact
    def __call__(self, x):
        return x * jax.random.uniform(self.make_rng("dropout")) if self.has_rng("dropout") else x


@pytest.mark.parametrize(
    ("layer", "needs"),
    [
        (nn.Dropout(0.5), True),
        (nn.Dropout(0.5, deterministic=True), False),
        (lambda rngs: nnx.Dropout(0.5, rngs=rngs), True),
        (jpipe.Layer(lambda key, x: (), lambda params, x, key: x * jax.random.uniform(key)), True),
        (jpipe.Layer(lambda key, x: (), lambda params, x, key: x), False),
        (AsksForAStream(), True),
        (Told(), True),  # the word of MaxText and T5X
        (jpipe.Layer(lambda key, x: (), lambda params, x: x), False),
    ],
)
def test_who_needs_a_key(layer, needs):
    assert trace([layer]).groups[0].needs_key is needs


# --- dropout that is off ----------------------------------------------------------------------------------------------


class Untold(nn.Module):
    rate: float = 0.25

    @nn.compact
    def __call__(self, x, dropping=False):
        return nn.Dropout(self.rate)(nn.Dense(4)(x), deterministic=not dropping)


class ByField(nn.Module):
    train: bool | None = None

    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.25, deterministic=not self.train)(x)


class NnxUntold(nnx.Module):
    def __init__(self, rate, rngs):
        self.dense, self.dropout = nnx.Linear(4, 4, rngs=rngs), nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x, dropping=False):
        return self.dropout(self.dense(x), deterministic=not dropping)

    def attend(self, x):
        return self.dense(x)


class NnxAttention(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(2, 4, decode=False, dropout_rate=0.25, rngs=rngs)

    def __call__(self, x, dropping=False):
        return self.attention(x, deterministic=not dropping)


@pytest.mark.parametrize(
    ("layer", "dropout"),
    [
        (Untold(), "Dropout of rate 0.25"),
        (nn.Sequential([nn.Dense(4), Untold()]), "Dropout of rate 0.25"),
        (lambda rngs: NnxUntold(0.25, rngs), "Dropout of rate 0.25"),
        (NnxAttention(nnx.Rngs(0)), "MultiHeadAttention of rate 0.25"),
        (jpipe.freeze(Untold(), lambda path: "kernel" in path), "Dropout of rate 0.25"),
    ],
)
def test_dropout_that_nothing_is_drawn_for_is_told_of(layer, dropout):
    warn_once.cache_clear()
    layers = [lambda x: x, layer]
    with pytest.warns(
        UserWarning, match=rf"layer 1 \(\w+\) holds a {dropout}, .* enable_dropout.*, give it the rate 0"
    ):
        trace(layers, np.ones((2, 3, 4), np.float32))
    trace(layers, np.ones((2, 3, 4), np.float32))  # once


@pytest.mark.parametrize(
    "layer",
    [
        Told(),
        Untold(0.0),
        Untold(1.0),
        nn.Dropout(0.25, deterministic=True),
        ByField(train=False),
        jpipe.freeze(Untold()),
        lambda rngs: nnx.Dropout(0.25, rngs=rngs),
        jpipe.Shared(NnxUntold(0.25, nnx.Rngs(0))).using("attend"),
    ],
)
def test_no_false_alarm_of_dropout(layer):
    warn_once.cache_clear()
    trace([lambda x: x, layer], np.ones((2, 3, 4), np.float32))  # warnings are errors
