"""Loops in place of branches: the trips they take, and what a compiler may not move out of them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpipe.jax.in_place import (
    each,
    is_apart,
    look_up,
    on_host,
    put_row,
    put_slice,
    take_row,
    take_slice,
    when,
)
from jpipe.tools.chips import parse_topology


def test_cpus_have_one_memory_and_others_two():
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("stage",))
    sharding = NamedSharding(mesh, PartitionSpec("stage"))
    assert (is_apart(mesh), on_host(sharding)) == (False, sharding)
    there = Mesh(np.asarray(parse_topology("h100:2").stand_ins()), ("stage",))
    assert is_apart(there) and is_apart(mesh.abstract_mesh)


# --- slices and rows --------------------------------------------------------------------------------------------------


ARRAY = np.arange(4 * 3 * 5, dtype=np.float32).reshape(4, 3, 5)


def both(function, *indices):
    """What a function gives for known indices and for traced ones, which have to agree."""
    known = function(*indices)
    traced = jax.jit(function)(*indices)
    np.testing.assert_array_equal(known, traced)
    return np.asarray(traced)


@pytest.mark.parametrize("table", [(3, 1, 4, 1), (5, 5, 5), (-2, 7), (9,), tuple(range(100, 0, -3))])
def test_tables(table):
    for index, entry in enumerate(table):
        assert both(lambda i: look_up(table, i), index) == entry


@pytest.mark.parametrize("row", range(4))
def test_rows(row):
    value = np.full((3, 5), -1, np.float32)
    np.testing.assert_array_equal(both(lambda i: take_row(jnp.asarray(ARRAY), i), row), ARRAY[row])
    expected = ARRAY.copy()
    expected[row] = value
    np.testing.assert_array_equal(both(lambda i: put_row(jnp.asarray(ARRAY), value, i), row), expected)


@pytest.mark.parametrize(
    ("index", "shape"),
    [((1,), (2, 3, 5)), ((2, 1), (1, 2, 5)), ((3, 0, 2), (1, 3, 2)), ((), (4, 3, 5)), ((0,), (1, 1, 1))],
)
def test_slices(index, shape):
    """Dimensions for which there is no index begin at 0."""
    starts = (*index, 0, 0, 0)[:3]
    within = tuple(slice(start, start + size) for start, size in zip(starts, shape, strict=True))
    np.testing.assert_array_equal(both(lambda *i: take_slice(jnp.asarray(ARRAY), i, shape), *index), ARRAY[within])
    expected = ARRAY.copy()
    expected[within] = update = np.full(shape, -1, np.float32)
    np.testing.assert_array_equal(both(lambda *i: put_slice(jnp.asarray(ARRAY), update, i), *index), expected)


def test_indices_of_several_types_in_one():
    """A regression: in 64-bit mode a Python index is wider than a traced one, and a slice takes them of one type."""
    with jax.enable_x64(True):
        found = jax.jit(lambda i: take_slice(jnp.asarray(ARRAY), (i, 1), (1, 1, 5)))(np.int32(2))
    np.testing.assert_array_equal(found, ARRAY[2:3, 1:2])


@pytest.mark.parametrize("table", [[5, 7, 6], [4, 4]])
def test_an_index_that_is_looked_up_once(table):
    assert [look_up(table, i, once=True) for i in range(len(table))] == table
    assert jax.jit(lambda: [look_up(table, jnp.int32(i), once=True) for i in range(len(table))])() == table


# --- loops ------------------------------------------------------------------------------------------------------------


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
