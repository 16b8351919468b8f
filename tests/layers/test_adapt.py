"""All that a layer may be, behind one interface."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jpipe
from jpipe.layers.adapt import as_layers
from jpipe.layers.base import Context, is_same

X = np.ones((2, 4), np.float32)


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


SAME = [
    lambda: nn.Dense(3),
    lambda: nn.Sequential([nn.Dense(3), nn.relu]),
    lambda: lambda rngs: nnx.Linear(4, 3, rngs=rngs),
    lambda: nnx.Linear(4, 3, rngs=nnx.Rngs(0)),
    lambda: jpipe.Layer(max, min),
    lambda: (lambda scale: jpipe.Layer(max, lambda params, x: scale * x))(2),
]
DIFFER = [
    [(lambda scale: jpipe.Layer(max, lambda params, x: scale * x))(np.ones(1)) for _ in range(2)],
    (nn.Dense(3), nn.Dense(4)),
    (nn.Dense(3), nn.Dense(3, kernel_init=nn.initializers.zeros)),
    (lambda rngs: nnx.Linear(4, 3, rngs=rngs), lambda rngs: nnx.Linear(4, 5, rngs=rngs)),
    [
        lambda rngs, init=i: nnx.Linear(4, 3, kernel_init=init, rngs=rngs)
        for i in (nnx.initializers.ones, nnx.initializers.zeros)
    ],
    (lambda rngs: nnx.Dropout(0.1, rngs=rngs), lambda rngs: nnx.Dropout(0.2, rngs=rngs)),
    (lambda rngs: nnx.Linear(4, 3, rngs=rngs), nnx.Linear(4, 3, rngs=nnx.Rngs(0))),
    (nn.relu, nn.tanh),
]


@pytest.mark.parametrize(("pair", "same"), [*(((m(), m()), True) for m in SAME), *((pair, False) for pair in DIFFER)])
def test_layers_are_the_same_or_differ(pair, same):
    first, second = as_layers([*pair])
    assert is_same(first, second) is is_same(second, first) is same
    assert is_same(first, first)


def test_a_partial_of_an_nnx_class_is_a_factory():
    """A regression: it was called with the activations."""
    (layer,) = as_layers([functools.partial(nnx.Linear, 4, 3)])
    assert layer.name == "Linear"
    variables = layer.init((X,), Context(jax.random.key(0), False))
    assert layer.apply(variables, (X,), Context(None, True))[0].shape == (2, 3)


@pytest.mark.parametrize("layer", [nn.Dense, nnx.Linear, functools.partial(nn.Dense, 4)])
def test_classes_are_no_layers(layer):
    """A regression: "is a type", which names neither the class nor what to do."""
    with pytest.raises(TypeError, match=r"layers\[0\] is the class (Dense|Linear), which makes layers and is none"):
        as_layers([layer])


def test_functions_that_name_a_module():
    """Of a layer they are refused (tests/layers/test_base.py); alone it is theirs, as often as they stand."""
    frozen = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    function = lambda x: frozen(x)
    assert len(as_layers([function, nn.relu, function, lambda x: frozen(x)])) == 4
