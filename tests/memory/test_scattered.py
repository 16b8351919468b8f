"""Leaves of one stage, shared out among all."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from cases import assert_equal
from jpipe.memory.scattered import ScatteredLeaf


def leaf(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def test_along_which_dimension_a_leaf_is_scattered(make_mesh):
    mesh = make_mesh((2, 2), ("stage", "model"))
    dimension = lambda shape, *spec: ScatteredLeaf(leaf(*shape), PartitionSpec(*spec), mesh).dimension
    assert dimension((3, 4)) == dimension((2, 4)) == 1, "the largest that K divides"
    assert dimension((4, 4)) == 0
    assert dimension((2, 4), "model") == 1, "after other axes split it"
    assert dimension((3, 5)) is None
    assert dimension(()) is None
    assert ScatteredLeaf(leaf(4, 3), PartitionSpec("model"), mesh).sharding.spec == PartitionSpec(("model", "stage"))


def test_leaves_of_other_devices(make_mesh):
    known = ScatteredLeaf(leaf(4, 3), PartitionSpec(), make_mesh((4,), ("stage",)))
    value = np.arange(12, dtype=np.float32).reshape(4, 3)
    mine = make_mesh((4,), ("stage",))
    for lies in (
        value,
        jax.device_put(value, jax.devices()[7]),
        jax.device_put(value, NamedSharding(mine, PartitionSpec())),
    ):
        put = known.put(lies)
        assert put.sharding == known.sharding
        assert_equal(put, value)
