"""Slices, rows and tables at known and traced indices, against NumPy's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpipe.arrays.indexing import look_up, look_up_once, put_row, put_slice, take_row, take_slice

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


def test_what_is_known_of_a_table_stays_known():
    assert isinstance(look_up((1, 2), 1), int)
    looked_up = jax.make_jaxpr(lambda i: look_up((4, 4, 4), i))(1)
    assert not looked_up.jaxpr.eqns, "a table of equal entries isn't looked at"


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
    assert [look_up_once(table, i) for i in range(len(table))] == table
    assert jax.jit(lambda: [look_up_once(table, jnp.int32(i)) for i in range(len(table))])() == table
