"""Tells how fast the axes of a mesh are: by the links of TPUs along them; inside a host GPUs are joined by links, too,
and hosts by a slower network.

A TPU has a link to each neighbour on a torus. A collective goes both ways round a ring, so it sends over two links at
once where the devices of an axis lie on a ring:

    2 in a line                   o-o             1 link
    4 in a line, no wraparound    o-o-o-o         1 link     the device at an end has no other
    4 in a square                 o-o             2 links
                                  o-o
    4 or more, wraparound         (o-o-o-o)       2 links
"""

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


def _extents(group: np.ndarray) -> list[int]:
    """How many chips of each dimension a group takes; its coordinates are `[devices, dimensions]`."""
    return [len(np.unique(column)) for column in group.T]


@dataclass(frozen=True)
class Network:
    """The links between the devices of a mesh, and the network between hosts.

    Attributes:
      chip: the kind of the devices.
      sizes: (name, number of devices) of each mesh axis.
      hosts: the number of each device's host, in the order of the mesh; empty if links join all devices.
      coordinates: where each TPU is on its torus, in the order of the mesh; empty of GPUs, and of TPUs that nobody has
        placed yet: there four and more along an axis are taken to lie on a ring.
    """

    chip: Chip
    sizes: tuple[tuple[str, int], ...]
    hosts: tuple[int, ...] = ()
    coordinates: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, chip: Chip, mesh: Mesh) -> Network:
        """The network of a mesh of such chips.

        JAX calls a host of GPUs that are at hand a slice, and takes one process for each host of GPUs that aren't.
        """
        sizes, devices = tuple(mesh.shape.items()), mesh.devices.flatten().tolist()
        if not chip.network_bandwidth:
            coordinates = tuple(tuple(device.coords) for device in devices if hasattr(device, "coords"))
            return cls(chip, sizes, coordinates=coordinates if len(coordinates) == len(devices) else ())
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
        if not self.chip.network_bandwidth:
            return self.chip.link_bandwidth * (1 if collective == "permute" else self._links(axes))
        counts = [np.unique(row, return_counts=True)[1] for row in self._groups(axes, self.hosts or 0)]
        apart = [int(count.min()) for count in counts if len(count) > 1]
        if not apart:
            return self.chip.link_bandwidth
        adapters = 1 if collective in ALONE else min(apart)
        return min(self.chip.link_bandwidth, adapters * self.chip.network_bandwidth)

    def _groups(self, axes: Collection[str], of_devices: object) -> np.ndarray:
        """`[groups, devices of a group, ...]`: what devices have (`[all devices, ...]`, or one for all), along axes."""
        sizes = [n for _, n in self.sizes]
        along = [i for i, (name, _) in enumerate(self.sizes) if name in axes]
        values = np.asarray(of_devices)
        values = values if values.ndim else np.full(math.prod(sizes), values)
        grid = np.moveaxis(values.reshape(*sizes, *values.shape[1:]), along, range(len(along)))
        size = math.prod(sizes[i] for i in along)
        return np.moveaxis(grid.reshape(size, -1, *values.shape[1:]), 0, 1)

    def _links(self, axes: Collection[str]) -> int:
        """The links of a TPU over which a collective along mesh axes sends at once: of the group with the fewest."""
        if not self.coordinates:
            return 2 if math.prod(n for name, n in self.sizes if name in axes) >= 4 else 1
        whole, ring = _extents(np.asarray(self.coordinates)), self.chip.ring
        in_cubes = "x" in self.chip.example.partition("x")[2]  # a torus of three dimensions
        closed = [all(m % ring == 0 for m in (whole if in_cubes else [n])) for n in whole]

        def of_group(group: np.ndarray) -> int:
            dims = zip(_extents(group), whole, closed, strict=True)
            return sum(2 if n == all_of and is_closed else 1 for n, all_of, is_closed in dims if n > 1)

        return max(1, min(map(of_group, self._groups(axes, self.coordinates))))

    def seconds(self, sent: Iterable[Sent]) -> float:
        """Seconds in which a device sends what a program's collectives send, one after the other."""
        return sum(one.bytes * math.prod(one.loops) / self.bandwidth(one.axes, one.collective) for one in sent)
