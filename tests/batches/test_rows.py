"""Which rows of a batch a process feeds; several processes are in tests/end_to_end/test_processes.py."""

import jax
import numpy as np
import pytest

from jpipe.batches.rows import data_shard, place_rows
from jpipe.configuration import check_placed


@pytest.mark.parametrize(
    ("shape", "axes"), [((4,), ("stage",)), ((2, 4), ("stage", "data")), ((2, 4), ("stage", "dp"))]
)
def test_one_process_feeds_all_rows(make_mesh, shape, axes):
    mesh = make_mesh(shape, axes)
    assert data_shard(mesh, axes[1:]) == (0, 1)
    batch = {"x": np.arange(16).reshape(8, 2)}
    placed = place_rows(batch, mesh, axes[1:])["x"]
    np.testing.assert_array_equal(placed, batch["x"])
    assert {shard.data.shape for shard in placed.addressable_shards} == {(8 // (mesh.size // mesh.shape["stage"]), 2)}
    check_placed(batch)


def test_rows_that_can_not_be_placed(make_mesh):
    mesh = make_mesh((2, 4), ("stage", "data"))
    with pytest.raises(ValueError, match=r"6 rows of each of 1 parts .* split over the 4 devices.* multiple of 4 rows"):
        place_rows(np.ones((6, 2)), mesh, ("data",))
    with pytest.raises(ValueError, match="batch is being traced; place takes the rows of this process"):
        jax.jit(lambda x: place_rows(x, mesh, ("data",)))(np.ones((8, 2)))
