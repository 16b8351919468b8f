"""PartitionSpecs of arrays at rest, and gathering along some of their axes."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jpipe.mesh.specs import gather_axes, scatter_axes, split_by
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
