"""Moves arrays between the memory of devices and that of their hosts, in traced code."""

from __future__ import annotations

import jax

from jpipe.types import PyTree

HOST, DEVICE = "pinned_host", "device"
"""The two memories, as JAX calls them in shardings (`memory_kind`) and in `jax.checkpoint` policies."""


def to_host(tree: PyTree) -> PyTree:
    """Arrays, traced, in the memory of the host."""
    return jax.device_put(tree, jax.memory.Space.Host)


def to_device(tree: PyTree) -> PyTree:
    """Arrays, traced, in the memory of the device."""
    return jax.device_put(tree, jax.memory.Space.Device)
