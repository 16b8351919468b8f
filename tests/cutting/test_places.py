"""The places are those that the fewest values cross."""

from itertools import pairwise

import jax
import jax.numpy as jnp

from jpipe.cutting.places import Places, find_places
from jpipe.cutting.straight import straighten

X = jnp.ones((2, 8))


def places_of(function, num_weights, wanted=1, width=8):
    weights = [jnp.ones((width, width)) for _ in range(num_weights)]
    closed = jax.make_jaxpr(function)(weights, X)
    places = Places(straighten(closed, num_weights, 1, ()))
    return places, find_places(places, wanted, lambda place: False)


def products_between(places, found):
    """How many products lie between the places."""
    ends = [0, *found, len(places.works)]
    return [sum(places.works[a:b]) for a, b in pairwise(ends)]


def residual(x, v, w):
    return x + jnp.tanh(x @ v) @ w


def test_a_chain_is_cut_behind_each_product():
    chain = lambda ws, x: jnp.tanh(jnp.tanh(jnp.tanh(x @ ws[0]) @ ws[1]) @ ws[2])
    places, found = places_of(chain, 3)
    assert products_between(places, found) == [1, 1, 1]
    assert [len(places.crossing[p]) for p in found] == [1, 1]


def test_residual_blocks_are_cut_between_them():
    def blocks(ws, x):
        x = x @ ws[0]
        for i in range(1, 21, 2):
            x = residual(x, ws[i], ws[i + 1])
        return x

    places, found = places_of(blocks, 21)
    assert products_between(places, found) == [1, *[2] * 10]


def test_a_block_that_is_too_large_is_cut_inside():
    places, found = places_of(lambda ws, x: residual(x @ ws[0], ws[1], ws[2]), 3, wanted=3)
    assert products_between(places, found) == [1, 1, 1]
    assert [len(places.crossing[p]) for p in found] == [1, 2]


def test_a_wide_hidden_layer_is_no_place():
    def wide(ws, x):
        for w in ws:
            x = jnp.tanh(x @ jnp.tile(w, (1, 4))) @ jnp.tile(w, (4, 1))
        return x

    places, found = places_of(wide, 10)
    assert products_between(places, found) == [2] * 10


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
