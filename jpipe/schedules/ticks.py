"""Lowers orders of actions to a table of ticks and buffer rows, which the executor runs and the simulator times.

All devices run the same code, so what a device does in a slot, and where its inputs lie, must be data. `lower` makes
the orders that data. It looks up when each action runs (`timing.slot_times`). And it gives every value that waits for
an action (an activation, a cotangent, a forward's residuals) a row of a buffer for as long as it is live, so the memory
held is what the orders need and no more.

Arrays here are NumPy's, int32, `[T, K]`: T ticks, K stages.
"""

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jpipe.schedules.actions import ACTION_KINDS, FLOWS, Orders, admitted
from jpipe.schedules.timing import slot_times

KEEPS = {"residual": ("F", "BI"), "kept": ("F", "BIW"), "stash": ("I", "W")}
"""Values that actions keep in rows for later ones of their own stage: by the column that names the rows, the kind of
action that writes one, and the kinds that read it, of which the last to run frees it. "kept" only if a backward is
split."""

ROWS = (*KEEPS,)
"""The columns."""


@dataclass(frozen=True, eq=False)
class SlotTable:
    """The actions of all stages in one slot of each tick. Arrays are read-only int32 `[T, K]`.

    Attributes:
      kinds: the kinds that ever run in this slot.
      kind: 0 where the stage idles, else 1 + `kinds.index(kind of the action)`.
      microbatch: the action's micro-batch; 0 where idle.
      chunk: the action's chunk; 0 where idle.
      activation: row of the activation buffer with the boundary input of this action's virtual stage, for F, and with
        `keep_inputs` for what computes the forward anew too; -1 where there is none (first virtual stage, idle).
      cotangent: row of the cotangent buffer with what the next virtual stage sent back, for B and I; -1 where there is
        none (last virtual stage, other kinds, idle).
      anew: 1 where the action computes a forward anew: with `keep_inputs` R, and those B for which no R did; else 0.
      residual: row of the residuals that F writes, or with `keep_inputs` what computes it anew, and B or I reads; -1
        where idle, and in forward-only schedules.
      kept: row of those residuals that F writes and W (or B) reads last; -1 everywhere in a schedule without W.
      stash: row of what I writes for W; -1 for other kinds.
      activation_in: for each route (`Placement.routes`), row of the activation buffer into which a stage writes what
        arrives over its boundary at the end of this slot, after the slot's action has read its own row. What an action
        sends arrives at the end of the next slot where `crosses_beside` says so, else at the end of its own. Where
        nothing arrives, but does in other ticks or on other stages, a row that holds nothing live, so that the
        executor can write always, without a condition. -1 everywhere if nothing ever arrives in this slot.
      cotangent_in: the same for the cotangent buffer.
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
    activation_in: tuple[np.ndarray, ...]
    cotangent_in: tuple[np.ndarray, ...]


@dataclass(frozen=True, eq=False)
class TickTable:
    """A schedule in lockstep ticks.

    Attributes:
      slots: the slots of a tick, in the order in which they run.
      num_ticks: T; the last tick has an action.
      rows: for each of `ROWS` K numbers, the rows that each stage needs, which is the most (micro-batch, chunk) pairs
        between the action that writes a row and the last one that reads it.
    """

    slots: tuple[SlotTable, ...]
    num_ticks: int
    rows: dict[str, tuple[int, ...]]

    def rows_written(self, name: str) -> int:
        """How many rows the "activation" or "cotangent" buffer must have: those that any stage ever writes."""
        arrivals = [column for slot in self.slots for column in getattr(slot, f"{name}_in")]
        return 1 + max((int(column.max()) for column in arrivals), default=-1)


@dataclass(frozen=True, eq=False)
class _Values:
    """Values kept on stages, each of which has its row to itself from slot time `first` to its last use, both included.

    Integer arrays of the n values.

    Attributes:
      stage: which keeps it, `[n]`.
      first: `[n]`.
      uses: slot times of the actions that need to know its row, `[n, u]`; -1 for none. The first is never none.
      sender: the stage that a boundary value comes from, `[n]`; -1 for those that a stage keeps for itself.
    """

    stage: np.ndarray
    first: np.ndarray
    uses: np.ndarray
    sender: np.ndarray

    @cached_property
    def last(self) -> np.ndarray:
        """`[n]`."""
        return self.uses.max(axis=1)

    @cached_property
    def row(self) -> np.ndarray:
        """The lowest that is free on its stage, `[n]`.

        Taken in the order in which values become live, this needs as many rows as are live at once, and no more.
        """
        rows = np.zeros_like(self.stage)
        taken: dict[int, list[tuple[int, int]]] = {}  # by stage a heap of rows, each after the last use of its value
        freed: dict[int, list[int]] = {}  # by stage a heap of rows
        order = np.lexsort((self.uses[:, 0], self.first))
        columns = (order, self.stage[order], self.first[order], self.last[order])
        for i, stage, first, last in zip(*(column.tolist() for column in columns), strict=True):
            live, free = taken.setdefault(stage, []), freed.setdefault(stage, [])
            while live and live[0][0] < first:
                heapq.heappush(free, heapq.heappop(live)[1])
            rows[i] = row = heapq.heappop(free) if free else len(live)
            heapq.heappush(live, (last, row))
        return rows

    def column(self, shape: tuple[int, int]) -> np.ndarray:
        """The row for each slot time and stage that uses one, `[T * width, K]`; -1 elsewhere."""
        column = np.full(shape, -1, np.int32)
        for uses in self.uses.T:
            column[uses[uses >= 0], self.stage[uses >= 0]] = self.row[uses >= 0]
        return column


def lower(orders: Orders, *, keep_inputs: bool = False) -> TickTable:
    """Lowers any valid orders to ticks, each action as soon as possible, each value in the lowest free row.

    Args:
      orders: a `Schedule`, or orders that are known not to deadlock.
      keep_inputs: keep an activation that crossed a boundary, in place of residuals, until the R of its micro-batch and
        chunk has read it again, or its B if there is no R (for remat); otherwise until its F has. Without effect in a
        forward-only schedule.

    Returns:
      The table. Slot times at which every stage idles are kept, except after the last action's tick.
    """
    at, width = _times_by_kind(orders), len(orders.slots)
    num_ticks = max(int(times.max()) for times in at.values()) // width + 1
    shape = (num_ticks * width, orders.num_stages)  # a line for each slot time; the slots of a tick are split below
    occurs = {kind: {*np.unique(times[times >= 0] % width).tolist()} for kind, times in at.items()}
    used = ["".join(kind for kind in admitted(slot) if i in occurs[kind]) for i, slot in enumerate(orders.slots)]
    columns = {name: np.zeros(shape, np.int32) for name in ("kind", "microbatch", "chunk")}
    for kind, times in at.items():
        stages, microbatches, chunks = np.nonzero(times >= 0)
        taus = times[stages, microbatches, chunks]
        columns["kind"][taus, stages] = np.array([1 + kinds.find(kind) for kinds in used])[taus % width]
        columns["microbatch"][taus, stages] = microbatches
        columns["chunk"][taus, stages] = chunks
    backward = np.maximum(at["B"], at["I"])
    anew = np.where((at["R"] >= 0) | (not keep_inputs), at["R"], backward)
    columns["anew"] = np.zeros(shape, np.int32)
    stages, microbatches, chunks = np.nonzero(anew >= 0)
    columns["anew"][anew[stages, microbatches, chunks], stages] = 1
    arrivals: dict[str, list[np.ndarray]] = {}  # a boundary value arrives in the slot before it is live
    for name, flow in (("activation", +1), ("cotangent", -1)):
        values = _boundary_values(orders, at, flow, [anew] if keep_inputs and flow > 0 else [])
        columns[name] = values.column(shape)
        arrivals[name] = _arrivals(values, orders.placement.routes(flow), shape, width)
    for name, (writer, readers) in KEEPS.items():
        unused = name == "kept" and not occurs["W"]
        written = anew if keep_inputs and writer == "F" else at[writer]
        columns[name] = _kept(written, [at[kind] for kind in ("" if unused else readers)]).column(shape)
    for column in [*columns.values(), *itertools.chain(*arrivals.values())]:
        column.flags.writeable = False
    slots = (
        SlotTable(
            kinds=kinds,
            **{name: column[i::width] for name, column in columns.items()},
            activation_in=tuple(column[i::width] for column in arrivals["activation"]),
            cotangent_in=tuple(column[i::width] for column in arrivals["cotangent"]),
        )
        for i, kinds in enumerate(used)
    )
    rows = {name: tuple((1 + columns[name].max(axis=0)).tolist()) for name in ROWS}
    return TickTable(slots=tuple(slots), num_ticks=num_ticks, rows=rows)


def _times_by_kind(orders: Orders) -> dict[str, np.ndarray]:
    """The slot times of stages' actions, by kind, `[K, M, V]` (micro-batches, chunks); -1 where there is none."""
    at = {kind: np.full(tuple(orders.sizes.values()), -1) for kind in ACTION_KINDS}
    for (stage, (kind, microbatch, chunk)), tau in slot_times(orders).items():
        at[kind][stage, microbatch, chunk] = tau
    return at


def _boundary_values(orders: Orders, at: dict[str, np.ndarray], flow: int, later: Sequence[np.ndarray]) -> _Values:
    """The values of a flow that actions receive over boundaries, kept for those at the times in `later` too.

    One that arrives at the end of slot time tau is live from tau + 1 on. For a slot's action reads before arrivals are
    written, so the row of a value read for the last time may take the arrival of the same slot.
    """
    width = len(orders.slots)
    beside = np.array([crosses_beside(orders.slots, flow, slot) for slot in range(width)], int)
    either = np.max([at[kind] for kind in FLOWS[flow]], axis=0)  # there is one of them at most
    sources = [(to, source) for (way, *to), source in orders.placement.sources.items() if way == flow]
    parts = [np.zeros((0, 4 + len(later)), int)]
    for (stage, chunk), (sender, sent_by) in sources:
        sent, used = either[sender, :, sent_by], either[stage, :, chunk]
        first = sent + beside[sent % width] + 1
        fixed = (np.full_like(sent, stage), first, np.full_like(sent, sender), used)
        parts.append(np.stack([*fixed, *(times[stage, :, chunk] for times in later)], axis=1)[used >= 0])
    stages, firsts, senders, *uses = np.concatenate(parts).T
    return _Values(stages, firsts, np.stack(uses, axis=1), senders)


def crosses_beside(slots: Sequence[str], flow: int, slot: int) -> bool:
    """Whether what actions send along `flow` crosses its boundary while the next slot runs, not before it.

    It may where the next slot admits no action that receives from there, the only ones that could need it at once.

    Args:
      slots: the slots of a tick, by the kinds that each admits.
      flow: +1 for activations, -1 for cotangents.
      slot: the index of the slot in which they run.
    """
    return not set(FLOWS[flow]) & set(admitted(slots[(slot + 1) % len(slots)]))


def _kept(written: np.ndarray, readers: Sequence[np.ndarray]) -> _Values:
    """The values that actions keep for later ones of their stage: live until the last of `readers` has read them."""
    uses = np.stack([written, *readers], axis=-1)
    read = (written >= 0) & (uses[..., 1:] >= 0).any(axis=-1)
    stages = np.nonzero(read)[0]
    return _Values(stages, written[read], uses[read], np.full_like(stages, -1))


def _arrivals(
    values: _Values, routes: list[list[tuple[int, int]]], shape: tuple[int, int], width: int
) -> list[np.ndarray]:
    """The rows into which each stage writes what arrives, by route, at each slot time: `[T * width, K]`.

    Where nothing arrives, it is the lowest row that holds nothing live, nor gets what arrives by another route; or -1
    in a slot in which nothing ever arrives, or things by two routes.
    """
    columns = []
    for route in routes:
        comes = np.zeros((shape[1], shape[1]), bool)
        comes[tuple(np.array(route, int).reshape(-1, 2).T)] = True
        here = comes[values.sender, values.stage]
        rows = np.full(shape, -1, np.int32)
        rows[values.first[here] - 1, values.stage[here]] = values.row[here]
        columns.append(rows)
    free = np.zeros(shape, np.int32)
    for stage in set(values.stage.tolist()):
        own = values.stage == stage
        taken = np.zeros((values.row[own].max() + 2, shape[0]), bool)  # the last row is spare
        spans = values.row[own], values.first[own] - 1, values.last[own]
        for row, first, last in zip(*(span.tolist() for span in spans), strict=True):
            taken[row, first:last] = True
        free[:, stage] = np.argmin(taken, axis=0)
    for i in range(width):
        slots = [rows[i::width] for rows in columns if (rows[i::width] >= 0).any()]
        if len(slots) == 1:
            slots[0][:] = np.where(slots[0] >= 0, slots[0], free[i::width])
    return columns
