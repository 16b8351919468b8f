"""The two memories."""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpipe.arrays.host import HOST, is_apart, on_host, to_device, to_host
from jpipe.costs.chips import parse_topology


def test_cpus_have_one_memory_and_others_two():
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("stage",))
    sharding = NamedSharding(mesh, PartitionSpec("stage"))
    assert (is_apart(mesh), on_host(sharding)) == (False, sharding)
    there = Mesh(np.asarray(parse_topology("h100:2").stand_ins()), ("stage",))
    assert is_apart(there) and is_apart(mesh.abstract_mesh)


def test_a_sharding_in_the_memory_of_hosts_of_devices_that_are_not_known():
    mesh = jax.sharding.AbstractMesh((2,), ("stage",))
    assert on_host(NamedSharding(mesh, PartitionSpec("stage"))).memory_kind == HOST


def test_moves_are_traced():
    jaxpr = jax.make_jaxpr(lambda x: to_device(to_host(x)))(np.ones(3, np.float32))
    spaces = [equation.params["devices"] for equation in jaxpr.eqns]
    assert spaces == [(jax.memory.Space.Host,), (jax.memory.Space.Device,)]
