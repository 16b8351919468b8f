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
