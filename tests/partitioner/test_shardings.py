"""How arrays lie on devices, against arrays that are cut in NumPy by the definition of a shard."""

import itertools

import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jpipe.partitioner.shardings import (
    PARTIAL,
    REPLICATED,
    Axis,
    Shard,
    is_possible,
    of_spec,
    part_shape,
    to_spec,
)
from partitioned import whole_shape
from parts import AXES, DEVICES, SPECS, X, cut

SHARDS = [Shard(0), Shard(1), Shard(0, 2), Shard(1, 2), Shard(0, 4)]
SHARDINGS = [s for s in itertools.product([REPLICATED, PARTIAL, *SHARDS], repeat=2) if is_possible(X.shape, s, AXES)]


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_the_shape_of_parts_and_of_the_whole(sharding):
    assert {cut(X, sharding, device).shape for device in DEVICES} == {part_shape(X.shape, sharding, AXES)}
    assert whole_shape(part_shape(X.shape, sharding, AXES), sharding, AXES) == X.shape


@pytest.mark.parametrize("spec", SPECS)
def test_specs_mean_what_they_mean_to_jax(make_mesh, spec):
    """The parts of `of_spec` are those of JAX, and `to_spec` gives the spec back."""
    spec, mesh = PartitionSpec(*spec), make_mesh((2, 2), ("data", "model"))
    sharding = of_spec(spec, AXES)
    indices = NamedSharding(mesh, spec).devices_indices_map(X.shape)
    for device in DEVICES:
        np.testing.assert_array_equal(cut(X, sharding, device), X[indices[mesh.devices[device]]])
    assert tuple(to_spec(sharding, AXES, 2)) == (*spec, None)[:2]


def test_specs_of_axes_that_split_jointly():
    axes = (Axis(("data", "fsdp"), (2, 2)), Axis(("model",), (2,)))
    assert of_spec(PartitionSpec(None, ("data", "fsdp", "model")), axes) == (Shard(1), Shard(1, 4))
    assert of_spec(PartitionSpec(("one", "model")), axes) == (REPLICATED, Shard(0))  # an axis of one device
    assert of_spec(PartitionSpec(("data", "one", "fsdp")), axes) == (Shard(0), REPLICATED)  # also between others
    for names in ("fsdp", ("fsdp", "data")):
        with pytest.raises(ValueError, match=r"arrays are split over the mesh axes \('data', 'fsdp'\) jointly"):
            of_spec(PartitionSpec(names), axes)
