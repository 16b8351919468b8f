"""Linen modules as layers."""

import flax.linen as nn
import numpy as np

from cases import assert_close, assert_equal
from jpipe.layers.adapt import as_layers
from jpipe.layers.base import Context

X = np.ones((2, 4), np.float32)


def test_linen_item_is_what_init_returns(key):
    (layer,) = as_layers([nn.Dense(3)])
    variables = layer.init((X,), Context(key, False))
    assert_equal(variables, nn.Dense(3).init(key, X))
    assert layer.to_item(variables) is variables
    outputs, updates = layer.apply(variables, (X,), Context(None, True))
    assert_close(outputs, nn.Dense(3).apply(variables, X))
    assert updates == {}
    assert_close(layer.bind(variables)(X), outputs)
