"""Scalars taken out of traces, and put back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpipe.jax.flat_jaxpr import without_calls
from jpipe.jax.primitives import PLAIN_CALLS
from jpipe.jax.tracing import replay
from jpipe.model.groups import Constants, differing, scalars_of

X = np.linspace(-1, 1, 5)
MASK = np.arange(5) > 1


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def traced(function, *given):
    return without_calls(jax.make_jaxpr(function)(*given), PLAIN_CALLS)


def make(a, b, count):
    """Numbers outside, within a `jit`, and in a NumPy scalar; an array and a boolean that are none of them."""
    inner = jax.jit(lambda x: jnp.where(MASK & True, x, b))
    return lambda x: (inner(a * x) + np.float64(a), jnp.arange(5) + count)


def test_scalars_are_found_in_order_with_their_types():
    found = scalars_of(traced(make(0.5, -2.0, 7), X))
    assert [(str(one.dtype), one.item()) for one in found if one.item() in (0.5, -2.0, 7)] == [
        ("float64", 0.5),
        ("float64", -2.0),
        ("float64", 0.5),
        ("int64", 7),
    ]


def test_other_numbers_put_into_a_trace_are_another_function():
    layers = {2: (0.5, -2.0, 7), 5: (0.5, 3.0, 7), 9: (0.25, 4.0, 8)}
    traces = {i: jax.make_jaxpr(make(*numbers))(X) for i, numbers in layers.items()}
    constants = differing({i: scalars_of(without_calls(trace, PLAIN_CALLS)) for i, trace in traces.items()}, first=2)
    assert len(constants.places) == 4
    for i, numbers in layers.items():
        shapes = jax.eval_shape(make(*numbers), X)
        run = lambda x, i, shapes=shapes: replay(constants.put_into(traces[2], constants.of(i)), shapes)(x)
        for found, want in zip(run(X, i), make(*numbers)(X), strict=True):
            np.testing.assert_array_equal(found, want)
        for found, want in zip(jax.jit(run)(X, jnp.int32(i)), make(*numbers)(X), strict=True):
            np.testing.assert_allclose(found, want, rtol=1e-15)
        function = make(*numbers)
        gradient = jax.grad(lambda x, i=i, run=run: run(x, i)[0].sum())(X)
        np.testing.assert_array_equal(gradient, jax.grad(lambda x, f=function: f(x)[0].sum())(X))


def test_equal_layers_have_no_constants():
    scalars = scalars_of(traced(make(0.5, -2.0, 7), X))
    constants = differing({0: scalars, 1: scalars}, first=0)
    assert constants.places == () and constants.of(1) == [] and constants.of(jnp.int32(1)) == []
    assert Constants().shapes == []


def test_zeros_of_both_signs_differ():
    scalars = {i: scalars_of(traced(lambda x, zero=zero: x * zero, X)) for i, zero in enumerate((0.0, -0.0))}
    assert differing(scalars, first=0).places == (0,)


def test_another_trace_is_refused():
    """As under random keys of another kind, if a layer looks at their bits."""
    scalars = scalars_of(traced(lambda x: 2.0 * x, X))
    constants = differing({0: scalars, 1: scalars_of(traced(lambda x: 3.0 * x, X))}, first=0)
    with pytest.raises(ValueError, match="under these keys the layer has other numbers"):
        constants.put_into(traced(lambda x: 2.0 * x + 1.0, X), constants.of(1))
