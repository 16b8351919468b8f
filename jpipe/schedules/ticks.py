"""Lowers orders of actions to lockstep ticks: the table that the executor runs and the simulator times.

All devices run the same code, so what a device does in a slot, and where its inputs lie, must be data. `lower` makes
the orders that data. It looks up when each action runs (`timing.slot_times`). And it gives every value that waits for
an action (an activation, a cotangent, a forward's residuals) a row of a buffer for as long as it is live, so the memory
held is what the orders need and no more.

Arrays here are NumPy's, int32, `[T, K]`: T ticks, K stages.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from jpipe.schedules.actions import ACTION_KINDS, Action, Orders, Placed
from jpipe.schedules.timing import boundary_source, slot_times


@dataclass(frozen=True, eq=False)
class SlotTable:
    """What every stage does in one slot of each tick. Arrays are read-only int32 `[T, K]`.

    Attributes:
      kinds: the kinds that this slot admits.
      kind: 0 where the stage idles, else 1 + `kinds.index(kind of the action)`.
      microbatch: the action's micro-batch; 0 where idle.
      chunk: the action's chunk; 0 where idle.
      activation: row of the activation buffer with the boundary input of this action's virtual stage, for F, and with
        `keep_inputs` for B too; -1 where there is none (first virtual stage, idle).
      cotangent: row of the cotangent buffer with what the next virtual stage sent back, for B; -1 where there is none
        (last virtual stage, F, idle).
      residual: row of the residual buffer that F writes and B reads; -1 where idle, and in forward-only schedules.
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
    residual: np.ndarray
    activation_in: tuple[np.ndarray, ...]
    cotangent_in: tuple[np.ndarray, ...]


@dataclass(frozen=True, eq=False)
class TickTable:
    """A schedule in lockstep ticks.

    Attributes:
      slots: the slots of a tick, in the order in which they run.
      num_ticks: T; the last tick has an action.
      residual_rows: K numbers, the rows of the residual buffer that each stage needs, which is the most (micro-batch,
        chunk) pairs between their F and their B.
    """

    slots: tuple[SlotTable, ...]
    num_ticks: int
    residual_rows: tuple[int, ...]

    def rows_written(self, name: str) -> int:
        """How many rows the "activation" or "cotangent" buffer must have: those that any stage ever writes."""
        arrivals = [column for slot in self.slots for column in getattr(slot, f"{name}_in")]
        return 1 + max((int(column.max()) for column in arrivals), default=-1)


@dataclass(frozen=True)
class _Value:
    """A value kept on a stage, which has its row to itself from slot time `first` to its last use, both included."""

    stage: int
    first: int
    uses: tuple[int, ...]  # slot times of the actions that need to know its row, in order
    sender: int = -1  # the stage that a boundary value comes from


def lower(orders: Orders, *, keep_inputs: bool = False) -> TickTable:
    """Lowers any valid orders to ticks, each action as soon as possible, each value in the lowest free row.

    Args:
      orders: a `Schedule`, or orders that are known not to deadlock.
      keep_inputs: keep an activation that crossed a boundary until the B of its micro-batch and chunk has read it again
        (for remat); otherwise until its F has. Without effect in a forward-only schedule.

    Returns:
      The table. Slot times at which every stage idles are kept, except after the last action's tick.
    """
    times = slot_times(orders)
    width = len(orders.slots)
    num_ticks = max(times.values()) // width + 1
    shape = (num_ticks * width, orders.num_stages)  # a line for each slot time; the slots of a tick are split below
    columns = {name: np.zeros(shape, np.int32) for name in ("kind", "microbatch", "chunk")}
    for (stage, action), tau in times.items():
        columns["kind"][tau, stage] = 1 + orders.slots[tau % width].index(action.kind)
        columns["microbatch"][tau, stage] = action.microbatch
        columns["chunk"][tau, stage] = action.chunk
    arrivals: dict[str, list[np.ndarray]] = {}  # a boundary value arrives in the slot before it is live
    for name, flow, values in (
        ("activation", +1, _boundary_values(orders, times, "F", "FB" if keep_inputs else "F")),
        ("cotangent", -1, _boundary_values(orders, times, "B", "B")),
        ("residual", 0, _residuals(times)),  # F itself writes them
    ):
        allocated = _allocate(values)
        columns[name] = _column(shape, ((tau, value.stage, row) for value, row in allocated for tau in value.uses))
        if flow:
            routes = orders.placement.routes(flow)
            arrivals[name] = [_arrivals(allocated, route, shape, width) for route in routes]
    for column in [*columns.values(), *itertools.chain(*arrivals.values())]:
        column.flags.writeable = False
    slots = (
        SlotTable(
            kinds=kinds,
            **{name: column[i::width] for name, column in columns.items()},
            activation_in=tuple(column[i::width] for column in arrivals["activation"]),
            cotangent_in=tuple(column[i::width] for column in arrivals["cotangent"]),
        )
        for i, kinds in enumerate(orders.slots)
    )
    rows = tuple((1 + columns["residual"].max(axis=0)).tolist())
    return TickTable(slots=tuple(slots), num_ticks=num_ticks, residual_rows=rows)


def _boundary_values(orders: Orders, times: dict[Placed, int], kind: str, readers: str) -> list[_Value]:
    """The values that actions of `kind` receive over boundaries, each kept until the last of `readers` has read it.

    One that arrives at the end of slot time tau is live from tau + 1 on. For a slot's action reads before arrivals are
    written, so the row of a value read for the last time may take the arrival of the same slot.
    """
    values, slots = [], orders.slots
    for stage, action in times:
        source = boundary_source(orders.placement, stage, action)
        if action.kind == kind and source is not None:
            arrives = times[source] + crosses_beside(slots, kind, times[source] % len(slots))
            values.append(_Value(stage, arrives + 1, _uses(times, stage, action, readers), source[0]))
    return values


def crosses_beside(slots: Sequence[str], kind: str, slot: int) -> bool:
    """Whether what actions of `kind` send crosses its boundary while the next slot runs, not before it.

    It may where the next slot admits no action of the same kind, the only ones that could need it at once.

    Args:
      slots: the kinds that each slot of a tick admits.
      kind: the kind of the actions that send.
      slot: the index of the slot in which they run.
    """
    return kind not in slots[(slot + 1) % len(slots)]


def _residuals(times: dict[Placed, int]) -> list[_Value]:
    """What the forwards keep for the backwards: live from the slot of F to the last one that reads it."""
    values = (
        _Value(stage, tau, _uses(times, stage, action, ACTION_KINDS))
        for (stage, action), tau in times.items()
        if action.kind == "F"
    )
    return [value for value in values if len(value.uses) > 1]


def _uses(times: dict[Placed, int], stage: int, action: Action, kinds: Iterable[str]) -> tuple[int, ...]:
    """Slot times, in order, of the actions of these kinds on the same micro-batch and virtual stage."""
    same = ((stage, Action(kind, action.microbatch, action.chunk)) for kind in kinds)
    return tuple(sorted(times[placed] for placed in same if placed in times))


def _allocate(values: Iterable[_Value]) -> list[tuple[_Value, int]]:
    """Gives each value the lowest row that is free on its stage.

    Taken in the order in which values become live, this needs as many rows as are live at once, and no more.
    """
    allocated = []
    until: dict[int, list[int]] = {}  # by stage: the last slot time for which each row is taken
    for value in sorted(values, key=lambda value: value.first):
        rows = until.setdefault(value.stage, [])
        row = next((row for row, last in enumerate(rows) if last < value.first), len(rows))
        rows[row : row + 1] = [value.uses[-1]]
        allocated.append((value, row))
    return allocated


def _arrivals(
    allocated: list[tuple[_Value, int]], route: list[tuple[int, int]], shape: tuple[int, int], width: int
) -> np.ndarray:
    """The row into which each stage writes what arrives by a route, at each slot time: `[T * width, K]`.

    Where nothing arrives, it is the lowest row that holds nothing live, nor gets what arrives by another route; or -1
    in a slot in which nothing ever arrives.
    """
    comes = lambda value: (value.sender, value.stage) in route
    rows = _column(shape, ((value.first - 1, value.stage, row) for value, row in allocated if comes(value)))
    taken = np.zeros((*shape, 1 + max((row for _, row in allocated), default=-1) + 1), bool)  # the last row is spare
    for value, row in allocated:
        taken[value.first - (not comes(value)) : value.uses[-1], value.stage, row] = True
    free = np.argmin(taken, axis=-1).astype(np.int32)
    for i in range(width):
        slot = rows[i::width]
        if (slot >= 0).any():
            slot[:] = np.where(slot >= 0, slot, free[i::width])
    return rows


def _column(shape: tuple[int, int], entries: Iterable[tuple[int, int, int]]) -> np.ndarray:
    """-1 everywhere but in the entries, each a slot time, a stage and a row."""
    column = np.full(shape, -1, np.int32)
    for tau, stage, row in entries:
        column[tau, stage] = row
    return column
