"""Places what a stage's actions keep for its later ones (residuals, stashes) in buffers, in rows that `ticks` numbers.

A forward keeps its layers' residuals. Where backwards are split, their second part, W, needs some of the residuals too,
which have rows of their own, and what the first part, I, stashes for it (`jpipe.model.split_backward`):

    "residual"    F writes them, B or I reads them last
    "kept"        F writes them, B or W reads them last       only where backwards are split
    "stash"       I writes it, W reads it                     only where backwards are split
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import jax
from jax.sharding import Mesh

from jpipe.arrays.indexing import Index
from jpipe.memory.memory_order import Order, result_orders
from jpipe.memory.storage import Buffers, Row, Storage, build_storage, each_apart
from jpipe.model.traced_layer import DeviceLayer
from jpipe.schedules.ticks import ROWS
from jpipe.types import Leaf

Kept: TypeAlias = dict[str, Buffers]
"""A device's buffers by the name of their rows."""


@dataclass(frozen=True, eq=False)
class KeptStorage:
    """The places of what actions keep.

    Attributes:
      storages: by name of the rows, with a record type for each group.
      waits: for each group and each of its residuals, whether it is among those for W.
    """

    storages: dict[str, Storage]
    waits: tuple[tuple[bool, ...], ...]

    def empty(self) -> Kept:
        """One stage's arrays, of any values."""
        return {name: storage.empty() for name, storage in self.storages.items()}

    def read_residuals(self, kept: Kept, g: int, position: Index, rows: dict[str, Row]) -> list[Leaf]:
        """A layer's residuals, in their own order."""
        read = lambda name: iter(self.storages[name].read(kept[name], g, position, rows[name]))
        leaves = {name: read(name) for name in kept if name != "stash"}
        return [next(leaves["kept" if waits else "residual"]) for waits in self.waits[g]]

    def write_residuals(
        self, kept: Kept, g: int, position: Index, leaves: Sequence[Leaf], rows: dict[str, Row]
    ) -> Kept:
        """The inverse of `read_residuals`."""
        by_rows: dict[str, list[Leaf]] = {"residual": [], "kept": []}
        for leaf, waits in zip(leaves, self.waits[g], strict=True):
            by_rows["kept" if waits else "residual"].append(leaf)
        write = lambda name: self.storages[name].write(kept[name], g, position, by_rows[name], rows[name])
        return kept | {name: write(name) for name in kept if name != "stash"}


def make_kept_storage(
    layers: Sequence[DeviceLayer],
    traced_as: Sequence[int],
    owners: Sequence[Sequence[int]],
    device_of: Sequence[int],
    rows: Mapping[str, Sequence[int]],
    *,
    mesh: Mesh,
    apart: bool,
) -> KeptStorage:
    """The places of what layers keep.

    Args:
      layers: forward and backward of the groups as traced; empty if nothing is kept.
      traced_as: for each group its index among `layers`.
      owners: for each group, the virtual stage of each of its layers.
      device_of: for each virtual stage, its device along `stage`.
      rows: by name, for each device, how many rows it needs.
      mesh: the devices.
      apart: each leaf has a stacked buffer of its own, if it has one at all (`each_apart`).
    """
    groups = traced_as if layers else ()
    waits = [layer.waits for layer in layers]
    kept = [_kept_of(layer, mesh) for layer in layers]
    storages = {}
    for name in ROWS if any(layer.split for layer in layers) else ROWS[:1]:
        leaves = [[leaf for leaf, _ in kept[g][name]] for g in groups]
        storages[name] = build_storage(
            leaves,
            owners[: len(groups)],
            device_of=device_of,
            rows=rows[name],
            orders=[[order for _, order in kept[g][name]] for g in groups],
            tags=each_apart(leaves) if apart else None,
        )
    return KeptStorage(storages, tuple(waits[g] for g in groups))


def _kept_of(layer: DeviceLayer, mesh: Mesh) -> dict[str, list[tuple[jax.ShapeDtypeStruct, Order | None]]]:
    """The leaves that a layer keeps, by name of their rows, with the orders of dimensions in which they are made."""
    forward, split = layer.forward, layer.split
    orders = result_orders(forward.jaxpr, forward.residual_indices, mesh)
    residuals = list(zip(layer.residuals, orders, strict=True))
    that_wait = lambda waiting: [leaf for leaf, waits in zip(residuals, layer.waits, strict=True) if waits == waiting]
    stash = zip(split.stash, result_orders(split.inputs, split.stash_indices, mesh), strict=True) if split else ()
    return {"residual": that_wait(False), "kept": that_wait(True), "stash": list(stash)}
