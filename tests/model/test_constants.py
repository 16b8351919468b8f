"""Scalars taken out of traces, and put back."""

import jax
import numpy as np
import pytest

from jpipe.jax.flat_jaxpr import without_calls
from jpipe.jax.primitives import PLAIN_CALLS
from jpipe.model.groups import differing, scalars_of

X = np.linspace(-1, 1, 5)


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def traced(function, *given):
    return without_calls(jax.make_jaxpr(function)(*given), PLAIN_CALLS)


def test_zeros_of_both_signs_differ():
    scalars = {i: scalars_of(traced(lambda x, zero=zero: x * zero, X)) for i, zero in enumerate((0.0, -0.0))}
    assert differing(scalars, first=0).places == (0,)


def test_another_trace_is_refused():
    """As under random keys of another kind, if a layer looks at their bits."""
    scalars = scalars_of(traced(lambda x: 2.0 * x, X))
    constants = differing({0: scalars, 1: scalars_of(traced(lambda x: 3.0 * x, X))}, first=0)
    with pytest.raises(ValueError, match="under these keys the layer has other numbers"):
        constants.put_into(traced(lambda x: 2.0 * x + 1.0, X), constants.of(1))
