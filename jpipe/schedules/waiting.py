"""Gives each value that waits for an action a row of a buffer: the lowest that is free while the value is live.

Arrays are as in `jpipe.schedules.ticks`, which puts together the table of ticks of them. K stages, M micro-batches, V
chunks a stage; T ticks of `width` slots each; a *column* is `[T * width, K]`, a line for each slot time.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np

from jpipe.schedules.actions import FLOWS, Orders, crosses_beside

Route: TypeAlias = list[tuple[int, int]]
"""(From stage, to stage) pairs, as of `Placement.routes`."""
Shape: TypeAlias = tuple[int, int]


Column = TypeVar("Column")


class Away(NamedTuple, Generic[Column]):
    """Where values that go to the host are in one slot of each tick, as arrays `[T, K]`; in a tick of a stage, numbers.

    A value is written into a row on the device, goes to the host beside the next slot, and comes back, into a place of
    its own, beside the slot before the action that reads it. One that has too little time for that, or that two actions
    read, stays in its row. In 1F1B, two slots a tick, with a wait of two ticks:

        slot         F        B        F   B   F        B
        action       writes                             reads
        moves                leaves            returns

    Attributes:
      row: the row on the device that the slot's action writes, or reads if the value has stayed; -1 for others.
      stays: 1 where the slot's action reads a value that has stayed.
      sent_to: the host's row into which the row of this slot goes, beside the next one; where no value leaves, a row
        that holds nothing live. -1 everywhere if none ever leaves after this slot.
      returns: the host's row whose value comes back beside this slot, for the next one; -1 for none.
    """

    row: Column
    stays: Column
    sent_to: Column
    returns: Column


@dataclass(frozen=True, eq=False)
class WaitingValues:
    """The n values of one kind that stages keep, as integer arrays.

    A value has its row to itself from slot time `first` to its last use, both included.

    Attributes:
      stage: `[n]`, the stage that keeps the value.
      first: `[n]`, the slot time from which the value is live.
      uses: `[n, u]`, the slot times of the actions that need to know its row; -1 for none, but never in column 0.
      sender: `[n]`, the stage that a boundary value comes from; -1 for a value that a stage keeps for itself.
      again: `[n]`, the slot time before which each transfer brings this value once more, because its sender has left no
        other since; 0 for a value that a stage keeps for itself.
    """

    stage: np.ndarray
    first: np.ndarray
    uses: np.ndarray
    sender: np.ndarray
    again: np.ndarray

    def comes_by(self, *routes: Route) -> np.ndarray:
        """`[n]`, whether the value arrives by one of some routes."""
        pairs = zip(self.sender.tolist(), self.stage.tolist(), strict=True)
        return np.fromiter(map({*itertools.chain(*routes)}.__contains__, pairs), bool, len(self.stage))

    def by(self, *routes: Route) -> WaitingValues:
        """Those values alone that arrive by one of some routes."""
        mine = self.comes_by(*routes)
        return WaitingValues(*(getattr(self, each.name)[mine] for each in fields(self)))

    @cached_property
    def last(self) -> np.ndarray:
        """`[n]`, the slot time of the value's last use."""
        return self.uses.max(axis=1)

    @cached_property
    def row(self) -> np.ndarray:
        """`[n]`, the value's row: the lowest that is free on its stage.

        Rows are given in the order in which values become live. So a stage needs as many rows as values are live at
        once, and no more.
        """
        rows, counts = np.zeros_like(self.stage), np.bincount(self.stage, minlength=1)
        until = np.full((len(counts), counts.max()), -1)  # `[K, rows]`, the last use of the latest value in each row
        # By `first`; of values that become live together, as by two routes, the one that is used first goes first.
        for i in np.lexsort((self.uses[:, 0], self.first)):
            of_stage = until[self.stage[i]]
            rows[i] = np.argmax(of_stage < self.first[i])
            of_stage[rows[i]] = self.last[i]
        return rows

    def free(self, shape: Shape, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
        """`[T * width, K]`, the lowest row that no value has, if each has its own from slot time `begin` until `end`.

        Where all are taken, it is one more than there are.
        """
        free = np.zeros(shape, np.int32)
        for stage in set(self.stage.tolist()):
            mine = self.stage == stage
            taken = np.zeros((self.row[mine].max() + 2, shape[0]), bool)  # [rows, T * width]; the last is never taken
            spans = self.row[mine], begin[mine], end[mine]
            for row, first, last in zip(*(span.tolist() for span in spans), strict=True):
                taken[row, first:last] = True
            free[:, stage] = np.argmin(taken, axis=0)
        return free

    def arriving(self, route: Route, shape: Shape) -> np.ndarray:
        """`[T * width, K]`, the row of the value that arrives by a route, in the slot before it is live; else -1."""
        mine, column = self.comes_by(route), np.full(shape, -1, np.int32)
        column[self.first[mine] - 1, self.stage[mine]] = self.row[mine]
        return column

    def arriving_again(self, shape: Shape, width: int) -> np.ndarray:
        """`[T * width, K]`, the row of the value that a transfer brings while it waits there already; else -1."""
        column, until = np.full(shape, -1, np.int32), np.minimum(self.last, self.again)
        spans = self.stage, self.row, self.first - 1, until
        for stage, row, first, last in zip(*(each.tolist() for each in spans), strict=True):
            column[first:last:width, stage] = row
        return column

    def column(self, shape: Shape) -> np.ndarray:
        """`[T * width, K]`, the row of the value that a stage uses at a slot time; -1 where it uses none."""
        column = np.full(shape, -1, np.int32)
        for uses in self.uses.T:
            column[uses[uses >= 0], self.stage[uses >= 0]] = self.row[uses >= 0]
        return column


def boundary_values(
    orders: Orders, at: dict[str, np.ndarray], flow: int, later: Sequence[np.ndarray], *, in_place: bool = False
) -> WaitingValues:
    """The values that actions receive over boundaries along a flow, and that wait for them in rows.

    A value that arrives at the end of slot time tau is live from tau + 1 on, because a slot's action reads before
    arrivals are written. So the row of a value that is read for the last time may take an arrival of the same slot.

    Args:
      orders, at: the orders, and their `_times_by_kind`.
      flow: +1 for activations, -1 for cotangents.
      later: `[K, M, V]` each, times of actions that read the values too.
      in_place: leave out what a stage leaves for its own very next action along this flow: it is there already.
    """
    width = len(orders.slots)
    beside = np.array([crosses_beside(orders.slots, flow, slot) for slot in range(width)], int)
    either = np.max([at[kind] for kind in FLOWS[flow]], axis=0)  # there is one of them at most
    # `sources`: (flow, stage, chunk) -> the (stage, chunk) from which its values come; missing at the end of the chain.
    sources = [(to, source) for (way, *to), source in orders.placement.sources.items() if way == flow]
    parts = [np.zeros((0, 5 + len(later)), int)]
    for (stage, chunk), (sender, sent_by) in sources:
        sent, used = either[sender, :, sent_by], either[stage, :, chunk]
        first = sent + beside[sent % width] + 1
        waits = used >= 0
        if in_place and sender == stage:
            others = either[stage].reshape(1, -1)
            waits &= ((others >= first[:, None]) & (others < used[:, None])).any(axis=1)
        after = np.sort(either[sender], axis=None)  # the sender's actions along this flow
        after = np.append(after, len(orders.slot_times) * width)[np.searchsorted(after, sent, side="right")]
        again = after + beside[sent % width]
        fixed = (np.full_like(sent, stage), first, np.full_like(sent, sender), again, used)
        parts.append(np.stack([*fixed, *(times[stage, :, chunk] for times in later)], axis=1)[waits])
    stages, firsts, senders, again, *uses = np.concatenate(parts).T
    return WaitingValues(stages, firsts, np.stack(uses, axis=1), senders, again)


class ArrivalRows(NamedTuple):
    """Where values wait that have arrived over boundaries.

    Attributes:
      read: a column, the rows that are read (`SlotTable.activation`).
      written: for each route a column, the rows that are written (`SlotTable.activation_in`).
      buffers: the numbers of the rows of each buffer (`TickTable.waiting`).
    """

    read: np.ndarray
    written: list[np.ndarray]
    buffers: tuple[range, ...]


def arrival_rows(
    orders: Orders, at: dict[str, np.ndarray], flow: int, later: Sequence[np.ndarray], shape: Shape, *, always: bool
) -> ArrivalRows:
    """Gives rows to the values that arrive over boundaries.

    Several routes have a buffer each, where that takes one row more at the most. What comes from another stage is then
    written at no cost if its buffer has one row and is always written: what the transfer leaves is the buffer, and
    nothing is copied. (A value that waits is in no danger while its sender has left no other.) And what a stage leaves
    for its own very next action needs no row.

    Args:
      orders, at, flow, later: as of `boundary_values`. Values that are read again later are in one buffer.
      shape: of a column, `[T * width, K]`.
      always: have one buffer, and write in each tick what arrives by several routes, though it takes copies.
    """
    routes, width = orders.placement.routes(flow), len(orders.slots)
    in_one = _rows_in_buffers(boundary_values(orders, at, flow, later), [routes], shape, width, always=always)
    if len(routes) <= 1 or later or always:
        return in_one
    values = boundary_values(orders, at, flow, later, in_place=True)
    by_route = _rows_in_buffers(values, [[route] for route in routes], shape, width, always=False)
    total = lambda rows: sum(map(len, rows.buffers))
    return by_route if total(by_route) <= total(in_one) + 1 else in_one


def _rows_in_buffers(
    values: WaitingValues, buffers: Sequence[Sequence[Route]], shape: Shape, width: int, *, always: bool
) -> ArrivalRows:
    """The rows of values, where each buffer holds what arrives by some of the routes."""
    read, written, numbers = np.full(shape, -1, np.int32), list[np.ndarray](), list[range]()
    slots_of = lambda route: {*((values.by(route).first - 1) % width).tolist()}  # in which something arrives by it
    num_routes = Counter(itertools.chain(*map(slots_of, itertools.chain(*buffers))))
    for routes in buffers:
        waiting = values.by(*routes)
        columns = [waiting.arriving(route, shape) for route in routes]
        free = waiting.free(shape, waiting.first - 1, waiting.last)
        for column, route in zip(columns, routes, strict=True):
            crosses = len(buffers) > 1 and route[0][0] != route[0][1]  # the transfer may leave it in the buffer
            again = waiting.arriving_again(shape, width) if crosses else free
            otherwise = np.where(again >= 0, again, free)  # where nothing new arrives
            for i in slots_of(route):
                in_each_tick = np.where(column[i::width] >= 0, column[i::width], otherwise[i::width])
                if num_routes[i] == 1 or always or (crosses and in_each_tick.max() == 0):
                    column[i::width] = in_each_tick
        start = numbers[-1].stop if numbers else 0
        numbers.append(range(start, start + 1 + max((int(column.max()) for column in columns), default=-1)))
        of_reads, *of_writes = (np.where(rows >= 0, start + rows, -1) for rows in (waiting.column(shape), *columns))
        read = np.maximum(read, of_reads)
        written += of_writes
    return ArrivalRows(read, written, tuple(numbers))


def kept_values(written: np.ndarray, readers: Sequence[np.ndarray]) -> WaitingValues:
    """The values that actions at the times `written` keep for later actions of their stage, at the times `readers`.

    All times are `[K, M, V]`. A value that nothing reads isn't kept.
    """
    uses = np.stack([written, *readers], axis=-1)
    read = (written >= 0) & (uses[..., 1:] >= 0).any(axis=-1)
    stages = np.nonzero(read)[0]
    return WaitingValues(stages, written[read], uses[read], np.full_like(stages, -1), np.zeros_like(stages))


def kept_rows(values: WaitingValues, shape: Shape, along: np.ndarray) -> np.ndarray:
    """A column `[T * width, K]` of the rows of values that stay; where stages that idle write `along`, free ones."""
    column = values.column(shape)
    writes_along = values.stage.size and along.any()
    return np.where(along, values.free(shape, values.first, values.last + 1), column) if writes_along else column


def rows_away(values: WaitingValues, shape: Shape, width: int, along: np.ndarray) -> Away[np.ndarray]:
    """Sends to the host what has the time to come back; columns `[T * width, K]` of an `Away`.

    Args:
      values: those that actions keep.
      shape: of the columns.
      width: the slots of a tick.
      along: `[T * width, K]`, whether a stage that idles writes, too.
    """
    reads, stage, first = values.uses[:, 1:], values.stage, values.first
    # Beside the slot after the one that writes it a value leaves; beside the slot before its reader's it comes back.
    goes = ((reads >= 0).sum(axis=1) == 1) & (values.last - first >= 3)
    until = np.where(goes, first + 1, values.last)
    on_device = WaitingValues(stage, first, until[:, None], values.sender, values.again)
    row, stays, sent_to, returns = (np.full(shape, n, np.int32) for n in (-1, 0, -1, -1))
    row[first, stage] = on_device.row
    for times in reads[~goes].T:
        reader = times[times >= 0], stage[~goes][times >= 0]
        row[reader], stays[reader] = on_device.row[~goes][times >= 0], 1
    row = np.where(along, on_device.free(shape, first, until + 1), row)

    leaves, stage = first[goes] + 1, stage[goes]
    on_host = WaitingValues(stage, leaves, values.last[goes, None] - 1, stage, np.zeros_like(stage))
    sent_to[leaves - 1, stage], returns[on_host.last, stage] = on_host.row, on_host.row
    free = on_host.free((shape[0] + 1, shape[1]), leaves, on_host.last + 1)[1:]
    for i in range(width):
        if (sent_to[i::width] >= 0).any():
            sent_to[i::width] = np.where(sent_to[i::width] >= 0, sent_to[i::width], free[i::width])
    return Away(row, stays, sent_to, returns)
