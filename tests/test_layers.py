"""Adapters: every kind of layer behind one interface."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import jpipe
from helpers import assert_close, assert_equal
from jpipe.adapt import as_layers
from jpipe.functions import mode_arguments
from jpipe.layers import Context, MissingKeyError, positional

X = np.ones((2, 4), np.float32)


@pytest.fixture(scope="module")
def key():
    return jax.random.key(0)


def adapt(layer):
    return as_layers([layer])[0]


def test_names():
    layers = [nn.Dense(3), nn.Dense(3, name="out"), nn.relu, lambda x: x, jpipe.Layer(max, min, name="mine")]
    names = [layer.name for layer in as_layers([*layers, lambda rngs: nnx.Linear(2, 3, rngs=rngs)])]
    assert names == ["Dense", "out", "relu", "<lambda>", "mine", "Linear"]


def test_sequentials_are_opened(key):
    assert [layer.name for layer in as_layers(nn.Sequential([nn.Dense(3), nn.tanh]))] == ["Dense", "tanh"]
    linear = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    assert [layer.name for layer in as_layers(nnx.Sequential(linear, jnp.tanh))] == ["Linear", "tanh"]
    assert len(as_layers((nn.Dense(3), nn.Dense(3)))) == 2


def test_linen_item_is_what_init_returns(key):
    layer = adapt(nn.Dense(3))
    variables = layer.init(key, (X,), None)
    assert_equal(variables, nn.Dense(3).init(key, X))
    assert layer.to_item(variables) is variables
    outputs, updates = layer.apply(variables, (X,), Context(None, True))
    assert_close(outputs, nn.Dense(3).apply(variables, X))
    assert updates == {}
    assert_close(layer.bind(variables)(X), outputs)


def test_plain_item_is_what_init_returns(key):
    layer = adapt(jpipe.Layer(lambda key, x: [jnp.ones(4)], lambda params, x: x * params[0]))
    variables = layer.init(key, (X,), None)
    assert list(variables) == ["params"]
    assert isinstance(layer.to_item(variables), list)
    assert_equal(layer.from_item(layer.to_item(variables)), variables)
    assert_close(layer.bind(layer.to_item(variables))(X), X)


def test_function_has_no_variables(key):
    layer = adapt(lambda x, y: (y, x))
    assert layer.init(key, (X, X), None) == {}
    assert layer.to_item({}) == {}
    outputs, _ = layer.apply({}, (X, 2 * X), Context(None, True))
    assert_equal(outputs, (2 * X, X))


def test_nnx_item_is_a_pure_dict(key):
    layer = adapt(lambda rngs: nnx.Linear(4, 3, rngs=rngs))
    variables = layer.init(key, (X,), None)
    module = nnx.Linear(4, 3, rngs=nnx.Rngs(key))
    assert_equal(variables, {"params": {"kernel": module.kernel[...], "bias": module.bias[...]}})
    assert_close(layer.bind(variables)(X), module(X))
    assert layer.ready is None


def test_ready_nnx_module_keeps_its_values(key):
    module = nnx.Linear(4, 3, rngs=nnx.Rngs(7))
    layer = adapt(module)
    assert_equal(layer.ready, {"params": {"kernel": module.kernel[...], "bias": module.bias[...]}})
    assert_equal(layer.init(key, (X,), None), layer.ready)


def test_the_users_nnx_module_is_not_changed():
    module = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
    layer = adapt(module)
    before = np.asarray(module.mean[...])
    _, updates = layer.apply(layer.ready, (3 * X,), Context(None, True))
    assert not np.array_equal(updates["batch_stats"]["mean"], before)
    assert_equal(np.asarray(module.mean[...]), before)
    assert module.use_running_average is False


SAME = [
    (lambda: nn.Dense(3), True),
    (lambda: nn.Sequential([nn.Dense(3), nn.relu]), True),
    (lambda: nn.Dense(3, kernel_init=np.zeros), True),
    (lambda: lambda rngs: nnx.Linear(4, 3, rngs=rngs), True),
    (lambda: nnx.Linear(4, 3, rngs=nnx.Rngs(0)), True),
    (lambda: jpipe.Layer(max, min), True),
    (lambda: nn.relu, True),
    (lambda: jpipe.Layer(max, lambda params, x: x), True),
    (lambda: (lambda scale: jpipe.Layer(max, lambda params, x: scale * x))(2), True),
    (lambda: (lambda scale: jpipe.Layer(max, lambda params, x: scale * x))(np.ones(1)), False),
]


@pytest.mark.parametrize(("make", "same"), SAME)
def test_equal_layers_are_the_same(make, same):
    first, second = as_layers([make(), make()])
    assert first.is_same(second) is same
    assert first.is_same(first)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (nn.Dense(3), nn.Dense(4)),
        (nn.Dense(3), nn.DenseGeneral(3)),
        (nn.Dense(3), nn.Dense(3, kernel_init=nn.initializers.zeros)),
        (lambda rngs: nnx.Linear(4, 3, rngs=rngs), lambda rngs: nnx.Linear(4, 5, rngs=rngs)),
        (
            lambda rngs: nnx.Linear(4, 3, rngs=rngs),
            lambda rngs: nnx.Linear(4, 3, kernel_init=nnx.initializers.zeros, rngs=rngs),
        ),
        (lambda rngs: nnx.Dropout(0.1, rngs=rngs), lambda rngs: nnx.Dropout(0.2, rngs=rngs)),
        (lambda rngs: nnx.Linear(4, 3, rngs=rngs), nnx.Linear(4, 3, rngs=nnx.Rngs(0))),
        (jpipe.Layer(max, min), jpipe.Layer(min, min)),
        (nn.relu, nn.tanh),
        (nn.Dense(3), nn.relu),
    ],
)
def test_layers_that_differ(first, second):
    first, second = as_layers([first, second])
    assert not first.is_same(second)
    assert not second.is_same(first)


def test_names_do_not_make_linen_layers_differ():
    first, second = as_layers([nn.Dense(3, name="a"), nn.Dense(3, name="b")])
    assert first.is_same(second)


def test_mode_arguments():
    both = lambda x, train, deterministic: x
    assert mode_arguments(both, True) == {"train": True, "deterministic": False}
    assert mode_arguments(both, False) == {"train": False, "deterministic": True}
    assert mode_arguments(both, True, lambda name: name == "train") == {"deterministic": False}
    assert mode_arguments(max, True) == {}
    assert mode_arguments(lambda use_running_average, training, is_training: 0, True) == {
        "use_running_average": False,
        "training": True,
        "is_training": True,
    }


class Drop(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.5)(x, deterministic=False)


class NnxDrop(nnx.Module):
    def __init__(self, rngs):
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(x)


@pytest.mark.parametrize(
    "layer",
    [Drop(), lambda rngs: NnxDrop(rngs=rngs)],
    ids=["linen", "nnx"],
)
def test_a_layer_that_needs_a_key_says_so(key, layer):
    layer = adapt(layer)
    with pytest.raises(MissingKeyError):
        layer.apply({}, (X,), Context(None, True))
    layer.apply({}, (X,), Context(key, True))


def test_two_nnx_streams_of_one_layer_differ(key):
    class Two(nnx.Module):
        def __init__(self, rngs):
            self.first, self.second = nnx.Dropout(0.5, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.first(x), self.second(x)

    (a, b), _ = adapt(lambda rngs: Two(rngs)).apply({}, (np.ones((20, 20), np.float32),), Context(key, True))
    assert not np.array_equal(a, b)


def test_partition_specs(key):
    init = nn.with_partitioning(nn.initializers.ones, (None, "model"))
    layer = adapt(nn.Dense(4, kernel_init=init))
    variables = jax.eval_shape(lambda k: layer.init(k, (X,), None), key)
    assert layer.partition_specs(variables) == {"params": [PartitionSpec(), PartitionSpec(None, "model")]}
    factory = lambda rngs: nnx.Linear(
        4, 4, kernel_init=nnx.with_partitioning(nnx.initializers.ones, (None, "model")), rngs=rngs
    )
    layer = adapt(factory)
    variables = jax.eval_shape(lambda k: layer.init(k, (X,), None), key)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(variables["params"])]
    assert dict(zip(paths, layer.partition_specs(variables)["params"], strict=True)) == {
        "['bias']": PartitionSpec(),
        "['kernel']": PartitionSpec(None, "model"),
    }


def test_positional():
    assert positional((1, 2)) == (1, 2)
    assert positional([1, 2]) == ([1, 2],)
    assert positional({"a": 1}) == ({"a": 1},)


def test_parameters_of_types_of_their_own_are_parameters():
    """A regression: LoRA's were state, and never trained."""

    def make(rngs):
        return nnx.LoRA(4, 2, 4, base_module=nnx.Linear(4, 4, rngs=rngs), rngs=rngs)

    (layer,) = as_layers([make])
    variables = layer.init(jax.random.key(0), (jnp.ones((1, 4), jnp.float32),), None)
    assert set(variables) == {"params"}
    assert set(variables["params"]) == {"base_module", "lora_a", "lora_b"}
    outputs, _ = layer.apply(variables, (jnp.ones((1, 4), jnp.float32),), Context(None, True))
    expected = make(nnx.Rngs(jax.random.key(0)))(jnp.ones((1, 4), jnp.float32))
    np.testing.assert_allclose(outputs, expected, rtol=1e-6)


def test_what_partial_fixes_stays_fixed():
    def apply(x, train):
        return x + 1 if train else x

    (layer,) = as_layers([functools.partial(apply, train=False)])
    assert layer.apply({}, (1,), Context(None, True))[0] == 1
