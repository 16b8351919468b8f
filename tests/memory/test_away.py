"""Rows that go to the host and come back."""

import jax
import jax.numpy as jnp
import numpy as np

from cases import assert_equal
from jpipe.memory.away import build_away_storage
from jpipe.memory.storage import Row


def test_a_row_goes_and_comes_back():
    """Two types of records on two virtual stages; a row has room for those of either."""
    leaves = [[jax.ShapeDtypeStruct((2, 3), "float32")], [jax.ShapeDtypeStruct((5,), "int32")]]
    storage = build_away_storage(leaves, [[0, 0, 1], [1]], (1, 3), orders=[[None], [None]], moves=False)
    here, host = storage.empty(), storage.empty_host()
    values = [jnp.full((2, 3), float(i)) for i in range(2)]
    for i, value in enumerate(values):
        here = storage.write(here, 0, i, [value], Row(0, 0))
    host = storage.sent(host, storage.leaving(here, jnp.int32(-1)), jnp.int32(2))
    assert {array.shape[0] for array in host.values()} == {3}
    for i in range(2):
        here = storage.write(here, 0, i, [jnp.full((2, 3), 9.0)], Row(0, 0))
    back = storage.fetched(host, jnp.int32(2))
    assert jax.tree.map(jnp.shape, back) == jax.tree.map(jnp.shape, storage.empty_row())
    for i, value in enumerate(values):
        assert_equal(storage.read_back(here, back, 0, i, Row(0, 0, stays=jnp.int32(0))), [value])
        assert_equal(
            storage.read_back(here, back, 0, i, Row(0, 0, stays=jnp.int32(1))), [np.full((2, 3), 9, np.float32)]
        )
