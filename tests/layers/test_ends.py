"""The first layer reads its inputs from the micro-batch."""

import flax.linen as nn
import jax
import numpy as np

from cases import assert_close
from jpipe.layers.adapt import as_layers
from jpipe.layers.base import Context
from jpipe.layers.ends import with_inputs

BATCH = {"a": np.ones((2, 3), np.float32), "b": np.full((2, 3), 2, np.float32)}


def test_the_first_layer_takes_no_activation(key):
    """What is read as a tuple is passed as several arguments."""
    first, second = with_inputs(as_layers([lambda a, b: a + b, nn.Dense(3)]), lambda batch: (batch["a"], batch["b"]))
    assert (first.reads_batch, second.reads_batch) == (True, False)
    assert first.init(key, (), BATCH) == {}
    outputs, _ = first.apply({}, (), Context(None, False, BATCH))
    assert_close(outputs, np.full((2, 3), 3, np.float32))


def test_its_variables_are_the_layers_own(key):
    (layer,) = as_layers([nn.Dense(4)])
    (reading,) = with_inputs([layer], lambda batch: batch["a"])
    variables = reading.init(key, (), BATCH)
    assert jax.tree.map(np.shape, variables) == {"params": {"kernel": (3, 4), "bias": (4,)}}
    outputs, _ = reading.apply(variables, (), Context(None, False, BATCH))
    assert_close(outputs, reading.bind(reading.to_item(variables))(BATCH["a"]))


def test_only_those_that_read_alike_are_the_same():
    read = lambda batch: batch["a"]
    one, same, other = (with_inputs(as_layers([nn.Dense(4)]), r)[0] for r in (read, read, lambda batch: batch["a"]))
    assert one.is_same(same)
    assert not one.is_same(other)
    assert not one.is_same(as_layers([nn.Dense(4)])[0])
