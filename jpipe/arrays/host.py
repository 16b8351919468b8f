"""Tells the memory of devices from that of their hosts, and moves arrays between them."""

from __future__ import annotations

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jpipe.types import PyTree

HOST, DEVICE = "pinned_host", "device"
"""The two memories, as JAX calls them in shardings (`memory_kind`) and in `jax.checkpoint` policies."""


def is_apart(mesh: Mesh | AbstractMesh) -> bool:
    """Whether the hosts' memory is another than that of the devices, as it isn't on CPUs."""
    return not isinstance(mesh, Mesh) or mesh.devices.flat[0].platform != "cpu"


def on_host(sharding: NamedSharding) -> NamedSharding:
    """The same sharding in the memory of the hosts; as it is on CPUs, which have no other.

    The shape of a device that isn't there, as its compiler is given it, may not say that it has such a memory.
    """
    if not is_apart(sharding.mesh):
        return sharding
    there = sharding.with_memory_kind(HOST)
    is_known = there.memory_kind == HOST
    return there if is_known else NamedSharding(sharding.mesh.abstract_mesh, sharding.spec, memory_kind=HOST)


def to_host(tree: PyTree) -> PyTree:
    """Arrays, traced, in the memory of the host."""
    return jax.device_put(tree, jax.memory.Space.Host)


def to_device(tree: PyTree) -> PyTree:
    """Arrays, traced, in the memory of the device."""
    return jax.device_put(tree, jax.memory.Space.Device)
