"""The places are those that the fewest values cross."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jpipe
from jpipe.cutting.places import Traced, find_places
from jpipe.cutting.straight import straighten

X = jnp.ones((2, 8))


def places_of(function, num_weights, wanted=1, width=8):
    weights = [jnp.ones((width, width)) for _ in range(num_weights)]
    closed = jax.make_jaxpr(function)(weights, X)
    places = Traced(straighten(closed, num_weights, 1, ()))
    return places, find_places(places, wanted, lambda place: False)


def products_between(places, found):
    """How many products lie between the places."""
    ends = [0, *found, len(places.works)]
    return [sum(places.works[a:b]) for a, b in pairwise(ends)]


def residual(x, v, w):
    return x + jnp.tanh(x @ v) @ w


def residual_blocks(ws, x):
    x = x @ ws[0]
    for i in range(1, len(ws), 2):
        x = residual(x, ws[i], ws[i + 1])
    return x


def wide(x, w):
    """A product with a hidden layer of four times the width."""
    return jnp.tanh(x @ jnp.tile(w, (1, 4))) @ jnp.tile(w, (4, 1))


def wide_residuals(ws, x):
    x = x @ ws[0]
    for w in ws[1:]:
        x = x + wide(x, w)
    return x


def with_time(ws, x):
    """An embedding of a time, which all blocks read, is narrower than any place between them."""
    time = jnp.tanh(x[:1, :1] @ ws[0][:1, :1]) @ ws[1][:1, :1]
    x = x @ ws[2]
    for w in ws[3:]:
        x = x + jnp.tanh(x @ w) * time
    return x


def lopsided(ws, x):
    """Each block ends with next to nothing."""
    x = x @ ws[0]
    for i in range(1, 11, 2):
        x = x + jnp.tanh(jnp.tanh(x @ jnp.tile(ws[i], (1, 9))) @ jnp.tile(ws[i], (9, 1))) @ ws[i + 1]
    return x


CUTS = {  # function, weights, pieces wanted at least; products in each piece, values that cross
    "a chain": (lambda ws, x: jnp.tanh(jnp.tanh(jnp.tanh(x @ ws[0]) @ ws[1]) @ ws[2]), 3, 1, [1, 1, 1], [1, 1]),
    "between residual blocks": (residual_blocks, 21, 1, [1, *[2] * 10], [1] * 10),
    "inside of a block that is too large": (residual_blocks, 3, 3, [1, 1, 1], [1, 2]),
    "not beside the path alone": (with_time, 12, 1, [1] * 12, [1, 1, *[2] * 9]),
    "nothing next to nothing": (lopsided, 11, 1, [1, *[3] * 5], [1] * 5),
    "of a stage's share": (wide_residuals, 4, 4, [1, 2, 2, 2], [1] * 3),
}


@pytest.mark.parametrize("name", CUTS)
def test_a_model_is_cut_where_the_fewest_values_cross(name):
    function, num_weights, wanted, products, crossing = CUTS[name]
    places, found = places_of(function, num_weights, wanted)
    assert products_between(places, found) == products
    assert [len(places.crossing[p]) for p in found] == crossing


# --- marks ------------------------------------------------------------------------------------------------------------


def test_it_does_nothing():
    x = {"a": jnp.arange(3.0), "b": (jnp.ones(()), jnp.arange(2))}
    jax.tree.map(np.testing.assert_array_equal, jpipe.cut(x), x)
    function = lambda x: jnp.sin(jpipe.cut(x**2)).sum()
    plain = lambda x: jnp.sin(x**2).sum()
    y = jnp.arange(4.0)
    np.testing.assert_array_equal(jax.jit(jax.grad(function))(y), jax.grad(plain)(y))
    np.testing.assert_array_equal(jax.vmap(function)(y[:, None]), jax.vmap(plain)(y[:, None]))
