"""Lowers orders of actions to a table of ticks and buffer rows, which the executor runs.

All devices run the same code. So it must be data what a device does in a slot, and where its inputs lie. `lower` makes
this data, a `TickTable`, from orders of actions. It looks up when each action runs (`Orders.slot_times`), and lists the
values that wait for actions; `jpipe.schedules.waiting` gives each a row of a buffer while it is live, so that no more
memory is held than the orders need. A *row* here is the part of a buffer for one value.

Arrays are NumPy's, int32. K stages, M micro-batches, V chunks a stage; T ticks of `width` slots each. Slot time tau is
slot `tau % width` of tick `tau // width`. While the table is made, a *column* is `[T * width, K]`, a line for each slot
time; the table has `[T, K]` for each slot of a tick.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple

import numpy as np

from jpipe.schedules.actions import ACTION_KINDS, Orders, admitted
from jpipe.schedules.waiting import Away, Column, Times, arrival_rows, kept_rows, kept_values, rows_away

KEEPS = {"residual": ("F", "BI"), "late_residual": ("F", "BIW"), "w_input": ("I", "W")}
"""Values that actions keep in rows for later actions of their own stage: column -> (the kind of action that writes the
row, the kinds that read it). The last of these to run frees the row. Without W no residual is late."""

ROWS = (*KEEPS,)
"""The names of the columns that say in which rows these values lie."""

AWAY = {"residual_away": "residual", "late_residual_away": "late_residual"}
"""Such values that go to the host while they wait, and come back: their name -> that of those that stay."""


@dataclass(frozen=True, eq=False)
class Slot(Generic[Column]):
    """The actions in one slot: of all stages in each tick, as read-only arrays `[T, K]`; of a stage in a tick, numbers.

    Attributes:
      kinds: the kinds that ever run in this slot.
      kind: 0 where the stage idles, else 1 + `kinds.index(kind of the action)`.
      microbatch: the action's micro-batch; 0 where the stage idles.
      chunk: the action's chunk; 0 where the stage idles.
      anew: 1 where the action computes a forward anew: R, and with `keep_inputs` those B or I for which no R did.
      activation: row of the activation that the action reads: F, and with `keep_inputs` what computes a forward anew;
        -1 if it reads none, or what is still where the stage's last action left it (where the chain of a "v" turns).
      cotangent: the same of the cotangent that B or I reads.
      residual, late_residual, w_input: row of what the action writes or reads of that name (`KEEPS`); -1 if nothing.
        With `keep_inputs` what computes a forward anew writes in the place of F.
      away: by name (`AWAY`), where values that go to the host are; those alone of which some wait long enough to leave.
        Empty unless `lower` is to look for some.
      activation_in: for each route (`Placement.routes`), row of the activation buffer into which a stage writes the
        value that arrives over its boundary at the end of this slot, after the slot's action has read its own row. A
        value arrives at the end of the slot in which it is sent, or of the next one where `crosses_beside` says so.
        -1 everywhere if nothing ever arrives by the route in this slot, in any tick or on any stage. Else, where
        nothing new arrives, it is a row that holds nothing live, or that of the value which arrives once more, so that
        the executor writes without a condition; or -1, if values arrive in this slot by several routes, and to write
        always by this one takes a copy or a row more.
      cotangent_in: the same for the cotangent buffer.

    In a table for stages that work along (`lower`), a stage that idles has free rows for what it writes, not -1, and
    what arrives by several routes is always written.
    """

    kinds: str
    kind: Column
    microbatch: Column
    chunk: Column
    anew: Column
    activation: Column
    cotangent: Column
    residual: Column
    late_residual: Column
    w_input: Column
    away: dict[str, Away[Column]]
    activation_in: tuple[Column, ...]
    cotangent_in: tuple[Column, ...]

    def codes(self, kinds: str) -> list[int]:
        """The numbers that `kind` has for some kinds, as far as the slot has these."""
        return [1 + i for i, kind in enumerate(self.kinds) if kind in kinds]


SlotTable = Slot[np.ndarray]
"""A slot in all ticks, on all stages."""


class Run(NamedTuple):
    """Ticks that follow each other, which the executor scans over in one loop.

    Attributes:
      start: the first tick.
      stop: one past the last.
      together: for each slot the kind of action that every stage computes in each of these ticks; "" if there is none.
        "IW" where stages have B and its parts at once: all compute I, then W, which takes as long as B.
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
      runs: all ticks, in order. One run, if idle stages do nothing; `together` then has what all stages have in every
        tick. If they work along (`lower`), up to seven:

          ticks    0   1   2 | 3   4   5   6   7   8   9   10 | 11  12  13      1F1B, K=4, M=8
          slot     F   F   F | FB  FB  FB  FB  FB  FB  FB  FB | B   B   B       what any stage has
          together F, ""     | F, B                           | "", B
      rows: by name (`ROWS`), K numbers: the rows that each stage needs. That is the most (micro-batch, chunk) pairs at
        a time which are between the action that writes a row and the last one that reads it.
      away_rows: by name (`AWAY`), (the rows on the device, the rows on the host) that the stage with the most needs.
      waiting: for "activation" and "cotangent", the rows of each buffer that any stage ever writes: one buffer, or one
        for each route. Rows are numbered through all buffers.
    """

    slots: tuple[SlotTable, ...]
    num_ticks: int
    runs: tuple[Run, ...]
    rows: dict[str, tuple[int, ...]]
    away_rows: dict[str, tuple[int, int]]
    waiting: dict[str, tuple[range, ...]]

    @property
    def joins_parts(self) -> bool:
        """Whether stages compute I, then W, in place of B in some ticks (`Run.together`)."""
        return any("IW" in run.together for run in self.runs)

    def rows_written(self, name: str) -> int:
        """Counts the rows in which "activation"s or "cotangent"s wait, over all buffers."""
        return sum(map(len, self.waiting[name]))


def lower(orders: Orders, *, keep_inputs: bool = False, idle_work: bool = False, away: bool = False) -> TickTable:
    """Lowers any valid orders to ticks, each action as soon as possible, each value in the lowest free row.

    Args:
      orders: a `Schedule`, or orders that are known not to deadlock.
      keep_inputs: keep an activation that crossed a boundary, in place of residuals, until the R of its micro-batch and
        chunk has read it again, or its B or I if there is no R (for remat); otherwise until its F has. Without effect
        in a forward-only schedule.
      idle_work: stages that idle work along, wherever all stages that have an action have one of the same kind, or B
        and its parts. What they keep goes into rows that hold nothing live.
      away: residuals may go to the host while they wait; not with `keep_inputs`.

    Returns:
      The table. Slot times at which every stage idles are kept, except after the last action's tick.
    """
    width, times = len(orders.slots), orders.slot_times
    num_ticks = max(times.values()) // width + 1
    shape = (num_ticks * width, orders.num_stages)  # a line for each slot time; the slots of a tick are split below
    occurs = {(action.kind, tau % width) for (_, action), tau in times.items()}
    used = ["".join(kind for kind in admitted(slot) if (kind, i) in occurs) for i, slot in enumerate(orders.slots)]
    at: dict[str, Times] = {kind: {} for kind in ACTION_KINDS}
    does = np.full(shape, "")  # the kind of the stage's action
    columns = {name: np.zeros(shape, np.int32) for name in ("kind", "microbatch", "chunk", "anew")}
    for (stage, (kind, microbatch, chunk)), tau in times.items():
        at[kind][stage, microbatch, chunk], does[tau, stage] = tau, kind
        columns["kind"][tau, stage] = 1 + used[tau % width].index(kind)
        columns["microbatch"][tau, stage], columns["chunk"][tau, stage] = microbatch, chunk
    runs = _runs(does.reshape(num_ticks, width, -1), idle_work=idle_work)
    anew = at["B"] | at["I"] | at["R"] if keep_inputs else at["R"]
    for place, tau in anew.items():
        columns["anew"][tau, place[0]] = 1
    arrivals: dict[str, list[np.ndarray]] = {}  # by route
    waiting: dict[str, tuple[range, ...]] = {}
    for name, flow in (("activation", +1), ("cotangent", -1)):
        later = anew if keep_inputs and flow > 0 else {}
        columns[name], arrivals[name], waiting[name] = arrival_rows(orders, flow, later, shape, always=idle_work)
    moves: dict[str, Away[np.ndarray]] = {}
    for name, (writer, readers) in KEEPS.items():
        # Without W nothing reads late residuals, so they get no rows.
        again, unused = keep_inputs and writer == "F", name == "late_residual" and not at["W"]
        values = kept_values(anew if again else at[writer], [at[kind] for kind in readers if not unused])
        # A stage with B writes no "w_input", but where others have its parts it computes I, then W: into a free row.
        writes_nothing = (does == "") | ((does == "B") & (name == "w_input"))
        along = _works_along(runs, "RBI" if again else writer, writes_nothing & idle_work)
        columns[name] = kept_rows(values, shape, along)
        if away and writer == "F" and (moved := rows_away(values, shape, width, along)):
            moves[f"{name}_away"] = moved
    for column in [*columns.values(), *itertools.chain(*arrivals.values(), *moves.values())]:
        column.flags.writeable = False

    def slot(i: int, kinds: str) -> SlotTable:
        of_slot = lambda columns: tuple(column[i::width] for column in columns)
        own = dict(zip(columns, of_slot(columns.values()), strict=True))
        moving = {name: Away(*of_slot(one)) for name, one in moves.items()}
        up, down = map(of_slot, arrivals.values())
        return SlotTable(kinds, **own, away=moving, activation_in=up, cotangent_in=down)

    rows = {name: tuple((1 + columns[name].max(axis=0)).tolist()) for name in ROWS}
    away_rows = {name: (1 + int(one.row.max()), 1 + int(one.sent_to.max())) for name, one in moves.items()}
    return TickTable(tuple(map(slot, range(width), used)), num_ticks, runs, rows, away_rows, waiting)


def _runs(does: np.ndarray, *, idle_work: bool) -> tuple[Run, ...]:
    """Cuts the ticks into runs, each with the same kinds of actions in all of its ticks.

    Each is compiled, so there are at most seven: `zero_bubble` has four, or up to seven if it has few micro-batches. If
    the kinds change more often, the runs are the one in which most is done together, what is before it, and what is
    after it; or, if that one has less than a quarter of all ticks, all of them are one run.

    Args:
      does: `[T, width, K]`, the kind of each stage's action; "" where it idles.
      idle_work: whether stages that idle work along; else all ticks are one run.
    """
    by_tick = [tuple(_together(kinds, idle_work=idle_work) for kinds in tick) for tick in does.tolist()]
    changes = [t for t, (before, after) in enumerate(itertools.pairwise(by_tick), 1) if before != after and idle_work]
    borders = [0, *changes, len(does)]
    if len(changes) > 6:
        num_together = lambda ends: (ends[1] - ends[0]) * sum(map(bool, by_tick[ends[0]]))
        begin, end = max(itertools.pairwise(borders), key=num_together)
        borders = sorted({0, begin, end, len(does)}) if 4 * (end - begin) >= len(does) else [0, len(does)]
    alone = lambda kinds: kinds[0] if len({*kinds}) == 1 else ""
    return tuple(
        Run(start, stop, tuple(map(alone, zip(*by_tick[start:stop], strict=True))))
        for start, stop in itertools.pairwise(borders)
    )


def _together(kinds: Sequence[str], *, idle_work: bool) -> str:
    """Returns what all stages can compute in a slot of a tick (`Run.together`) in which they have these kinds."""
    has = {*kinds} - {""} if idle_work else {*kinds}
    if len(has) == 1:
        return has.pop()
    return "IW" if idle_work and "B" in has and has <= {*"BIW"} else ""


def _works_along(runs: Sequence[Run], kinds: str, idles: np.ndarray) -> np.ndarray:
    """`[T * width, K]`: whether a stage that idles works along with an action of one of these kinds.

    Args:
      runs: those of all ticks.
      kinds: the kinds.
      idles: `[T * width, K]`, whether it idles.
    """
    has = [[any(kind in kinds for kind in together) for together in run.together] for run in runs]
    return idles & np.repeat(has, [run.stop - run.start for run in runs], axis=0).reshape(-1, 1)
