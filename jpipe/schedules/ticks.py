"""Lowers orders of actions to a table of ticks and buffer rows, which the executor runs and the simulator times.

All devices run the same code. So it must be data what a device does in a slot, and where its inputs lie. `lower` makes
this data, a `TickTable`, from orders of actions. It looks up when each action runs (`Orders.slot_times`). And it gives
every value that waits for an action (an activation, a cotangent, a forward's residuals) a row of a buffer while it is
live, so that no more memory is held than the orders need. A *row* here is the part of a buffer for one value.

Arrays are NumPy's, int32. K stages, M micro-batches, V chunks a stage; T ticks of `width` slots each. Slot time tau is
slot `tau % width` of tick `tau // width`. While the table is made, a *column* is `[T * width, K]`, a line for each slot
time; the table has `[T, K]` for each slot of a tick.
"""

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np

from jpipe.schedules.actions import ACTION_KINDS, FLOWS, admitted
from jpipe.schedules.timing import Orders

KEEPS = {"residual": ("F", "BI"), "kept": ("F", "BIW"), "stash": ("I", "W")}
"""Values that actions keep in rows for later actions of their own stage: column -> (the kind of action that writes the
row, the kinds that read it). The last of these to run frees the row. "kept" is used only if a backward is split."""

ROWS = (*KEEPS,)
"""The names of the columns that say in which rows these values lie."""

AWAY = {"residual_away": "residual", "kept_away": "kept"}
"""Such values that go to the host while they wait, and come back: their name -> that of those that stay."""


Route: TypeAlias = list[tuple[int, int]]
"""(From stage, to stage) pairs, as of `Placement.routes`."""


class Away(NamedTuple):
    """Where values that go to the host are in one slot of each tick, as arrays `[T, K]`.

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

    row: np.ndarray
    stays: np.ndarray
    sent_to: np.ndarray
    returns: np.ndarray


@dataclass(frozen=True, eq=False)
class SlotTable:
    """The actions of all stages in one slot of each tick, as read-only arrays `[T, K]`.

    Attributes:
      kinds: the kinds that ever run in this slot.
      kind: 0 where the stage idles, else 1 + `kinds.index(kind of the action)`.
      microbatch: the action's micro-batch; 0 where the stage idles.
      chunk: the action's chunk; 0 where the stage idles.
      activation: row of the activation buffer with the boundary input of this action's virtual stage, for F, and with
        `keep_inputs` for what computes the forward anew too; -1 where there is none (first virtual stage, idle), or
        where it is still where the stage's last action left it (where the chain of a "v" turns).
      cotangent: row of the cotangent buffer with what the next virtual stage sent back, for B and I; -1 where there is
        none (last virtual stage, other kinds, idle).
      anew: 1 where the action computes a forward anew: R, and with `keep_inputs` those B or I for which no R did.
      residual: row of the residuals that F writes, or with `keep_inputs` what computes it anew, and B or I reads; -1
        where idle, and in forward-only schedules.
      kept: row of those residuals that F writes and W (or B) reads last; -1 everywhere in a schedule without W.
      stash: row of what I writes for W; -1 for other kinds.
      away: by name (`AWAY`), where values that go to the host are; those alone for which this takes fewer rows on the
        device. Empty unless `lower` is to look for some.
      activation_in: for each route (`Placement.routes`), row of the activation buffer into which a stage writes the
        value that arrives over its boundary at the end of this slot, after the slot's action has read its own row. A
        value arrives at the end of the slot in which it is sent, or of the next one where `crosses_beside` says so.
        -1 everywhere if nothing ever arrives by the route in this slot, in any tick or on any stage. Else, where
        nothing arrives, it is a row that holds nothing live, so that the executor writes without a condition; or -1,
        if values arrive in this slot by several routes, and to write always by this one takes a copy or a row more.
      cotangent_in: the same for the cotangent buffer.

    In a table for stages that work along (`lower`), a stage that idles has free rows for what it writes, not -1, and
    what arrives by several routes is always written.
    """

    kinds: str
    kind: np.ndarray
    microbatch: np.ndarray
    chunk: np.ndarray
    activation: np.ndarray
    cotangent: np.ndarray
    anew: np.ndarray
    residual: np.ndarray
    kept: np.ndarray
    stash: np.ndarray
    away: dict[str, Away]
    activation_in: tuple[np.ndarray, ...]
    cotangent_in: tuple[np.ndarray, ...]


class Run(NamedTuple):
    """Ticks that follow each other, which the executor scans over in one loop.

    Attributes:
      start: the first tick.
      stop: one past the last.
      together: for each slot the kind of action that every stage computes in each of these ticks; "" if there is none.
    """

    start: int
    stop: int
    together: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class TickTable:
    """A schedule in lockstep ticks.

    Attributes:
      slots: the slots of a tick, in the order in which they run.
      num_ticks: T; the last tick has an action.
      runs: all ticks, in order. One run, if idle stages do nothing. If they work along (`lower`), up to five:

          ticks    0   1   2 | 3   4   5   6   7   8   9   10 | 11  12  13      1F1B, K=4, M=8
          slot     F   F   F | FB  FB  FB  FB  FB  FB  FB  FB | B   B   B       what any stage has
          together F, ""     | F, B                           | "", B
      rows: by name (`ROWS`), K numbers: the rows that each stage needs. That is the most (micro-batch, chunk) pairs at
        a time which are between the action that writes a row and the last one that reads it.
      away_rows: by name (`AWAY`), (the rows on the device, the rows on the host) that the stage with the most needs.
      waiting: for "activation" and "cotangent", the rows of each buffer that any stage ever writes: one buffer, or one
        for each route. Their rows are numbered through: those of the second follow on the last of the first.
    """

    slots: tuple[SlotTable, ...]
    num_ticks: int
    runs: tuple[Run, ...]
    rows: dict[str, tuple[int, ...]]
    away_rows: dict[str, tuple[int, int]]
    waiting: dict[str, tuple[int, ...]]

    def rows_written(self, name: str) -> int:
        """Counts the rows in which "activation"s or "cotangent"s wait, over all buffers."""
        return sum(self.waiting[name])


@dataclass(frozen=True, eq=False)
class _Values:
    """The n values of one kind that stages keep, as integer arrays.

    A value has its row to itself from slot time `first` to its last use, both included.

    Attributes:
      stage: `[n]`, the stage that keeps the value.
      first: `[n]`, the slot time from which the value is live.
      uses: `[n, u]`, the slot times of the actions that need to know its row; -1 for none, but never in column 0.
      sender: `[n]`, the stage that a boundary value comes from; -1 for a value that a stage keeps for itself.
    """

    stage: np.ndarray
    first: np.ndarray
    uses: np.ndarray
    sender: np.ndarray

    def comes_by(self, route: Route) -> np.ndarray:
        """`[n]`, whether the value arrives by a route."""
        pairs = zip(self.sender.tolist(), self.stage.tolist(), strict=True)
        return np.fromiter(map({*route}.__contains__, pairs), bool, len(self.stage))

    def by(self, route: Route) -> "_Values":
        """Those values alone that arrive by a route."""
        mine = self.comes_by(route)
        return _Values(self.stage[mine], self.first[mine], self.uses[mine], self.sender[mine])

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
        rows = np.zeros_like(self.stage)
        taken: dict[int, list[tuple[int, int]]] = {}  # by stage a heap of rows, each after the last use of its value
        freed: dict[int, list[int]] = {}  # by stage a heap of rows
        # By `first`; of values that become live together, as by two routes, the one that is used first goes first.
        order = np.lexsort((self.uses[:, 0], self.first))
        columns = (order, self.stage[order], self.first[order], self.last[order])
        for i, stage, first, last in zip(*(column.tolist() for column in columns), strict=True):
            live, free = taken.setdefault(stage, []), freed.setdefault(stage, [])
            while live and live[0][0] < first:
                heapq.heappush(free, heapq.heappop(live)[1])
            rows[i] = row = heapq.heappop(free) if free else len(live)
            heapq.heappush(live, (last, row))
        return rows

    def free(self, shape: tuple[int, int], begin: np.ndarray, end: np.ndarray) -> np.ndarray:
        """`[T * width, K]`, the lowest row that no value has, if each has its own from slot time `begin` until `end`.

        Where all are taken, it is one more than there are.
        """
        free = np.zeros(shape, np.int32)
        for stage in set(self.stage.tolist()):
            kept = self.stage == stage
            taken = np.zeros((self.row[kept].max() + 2, shape[0]), bool)  # [rows, T * width]; the last is never taken
            spans = self.row[kept], begin[kept], end[kept]
            for row, first, last in zip(*(span.tolist() for span in spans), strict=True):
                taken[row, first:last] = True
            free[:, stage] = np.argmin(taken, axis=0)
        return free

    def arriving(self, route: Route, shape: tuple[int, int]) -> np.ndarray:
        """`[T * width, K]`, the row of the value that arrives by a route, in the slot before it is live; else -1."""
        mine, column = self.comes_by(route), np.full(shape, -1, np.int32)
        column[self.first[mine] - 1, self.stage[mine]] = self.row[mine]
        return column

    def column(self, shape: tuple[int, int]) -> np.ndarray:
        """`[T * width, K]`, the row of the value that a stage uses at a slot time; -1 where it uses none."""
        column = np.full(shape, -1, np.int32)
        for uses in self.uses.T:
            column[uses[uses >= 0], self.stage[uses >= 0]] = self.row[uses >= 0]
        return column


def lower(orders: Orders, *, keep_inputs: bool = False, idle_work: bool = False, away: bool = False) -> TickTable:
    """Lowers any valid orders to ticks, each action as soon as possible, each value in the lowest free row.

    Args:
      orders: a `Schedule`, or orders that are known not to deadlock.
      keep_inputs: keep an activation that crossed a boundary, in place of residuals, until the R of its micro-batch and
        chunk has read it again, or its B or I if there is no R (for remat); otherwise until its F has. Without effect
        in a forward-only schedule.
      idle_work: stages that idle work along, wherever all stages that have an action have one of the same kind. What
        they keep goes into rows that hold nothing live.
      away: residuals may go to the host while they wait; not with `keep_inputs`.

    Returns:
      The table. Slot times at which every stage idles are kept, except after the last action's tick.
    """
    at, width = _times_by_kind(orders), len(orders.slots)
    num_ticks = max(int(times.max()) for times in at.values()) // width + 1
    shape = (num_ticks * width, orders.num_stages)  # a line for each slot time; the slots of a tick are split below
    occurs = {kind: {*np.unique(times[times >= 0] % width).tolist()} for kind, times in at.items()}
    # A slot admits the kinds in its name, and "I" where it names "B"; `used` keeps those that ever run in it.
    used = ["".join(kind for kind in admitted(slot) if i in occurs[kind]) for i, slot in enumerate(orders.slots)]
    columns = {name: np.zeros(shape, np.int32) for name in ("kind", "microbatch", "chunk")}
    for kind, times in at.items():
        stages, microbatches, chunks = np.nonzero(times >= 0)
        taus = times[stages, microbatches, chunks]
        columns["kind"][taus, stages] = np.array([1 + kinds.find(kind) for kinds in used])[taus % width]
        columns["microbatch"][taus, stages] = microbatches
        columns["chunk"][taus, stages] = chunks
    runs = _runs(used, columns["kind"].reshape(num_ticks, width, -1), idle_work=idle_work)
    backward = np.maximum(at["B"], at["I"])
    anew = np.where((at["R"] >= 0) | (not keep_inputs), at["R"], backward)
    columns["anew"] = np.zeros(shape, np.int32)
    stages, microbatches, chunks = np.nonzero(anew >= 0)
    columns["anew"][anew[stages, microbatches, chunks], stages] = 1
    arrivals: dict[str, list[np.ndarray]] = {}
    waiting: dict[str, tuple[int, ...]] = {}
    for name, flow in (("activation", +1), ("cotangent", -1)):
        later, routes = [anew] if keep_inputs and flow > 0 else [], orders.placement.routes(flow)
        apart = len(routes) > 1 and not (later or idle_work)
        values = _boundary_values(orders, at, flow, later, in_place=apart)
        found = _waiting(values, routes, shape, width, apart=apart, always=idle_work)
        columns[name], arrivals[name], waiting[name] = found
    moves: dict[str, Away] = {}
    for name, (writer, readers) in KEEPS.items():
        unused = name == "kept" and not occurs["W"]
        again = keep_inputs and writer == "F"
        values = _kept(anew if again else at[writer], [at[kind] for kind in ("" if unused else readers)])
        along = _works_along(runs, "RBI" if again else writer, (columns["kind"] == 0) & idle_work)
        columns[name] = _kept_rows(values, shape, along)
        if away and writer == "F" and values.stage.size:
            moved = _away(values, shape, width, along)
            # With the place for what comes back it has to take less.
            moves |= {f"{name}_away": moved} if 2 + moved.row.max() <= columns[name].max() else {}
    for column in [*columns.values(), *itertools.chain(*arrivals.values(), *moves.values())]:
        column.flags.writeable = False
    slots = (
        SlotTable(
            kinds=kinds,
            **{name: column[i::width] for name, column in columns.items()},
            away={name: Away(*(column[i::width] for column in one)) for name, one in moves.items()},
            activation_in=tuple(column[i::width] for column in arrivals["activation"]),
            cotangent_in=tuple(column[i::width] for column in arrivals["cotangent"]),
        )
        for i, kinds in enumerate(used)
    )
    rows = {name: tuple((1 + columns[name].max(axis=0)).tolist()) for name in ROWS}
    away_rows = {name: (1 + int(one.row.max()), 1 + int(one.sent_to.max())) for name, one in moves.items()}
    return TickTable(tuple(slots), num_ticks, runs, rows, away_rows, waiting)


def _runs(used: Sequence[str], kind: np.ndarray, *, idle_work: bool) -> tuple[Run, ...]:
    """Cuts the ticks into runs, each with the same kinds of actions in all of its ticks.

    Each is compiled, so there are at most five, which `zero_bubble` has. If the kinds change more often, the runs are
    the one in which most is done together, what is before it, and what is after it; or, if that one has less than a
    quarter of all ticks, all of them are one run.

    Args:
      used: for each slot the kinds that ever run in it.
      kind: `[T, width, K]`, as `SlotTable.kind`.
      idle_work: whether stages that idle work along; else all ticks are one run.
    """
    slots = np.array([i for i, kinds in enumerate(used) for _ in kinds])  # of each (slot, kind)
    names = "".join(used)
    actions = np.stack([kind[:, i] == 1 + code for i, kinds in enumerate(used) for code in range(len(kinds))], axis=1)
    done = np.asarray((np.any if idle_work else np.all)(actions, axis=2))  # [T, (slot, kind)]

    def run(start: int, stop: int) -> Run:
        count = done[start:stop].sum(axis=0).tolist()  # of ticks, by (slot, kind)
        of_slot = [[j for j in np.flatnonzero(slots == i).tolist() if count[j]] for i in range(len(used))]
        alone = lambda ever: len(ever) == 1 and count[ever[0]] == stop - start
        return Run(start, stop, tuple(names[ever[0]] if alone(ever) else "" for ever in of_slot))

    num_ticks = len(kind)
    changes = 1 + np.flatnonzero((done[1:] != done[:-1]).any(axis=1)) if idle_work else []
    borders = [0, *map(int, changes), num_ticks]
    runs = [run(*border) for border in itertools.pairwise(borders)]
    if len(runs) > 5:
        steady = max(runs, key=lambda one: (one.stop - one.start) * sum(map(bool, one.together)))
        borders = sorted({0, steady.start, steady.stop, num_ticks})
        if 4 * (steady.stop - steady.start) < num_ticks:
            borders = [0, num_ticks]
        runs = [run(*border) for border in itertools.pairwise(borders)]
    return tuple(runs)


def _works_along(runs: Sequence[Run], kinds: str, idles: np.ndarray) -> np.ndarray:
    """`[T * width, K]`: whether a stage that idles works along with an action of one of these kinds.

    Args:
      runs: those of all ticks.
      kinds: the kinds.
      idles: `[T * width, K]`, whether it idles.
    """
    has = [[name != "" and name in kinds for name in run.together] for run in runs]
    return idles & np.repeat(has, [run.stop - run.start for run in runs], axis=0).reshape(-1, 1)


def _times_by_kind(orders: Orders) -> dict[str, np.ndarray]:
    """The slot times of stages' actions, by kind, `[K, M, V]`; -1 where there is no such action."""
    at = {kind: np.full(tuple(orders.sizes.values()), -1) for kind in ACTION_KINDS}
    for (stage, (kind, microbatch, chunk)), tau in orders.slot_times.items():
        at[kind][stage, microbatch, chunk] = tau
    return at


def _boundary_values(
    orders: Orders, at: dict[str, np.ndarray], flow: int, later: Sequence[np.ndarray], *, in_place: bool
) -> _Values:
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
    parts = [np.zeros((0, 4 + len(later)), int)]
    for (stage, chunk), (sender, sent_by) in sources:
        sent, used = either[sender, :, sent_by], either[stage, :, chunk]
        first = sent + beside[sent % width] + 1
        waits = used >= 0
        if in_place and sender == stage:
            others = either[stage].reshape(1, -1)
            waits &= ((others >= first[:, None]) & (others < used[:, None])).any(axis=1)
        fixed = (np.full_like(sent, stage), first, np.full_like(sent, sender), used)
        parts.append(np.stack([*fixed, *(times[stage, :, chunk] for times in later)], axis=1)[waits])
    stages, firsts, senders, *uses = np.concatenate(parts).T
    return _Values(stages, firsts, np.stack(uses, axis=1), senders)


def crosses_beside(slots: Sequence[str], flow: int, slot: int) -> bool:
    """Whether the values that a slot's actions send cross their boundaries while the next slot runs, not before it.

    They may if the next slot admits no action that receives along this flow. Only such an action could need them.

    Args:
      slots: the slots of a tick, by the kinds that each admits.
      flow: +1 for activations, -1 for cotangents.
      slot: the index of the slot in which the senders run.
    """
    return not set(FLOWS[flow]) & set(admitted(slots[(slot + 1) % len(slots)]))


def _kept(written: np.ndarray, readers: Sequence[np.ndarray]) -> _Values:
    """The values that actions at the times `written` keep for later actions of their stage, at the times `readers`.

    All times are `[K, M, V]`. A value that nothing reads isn't kept.
    """
    uses = np.stack([written, *readers], axis=-1)
    read = (written >= 0) & (uses[..., 1:] >= 0).any(axis=-1)
    stages = np.nonzero(read)[0]
    return _Values(stages, written[read], uses[read], np.full_like(stages, -1))


def _kept_rows(values: _Values, shape: tuple[int, int], along: np.ndarray) -> np.ndarray:
    """A column `[T * width, K]` of the rows of values that stay; where stages that idle write `along`, free ones."""
    column = values.column(shape)
    writes_along = values.stage.size and along.any()
    return np.where(along, values.free(shape, values.first, values.last + 1), column) if writes_along else column


def _away(values: _Values, shape: tuple[int, int], width: int, along: np.ndarray) -> Away:
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
    on_device = _Values(stage, first, until[:, None], values.sender)
    row, stays, sent_to, returns = (np.full(shape, n, np.int32) for n in (-1, 0, -1, -1))
    row[first, stage] = on_device.row
    for times in reads[~goes].T:
        reader = times[times >= 0], stage[~goes][times >= 0]
        row[reader], stays[reader] = on_device.row[~goes][times >= 0], 1
    row = np.where(along, on_device.free(shape, first, until + 1), row)

    leaves, stage = first[goes] + 1, stage[goes]
    on_host = _Values(stage, leaves, values.last[goes, None] - 1, stage)
    sent_to[leaves - 1, stage], returns[on_host.last, stage] = on_host.row, on_host.row
    free = on_host.free((shape[0] + 1, shape[1]), leaves, on_host.last + 1)[1:]
    for i in range(width):
        if (sent_to[i::width] >= 0).any():
            sent_to[i::width] = np.where(sent_to[i::width] >= 0, sent_to[i::width], free[i::width])
    return Away(row, stays, sent_to, returns)


def _waiting(
    values: _Values, routes: Sequence[Route], shape: tuple[int, int], width: int, *, apart: bool, always: bool
) -> tuple[np.ndarray, list[np.ndarray], tuple[int, ...]]:
    """Gives rows to the values that arrive over boundaries.

    Where each route has a buffer of its own, what comes from another stage is written at no cost if that buffer has one
    row and is always written: what the transfer leaves is the buffer then, and nothing is copied.

    Args:
      values: the values; each arrives in the slot before it is live.
      routes: those of `Placement.routes`.
      shape: of a column, `[T * width, K]`.
      width: the slots of a tick.
      apart: whether each route has a buffer of its own; else all share one.
      always: write in each tick what arrives by several routes, though it takes a copy or a row more.

    Returns:
      (rows that are read, for each route rows that are written, rows of each buffer): the columns `SlotTable.activation`
      and `activation_in`, and `TickTable.waiting`.
    """
    held = [values.by(route) for route in routes] if apart else [values]
    buffer_of = range(len(routes)) if apart else [0] * len(routes)  # by route
    written = [held[b].arriving(route, shape) for b, route in zip(buffer_of, routes, strict=True)]
    free = [one.free(shape, one.first - 1, one.last) for one in held]
    for i in range(width):
        used = [j for j, column in enumerate(written) if (column[i::width] >= 0).any()]
        for j in used:
            slot = written[j][i::width]
            filled = np.where(slot >= 0, slot, free[buffer_of[j]][i::width])
            moves = any(sender != receiver for sender, receiver in routes[j])
            if len(used) == 1 or always or (apart and moves and filled.max() == 0):
                slot[:] = filled
    rows = [0] * len(held)
    for b, column in zip(buffer_of, written, strict=True):
        rows[b] = max(rows[b], 1 + int(column.max()))
    starts = [sum(rows[:b]) for b in range(len(rows))]
    numbered = lambda column, b: np.where(column >= 0, column + starts[b], -1).astype(np.int32)
    read = np.max([numbered(one.column(shape), b) for b, one in enumerate(held)], axis=0)
    return read, [numbered(column, b) for b, column in zip(buffer_of, written, strict=True)], tuple(rows)
