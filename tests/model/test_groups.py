"""The traced model: whose variables are whose; scalars taken out of traces, and put back."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jpipe
from jpipe.jax.flat_jaxpr import without_calls
from jpipe.jax.primitives import PLAIN_CALLS
from jpipe.layers.adapt import as_layers
from jpipe.model.groups import differing, scalars_of
from jpipe.model.trace import trace_model


def test_variables_are_in_sets():
    """A set for each group with parameters, an instance for each of its layers; one for all that share."""
    table = jpipe.Shared(nn.Embed(5, 8))
    layers = [table, *[nn.Dense(8) for _ in range(3)], nn.relu, *[nn.Dense(8)], table.using("attend")]
    model = trace_model(as_layers(layers), lambda batch: batch, jax.ShapeDtypeStruct((2, 4), jnp.int32))
    assert model.group_of == (0, 1, 1, 1, 2, 1, 3)
    assert [(known.group, known.users, known.shared) for known in model.variable_sets] == [
        (0, ((0, 6),), True),
        (1, ((1,), (2,), (3,), (5,)), False),
    ]
    assert [group.variable_set for group in model.groups] == [0, 1, None, 0]


# --- scalars ----------------------------------------------------------------------------------------------------------


def traced(function):
    return without_calls(jax.make_jaxpr(function)(np.linspace(-1, 1, 5)), PLAIN_CALLS)


def test_zeros_of_both_signs_differ(x64):
    scalars = {i: scalars_of(traced(lambda x, zero=zero: x * zero)) for i, zero in enumerate((0.0, -0.0))}
    assert differing(scalars, first=0).places == (0,)


def test_another_trace_is_refused(x64):
    """As under random keys of another kind, if a layer looks at their bits."""
    scalars = scalars_of(traced(lambda x: 2.0 * x))
    constants = differing({0: scalars, 1: scalars_of(traced(lambda x: 3.0 * x))}, first=0)
    with pytest.raises(ValueError, match="under these keys the layer has other numbers"):
        constants.put_into(traced(lambda x: 2.0 * x + 1.0), constants.of(1))
