"""Loops in place of branches: the trips they take, and what a compiler may not move out of them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpipe.arrays.loops import each, of_trip, when


def visited(start, stop, *, reverse=False):
    """The trips in the order in which they are taken."""

    def body(i, _, carry):
        seen, count = carry
        return seen.at[count].set(i), count + 1

    seen, count = each(start, stop, (), body, (jnp.full(8, -1), 0), reverse=reverse)
    return np.asarray(seen)[: int(count)].tolist()


@pytest.mark.parametrize("bounds", [(0, 0), (2, 3), (1, 5), (4, 2)])
@pytest.mark.parametrize("reverse", [False, True])
def test_each_takes_the_trips_of_a_range(bounds, reverse):
    expected = list(range(*bounds))[:: -1 if reverse else 1]
    assert visited(*bounds, reverse=reverse) == expected
    traced = jax.jit(lambda a, b: each(a, b, (), lambda i, _, c: 10 * c + i, jnp.int32(0), reverse=reverse))
    assert int(traced(*bounds)) == sum(i * 10**n for n, i in enumerate(reversed(expected)))


@pytest.mark.parametrize("condition", [False, True])
def test_when(condition):
    body = lambda given, carry: carry + given
    assert int(when(condition, 3, body, jnp.int32(4))) == 4 + 3 * condition
    assert int(jax.jit(lambda c: when(c, 3, body, jnp.int32(4)))(condition)) == 4 + 3 * condition


def test_what_a_body_reads_comes_from_the_given_and_the_carry():
    reads = lambda i, given, carry: {"row": given[i], "sum": carry}
    body = lambda i, values, carry: values["row"] * 10 + values["sum"]
    for bounds in [(0, 2), (jnp.int32(0), jnp.int32(2)), (1, 2)]:
        expected = sum(10 * (i + 5) for i in range(*map(int, bounds)))
        assert int(each(*bounds, jnp.arange(5, 9), body, jnp.int32(0), reads=reads)) == expected


def test_known_bounds_leave_no_loop_of_one_trip():
    text = jax.jit(lambda x: each(0, 1, (), lambda i, _, c: c * 2, x)).lower(1.0).as_text()
    assert "while" not in text
    assert "while" not in jax.jit(lambda x: when(False, (), lambda _, c: c * 2, x)).lower(1.0).as_text()


def products_outside_of_loops(run, *arguments):
    text = jax.jit(run).lower(*arguments).compile().as_text()
    entry = re.search(r"^ENTRY .*?^\}", text, re.MULTILINE | re.DOTALL)[0]
    assert "dot(" in text
    return "dot(" in entry


def product(x, total):
    return total + x @ x


LOOPS = {
    "given": lambda x, count: each(0, count, x, lambda _, x, total: product(x, total), jnp.zeros_like(x)),
    "read": lambda x, count: each(
        0, count, (), lambda _, x, total: product(x, total), jnp.zeros_like(x), reads=lambda *_: x
    ),
    "read from the carry": lambda x, count: each(
        0,
        count,
        (),
        lambda _, x, carry: (carry[0], product(x, carry[1])),
        (x, jnp.zeros_like(x)),
        reads=lambda _, given, carry: carry[0],
    )[1],
    "in a branch": lambda x, count: when(count > 0, x, product, jnp.zeros_like(x)) * count,
    "not tied": lambda x, count: each(0, count, (), lambda _, given, total: product(x, total), jnp.zeros_like(x)),
}


@pytest.mark.parametrize("name", LOOPS)
def test_what_a_loop_hands_out_stays_in_the_loop(name):
    """Without the tie this compiler computes the product of what doesn't change once, before the loop."""
    x = jnp.arange(9.0).reshape(3, 3)
    assert products_outside_of_loops(LOOPS[name], x, 2) is (name == "not tied")
    np.testing.assert_allclose(jax.jit(LOOPS[name])(x, 3), 3 * (x @ x))


def test_of_trip_changes_nothing():
    for leaf in (jnp.ones((2, 3)), jnp.ones(3), jnp.arange(4).reshape(2, 2), jnp.full((2, 2), -0.0)):
        found = jax.jit(of_trip)(leaf, 5)
        assert found.dtype == leaf.dtype
        np.testing.assert_array_equal(np.asarray(found).tobytes(), np.asarray(leaf).tobytes())
