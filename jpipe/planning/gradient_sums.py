"""Decides along which mesh axes sums of gradients stay partial until the end of a step.

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
      partial: by buffer, for each of the axes whether the leaves in it are partial along it.
    """

    axes: tuple[Axis, ...]
    partial: dict[str, tuple[bool, ...]]

    @property
    def partial_along(self) -> dict[str, tuple[str, ...]]:
        """The mesh axes along which each buffer is partial."""
        names = lambda flags: tuple(n for axis, yes in zip(self.axes, flags, strict=True) if yes for n in axis.names)
        return {buffer: names(flags) for buffer, flags in self.partial.items()}

    def converted(
        self, buffers: Sequence[str], gradients: Sequence[Leaf | None], now: Sequence[Sharding]
    ) -> list[Leaf | None]:
        """A layer's gradients, those that there are, which lie as `now` says, as the sums in these buffers lie."""

        def as_sum(name: str, leaf: Leaf, at: Sharding) -> Leaf:
            wanted = tuple(PARTIAL if yes else s for yes, s in zip(self.partial[name], at, strict=True))
            return convert(leaf, self.axes, at, wanted)

        lying = zip(buffers, gradients, [at[: len(self.axes)] for at in now], strict=True)
        return [None if leaf is None else as_sum(name, leaf, at) for name, leaf, at in lying]


def make_gradient_sums(
    model: Model, layers: Sequence[DeviceLayer], storage: Storage, axes: tuple[Axis, ...]
) -> GradientSums:
    """How the sums lie where the layers of each group give their gradients so; empty without layers."""
    partial: dict[str, tuple[bool, ...]] = {}
    for group, layer in zip(model.groups, layers, strict=False):
        buffers = () if group.variable_set is None else storage.record_types[group.variable_set].buffers
        for name, own in zip(buffers, layer.gradients_at, strict=True):
            # All leaves of a buffer are split alike, so that they differ in nothing else.
            flags = partial.get(name, (False,) * len(axes))
            # Ends that all stages compute together have a last axis, `stage`, along which nothing is partial.
            partial[name] = tuple(yes or along == PARTIAL for yes, along in zip(flags, own, strict=False))
    return GradientSums(axes, partial)
