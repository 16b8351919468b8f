"""Places what a stage's actions keep for its later ones (residuals, stashes) in buffers, in rows that `ticks` numbers.

A forward keeps its layers' residuals. Where backwards are split, their second part, W, needs some of the residuals too,
which have rows of their own, and what the first part, I, stashes for it (`jpipe.model.split_backward`):

    "residual"    F writes them, B or I reads them last
    "kept"        F writes them, B or W reads them last       only where backwards are split
    "stash"       I writes it, W reads it                     only where backwards are split

With `offload=` some residuals are in "residual_away" and "kept_away" instead: these rows go to the host while they wait
(`jpipe.memory.away`), if that takes fewer rows on the device.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import jax
from jax.sharding import Mesh

from jpipe.arrays.in_place import Index, is_apart
from jpipe.memory.away import AwayStorage, build_away_storage
from jpipe.memory.memory_order import Order, result_orders
from jpipe.memory.storage import Buffers, Row, Storage, build_storage, each_apart
from jpipe.model.traced_layer import DeviceLayer
from jpipe.planning.host_residuals import Going
from jpipe.schedules.ticks import AWAY, ROWS, TickTable
from jpipe.types import Leaf

Kept: TypeAlias = dict[str, Buffers]
"""A device's buffers by the name of their rows."""
Owners = Sequence[Sequence[int]]
"""For each of some groups the virtual stage of each of its layers."""
Ordered = list[tuple[jax.ShapeDtypeStruct, Order | None]]
"""Leaves, and the order of dimensions in which each is made."""


@dataclass(frozen=True, eq=False)
class KeptStorage:
    """The places of what actions keep.

    Attributes:
      storages: by name of the rows, with a record type for each group.
      away: those of them whose rows go to the host.
      rows_of: for each group the name of the rows of each of its residuals.
    """

    storages: dict[str, Storage]
    away: dict[str, AwayStorage]
    rows_of: tuple[tuple[str, ...], ...]

    def empty(self) -> Kept:
        """One stage's arrays, of any values."""
        return {name: storage.empty() for name, storage in self.storages.items()}

    def read(
        self, kept: Kept, name: str, layer: tuple[int, Index], rows: dict[str, Row], back: Kept | None = None
    ) -> list[Leaf]:
        """A layer's leaves in the rows of a name.

        Args:
          kept: what a device keeps.
          name: the name.
          layer: the layer's group, and its position there.
          rows: the rows of the action at hand, by name.
          back: the rows that have come back from the host for it, if any have.
        """
        if back and name in back:
            return self.away[name].read_back(kept[name], back[name], *layer, rows[name])
        return self.storages[name].read(kept[name], *layer, rows[name])

    def read_residuals(
        self, kept: Kept, layer: tuple[int, Index], rows: dict[str, Row], back: Kept, *, late: bool = False
    ) -> list[Leaf]:
        """A layer's residuals, or only those that are `late`, which W reads, in their own order."""
        names = [name for name in self.rows_of[layer[0]] if not late or AWAY.get(name, name) == "kept"]
        leaves = {name: iter(self.read(kept, name, layer, rows, back)) for name in self.storages if name in names}
        return [next(leaves[name]) for name in names]

    def write_residuals(
        self, kept: Kept, layer: tuple[int, Index], leaves: Sequence[Leaf], rows: dict[str, Row]
    ) -> Kept:
        """The inverse of `read_residuals`, on the device."""
        names = self.rows_of[layer[0]]
        for name in filter(names.__contains__, self.storages):
            own = [leaf for leaf, rows_of in zip(leaves, names, strict=True) if rows_of == name]
            kept = kept | {name: self.storages[name].write(kept[name], *layer, own, rows[name])}
        return kept


def make_kept_storage(
    layers: Sequence[DeviceLayer],
    goes: Going,
    traced_as: Sequence[int],
    owners: Sequence[Sequence[int]],
    device_of: Sequence[int],
    table: TickTable,
    *,
    mesh: Mesh,
    apart: bool,
) -> KeptStorage:
    """The places of what layers keep.

    Args:
      layers: forward and backward of the groups as traced; empty if nothing is kept.
      goes: for each of them, whether each of its residuals goes to the host while it waits.
      traced_as: for each group its index among `layers`.
      owners: for each group, the virtual stage of each of its layers.
      device_of: for each virtual stage, its device along `stage`.
      table: with the rows.
      mesh: the devices.
      apart: each leaf has a stacked buffer of its own, if it has one at all (`each_apart`).
    """
    groups = traced_as if layers else ()
    of_traced = [[owners[i] for i, g in enumerate(groups) if g == one] for one in range(len(layers))]
    frees = _frees(table, of_traced, device_of)
    rows_of = [_rows_of(*one) for one in zip(layers, goes, frees, strict=True)]
    kept = [_kept_of(layer, rows, mesh) for layer, rows in zip(layers, rows_of, strict=True)]
    names = ROWS if any(layer.split for layer in layers) else ROWS[:1]
    storages, away = {}, {}
    for name in [*names, *(name for name in table.away_rows if any(name in rows for rows in rows_of))]:
        leaves = [[leaf for leaf, _ in kept[g].get(name, ())] for g in groups]
        orders = [[order for _, order in kept[g].get(name, ())] for g in groups]
        tags, own = each_apart(leaves) if apart else None, owners[: len(groups)]
        if name in table.away_rows:
            rows = table.away_rows[name]
            away[name] = build_away_storage(leaves, own, rows, orders=orders, tags=tags, moves=is_apart(mesh))
            storages[name] = away[name]
        else:
            storages[name] = build_storage(
                leaves, own, device_of=device_of, rows=table.rows[name], orders=orders, tags=tags
            )
    return KeptStorage(storages, away, tuple(rows_of[g] for g in groups))


def _frees(table: TickTable, owners: Sequence[Owners], device_of: Sequence[int]) -> list[frozenset[str]]:
    """For each group as traced, the names of `AWAY` under which its residuals take fewer rows of the devices.

    Rows that go are as many on all stages, and as large as on the stage with the most layers of the group: more than
    those that stay, if only stages near the end of the pipeline have the group.
    """

    def of_group(owned: Owners, name: str) -> bool:
        counts = Counter(itertools.chain(*owned))
        stays = max((n * table.rows[AWAY[name]][device_of[s]] for s, n in counts.items()), default=0)
        return (table.away_rows[name][0] + 1) * max(counts.values(), default=0) < stays

    return [frozenset(name for name in table.away_rows if of_group(owned, name)) for owned in owners]


def _rows_of(layer: DeviceLayer, goes: Sequence[bool], frees: Collection[str]) -> tuple[str, ...]:
    """The name of the rows of each residual."""
    names = ["kept" if waits else "residual" for waits in layer.waits]
    away = [f"{name}_away" if leaves else name for name, leaves in zip(names, goes, strict=True)]
    return tuple(there if there in frees else name for name, there in zip(names, away, strict=True))


def _kept_of(layer: DeviceLayer, rows_of: Sequence[str], mesh: Mesh) -> dict[str, Ordered]:
    """The leaves that a layer keeps, by name of their rows."""
    forward, split = layer.forward, layer.split
    orders = result_orders(forward.jaxpr, forward.residual_indices, mesh)
    kept: dict[str, Ordered] = {"stash": []}
    for leaf, order, name in zip(layer.residuals, orders, rows_of, strict=True):
        kept.setdefault(name, []).append((leaf, order))
    if split:
        kept["stash"] = list(zip(split.stash, result_orders(split.inputs, split.stash_indices, mesh), strict=True))
    return kept
