"""Layers from plain functions."""

import functools

import jax.numpy as jnp
import numpy as np

import jpipe
from cases import assert_close, assert_equal
from jpipe.layers.adapt import as_layers
from jpipe.layers.base import Context

X = np.ones((2, 4), np.float32)


def test_plain_item_is_what_init_returns(key):
    (layer,) = as_layers([jpipe.Layer(lambda key, x: [jnp.ones(4)], lambda params, x: x * params[0])])
    variables = layer.init((X,), Context(key, False))
    assert list(variables) == ["params"]
    assert isinstance(layer.to_item(variables), list)
    assert_equal(layer.from_item(layer.to_item(variables)), variables)
    assert_close(layer.bind(layer.to_item(variables))(X), X)


def test_function_has_no_variables(key):
    (layer,) = as_layers([lambda x, y: (y, x)])
    assert layer.init((X, X), Context(key, False)) == {}
    assert layer.to_item({}) == {}
    outputs, _ = layer.apply({}, (X, 2 * X), Context(None, True))
    assert_equal(outputs, (2 * X, X))


def test_what_partial_fixes_stays_fixed():
    def apply(x, train):
        return x + 1 if train else x

    (layer,) = as_layers([functools.partial(apply, train=False)])
    assert layer.apply({}, (1,), Context(None, True))[0] == 1
