"""Places what a stage's actions keep for its later ones in buffers, in rows that `ticks` numbers.

A forward keeps its layers' residuals. Where backwards are split, their second part, W, needs some of the residuals too,
which have rows of their own, and what the first part, I, hands over to it (`jpipe.model.split_backward`):

    "residual"        F writes them, B or I reads them last
    "late_residual"   F writes them, B or W reads them last       only where backwards are split
    "w_input"         I writes it, W reads it                     only where backwards are split

With `offload=`, or a policy of `remat=` that offloads, some residuals are in "residual_away" and "late_residual_away"
instead: these rows go to the host while they wait, and come back in time, if that takes fewer rows on the device.

A device has the rows that were just written, and those that wait too briefly to leave; and one place for the row that
has come back. The host has the rows that wait. `jpipe.schedules.waiting` says which row moves when:

    buffer                    device, `here`          device, `back`       host
    bfloat16_4x512x2048       [rows * n, 4, 512, 2048]  [n, 4, 512, 2048]    [host_rows, n, 4, 512, 2048]

n leaves are a row: as many as the virtual stage with the most has, on all stages, so that a row is a slice of one size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jpipe.jax.in_place import Index, is_apart, put_row, take_row, take_slice, to_host
from jpipe.jax.trees import bytes_of
from jpipe.memory.buffers import Order, StackedBuffer, in_order, result_orders
from jpipe.memory.storage import Buffers, Row, Storage, build_storage
from jpipe.model.groups import Model
from jpipe.model.traced_layer import DeviceLayer, TracedLayer
from jpipe.planning.request import Offload, Request
from jpipe.processes.progress import warn_once
from jpipe.schedules.schedule import Schedule
from jpipe.schedules.ticks import AWAY, ROWS, TickTable, lower
from jpipe.types import Leaf


@dataclass(frozen=True)
class AwayStorage(Storage):
    """The places in rows that go to the host.

    All devices have equally large rows: for `Row.device` it has device 0 alone.

    Attributes:
      host_rows: the rows on the host.
      moves: whether the devices have a memory besides their host's; else the host's rows lie with the others.
    """

    host_rows: int
    moves: bool

    def read_back(self, here: Buffers, back: Buffers, t: int, record: Index, at: Row) -> list[Leaf]:
        """Reads the leaves of a record from the row that has come back; from its own, if `at.stays` is 1."""
        came = self.read(back, t, record, Row(0, 0))
        if at.stays is None:
            return came
        return [jnp.where(at.stays > 0, *pair) for pair in zip(self.read(here, t, record, at), came, strict=True)]

    def empty_host(self) -> Buffers:
        """The host's rows `[host_rows, n, ...]`, of any values: nothing is written to memory."""
        shape = lambda buffer: (self.host_rows, buffer.strides[0], *buffer.shape[1:])
        host = {name: jax.lax.empty(shape(buffer), buffer.dtype) for name, buffer in self.named_buffers}
        return to_host(host) if self.moves else host

    @property
    def row_bytes(self) -> int:
        """The bytes of a row."""
        return bytes_of(jax.eval_shape(self.empty_row))

    def empty_row(self) -> Buffers:
        """A row on the device, of any values."""
        return {name: jax.lax.empty((b.strides[0], *b.shape[1:]), b.dtype) for name, b in self.named_buffers}

    def fetched(self, host: Buffers, row: Index) -> Buffers:
        """Copies a row of the host's to the device; for -1 row 0, which nobody reads."""
        return self._in_order({name: take_row(array, jnp.maximum(row, 0)) for name, array in host.items()})

    def leaving(self, here: Buffers, row: Index) -> Buffers:
        """A row of the device's, to be sent; for -1 row 0, which nobody reads there."""
        rows = dict(here)
        for name, buffer in self.named_buffers:
            size, *shape = buffer.strides[0], *here[name].shape[1:]
            if here[name].shape[0] > size:
                rows[name] = take_slice(here[name], (jnp.maximum(row, 0) * size,), (size, *shape))
        return self._in_order(rows)

    def sent(self, host: Buffers, leaving: Buffers, row: Index) -> Buffers:
        """The host's rows with one replaced."""
        return {name: put_row(array, leaving[name], row) for name, array in host.items()}

    def _in_order(self, rows: Buffers) -> Buffers:
        """Rows with the orders of dimensions that buffers have."""
        order = lambda buffer: buffer.array_order if isinstance(buffer, StackedBuffer) else None
        return {name: in_order(rows[name], order(buffer)) for name, buffer in self.named_buffers}


Going = list[tuple[bool, ...]]
"""For each group as traced, whether each of its residuals goes."""


def residuals_that_go(request: Request, trained: Sequence[TracedLayer], layers: Sequence[DeviceLayer]) -> Going:
    """Chooses residuals by share of bytes: the largest first, as long as they are no more than the share.

    Those of the last layer stay. Its backward follows its forward at once, and all stages would have room for them.

    Args:
      request: with the shares of `offload=`, and a policy that may name others, which go too.
      trained: the groups of layers; empty if nothing is kept.
      layers: the same, as one device runs them.
    """
    goes, offload = [list(layer.offloaded) for layer in trained], request.offload
    counts = [len(layer.function.group.indices) for layer in trained]
    for share, wanted in (
        (offload.residuals, [[True] * len(layer.residuals) for layer in layers]),
        (offload.boundaries, [layer.are_inputs for layer in trained]),
    ):
        places = [(g, i) for g, of_group in enumerate(wanted[:-1]) for i, wants in enumerate(of_group) if wants]
        bytes_in = {(g, i): bytes_of(layers[g].residuals[i]) for g, i in places}
        room = share * sum(counts[g] * size for (g, _), size in bytes_in.items())
        for g, i in sorted(places, key=lambda place: -bytes_in[place]):
            room_left = room - counts[g] * bytes_in[g, i]
            if room_left >= 0:
                goes[g][i], room = True, room_left
    return list(map(tuple, goes))


Kept: TypeAlias = dict[str, Buffers]
"""A device's buffers by the name of their rows."""


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

    def read_residuals(
        self, kept: Kept, layer: tuple[int, Index], rows: dict[str, Row], back: Kept, *, late: bool = False
    ) -> list[Leaf]:
        """Reads a layer's residuals, in their own order.

        Args:
          kept: what a device keeps.
          layer: the layer's group, and its position there.
          rows: the rows of the action, by name.
          back: the rows that have come back from the host for it.
          late: whether only the late ones are read, which W needs.
        """
        names = [name for name in self.rows_of[layer[0]] if not late or AWAY.get(name, name) == "late_residual"]

        def read(name: str) -> list[Leaf]:
            if name in back:
                return self.away[name].read_back(kept[name], back[name], *layer, rows[name])
            return self.storages[name].read(kept[name], *layer, rows[name])

        leaves = {name: iter(read(name)) for name in self.storages if name in names}
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


def lay_out_rows(
    request: Request,
    model: Model,
    schedule: Schedule,
    bounds: Sequence[tuple[int, int]],
    groups: tuple[Sequence[TracedLayer], Sequence[DeviceLayer]],
    *,
    along: bool,
) -> tuple[TickTable, KeptStorage]:
    """The table of ticks, and the places of what actions keep in the rows that it numbers.

    Args:
      request, model, schedule: the user's, the layers, the order of actions.
      bounds: (first layer, one past the last) of each virtual stage.
      groups: the groups as traced, on whole arrays and as one device runs them; empty if forward only.
      along: whether idle stages compute along.

    Warns:
      UserWarning: residuals are to go to the host, and none waits long enough.
    """
    layers, keep_inputs, goes = groups[1], request.remat.keep_inputs, residuals_that_go(request, *groups)
    table = lower(schedule, keep_inputs=keep_inputs, idle_work=along, away=any(map(any, goes)) and not keep_inputs)
    device_of = list(map(schedule.placement.stage_of, range(len(bounds))))
    own = lambda indices: [s for i in indices for s, (start, stop) in enumerate(bounds) if start <= i < stop]
    owners = [own(group.indices) for group, _ in zip(model.groups, layers, strict=False)]
    rows_of = [_rows_of(*of_group, device_of, table) for of_group in zip(layers, goes, owners, strict=True)]
    all_kept = [_kept_by(layer, rows, request.mesh) for layer, rows in zip(layers, rows_of, strict=True)]
    names = ROWS if any(layer.split for layer in layers) else ROWS[:1]
    storages, away = dict[str, Storage](), dict[str, AwayStorage]()
    for name in [*names, *(name for name in table.away_rows if any(name in rows for rows in rows_of))]:
        kept = [[(leaf, order) for rows, leaf, order in of_group if rows == name] for of_group in all_kept]
        leaves, (on_device, on_host) = [[leaf for leaf, _ in one] for one in kept], table.away_rows.get(name, (0, 0))
        storages[name] = storage = build_storage(
            leaves,
            owners,
            device_of=[0] * len(device_of) if on_device else device_of,
            rows=[on_device] if on_device else table.rows[name],
            orders=[[order for _, order in one] for one in kept],
        )
        if on_device:
            places = storage.record_types, storage.named_buffers, storage.num_devices
            storages[name] = away[name] = AwayStorage(*places, on_host, moves=is_apart(request.mesh))
    if layers and not keep_inputs and not away:
        _warn_if_none_go(request.offload, goes, schedule)
    # The executor moves the rows that hold something, and no others.
    slots = tuple(replace(slot, away={name: slot.away[name] for name in away}) for slot in table.slots)
    return replace(table, slots=slots), KeptStorage(storages, away, tuple(rows_of))


def _rows_of(
    layer: DeviceLayer, goes: Sequence[bool], owners: Sequence[int], device_of: Sequence[int], table: TickTable
) -> tuple[str, ...]:
    """The name of the rows of each residual; those that may go do so if this takes fewer rows of the devices.

    Rows that go are as many on all stages, and as large as on the stage with the most layers of the group: more than
    those that stay, if only stages near the end of the pipeline have the group.

    Args:
      layer: the group.
      goes: for each of its residuals, whether it may go.
      owners: the virtual stage of each of its layers.
      device_of: for each virtual stage, its device along `stage`.
      table: with the rows.
    """
    owned = Counter(owners)  # the layers of each virtual stage

    def name_of(name: str, may_go: bool) -> str:
        stays = max((n * table.rows[name][device_of[s]] for s, n in owned.items()), default=0)
        if not may_go or f"{name}_away" not in table.away_rows:
            return name
        on_device = table.away_rows[f"{name}_away"][0] + 1  # one more is the place for what comes back
        return f"{name}_away" if on_device * max(owned.values(), default=0) < stays else name

    names = ["late_residual" if waits else "residual" for waits in layer.waits]
    return tuple(map(name_of, names, goes))


def _kept_by(layer: DeviceLayer, rows_of: Sequence[str], mesh: Mesh) -> list[tuple[str, Leaf, Order | None]]:
    """All that a layer keeps: the name of its rows, its shape, the order of dimensions in which it is made."""
    forward, split = layer.forward, layer.split
    orders = result_orders(forward.jaxpr, forward.residual_indices, mesh)
    kept = list(zip(rows_of, layer.residuals, orders, strict=True))
    if split:
        orders = result_orders(split.inputs, split.w_input_indices, mesh)
        kept += [("w_input", *pair) for pair in zip(split.w_inputs, orders, strict=True)]
    return kept


def _warn_if_none_go(offload: Offload, goes: Going, schedule: Schedule) -> None:
    """Says that no residuals go to the hosts, though some are to."""
    sizes = ", ".join(f"{name}={size}" for name, size in schedule.sizes.items())
    if any(map(any, goes)):
        why = f"under {schedule.name!r} with {sizes} none waits long enough to leave"
        warn_once(f"offload= moves no residuals: {why}")
    elif offload.residuals or offload.boundaries:
        shares = {word: share for word, share in vars(offload).items() if share and word != "optimizer"}
        warn_once(
            f"offload={shares} moves no residuals: each of the layers' residuals is a larger share (those of equal "
            "layers go together); use a larger one"
        )
