"""Bytes on the fullest device, by parts; those of a pipeline's step are in `test_profile.py`."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jpipe.profiling.device_memory import MIB, Memory, memory_of


def test_parts_are_those_of_the_fullest_device(make_mesh):
    mesh = make_mesh((2,), ("stage",))
    split = jax.device_put(jnp.zeros(8), NamedSharding(mesh, PartitionSpec("stage")))
    alone = jax.device_put(jnp.zeros(3), mesh.devices[1])
    state = SimpleNamespace(variables={"params": {"w": split}, "batch_stats": [split, alone]}, opt_state=(split, split))
    found = memory_of(SimpleNamespace(temporary_bytes=5), state)
    assert found == Memory(parameters=16, other_variables=16 + 12, optimizer=32, gradients=16, temporaries=5)
    assert found.total == 97


def test_the_table_is_in_mebibytes():
    table = Memory(2 * MIB, 0, MIB // 2, 2 * MIB, 2**30).table()
    assert table.rows[0] == ("parameters", "2.0") and table.rows[-1] == ("all", "1,028.5")
    assert [row[0] for row in table.rows][1:3] == ["other variables", "optimizer"]
