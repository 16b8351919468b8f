"""Bytes on the fullest device, by parts; those of a pipeline's step are in `test_profile.py`."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jpipe.profiling.device_memory import memory_of


def test_parts_are_those_of_the_fullest_device(make_mesh):
    mesh = make_mesh((2,), ("stage",))
    split = jax.device_put(jnp.zeros(8), NamedSharding(mesh, PartitionSpec("stage")))
    alone = jax.device_put(jnp.zeros(3), mesh.devices[1])
    state = SimpleNamespace(variables={"params": {"w": split}, "batch_stats": [split, alone]}, opt_state=(split, split))
    found = memory_of(SimpleNamespace(temporary_bytes=5), state)
    assert found == {"parameters": 16, "other_variables": 16 + 12, "optimizer": 32, "gradients": 16, "temporaries": 5}
    assert found.total == 97
