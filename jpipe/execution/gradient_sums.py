"""How the sums of gradients lie on the devices of a stage, while they grow.

A gradient may be left partial along axes that don't split its parameter, of which it is a sum over parts of the batch
or of the sequence: then it is added up once a step, and not for each micro-batch. Gradients that are added up in one
buffer have to be alike, so that where some are partial along an axis, the others are made so: the first device has the
gradient, the others zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jpipe.memory.storage import Storage
from jpipe.model.groups import Model
from jpipe.model.traced_layer import DeviceLayer
from jpipe.partitioner.conversions import convert
from jpipe.partitioner.shardings import PARTIAL, Axis, Sharding
from jpipe.types import Leaf


class GradientSums(NamedTuple):
    """How the sums of gradients lie.

    Attributes:
      axes: what arrays are split over.
      lying: by buffer, how the leaves in it lie.
    """

    axes: tuple[Axis, ...]
    lying: dict[str, Sharding]

    @property
    def partial_along(self) -> dict[str, tuple[str, ...]]:
        """For each buffer the mesh axes that it is partial along."""
        names = lambda at: tuple(n for axis, s in zip(self.axes, at, strict=True) if s == PARTIAL for n in axis.names)
        return {buffer: names(at) for buffer, at in self.lying.items()}

    def converted(self, buffers: Sequence[str], gradients: Sequence[Leaf], now: Sequence[Sharding]) -> list[Leaf]:
        """A layer's gradients, which lie as `now` says, as the sums in these buffers lie."""
        known = zip(buffers, gradients, now, strict=True)
        return [convert(leaf, self.axes, own, self.lying[name]) for name, leaf, own in known]


def make_gradient_sums(
    model: Model, layers: Sequence[DeviceLayer], storage: Storage, axes: tuple[Axis, ...]
) -> GradientSums:
    """How the sums lie where the layers of each group give their gradients so; empty without layers."""
    lying: dict[str, Sharding] = {}
    for group, layer in zip(model.groups, layers, strict=False):
        buffers = () if group.variable_set is None else storage.record_types[group.variable_set].buffers
        for name, own in zip(buffers, layer.gradients_at, strict=True):
            # All leaves of a buffer are split alike, so that they differ in nothing else.
            pairs = zip(own, lying.get(name, own), strict=True)
            lying[name] = tuple(PARTIAL if PARTIAL in pair else pair[0] for pair in pairs)
    return GradientSums(axes, lying)
