"""A chip that no table knows, measured: what a product of matrices and a copy take on a device at hand."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jpipe.forecasting.hardware import Chip
from jpipe.types import Device

WIDTH, COPIED, ROUNDS = 1024, 2**24, 3


def measure_chip(device: Device) -> Chip:
    """A device by the best of some float32 products of matrices, and of some copies.

    Its memory is what its runtime says, or the machine's; what it sends is taken to go at the speed of a copy.
    """
    place = lambda *shape: jax.device_put(jnp.ones(shape, jnp.float32), device)
    product = _seconds(lambda x: x @ x, place(WIDTH, WIDTH))
    copied = _seconds(lambda x: x + 1, place(COPIED))
    known = device.memory_stats() or {}
    memory = known.get("bytes_limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    bandwidth = 8 * COPIED / copied
    return Chip(device.device_kind, 2 * WIDTH**3 / product, memory, bandwidth, bandwidth, None, "measured now")


def _seconds(function: Callable[[jax.Array], jax.Array], argument: jax.Array) -> float:
    """The least of some rounds, after the one that compiles."""
    run, taken = jax.jit(function), []
    for _ in range(ROUNDS + 1):
        begin = time.perf_counter()
        jax.block_until_ready(run(argument))
        taken.append(time.perf_counter() - begin)
    return min(taken[1:])
