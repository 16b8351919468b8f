"""Rows of buffers that go to the host while they wait, and come back in time (`offload=`).

A device has the rows that were just written, and those that wait too briefly to leave; and one place for the row that
has come back. The host has the rows that wait. `jpipe.schedules.waiting` says which row moves when:

    buffer                    device, `here`          device, `back`       host
    bfloat16_4x512x2048       [rows * n, 4, 512, 2048]  [n, 4, 512, 2048]    [host_rows, n, 4, 512, 2048]

n leaves are a row: as many as the virtual stage with the most has, on all stages, so that a row is a slice of one size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jpipe.arrays.in_place import Index, put_row, take_row, take_slice, to_host
from jpipe.arrays.trees import bytes_of
from jpipe.memory.buffers import Buffer, StackedBuffer
from jpipe.memory.memory_order import Order, in_order
from jpipe.memory.storage import Buffers, Row, Storage, build_storage
from jpipe.types import Leaf


class AwayRow(NamedTuple):
    """A row of such buffers in one slot: integers, those of `Away` of `jpipe.schedules.waiting` for one stage and tick.

    Attributes:
      row: on the device; -1 for none.
      stays: 1 if the action at hand finds it there, though others come back.
      sent_to: the host's row into which it goes.
      returns: the host's row that comes back.
    """

    row: Index
    stays: Index
    sent_to: Index
    returns: Index


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

        def of_buffer(array: jax.Array, buffer: Buffer) -> jax.Array:
            size = buffer.strides[0]
            whole = array.shape[0] == size
            return array if whole else take_slice(array, (jnp.maximum(row, 0) * size,), (size, *array.shape[1:]))

        return self._in_order({name: of_buffer(here[name], buffer) for name, buffer in self.named_buffers})

    def sent(self, host: Buffers, leaving: Buffers, row: Index) -> Buffers:
        """The host's rows with one replaced."""
        return {name: put_row(array, leaving[name], row) for name, array in host.items()}

    def _in_order(self, rows: Buffers) -> Buffers:
        """Rows with the orders of dimensions that buffers have."""
        order = lambda buffer: buffer.array_order if isinstance(buffer, StackedBuffer) else None
        return {name: in_order(rows[name], order(buffer)) for name, buffer in self.named_buffers}


def build_away_storage(
    leaves: Sequence[Sequence[jax.ShapeDtypeStruct]],
    owners: Sequence[Sequence[int]],
    rows: tuple[int, int],
    *,
    orders: Sequence[Sequence[Order | None]],
    tags: Sequence[Sequence[tuple[int, ...]]] | None = None,
    moves: bool,
) -> AwayStorage:
    """Gives every record its place; `rows` on the device and on the host, the rest as of `build_storage`."""
    count = 1 + max((owner for of_type in owners for owner in of_type), default=0)
    storage = build_storage(leaves, owners, device_of=[0] * count, rows=rows[:1], orders=orders, tags=tags)
    return AwayStorage(storage.record_types, storage.named_buffers, storage.num_devices, rows[1], moves)
