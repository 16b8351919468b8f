"""Kinds: what is grouped, what is not, and the ends that complete a model."""

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
from jpipe.model.trace import trace_kinds

X = jax.ShapeDtypeStruct((2, 4), jnp.float32)
IDS = jax.ShapeDtypeStruct((2, 4), jnp.int32)


def trace(layers, inputs=X):
    return trace_kinds(as_layers(layers), inputs, inputs)


def test_a_run_between_different_ends():
    model = trace([nn.Embed(5, 8), *[nn.Dense(8) for _ in range(3)], nn.Dense(5)], IDS)
    assert model.kind_of == (0, 1, 1, 1, 2)
    assert [kind.members for kind in model.kinds] == [(0,), (1, 2, 3), (4,)]
    assert [(kind.entry, kind.final) for kind in model.kinds] == [(True, False), (False, False), (False, True)]
    assert (model.first, model.num_layers) == (0, 5)
    assert [[leaf.shape for leaf in boundary] for boundary in model.boundaries] == [[(2, 4, 8)]] * 4


def test_ends_are_added_to_a_run():
    model = trace([nn.Dense(4) for _ in range(3)])
    assert model.kind_of == (0, 1, 1, 1, 2)
    assert (model.first, model.num_layers) == (1, 3)
    assert [kind.layer.name for kind in model.kinds] == ["inputs", "Dense", "outputs"]


@pytest.mark.parametrize(
    ("layers", "kind_of", "first", "num_layers"),
    [
        ([nn.Dense(4)], (0,), 0, 1),
        ([nn.Dense(4), nn.Dense(3)], (0, 1), 0, 2),
        ([nn.Dense(4), nn.Dense(4), nn.relu], (0, 1, 1, 2), 1, 3),
        ([nn.relu, nn.Dense(4), nn.Dense(4)], (0, 1, 1, 2), 0, 3),
        ([nn.relu, nn.Dense(4), nn.relu, nn.Dense(4), nn.relu], (0, 1, 2, 1, 2, 1, 3), 1, 5),
    ],
)
def test_kinds(layers, kind_of, first, num_layers):
    model = trace(layers)
    assert model.kind_of == kind_of
    assert (model.first, model.num_layers) == (first, num_layers)


def test_layers_of_other_shapes_are_other_kinds():
    model = trace([nn.Dense(8), nn.Dense(8), nn.Dense(8)])
    assert model.kind_of == (0, 1, 1, 2)
    assert model.kinds[0].variables["params"]["kernel"].shape == (4, 8)
    assert model.kinds[1].variables["params"]["kernel"].shape == (8, 8)


def test_ready_modules_are_of_one_kind():
    modules = [nnx.Linear(4, 4, rngs=nnx.Rngs(seed)) for seed in range(3)]
    assert trace([nn.tanh, *modules, nn.relu]).kind_of == (0, 1, 1, 1, 2)
    assert trace([nn.tanh, modules[0], lambda rngs: nnx.Linear(4, 4, rngs=rngs), nn.relu]).kind_of == (0, 1, 2, 3)


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
    assert trace([layer]).kinds[0].needs_key is needs


def test_same_type():
    assert same_type({"a": X}, {"a": X})
    assert not same_type({"a": X}, {"b": X})
    assert not same_type(X, IDS)
    assert not same_type(X, jax.ShapeDtypeStruct((2, 5), jnp.float32))
    assert not same_type((X,), [X])


def test_describe():
    assert describe(np.zeros((2, 3), np.float32)) == "float32[2,3]"
    assert describe((X, {"ids": IDS})) == "(float32[2,4], {'ids': int32[2,4]})"
