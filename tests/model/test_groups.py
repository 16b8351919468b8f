"""The traced model: whose variables are whose, and what is compiled for itself."""

import flax.linen as nn
import jax
import jax.numpy as jnp

import jpipe
from jpipe.layers.adapt import as_layers
from jpipe.model.trace import trace_model

IDS = jax.ShapeDtypeStruct((2, 4), jnp.int32)


def trace(layers, inputs):
    return trace_model(as_layers(layers), lambda batch: batch, inputs)


def test_variables_are_in_sets():
    """A set for each group with parameters, an instance for each of its layers; one for all that share."""
    table = jpipe.Shared(nn.Embed(5, 8))
    layers = [table, *[nn.Dense(8) for _ in range(3)], nn.relu, *[nn.Dense(8)], table.using("attend")]
    model = trace(layers, IDS)
    assert model.group_of == (0, 1, 1, 1, 2, 1, 3)
    assert [(known.group, known.users, known.shared) for known in model.variable_sets] == [
        (0, ((0, 6),), True),
        (1, ((1,), (2,), (3,), (5,)), False),
    ]
    assert [group.variable_set for group in model.groups] == [0, 1, None, 0]
