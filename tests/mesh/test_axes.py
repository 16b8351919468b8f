"""What the axes of a mesh are for."""

import pytest

from jpipe.mesh.axes import BATCH_AXES, check_batch_axes, stage_axes
from jpipe.mesh.users_mesh import as_mesh
from jpipe.partitioner.shardings import Axis

NAMES = ("model", "fsdp", "stage", "data", "expert")


@pytest.fixture
def mesh(make_mesh):
    return make_mesh((2, 2, 1, 2, 1), NAMES)


def test_axes(mesh):
    """The data axes jointly and in their own order; axes of one device split nothing."""
    joint = Axis(("data", "fsdp"), (2, 2), is_data=True)
    assert stage_axes(mesh, ("data", "fsdp")) == (joint, Axis(("model",), (2,)))
    assert stage_axes(mesh, ("expert",)) == tuple(Axis((name,), (2,)) for name in ("model", "fsdp", "data"))
    assert stage_axes(mesh, ()) == tuple(Axis((name,), (2,)) for name in ("model", "fsdp", "data"))


def test_axes_of_a_mesh_of_stages():
    mesh = as_mesh(None, 2)
    assert dict(mesh.shape) == {"stage": 2}
    assert stage_axes(mesh, ()) == ()


def test_check_batch_axes(mesh):
    assert check_batch_axes(mesh, BATCH_AXES) == ("data", "fsdp"), "the default may name axes that the mesh lacks"
    assert check_batch_axes(mesh, "expert") == ("expert",)
    assert check_batch_axes(mesh, ["model", "data"]) == ("model", "data"), "in the order in which they are given"
    assert check_batch_axes(mesh, ()) == ()


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        (("data", "stage"), ValueError, r"\('data', 'stage'\) names 'stage', .*\['model', 'fsdp', 'data', 'expert'"),
        (("data", "fsdp", "data"), ValueError, r"names 'data' 2 times; name it once"),
        (("data", "dp"), ValueError, r"\('data', 'dp'\) names 'dp', which the mesh \{'model': 2, .*\} lacks"),
        ("dp", ValueError, "batch_axes='dp' names 'dp', which the mesh"),
        (("data", 2), TypeError, r"batch_axes=\('data', 2\) aren't names"),
        (None, TypeError, "batch_axes=None"),
        ({"data"}, TypeError, "pass a tuple"),
    ],
)
def test_wrong_batch_axes(mesh, names, error, message):
    with pytest.raises(error, match=message):
        check_batch_axes(mesh, names)
