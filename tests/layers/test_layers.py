"""Adapters: all that a layer may be, behind one interface."""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import jpipe
from cases import NnxDrops, assert_close, assert_equal
from jpipe.layers.adapt import as_layers
from jpipe.layers.base import Context, MissingKeyError, positional
from jpipe.layers.functions import mode_arguments

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


@pytest.mark.parametrize(
    "layer",
    [Drop(), lambda rngs: NnxDrops(rngs=rngs)],
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


# --- values that == takes for equal -----------------------------------------------------------------------------------


class Constant(nn.Module):
    c: Any

    @nn.compact
    def __call__(self, x):
        return x * jnp.copysign(1.0, jnp.asarray(jax.tree.leaves(self.c)[0], jnp.float32))


class NnxConstant(nnx.Module):
    def __init__(self, c):
        self.c = c

    def __call__(self, x):
        return x * jnp.copysign(1.0, jnp.asarray(self.c, jnp.float32))


@dataclasses.dataclass(frozen=True)
class CallableConstant:
    c: Any

    def __call__(self, x):
        return x * jnp.copysign(1.0, self.c)


def closure(c):
    return lambda x: x * jnp.copysign(1.0, c)


def default(c):
    def apply(x, *, c=c):
        return x * jnp.copysign(1.0, c)

    return apply


PAIRS = [
    (0.0, -0.0, False),
    (1, True, False),
    ((1,), (True,), False),
    ([{"a": (0.0,)}], [{"a": (-0.0,)}], False),
    ((np.float32(0.0),), (np.float32(-0.0),), False),
    (np.float32(1), np.float64(1), False),
    (complex(0.0, 0.0), complex(0.0, -0.0), False),
    (frozenset([1]), frozenset([True]), False),
    (float("nan"), float("nan"), True),
    ((1, {"a": [0.5, None, "b"]}), (1, {"a": [0.5, None, "b"]}), True),
    (frozenset([1, 2]), frozenset([2, 1]), True),
    (functools.partial(max, 0.0), functools.partial(max, -0.0), False),
    (functools.partial(max, 1, key=None), functools.partial(max, 1, key=None), True),
    (nn.Dense(2), nn.Dense(2), True),
    (nn.Dense(2, kernel_init=nn.initializers.normal(0.5)), nn.Dense(2, kernel_init=nn.initializers.normal(0.5)), True),
    (nn.Dense(2, kernel_init=nn.initializers.normal(0.5)), nn.Dense(2, kernel_init=nn.initializers.normal(1.0)), False),
]


@pytest.mark.parametrize("make", [Constant, CallableConstant, closure, default])
@pytest.mark.parametrize(("a", "b", "same"), PAIRS)
def test_values_of_other_types_or_bits_make_other_layers(make, a, b, same):
    """A regression: 0.0 == -0.0 and (1,) == (True,), so that unlike layers were taken for alike."""
    first, second = as_layers([make(a), make(b)])
    assert first.is_same(second) is same


def test_nnx_modules_of_other_bits_are_other_layers():
    """A regression, as above."""
    for a, b, same in [(0.0, -0.0, False), (1, True, False), (float("nan"), float("nan"), True), (2.0, 2.0, True)]:
        first, second = as_layers([NnxConstant(a), NnxConstant(b)])
        assert first.is_same(second) is same


def test_functions_that_hold_themselves():
    def make(c):
        def count(x):
            return count if x is None else x * c

        return count

    first, second, third = as_layers([make(1.0), make(1.0), make(2.0)])
    assert first.is_same(second)
    assert not first.is_same(third)


def test_layers_of_other_bits_compute_other_things():
    """A regression: both layers multiplied by 1."""
    pipe = jpipe.Pipeline(
        [Constant(0.0), Constant(-0.0)], lambda y, _: jnp.mean(y), num_stages=2, num_microbatches=1, balance="even"
    )
    assert_equal(pipe.apply(pipe.init(jax.random.key(0), X), X), -jnp.asarray(X))


# --- arrays in nnx modules --------------------------------------------------------------------------------------------


class Masked(nnx.Module):
    """Holds arrays that are no Variables, as masks and rotary tables are."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.mask = jnp.tril(jnp.ones((4, 4), jnp.float32))
        self.order = np.asarray([3, 2, 1, 0])
        self.tables = nnx.data((jnp.full(4, -jnp.inf), {"random": jax.random.normal(rngs.params(), (4,))}))

    def __call__(self, x):
        x = jnp.where(self.mask[0] > 0, self.linear(x) @ self.mask, 1.0)[:, self.order]
        return x * jnp.exp(self.tables[0]) + self.tables[1]["random"] * x


@pytest.mark.parametrize("ready", [False, True])
def test_arrays_in_nnx_modules(ready):
    """A regression: `init` of a factory passed, then UnexpectedTracerError; a ready module was refused."""
    modules = [Masked(nnx.Rngs(seed)) for seed in range(2)]
    layers = modules if ready else [lambda rngs: Masked(rngs) for _ in range(2)]
    pipe = jpipe.Pipeline(layers, lambda y, _: jnp.mean(y), num_stages=2, num_microbatches=2, balance="even")
    assert as_layers(layers)[0].is_same(as_layers(layers)[1])
    variables = pipe.init(jax.random.key(0), X)
    trees = pipe.layer_variables(variables)
    assert_equal(trees[1]["arrays"]["mask"], jnp.tril(jnp.ones((4, 4), jnp.float32)))
    assert not np.array_equal(*(tree["arrays"]["tables"][1]["random"] for tree in trees))
    (loss, updates), grads = pipe.value_and_grad(variables, X)
    assert_equal(updates["arrays"], variables["arrays"], "what isn't written stays")
    x = X
    for module in pipe.modules(variables):
        x = module(x)
    assert_close(pipe.apply(variables, X), x)
    assert_close(loss, jnp.mean(x))
    assert set(grads) == set(variables["params"])
    assert_equal(pipe.from_layer_variables(trees), variables)
    if ready:
        assert_equal(trees[1]["arrays"]["tables"][1]["random"], modules[1].tables[1]["random"])


def test_an_array_out_of_sight_in_an_nnx_factory():
    """A regression: an UnexpectedTracerError in the first step."""

    class Hidden(nnx.Module):
        def __init__(self, rngs):
            mask = jnp.ones(4)
            self.linear, self.function = nnx.Linear(4, 4, rngs=rngs), lambda x: x * mask

        def __call__(self, x):
            return self.function(self.linear(x))

    with pytest.raises(TypeError, match=r"layers\[0\] makes a module that keeps an array where nnx doesn't see it"):
        as_layers([lambda rngs: Hidden(rngs)])


# --- classes ----------------------------------------------------------------------------------------------------------


def test_a_partial_of_an_nnx_class_is_a_factory():
    """A regression: it was called with the activations."""
    (layer,) = as_layers([functools.partial(nnx.Linear, 4, 3)])
    assert layer.name == "Linear"
    variables = layer.init(jax.random.key(0), (X,), None)
    assert layer.apply(variables, (X,), Context(None, True))[0].shape == (2, 3)


@pytest.mark.parametrize("layer", [nn.Dense, nnx.Linear, functools.partial(nn.Dense, 4)])
def test_classes_are_no_layers(layer):
    """A regression: "is a type", which names neither the class nor what to do."""
    with pytest.raises(TypeError, match=r"layers\[0\] is the class (Dense|Linear), which makes layers and is none"):
        as_layers([layer])
