"""What the axes of a mesh are for, specs of arrays at rest, and functions of one device as programs of all."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jpipe.partitioner.axes import check_batch_axes, gather_axes, on_stages, scatter_axes, stage_axes
from jpipe.partitioner.shardings import REPLICATED, Axis, of_spec
from parts import AXES, DEVICES, SPECS, X, cut

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


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        (("data", "stage"), ValueError, r"\('data', 'stage'\) names 'stage', .*\['model', 'fsdp', 'data', 'expert'"),
        (("data", "fsdp", "data"), ValueError, r"names 'data' 2 times; name it once"),
        (("data", "dp"), ValueError, r"\('data', 'dp'\) names 'dp', which the mesh \{'model': 2, .*\} lacks"),
        (("data", 2), TypeError, r"batch_axes=\('data', 2\) aren't names"),
        ({"data"}, TypeError, "pass a tuple"),
    ],
)
def test_wrong_batch_axes(mesh, names, error, message):
    with pytest.raises(error, match=message):
        check_batch_axes(mesh, names)


@pytest.mark.parametrize("spec", SPECS)
def test_gather_axes_and_scatter_axes(make_mesh, spec):
    """Gathered over `data`, parts lie as the spec says of `model`; scattered, each device has its sum over `data`."""
    spec = PartitionSpec(*spec)
    gathered_at = (REPLICATED, of_spec(spec, AXES)[1])
    everywhere = PartitionSpec("data", "model")

    def run(part):
        gathered = gather_axes(part, spec, ("data", "fsdp"))
        return gathered[None, None], scatter_axes(gathered, spec, ("data", "fsdp"))

    mesh = make_mesh((2, 2), ("data", "model"))
    gathered, scattered = jax.jit(
        jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=(everywhere, spec), check_vma=False)
    )(X)
    for device in DEVICES:
        np.testing.assert_array_equal(gathered[device], cut(X, gathered_at, device))
    is_split = any("data" in (entry or ()) for entry in spec)
    np.testing.assert_array_equal(scattered, X * (2 if is_split else 1))


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
