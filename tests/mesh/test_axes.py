"""What the axes of a mesh are for, and functions of one device as programs of all of them."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jpipe.mesh.axes import as_mesh, batch_axes, num_shards, on_stages, part_shape, rest_axes, stage_axes
from jpipe.partitioner.shardings import Axis

NAMES = ("model", "fsdp", "stage", "data", "expert")


@pytest.fixture
def mesh(make_mesh):
    return make_mesh((2, 2, 1, 2, 1), NAMES)


def test_axes(mesh):
    """The data axes jointly and in their own order; axes of one device split nothing."""
    assert batch_axes(mesh) == ("data", "fsdp")
    assert num_shards(mesh) == 4
    assert stage_axes(mesh) == (Axis(("data", "fsdp"), (2, 2), of_examples=True), Axis(("model",), (2,)))
    assert rest_axes(mesh) == tuple(Axis((name,), (2,)) for name in ("model", "fsdp", "data"))


def test_axes_of_a_mesh_of_stages():
    mesh = as_mesh(None, 2)
    assert dict(mesh.shape) == {"stage": 2}
    assert (num_shards(mesh), stage_axes(mesh), rest_axes(mesh)) == (1, (), ())


@pytest.mark.parametrize(
    "spec", [(), ("model",), (None, ("fsdp", "model")), (("data", "fsdp", "model"), None, "expert")]
)
def test_part_shape(mesh, spec):
    """As JAX says; axes that aren't picked don't count."""
    spec, shape = PartitionSpec(*spec), (8, 4, 3)
    assert part_shape(shape, spec, mesh, lambda name: True) == NamedSharding(mesh, spec).shard_shape(shape)
    assert part_shape(shape, spec, mesh, lambda name: False) == shape
    alone = PartitionSpec(*["model" if entry and "model" in entry else None for entry in spec])
    expected = NamedSharding(mesh, alone).shard_shape(shape)
    assert part_shape(shape, spec, mesh, lambda name: name == "model") == expected


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
