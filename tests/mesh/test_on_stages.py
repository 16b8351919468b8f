"""Functions of one device as programs of all of them."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jpipe.mesh.on_stages import on_stages, shapes_only


def test_layers_are_traced_where_they_find_other_axes_than_stage(make_mesh):
    with shapes_only(make_mesh((2, 2), ("stage", "data"), explicit=True)):
        assert jax.sharding.get_abstract_mesh().axis_types == (AxisType.Manual, AxisType.Auto)


@pytest.mark.parametrize("explicit", [False, True])
def test_on_stages(make_mesh, explicit):
    """Parts in, parts out; what comes before and after sees whole arrays."""
    mesh = make_mesh((2, 2), ("stage", "data"), explicit=explicit)
    specs = PartitionSpec("stage", "data")
    body = lambda part: part * 10 + jax.lax.axis_index("stage") * 2 + jax.lax.axis_index("data")
    run = on_stages(body, mesh, (specs,), specs, lambda x: (x + 1,), lambda y: y[:, ::-1], PartitionSpec())
    x = np.arange(16, dtype=np.int32).reshape(4, 4)
    device = np.kron([[0, 1], [2, 3]], np.ones((2, 2), np.int32))
    np.testing.assert_array_equal(
        jax.jit(run)(jax.device_put(x, NamedSharding(mesh, specs))), ((x + 1) * 10 + device)[:, ::-1]
    )
