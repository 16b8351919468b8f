"""A straight list has the equations of all blocks, and says what each value follows from."""

import jax
import jax.numpy as jnp
import pytest

from jpipe.cutting.straight import Follows, Part, straighten

W, STACK, X = jnp.ones((3, 3)), jnp.ones((4, 3, 3)), jnp.ones((2, 3))


def straight(function, variables, batch):
    closed = jax.make_jaxpr(function)(variables, batch)
    return straighten(closed, len(jax.tree.leaves(variables)), len(closed.out_avals), ())


def products(found):
    equations = found.flat.equations
    return [equations[i] for i in found.main if equations[i].equation.primitive.name == "dot_general"]


def test_values_follow_from_variables_the_batch_or_both():
    found = straight(lambda w, x: jnp.tanh(x + 1) @ (2 * w), W, X)
    (product,) = products(found)
    assert [found.sources[n] for n in product.reads] == [Follows.BATCH, Follows.VARIABLES]
    assert found.sources[product.makes[0]] is Follows.BOTH
    equations, parts = found.support(product.reads)
    assert [found.flat.equations[i].equation.primitive.name for i in equations] == ["add", "tanh", "mul"]
    assert list(parts) == [Part(0)]


@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_over_blocks_is_its_trips(reverse):
    scanned = lambda stack, x: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack, reverse=reverse)[0]
    found = straight(scanned, STACK, X)
    parts = [next(iter(found.support(product.reads)[1])) for product in products(found)]
    order = [3, 2, 1, 0] if reverse else [0, 1, 2, 3]
    assert parts == [Part(0, (i,)) for i in order]
    assert found.depths_read == {0: 1}


def test_a_loop_over_time_stays_one_operation():
    over_time = lambda w, x: jax.lax.scan(lambda h, x: (jnp.tanh(h @ w + x), None), X, x)[0]
    assert products(straight(over_time, W, jnp.ones((5, 2, 3)))) == []


def test_stacked_weights_that_are_used_whole_too_are_not_sliced():
    both = lambda stack, x: jax.lax.scan(lambda x, w: (x @ w, None), x, stack)[0] * stack.sum()
    assert straight(both, STACK, X).depths_read == {0: 0}
