"""The user's mesh, checked; `tests/end_to_end/test_errors.py` has what a pipeline says of wrong ones."""

import jax
import pytest
from jax.sharding import Mesh

from jpipe.mesh.users_mesh import as_mesh, check_context


def test_no_mesh_is_one_of_stages_alone():
    assert dict(as_mesh(None, 2).shape) == {"stage": 2}
    with pytest.raises(ValueError, match=r"num_stages=9 is more than the 8 cpu devices"):
        as_mesh(None, 9)


def test_a_mesh_stays_as_it_is_or_is_refused(make_mesh):
    mesh = make_mesh((2, 2), ("data", "stage"))
    assert as_mesh(mesh, 2) is mesh
    with pytest.raises(ValueError, match=r"2 devices along 'stage' but num_stages=4"):
        as_mesh(mesh, 4)
    with pytest.raises(ValueError, match="no axis 'stage'"):
        as_mesh(make_mesh((2,), ("data",)), 2)
    with pytest.raises(TypeError, match=r"mesh is a list; pass a jax.sharding.Mesh"):
        as_mesh([], 2)
    mixed = Mesh(mesh.devices, mesh.axis_names, axis_types=(jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit))
    with pytest.raises(ValueError, match="all Auto or all Explicit"):
        as_mesh(mixed, 2)


def test_the_mesh_in_context_has_the_same_axes(make_mesh):
    mesh = make_mesh((2, 2), ("data", "stage"))
    check_context(mesh)
    with jax.set_mesh(make_mesh((2,), ("stage",))), pytest.raises(ValueError, match="set the pipeline's mesh"):
        check_context(mesh)
