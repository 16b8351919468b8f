"""What the axes of a mesh are for."""

import pytest

from jpipe.mesh.axes import batch_axes, num_shards, rest_axes, stage_axes
from jpipe.mesh.users_mesh import as_mesh
from jpipe.partitioner.shardings import Axis

NAMES = ("model", "fsdp", "stage", "data", "expert")


@pytest.fixture
def mesh(make_mesh):
    return make_mesh((2, 2, 1, 2, 1), NAMES)


def test_axes(mesh):
    """The data axes jointly and in their own order; axes of one device split nothing."""
    assert batch_axes(mesh) == ("data", "fsdp")
    assert num_shards(mesh) == 4
    assert stage_axes(mesh) == (Axis(("data", "fsdp"), (2, 2), is_data=True), Axis(("model",), (2,)))
    assert rest_axes(mesh) == tuple(Axis((name,), (2,)) for name in ("model", "fsdp", "data"))


def test_axes_of_a_mesh_of_stages():
    mesh = as_mesh(None, 2)
    assert dict(mesh.shape) == {"stage": 2}
    assert (num_shards(mesh), stage_axes(mesh), rest_axes(mesh)) == (1, (), ())
