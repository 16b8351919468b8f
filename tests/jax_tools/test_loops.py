"""Loops in place of branches: the trips they take, and what a compiler may not move out of them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpipe.jax_tools.loops import each, of_trip, tie, when


def visited(start, stop, *, reverse=False):
    """The trips in the order in which they are taken."""

    def body(i, carry):
        seen, count = carry
        return i, (seen.at[count].set(i), count + 1)

    seen, count = each(start, stop, body, (jnp.full(8, -1), 0), reverse=reverse)
    return np.asarray(seen)[: int(count)].tolist()


@pytest.mark.parametrize("bounds", [(0, 0), (2, 3), (1, 5), (4, 2)])
@pytest.mark.parametrize("reverse", [False, True])
def test_each_takes_the_trips_of_a_range(bounds, reverse):
    expected = list(range(*bounds))[:: -1 if reverse else 1]
    assert visited(*bounds, reverse=reverse) == expected
    traced = jax.jit(lambda a, b: each(a, b, lambda i, c: (i, 10 * c + i), jnp.int32(0), reverse=reverse))
    assert int(traced(*bounds)) == sum(i * 10**n for n, i in enumerate(reversed(expected)))


@pytest.mark.parametrize("condition", [False, True])
def test_when(condition):
    body = lambda i, carry: (i, carry + 1)
    assert int(when(condition, body, jnp.int32(4))) == 4 + condition
    assert int(jax.jit(lambda c: when(c, body, jnp.int32(4)))(condition)) == 4 + condition


def test_known_bounds_leave_no_loop_of_one_trip():
    text = jax.jit(lambda x: each(0, 1, lambda i, c: (i, c * 2), x)).lower(1.0).as_text()
    assert "while" not in text
    assert "while" not in jax.jit(lambda x: when(False, lambda i, c: (i, c * 2), x)).lower(1.0).as_text()


def products_outside_of_loops(run, *arguments):
    text = jax.jit(run).lower(*arguments).compile().as_text()
    entry = re.search(r"^ENTRY .*?^\}", text, re.MULTILINE | re.DOTALL)[0]
    assert "dot(" in text
    return "dot(" in entry


@pytest.mark.parametrize("tied", [True, False])
def test_what_is_tied_to_its_trip_stays_in_the_loop(tied):
    """Without the tie this compiler computes the product of what doesn't change once, before the loop."""

    def run(x, count):
        def body(i, total):
            factors, i = tie(x, i) if tied else (x, i)
            return i, total + factors @ factors

        return each(0, count, body, jnp.zeros_like(x))

    x = jnp.arange(9.0).reshape(3, 3)
    assert products_outside_of_loops(run, x, 2) is not tied
    np.testing.assert_allclose(jax.jit(run)(x, 3), 3 * (x @ x))


def test_of_trip_changes_nothing():
    for leaf in (jnp.ones((2, 3)), jnp.ones(3), jnp.arange(4).reshape(2, 2), jnp.full((2, 2), -0.0)):
        found = jax.jit(of_trip)(leaf, 5)
        assert found.dtype == leaf.dtype
        np.testing.assert_array_equal(np.asarray(found).tobytes(), np.asarray(leaf).tobytes())
