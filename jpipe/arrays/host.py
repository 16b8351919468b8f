"""Tells the memory of devices from that of their hosts, and moves arrays between them."""

from __future__ import annotations

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jpipe.types import Leaf, PyTree

HOST, DEVICE = "pinned_host", "device"
"""The two memories, as JAX calls them in shardings (`memory_kind`) and in `jax.checkpoint` policies."""


def is_apart(mesh: Mesh | AbstractMesh) -> bool:
    """Whether the hosts' memory is another than that of the devices, as it isn't on CPUs."""
    return not isinstance(mesh, Mesh) or mesh.devices.flat[0].platform != "cpu"


def on_host(sharding: NamedSharding) -> NamedSharding:
    """The same sharding in the memory of the hosts; as it is on CPUs, which have no other.

    A device that isn't there, as its compiler is given it or as planning takes it, may not say that it has such memory.
    """
    mesh = sharding.mesh
    if not is_apart(mesh):
        return sharding
    says = not isinstance(mesh, Mesh) or hasattr(mesh.devices.flat[0], "client")
    if says and (there := sharding.with_memory_kind(HOST)).memory_kind == HOST:
        return there
    return NamedSharding(mesh.abstract_mesh, sharding.spec, memory_kind=HOST)


def is_on_host(array: jax.Array) -> bool:
    """Whether an array, traced, lies in the memory of the host."""
    return jax.typeof(array).memory_space == jax.memory.Space.Host


def to_host(tree: PyTree) -> PyTree:
    """Arrays, traced, in the memory of the host."""
    return jax.device_put(tree, jax.memory.Space.Host)


def to_device(tree: PyTree) -> PyTree:
    """Arrays, traced, in the memory of the device."""
    return jax.device_put(tree, jax.memory.Space.Device)


def is_whole(leaf: Leaf) -> bool:
    """Whether this process can read all of a leaf."""
    return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated
