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


def wide_blocks(ws, x):
    for w in ws:
        x = wide(x, w)
    return x


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
    "not in a wide hidden layer": (wide_blocks, 10, 1, [2] * 10, [1] * 9),
    "not beside the path alone": (with_time, 12, 1, [1] * 12, [1, 1, *[2] * 9]),
    "nothing next to nothing": (lopsided, 11, 1, [1, *[3] * 5], [1] * 5),
    "of a stage's share": (wide_residuals, 4, 4, [1, 2, 2, 2], [1] * 3),
    "of twice the share of a stage by all means": (wide_residuals, 4, 8, [1] * 7, [1, 2, 1, 2, 1, 2]),
}


@pytest.mark.parametrize("name", CUTS)
def test_a_model_is_cut_where_the_fewest_values_cross(name):
    function, num_weights, wanted, products, crossing = CUTS[name]
    places, found = places_of(function, num_weights, wanted)
    assert products_between(places, found) == products
    assert [len(places.crossing[p]) for p in found] == crossing


def test_casts_at_the_ends_leave_the_blocks_equal():
    def mixed(ws, x):
        x = (x @ ws[0]).astype(jnp.bfloat16)
        for w in ws[1:-1]:
            x = x + jnp.tanh(x @ w.astype(jnp.bfloat16))
        return x.astype(jnp.float16) @ ws[-1].astype(jnp.float16)

    places, found = places_of(mixed, 12)
    assert {places.kinds(p) for p in found} == {((2, jnp.dtype(jnp.bfloat16)),)}


def test_all_of_an_elementwise_run_belongs_to_what_is_before_it():
    places, found = places_of(lambda ws, x: jax.nn.relu(2.0 * (x @ ws[0]) + 1.0) @ ws[1], 2)
    names = [places.straight.flat.equations[i].equation.primitive.name for i in places.straight.main]
    assert names[found[0]] == "dot_general"


def scaled(x, w):
    """A norm with a scale."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * w[0]


def operations_before(places, place):
    """The operations since the last product."""
    names = [places.straight.flat.equations[i].equation.primitive.name for i in places.straight.main[:place]]
    return names[len(names) - names[::-1].index("dot_general") :]


def test_a_norm_behind_each_block_belongs_to_it():
    def post_norm(ws, x):
        x = x @ ws[0]
        for i in range(1, 28, 3):
            x = scaled(residual(x, ws[i], ws[i + 1]), ws[i + 2])
        return x @ ws[28]

    places, found = places_of(post_norm, 29)
    assert products_between(places, found) == [1, *[2] * 9, 1]
    assert [operations_before(places, p)[0] for p in found[1:]] == ["add"] * 9
    assert [operations_before(places, p)[-1] for p in found[1:]] == ["mul"] * 9


def test_a_norm_before_the_head_is_no_part_of_the_last_block():
    def pre_norm(ws, x):
        x = x @ ws[0]
        for i in range(1, 10, 3):
            x = x + residual(scaled(x, ws[i]), ws[i + 1], ws[i + 2])
        return scaled(x, ws[10]) @ ws[11]

    places, found = places_of(pre_norm, 12)
    assert products_between(places, found) == [1, 2, 2, 2, 1]
    assert [operations_before(places, p) for p in found[1:]] == [["add", "add"]] * 3


# --- marks ------------------------------------------------------------------------------------------------------------


def test_it_does_nothing():
    x = {"a": jnp.arange(3.0), "b": (jnp.ones(()), jnp.arange(2))}
    jax.tree.map(np.testing.assert_array_equal, jpipe.cut(x), x)
    function = lambda x: jnp.sin(jpipe.cut(x**2)).sum()
    plain = lambda x: jnp.sin(x**2).sum()
    y = jnp.arange(4.0)
    np.testing.assert_array_equal(jax.jit(jax.grad(function))(y), jax.grad(plain)(y))
    np.testing.assert_array_equal(jax.vmap(function)(y[:, None]), jax.vmap(plain)(y[:, None]))
