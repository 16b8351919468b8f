"""Tracing a model: what is grouped, what is not, and whose variables are whose."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jpipe
from jpipe.layers.adapt import as_layers
from jpipe.layers.base import describe
from jpipe.model.groups import same_type
from jpipe.model.trace import trace_model
from jpipe.processes.progress import warn_once

X = jax.ShapeDtypeStruct((2, 4), jnp.float32)
IDS = jax.ShapeDtypeStruct((2, 4), jnp.int32)


def trace(layers, inputs=X):
    return trace_model(as_layers(layers), lambda batch: batch, inputs)


def test_a_run_between_different_ends():
    model = trace([nn.Embed(5, 8), *[nn.Dense(8) for _ in range(3)], nn.Dense(5)], IDS)
    assert model.group_of == (0, 1, 1, 1, 2)
    assert [group.indices for group in model.groups] == [(0,), (1, 2, 3), (4,)]
    assert (model.num_layers, model.last) == (5, 2)
    assert [[leaf.shape for leaf in boundary] for boundary in model.boundaries] == [[(2, 4, 8)]] * 4


def test_the_first_layer_reads_the_batch_and_takes_nothing():
    batch = {"x": X, "ids": IDS}
    model = trace_model(as_layers([nn.Dense(4), nn.relu, nn.relu]), lambda batch: batch["x"], batch)
    assert model.groups[0].takes == ()
    assert model.groups[0].layer.reads_batch and not model.groups[1].layer.reads_batch
    assert same_type(model.inputs, X) and same_type(model.called_with(0), X) and same_type(model.called_with(1), X)


@pytest.mark.parametrize(
    ("layers", "group_of"),
    [
        ([nn.Dense(4)], (0,)),
        ([nn.Dense(4), nn.Dense(3)], (0, 1)),
        ([nn.Dense(4) for _ in range(4)], (0, 1, 1, 2)),
        ([nn.Dense(4), nn.Dense(4), nn.relu], (0, 1, 2)),
        ([nn.relu, nn.Dense(4), nn.Dense(4), nn.relu], (0, 1, 1, 2)),
        ([nn.tanh, nn.relu, nn.Dense(4), nn.relu, nn.Dense(4), nn.relu], (0, 1, 2, 1, 2, 3)),
    ],
)
def test_groups(layers, group_of):
    """The ends are alone in their groups."""
    model = trace(layers)
    assert model.group_of == group_of
    assert model.num_layers == len(layers)


def test_layers_of_other_shapes_are_other_groups():
    model = trace([nn.Dense(8), nn.Dense(8), nn.Dense(8), nn.relu])
    assert model.group_of == (0, 1, 1, 2)
    assert model.groups[0].variables["params"]["kernel"].shape == (4, 8)
    assert model.groups[1].variables["params"]["kernel"].shape == (8, 8)


def test_ready_modules_are_of_one_group():
    modules = [nnx.Linear(4, 4, rngs=nnx.Rngs(seed)) for seed in range(3)]
    assert trace([nn.tanh, *modules, nn.relu]).group_of == (0, 1, 1, 1, 2)
    assert trace([nn.tanh, modules[0], lambda rngs: nnx.Linear(4, 4, rngs=rngs), nn.relu]).group_of == (0, 1, 2, 3)


def test_nothing_is_computed():
    def init(key, x):
        assert isinstance(x, jax.core.Tracer)
        return jnp.ones(())

    trace([jpipe.Layer(init, lambda params, x: x)])


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
        (nn.Dense(4), False),
        (lambda rngs: nnx.Dropout(0.5, rngs=rngs), True),
        (lambda rngs: nnx.Linear(4, 4, rngs=rngs), False),
        (jpipe.Layer(lambda key, x: (), lambda params, x, key: x * jax.random.uniform(key)), True),
        (jpipe.Layer(lambda key, x: (), lambda params, x, key: x), False),
        (AsksForAStream(), True),
        (jpipe.Layer(lambda key, x: (), lambda params, x: x), False),
    ],
)
def test_who_needs_a_key(layer, needs):
    assert trace([layer]).groups[0].needs_key is needs


def test_describe():
    assert describe(np.zeros((2, 3), np.float32)) == "float32[2,3]"
    assert describe((X, {"ids": IDS})) == "(float32[2,4], {'ids': int32[2,4]})"


# --- dropout that is off ----------------------------------------------------------------------------------------------


class Told(nn.Module):
    """A block with dropout, told its mode by an argument of a name that jpipe knows, or doesn't know."""

    rate: float = 0.25

    @nn.compact
    def __call__(self, x, enable_dropout=False):
        return nn.Dropout(self.rate)(nn.Dense(4)(x), deterministic=not enable_dropout)


class Untold(nn.Module):
    rate: float = 0.25
    parallel: bool = False  # whether it is an attention with dropout that is held

    @nn.compact
    def __call__(self, x, dropping=False):
        if self.parallel:
            return nn.MultiHeadDotProductAttention(2, dropout_rate=self.rate, deterministic=not dropping)(x)
        return nn.Dropout(self.rate)(nn.Dense(4)(x), deterministic=not dropping)


class ByField(nn.Module):
    train: bool = False

    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.25, deterministic=not self.train)(x)


class OwnField(ByField):
    train: bool | None = None


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
        (Untold(parallel=True), "MultiHeadDotProductAttention of rate 0.25"),
        (ByField(), "Dropout of rate 0.25"),
        (nn.Sequential([nn.Dense(4), Untold()]), "Dropout of rate 0.25"),
        (lambda rngs: NnxUntold(0.25, rngs), "Dropout of rate 0.25"),
        (NnxUntold(0.25, nnx.Rngs(0)), "Dropout of rate 0.25"),
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
        Told(0.0),
        Untold(0.0),
        Untold(1.0),
        nn.Dropout(0.25, deterministic=True),
        nn.Sequential([nn.Dense(4), nn.Dropout(0.25, deterministic=True)]),
        OwnField(train=False),
        jpipe.freeze(Untold()),
        lambda rngs: nnx.Dropout(0.25, rngs=rngs),
        lambda rngs: NnxUntold(0.0, rngs),
        jpipe.Shared(NnxUntold(0.25, nnx.Rngs(0))).using("attend"),
    ],
)
def test_no_false_alarm_of_dropout(layer):
    warn_once.cache_clear()
    trace([lambda x: x, layer], np.ones((2, 3, 4), np.float32))  # warnings are errors


def test_dropout_under_the_word_of_maxtext_and_t5x_is_on():
    assert [group.needs_key for group in trace([nn.Dense(4), Told()]).groups] == [False, True]
