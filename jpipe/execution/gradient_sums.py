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
      lying: for each set of variables how the gradient of each leaf lies.
      partial_along: for each buffer the mesh axes that it is partial along.
    """

    axes: tuple[Axis, ...]
    lying: list[list[Sharding]]
    partial_along: dict[str, tuple[str, ...]]

    def alike(self, v: int, gradients: Sequence[Leaf], now: Sequence[Sharding]) -> list[Leaf]:
        """A layer's gradients, which lie as `now` says, as the sums of its set of variables lie."""
        known = zip(gradients, now, self.lying[v], strict=True)
        return [convert(leaf, self.axes, own, wanted) for leaf, own, wanted in known]


def make_gradient_sums(
    model: Model, layers: Sequence[DeviceLayer], storage: Storage, axes: tuple[Axis, ...]
) -> GradientSums:
    """How the sums lie where the layers of each group give their gradients so; empty without layers."""
    owners = [(group.variable_set, layer) for group, layer in zip(model.groups, layers, strict=False)]
    known = [(v, storage.record_types[v].buffers, layer.gradients_at) for v, layer in owners if v is not None]
    partial: dict[str, set[int]] = {name: set() for name in storage.buffers}
    for _, buffers, gradients in known:
        for name, sharding in zip(buffers, gradients, strict=True):
            partial[name].update(i for i, along in enumerate(sharding) if along == PARTIAL)
    alike = lambda name, own: tuple(PARTIAL if i in partial[name] else along for i, along in enumerate(own))
    lying: list[list[Sharding]] = [[] for _ in model.variable_sets]
    for v, buffers, gradients in known:
        lying[v] = [alike(name, own) for name, own in zip(buffers, gradients, strict=True)]
    names = {name: tuple(n for i in sorted(found) for n in axes[i].names) for name, found in partial.items()}
    return GradientSums(axes, lying, names)
