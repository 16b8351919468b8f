"""Measures a chip that the table of chips lacks, by a product of matrices and a copy."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpipe.costs.chips import Chip
from jpipe.types import Device

WIDTH, COPIED, ROUNDS = 1024, 2**24, 3


def measure_chip(devices: Sequence[Device]) -> Chip:
    """Measures one of several equal devices: the best times of float32 matrix products, of copies and of passes.

    A pass is one that takes an exponential of each number, as those of softmax and activations do. All devices work at
    the same time, as in a pipeline: those that a host simulates have its cores in common, and its memory. A transfer
    is taken to go at the speed of a copy.
    """
    product = _seconds(lambda x: x @ x, WIDTH, devices)
    copied, passed = (_seconds(function, COPIED // WIDTH, devices) for function in (lambda x: x + 1, jnp.exp))
    reported = (devices[0].memory_stats() or {}).get("bytes_limit")
    memory = reported or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(devices)
    return Chip(
        name=devices[0].device_kind,
        flops=2 * WIDTH**3 / product,
        memory=memory,
        memory_bandwidth=8 * COPIED / copied,
        link_bandwidth=8 * COPIED / copied,
        clock=None,
        source="measured now",
        counted=8 * COPIED / passed,
    )


def _seconds(function: Callable[[jax.Array], jax.Array], rows: int, devices: Sequence[Device]) -> float:
    """Times a function of an array `[rows, WIDTH]` a device, in place; the least of some rounds after the first counts.

    Outputs that are allocated anew would be timed with what their pages take.
    """
    place = NamedSharding(Mesh(np.asarray(devices), ("device",)), PartitionSpec("device"))
    run = jax.jit(jax.vmap(function), donate_argnums=0, out_shardings=place)
    x = jax.device_put(jnp.zeros((len(devices), rows, WIDTH), jnp.float32), place)
    seconds = []
    for _ in range(ROUNDS + 1):
        begin = time.perf_counter()
        x = jax.block_until_ready(run(x))
        seconds.append(time.perf_counter() - begin)
    return min(seconds[1:])
