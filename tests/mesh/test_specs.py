"""PartitionSpecs of arrays at rest, and gathering along some of their axes."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jpipe.mesh.specs import gather_axes, scatter_axes, shard_shape, split_by
from jpipe.partitioner.shardings import REPLICATED, of_spec
from parts import AXES, DEVICES, X, cut

SPECS = [("data",), (None, "model"), ("model", "data"), (("data", "model"),), (("model", "data"),)]


def test_split_by():
    spec = PartitionSpec(("fsdp", "model"), None, "model")
    assert tuple(split_by(spec, lambda name: name == "fsdp")) == ("fsdp",)
    assert tuple(split_by(spec, lambda name: name == "model")) == ("model", None, "model")


@pytest.mark.parametrize("spec", SPECS)
def test_gather_axes_and_scatter_axes(make_mesh, spec):
    """Gathered over `data`, parts lie as the spec says of `model`; scattered, each device has its sum over `data`."""
    spec, is_data = PartitionSpec(*spec), lambda name: name == "data"
    gathered_at = (REPLICATED, of_spec(spec, AXES)[1])
    everywhere = PartitionSpec("data", "model")

    def run(part):
        gathered = gather_axes(part, spec, is_data)
        return gathered[None, None], scatter_axes(gathered, spec, is_data)

    mesh = make_mesh((2, 2), ("data", "model"))
    gathered, scattered = jax.jit(
        jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=(everywhere, spec), check_vma=False)
    )(X)
    for device in DEVICES:
        np.testing.assert_array_equal(gathered[device], cut(X, gathered_at, device))
    is_split = any("data" in (entry or ()) for entry in spec)
    np.testing.assert_array_equal(scattered, X * (2 if is_split else 1))


@pytest.mark.parametrize(
    "spec", [(), ("model",), (None, ("fsdp", "model")), (("data", "fsdp", "model"), None, "expert")]
)
def test_shard_shape(make_mesh, spec):
    """As JAX says; axes that aren't picked don't count."""
    mesh = make_mesh((2, 2, 1, 2, 1), ("model", "fsdp", "stage", "data", "expert"))
    spec, shape = PartitionSpec(*spec), (8, 4, 3)
    assert shard_shape(shape, spec, mesh, lambda name: True) == NamedSharding(mesh, spec).shard_shape(shape)
    assert shard_shape(shape, spec, mesh, lambda name: False) == shape
    alone = PartitionSpec(*["model" if entry and "model" in entry else None for entry in spec])
    expected = NamedSharding(mesh, alone).shard_shape(shape)
    assert shard_shape(shape, spec, mesh, lambda name: name == "model") == expected
