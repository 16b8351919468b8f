"""Tells how fast the axes of a mesh are: inside a host GPUs are joined by links, hosts by a slower network."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh

from jpipe.costs.chips import Chip
from jpipe.mesh.axes import AXIS
from jpipe.partitioner.traffic import Sent

ALONE = frozenset(["permute", "all_to_all"])
"""Collectives in which each device sends to others by itself: nothing goes round a ring of all."""


@dataclass(frozen=True)
class Network:
    """The links between the devices of a mesh, and the network between hosts.

    Attributes:
      chip: the kind of the devices.
      sizes: (name, number of devices) of each mesh axis.
      hosts: the number of each device's host, in the order of the mesh; empty if links join all devices.
    """

    chip: Chip
    sizes: tuple[tuple[str, int], ...]
    hosts: tuple[int, ...] = ()

    @classmethod
    def of(cls, chip: Chip, mesh: Mesh) -> Network:
        """The network of a mesh of such chips.

        JAX calls a host of GPUs that are at hand a slice, and takes one process for each host of GPUs that aren't.
        """
        sizes, devices = tuple(mesh.shape.items()), mesh.devices.flatten().tolist()
        if not chip.network_bandwidth:
            return cls(chip, sizes)
        at_hand = devices[0] in jax.devices()
        hosts = (getattr(device, "slice_index", 0) if at_hand else device.process_index for device in devices)
        return cls(chip, sizes, tuple(hosts))

    @property
    def hop(self) -> float:
        """bytes/s of what stages hand on. All wait for the slowest hop: between two hosts, if stages are on several."""
        return self.bandwidth([AXIS], "permute")

    def bandwidth(self, axes: Collection[str], collective: str = "all_reduce") -> float:
        """bytes/s one way that a device has along mesh axes: those of its links, if all devices along them share one.

        Else they are the network's. A ring leaves a host over the adapters of all the devices that it has there.
        """
        along = [i for i, (name, _) in enumerate(self.sizes) if name in axes]
        grid = np.reshape(self.hosts or np.zeros(math.prod(n for _, n in self.sizes), int), [n for _, n in self.sizes])
        rows = np.moveaxis(grid, along, range(-len(along), 0)).reshape(-1, math.prod(self.sizes[i][1] for i in along))
        counts = [np.unique(row, return_counts=True)[1] for row in rows]
        apart = [int(count.min()) for count in counts if len(count) > 1]
        if not apart:
            return self.chip.link_bandwidth
        adapters = 1 if collective in ALONE else min(apart)
        return min(self.chip.link_bandwidth, adapters * self.chip.network_bandwidth)

    def seconds(self, sent: Iterable[Sent]) -> float:
        """Seconds in which a device sends what a program's collectives send, one after the other."""
        return sum(one.bytes * math.prod(one.loops) / self.bandwidth(one.axes, one.collective) for one in sent)
