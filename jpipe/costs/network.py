"""Tells how fast the axes of a mesh are: by the links of chips along them, and by the network between hosts.

GPUs of a host are joined by links. A TPU has a link to each neighbour on a torus. A collective goes both ways round a
ring, so it sends over two links at once where the devices of an axis lie on a ring:

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

from jpipe.costs.chips import Chip, chip_of
from jpipe.mesh.axes import AXIS
from jpipe.partitioner.conversions import Sent
from jpipe.partitioner.rings import HIDDEN

LARGEST_RING = 8
"""The most devices of a ring of products: of more, pieces are too small."""
ALONE = frozenset(["permute", "all_to_all"])
"""Collectives in which each device sends to others by itself: nothing goes round a ring of all."""


def rings_of(mesh: Mesh) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The axes of a mesh of TPUs, but `stage`, whose devices lie on a ring of links, each with its devices in order.

    A TPU waits in a permutation for its neighbours alone, so that a layer may have one. On GPUs and CPUs all devices of
    a mesh have to carry out a permutation together, also those of stages that have no such layer.
    """
    device = mesh.devices.flat[0]
    chip = chip_of(device)
    if device.platform != "tpu" or chip is None:
        return ()
    network = Network.of(chip, mesh)
    return tuple((name, order) for name in mesh.axis_names if name != AXIS and (order := network.ring(name)))


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
            return self.chip.link_bandwidth * (1 if AXIS in axes and collective == "permute" else self._links(axes))
        hosts = np.broadcast_to(self.hosts or 0, math.prod(n for _, n in self.sizes))
        counts = [np.unique(group, return_counts=True)[1] for group in hosts[self._groups(axes)]]
        apart = [int(count.min()) for count in counts if len(count) > 1]
        if not apart:
            return self.chip.link_bandwidth
        adapters = 1 if collective in ALONE else min(apart)
        return min(self.chip.link_bandwidth, adapters * self.chip.network_bandwidth)

    def _groups(self, axes: Collection[str]) -> np.ndarray:
        """`[groups, devices of a group]`: the numbers of the devices that mesh axes join, in the order of the mesh."""
        sizes = [n for _, n in self.sizes]
        along = [i for i, (name, _) in enumerate(self.sizes) if name in axes]
        numbers = np.moveaxis(np.arange(math.prod(sizes)).reshape(sizes), along, range(-len(along), 0))
        return numbers.reshape(-1, math.prod(sizes[i] for i in along))

    def ring(self, axis: str) -> tuple[int, ...]:
        """The devices of a mesh axis in an order in which each has a link to the next, and the last to the first.

        Empty if there is none, or if it isn't known; of more than `LARGEST_RING` devices none is looked for.
        """
        size = dict(self.sizes)[axis]
        if not self.coordinates or not 1 < size <= LARGEST_RING:
            return ()
        groups = np.asarray(self.coordinates)[self._groups([axis])]

        def are_linked(i: int, j: int) -> bool:
            """Whether the devices i and j of all groups are."""
            apart = np.abs(groups[:, i] - groups[:, j])
            linked = (apart == 1) | ((apart == np.asarray(self._closed) - 1) & (apart > 1))
            return bool((linked.sum(-1) == 1).all() and ((apart > 0).sum(-1) == 1).all())

        def go_on(order: tuple[int, ...]) -> tuple[int, ...]:
            if len(order) == size:
                return order if are_linked(order[-1], order[0]) else ()
            nexts = (i for i in range(size) if i not in order and are_linked(order[-1], i))
            return next(filter(None, (go_on((*order, i)) for i in nexts)), ())

        return go_on((0,))

    @property
    def _closed(self) -> list[int]:
        """The chips along each dimension of the torus whose first has a link to the last; 0 along the others."""
        extents, ring = _extents(np.asarray(self.coordinates)), self.chip.ring
        is_linked = lambda n: ring > 0 and all(m % ring == 0 for m in (extents if self.chip.in_cubes else [n]))
        return [n if is_linked(n) else 0 for n in extents]

    def _links(self, axes: Collection[str]) -> int:
        """The links of a TPU over which a collective along mesh axes sends at once: of the group with the fewest."""
        if not self.coordinates:
            return 2 if math.prod(n for name, n in self.sizes if name in axes) >= 4 else 1

        def of_group(group: np.ndarray) -> int:
            dims = zip(_extents(group), self._closed, strict=True)
            return sum(2 if n == size else 1 for n, size in dims if n > 1)

        return max(1, min(map(of_group, np.asarray(self.coordinates)[self._groups(axes)])))

    def seconds(self, sent: Iterable[Sent]) -> float:
        """Seconds in which a device waits for what a program's collectives send, one after the other.

        Those that go by rings are for the most part beside products. These are a layer's permutations: a user's own are
        carried out as gathers (`jpipe.partitioner.handlers`).
        """

        def waited(one: Sent) -> float:
            by_ring = one.collective == "permute" and AXIS not in one.axes
            return math.prod(one.loops) * one.bytes * (1 - HIDDEN if by_ring else 1.0)

        return sum(waited(one) / self.bandwidth(one.axes, one.collective) for one in sent)
