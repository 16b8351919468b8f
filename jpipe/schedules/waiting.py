"""Gives each value that waits for an action a row of a buffer: the lowest that is free while the value is live.

There is one allocator, `Rows`: a list of values goes in, each with the slot times from which and until which it is
live, and rows come out. What waits differs in who writes it, who reads it, and where it is meanwhile:

    what              is written by              is read by         waits
    activations       F of the virtual stage     F, or one that     on the device               `arrival_rows`
                      before, as they arrive     computes it anew
    cotangents        B or I of the one after,   B or I             on the device               `arrival_rows`
                      as they arrive
    residuals         F                          B or I, W          on the device, or the host  `kept_rows`, `rows_away`
    what I leaves     I                          W                  on the device               `kept_rows`

`jpipe.schedules.ticks` puts the table of ticks together of that. K stages, T ticks of `width` slots each; a *column* is
an array `[T * width, K]`, int32, a line for each slot time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np

from jpipe.schedules.actions import FLOWS, Orders, crosses_beside

Column = TypeVar("Column")
Shape: TypeAlias = tuple[int, int]
Times: TypeAlias = dict[tuple[int, int, int], int]
"""The slot times of some kind of action by (stage, micro-batch, chunk), in order."""


ArrivalRows: TypeAlias = tuple[np.ndarray, list[np.ndarray], tuple[range, ...]]
"""What `arrival_rows` returns."""


class Value(NamedTuple):
    """A value that waits on a stage.

    Attributes:
      stage: the stage.
      first: the slot time from which it is live.
      last: the slot time until which it is live, included.
      reads: the slot times of the actions that read it.
      route: of one that arrives over a boundary, the index of the route.
      resent_until: of such a one, a slot time. Until then its sender leaves nothing newer, so each transfer by the
        route brings this value once more.
      in_place: whether its stage left it for its own very next action along the flow, so that it is there already.
    """

    stage: int
    first: int
    last: int
    reads: tuple[int, ...] = ()
    route: int = 0
    resent_until: int = 0
    in_place: bool = False


class Rows:
    """The rows of the values in one buffer: each has a row to itself while it is live.

    Rows are given in the order in which values become live, each the lowest that is free on its stage. So a stage needs
    as many rows as values are live at once, and no more.

    Args:
      values: the values. Of those that become live together on a stage, as by two routes, the first goes first.
      shape: of a column.

    Attributes:
      row: for each value its row.
      free: `[T * width + 1, K]`, the lowest row without a value that is live; if there is none, the number of rows. The
        last line is for what arrives at the end of the last slot.
    """

    def __init__(self, values: Sequence[Value], shape: Shape):
        self.values, self.shape, self.row = values, shape, [0] * len(values)
        self.free = np.zeros((shape[0] + 1, shape[1]), np.int32)
        by_start = sorted(range(len(values)), key=lambda i: (values[i].stage, values[i].first))
        for stage, own in groupby(by_start, lambda i: values[i].stage):
            of_stage = list(own)
            taken = np.zeros((len(of_stage) + 1, len(self.free)), bool)  # by row; the last is never taken
            for i in of_stage:
                self.row[i] = int(taken[:, values[i].first].argmin())
                taken[self.row[i], values[i].first : values[i].last + 1] = True
            self.free[:, stage] = taken.argmin(axis=0)

    def column(self, times: Callable[[Value], Iterable[int]]) -> np.ndarray:
        """A column with the row of each value at its slot times, -1 elsewhere."""
        column = np.full(self.shape, -1, np.int32)
        for value, row in zip(self.values, self.row, strict=True):
            for tau in times(value):
                column[tau, value.stage] = row
        return column


# --- what arrives over boundaries -------------------------------------------------------------------------------------


def arrival_rows(orders: Orders, flow: int, later: Times, shape: Shape, *, always: bool) -> ArrivalRows:
    """Gives rows to the values that arrive over boundaries.

    Several routes have a buffer each, where that takes one row more at the most. What comes from another stage is then
    written at no cost if its buffer has one row and is always written: what the transfer leaves is the buffer, and
    nothing is copied. (While its sender leaves no other value, each transfer brings the one that waits once more.) And
    what a stage leaves for its own very next action needs no row.

    Args:
      orders: the orders.
      flow: +1 for activations, -1 for cotangents.
      later: the times of actions that read the values again. If there are any, all values are in one buffer.
      shape: of a column.
      always: have one buffer, and write in each tick what arrives by several routes, though it takes copies.

    Returns:
      A column of the rows that are read (`SlotTable.activation`); for each route a column of those that are written
      (`SlotTable.activation_in`); the numbers of the rows of each buffer (`TickTable.waiting`).
    """
    routes, width = orders.placement.routes(flow), len(orders.slots)
    values = _arriving(orders, flow, later, shape)
    in_one = _in_buffers(values, {tuple(range(len(routes))): False}, shape, width, always=always)
    if len(routes) <= 1 or later or always:
        return in_one
    crosses = {(r,): route[0][0] != route[0][1] for r, route in enumerate(routes)}
    by_route = _in_buffers([value for value in values if not value.in_place], crosses, shape, width, always=False)
    return by_route if by_route[-1][-1].stop <= in_one[-1][-1].stop + 1 else in_one


def _arriving(orders: Orders, flow: int, later: Times, shape: Shape) -> list[Value]:
    """The values that arrive along a flow, in the order in which they are first read.

    A value that arrives at the end of slot time tau is live from tau + 1 on, because a slot's action reads before
    arrivals are written. So the row of a value that is read for the last time may take an arrival of the same slot.
    """
    beside = [crosses_beside(orders.slots, flow, slot) for slot in range(len(orders.slots))]
    route_of = {pair: r for r, route in enumerate(orders.placement.routes(flow)) for pair in route}
    times, following, ahead = Times(), Times(), dict[int, int]()  # `following`: of the stage's next action of this flow
    for (stage, action), tau in reversed(orders.slot_times.items()):
        if action.kind in FLOWS[flow]:
            place = stage, action.microbatch, action.chunk
            times[place], following[place], ahead[stage] = tau, ahead.get(stage, shape[0]), tau
    values: list[Value] = []
    for (stage, microbatch, chunk), used in reversed(times.items()):
        if source := orders.placement.sources.get((flow, stage, chunk)):
            sender, sent = source[0], (source[0], microbatch, source[1])
            crosses = beside[times[sent] % len(beside)]
            reads = (used, later[stage, microbatch, chunk]) if later else (used,)
            in_place = sender == stage and following[sent] == used
            lives = stage, times[sent] + crosses + 1, max(reads)
            values.append(Value(*lives, reads, route_of[sender, stage], following[sent] + crosses, in_place))
    return values


def _in_buffers(
    values: Sequence[Value], buffers: Mapping[tuple[int, ...], bool], shape: Shape, width: int, *, always: bool
) -> ArrivalRows:
    """The rows of values, where each buffer holds what arrives by some of the routes.

    `buffers` says of these whether a transfer from another stage may leave in the buffer what it brings.
    """
    read, written, numbers = np.full(shape, -1, np.int32), list[np.ndarray](), list[range]()
    arrives = {(value.route, (value.first - 1) % width) for value in values}  # (route, slot) in which something does
    num_routes = Counter(slot for _, slot in arrives)
    for routes, crosses in buffers.items():
        rows = Rows([value for value in values if value.route in routes], shape)
        otherwise = rows.free[1:]  # where nothing new arrives
        if crosses:  # the value that the transfer brings once more while it waits
            for value, row in zip(rows.values, rows.row, strict=True):
                otherwise[value.first - 1 : min(value.last, value.resent_until) : width, value.stage] = row
        start, count = numbers[-1].stop if numbers else 0, 0
        for route in routes:
            column = rows.column(lambda value, route=route: [value.first - 1] if value.route == route else [])
            for slot in range(width):
                in_each_tick = np.where(column[slot::width] >= 0, column[slot::width], otherwise[slot::width])
                costs_nothing = num_routes[slot] == 1 or always or (crosses and in_each_tick.max() == 0)
                if (route, slot) in arrives and costs_nothing:
                    column[slot::width] = in_each_tick
            count = max(count, 1 + int(column.max()))
            written.append(np.where(column >= 0, start + column, -1))
        column = rows.column(lambda value: value.reads)
        read = np.maximum(read, np.where(column >= 0, start + column, -1))
        numbers.append(range(start, start + count))
    return read, written, tuple(numbers)


# --- what stages keep for themselves ----------------------------------------------------------------------------------


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


def kept_values(written: Times, readers: Sequence[Times]) -> list[Value]:
    """The values that actions keep for later ones of their stage; what none of these reads isn't kept."""
    reads = {place: tuple(times[place] for times in readers if place in times) for place in written}
    return [Value(place[0], tau, max(reads[place]), reads[place]) for place, tau in written.items() if reads[place]]


def kept_rows(values: Sequence[Value], shape: Shape, along: np.ndarray) -> np.ndarray:
    """A column of the rows of values that actions keep on the device: where they are written and read.

    Args:
      values: the values.
      shape: of a column.
      along: a column, whether a stage that idles writes too: into a free row, if anything is ever kept.
    """
    rows = Rows(values, shape)
    column = rows.column(lambda value: (value.first, *value.reads))
    return np.where(along, rows.free[:-1], column) if values and along.any() else column


def rows_away(values: Sequence[Value], shape: Shape, width: int, along: np.ndarray) -> Away[np.ndarray] | None:
    """Sends to the host what has the time to come back: the columns of an `Away`, None if nothing has.

    Arguments are as of `kept_rows`, and the slots of a tick.
    """
    # Beside the slot after the one that writes it a value leaves; beside the slot before its reader's it comes back.
    goes = lambda value: len(value.reads) == 1 and value.last - value.first >= 3
    host = Rows([Value(value.stage, value.first + 1, value.last - 1) for value in values if goes(value)], shape)
    if not host.values:
        return None
    here = [value._replace(last=value.first + 1, reads=()) if goes(value) else value for value in values]
    stays = (Rows(here, shape).column(lambda value: value.reads) >= 0).astype(np.int32)
    sent_to, returns = host.column(lambda value: [value.first - 1]), host.column(lambda value: [value.last])
    for slot in range(width):
        if (sent_to[slot::width] >= 0).any():
            sent_to[slot::width] = np.where(sent_to >= 0, sent_to, host.free[1:])[slot::width]
    return Away(kept_rows(here, shape, along), stays, sent_to, returns)
