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
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jpipe.jax.in_place import Index, Where, chosen, is_apart, put_row, take_row, take_slice, to_host
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
        host = self.empty_row(self.host_rows)
        return to_host(host) if self.moves else host

    @property
    def row_bytes(self) -> int:
        """The bytes of a row."""
        return bytes_of(jax.eval_shape(self.empty_row))

    def empty_row(self, *count: int) -> Buffers:
        """A row on the device, `[n, ...]`, or so many, of any values."""
        shape = lambda buffer: (*count, buffer.strides[0], *buffer.shape[1:])
        return {name: jax.lax.empty(shape(buffer), buffer.dtype) for name, buffer in self.named_buffers}

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


RESIDUALS = "residual", "late_residual"
"""The rows, among `ROWS`, that hold residuals."""


@dataclass(frozen=True, eq=False)
class KeptStorage:
    """The places of what actions keep.

    Attributes:
      storages: by name of the rows, with a record type for each group.
      rows_of: for each group the name of the rows of all that a layer keeps: its residuals, then what I leaves for W.
    """

    storages: dict[str, Storage]
    rows_of: tuple[tuple[str, ...], ...]

    @property
    def away(self) -> dict[str, AwayStorage]:
        """Those whose rows go to the host."""
        return {name: storage for name, storage in self.storages.items() if isinstance(storage, AwayStorage)}

    def empty(self) -> Kept:
        """One stage's arrays, of any values."""
        return {name: storage.empty() for name, storage in self.storages.items()}

    def read(
        self, kept: Kept, at: tuple[int, Index], rows: dict[str, Row], names: Sequence[str], back: Kept | None = None
    ) -> list[Leaf]:
        """Reads what a layer keeps, in its own order.

        Args:
          kept: what a device keeps.
          at: the layer's group, and its position there.
          rows: the rows of the action, by name.
          names: which of it is read, by `ROWS`.
          back: the rows that have come back from the host for the action.
        """
        own, back, leaves = self._names(at, names), back or {}, dict[str, Iterator[Leaf]]()
        for name in filter(own.__contains__, self.storages):
            storage, here = self.storages[name], (*at, rows[name])
            if isinstance(storage, AwayStorage) and name in back:
                leaves[name] = iter(storage.read_back(kept[name], back[name], *here))
            else:
                leaves[name] = iter(storage.read(kept[name], *here))
        return [next(leaves[name]) for name in own]

    def write(
        self,
        kept: Kept,
        at: tuple[int, Index],
        leaves: Sequence[Leaf],
        rows: dict[str, Row],
        names: Sequence[str],
        where: Where = None,
    ) -> Kept:
        """The inverse of `read`, on the device; what lies there stays if `where` is False."""
        leaves, kept = chosen(where, leaves, lambda kept: self.read(kept, at, rows, names), kept)
        own = self._names(at, names)
        for name in filter(own.__contains__, self.storages):
            of_name = [leaf for leaf, rows_of in zip(leaves, own, strict=True) if rows_of == name]
            kept = kept | {name: self.storages[name].write(kept[name], *at, of_name, rows[name])}
        return kept

    def _names(self, at: tuple[int, Index], names: Sequence[str]) -> list[str]:
        """The rows of those leaves of a layer that wait in rows of these names, be it on the device or on the host."""
        return [name for name in self.rows_of[at[0]] if AWAY.get(name, name) in names]


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
    all_kept = [
        _kept_by(layer, may_go, _away_for(Counter(owned), device_of, table), request.mesh)
        for layer, may_go, owned in zip(layers, goes, owners, strict=True)
    ]
    rows_of = tuple(tuple(name for name, *_ in of_group) for of_group in all_kept)
    names, storages = ROWS if any(layer.split for layer in layers) else ROWS[:1], dict[str, Storage]()
    for name in [*names, *(name for name in table.away_rows if any(name in rows for rows in rows_of))]:
        kept = [[(leaf, order) for rows, leaf, order in of_group if rows == name] for of_group in all_kept]
        on_device, on_host = table.away_rows.get(name, (0, 0))
        storages[name] = storage = build_storage(
            [[leaf for leaf, _ in one] for one in kept],
            owners,
            device_of=[0] * len(device_of) if on_device else device_of,
            rows=[on_device] if on_device else table.rows[name],
            orders=[[order for _, order in one] for one in kept],
        )
        if on_device:
            places = storage.record_types, storage.named_buffers, storage.num_devices
            storages[name] = AwayStorage(*places, on_host, moves=is_apart(request.mesh))
    places = KeptStorage(storages, rows_of)
    if layers and not keep_inputs and not places.away:
        _warn_if_none_go(request.offload, goes, schedule)
    # The executor moves the rows that hold something, and no others.
    slots = tuple(replace(slot, away={name: slot.away[name] for name in places.away}) for slot in table.slots)
    return replace(table, slots=slots), places


def _away_for(owned: Counter[int], device_of: Sequence[int], table: TickTable) -> set[str]:
    """Names the rows in which a group's residuals may wait on the host, as this takes fewer rows of the devices.

    Rows that go are as many on all stages, and as large as on the stage with the most layers of the group: more than
    those that stay, if only stages near the end of the pipeline have the group.

    Args:
      owned: the layers that each virtual stage has of the group.
      device_of: for each virtual stage, its device along `stage`.
      table: with the rows.
    """

    def rows_that_stay(name: str) -> int:
        return max((n * table.rows[AWAY[name]][device_of[s]] for s, n in owned.items()), default=0)

    # One more row on the device is the place for what comes back.
    rows_that_go = {name: (rows + 1) * max(owned.values(), default=0) for name, (rows, _) in table.away_rows.items()}
    return {name for name, rows in rows_that_go.items() if rows < rows_that_stay(name)}


def _kept_by(
    layer: DeviceLayer, may_go: Sequence[bool], away: Collection[str], mesh: Mesh
) -> list[tuple[str, Leaf, Order | None]]:
    """All that a layer keeps: the name of its rows, its shape, the order of dimensions in which it is made.

    Args:
      layer: the layer.
      may_go: for each residual whether it may go to the host.
      away: the rows that go there.
      mesh: the devices.
    """
    forward, split = layer.forward, layer.split
    names = ["late_residual" if waits else "residual" for waits in layer.waits]
    moves = lambda name, goes: f"{name}_away" if goes and f"{name}_away" in away else name
    names = list(map(moves, names, may_go))
    orders = result_orders(forward.jaxpr, forward.residual_indices, mesh)
    kept = list(zip(names, layer.residuals, orders, strict=True))
    if split:
        orders = result_orders(split.inputs, split.w_input_indices, mesh)
        kept += [("w_input", *pair) for pair in zip(split.w_inputs, orders, strict=True)]
    return kept


def _warn_if_none_go(offload: Offload, goes: Going, schedule: Schedule) -> None:
    """Says that no residuals go to the hosts, though some are to."""
    sizes = ", ".join(f"{name}={size}" for name, size in schedule.sizes.items())
    if any(map(any, goes)):
        why = "none waits long enough to leave, or too few for the device to need fewer rows"
        warn_once(f"offload= moves no residuals: under {schedule.name!r} with {sizes} {why}")
    elif offload.residuals or offload.boundaries:
        shares = {word: share for word, share in vars(offload).items() if share and word != "optimizer"}
        warn_once(
            f"offload={shares} moves no residuals: each of the layers' residuals is a larger share (those of equal "
            "layers go together); use a larger one"
        )
