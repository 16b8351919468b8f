"""Schedules as plain data: which stage does what, in which order.

A pipeline's schedule decides its bubble and its memory, and nothing else about the result. So it is kept apart from
the program that executes it: a `Schedule` is one ordered list of actions a stage, checked when it is made, and a new
schedule is a new order of some twenty lines. `jpipe.schedules.ticks` lowers any of them to the table that the
executor and the simulator read.

K is the number of stages, M of micro-batches, V of chunks a stage. Chunk v of stage k is virtual stage v*K + k, so
a micro-batch goes through all stages once for each chunk (the interleaving of Megatron-LM, arXiv 2104.04473).

Stages work in lockstep ticks. A tick is a row of slots, and in each slot a stage does one action or idles. What is sent
at the end of a slot can be used from the next slot on. With the slots ("F", "B") a forward's hop to the next stage
therefore costs a tick, while on the last stage the backward follows its own forward in the same tick.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jpipe.schedules.ticks import TickTable


@dataclass(frozen=True)
class ActionKind:
    """What an action of this kind depends on, and where it sends its result.

    Attributes:
      flow: +1 if it takes the result of the same kind on the virtual stage before and sends its own to the one after
        (activations), -1 for the other direction (cotangents), 0 if nothing crosses a boundary.
      after: the kinds that must have run before it on its own virtual stage.
      executed: whether the executor can run it.
    """

    flow: int
    after: str
    executed: bool = True


ACTION_KINDS = {
    "F": ActionKind(flow=+1, after=""),
    "B": ActionKind(flow=-1, after="F"),
    "W": ActionKind(flow=0, after="B", executed=False),  # weight gradients apart from B: kept for zero-bubble orders
}


@dataclass(frozen=True)
class Action:
    """One piece of a stage's work: the forward "F" or backward "B" of one micro-batch through one chunk.

    >>> print(Action("F", 3), Action("B", 3, 1))
    F3 B3.1
    """

    kind: str
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


Placed = tuple[int, Action]  # an action and the stage that does it


@dataclass(frozen=True, init=False)
class Schedule:
    """The order of each stage's actions, and the slots of a tick in which they run.

    Args:
      actions: K sequences, the ordered actions of each stage. An action is an `Action`, a tuple `("F", 0)` or
        `("F", 0, 1)`, or a string `"F0"` or `"F0.1"`: kind, micro-batch, chunk.
      slots: the slots of a tick, each named by the kinds that it admits. `("F", "B")`: a forward, then a backward.
        `("FB",)`: either of them. `("F",)`: forward only.
      name: for pictures and messages; two schedules that differ in name alone are equal.

    Raises:
      TypeError: an action or the slots are of the wrong type.
      ValueError: see `validate`; the message names the first fault.

    >>> print(Schedule([["F0", "F1", "B0", "B1"], ["F0", "B0", "F1", "B1"]]))
    custom: K=2 stages, M=2 micro-batches, V=1 chunks; slots of a tick: F, B
    tick    |0     |1     |2     |3     |
    stage 0 |F0 .  |F1 .  |.  B0 |.  B1 |
    stage 1 |.  .  |F0 B0 |F1 B1 |.  .  |
    """

    actions: tuple[tuple[Action, ...], ...]
    slots: tuple[str, ...]
    name: str = field(compare=False)

    def __init__(
        self,
        actions: Sequence[Sequence[Action | tuple[Any, ...] | str]],
        *,
        slots: Sequence[str] = ("F", "B"),
        name: str = "custom",
    ) -> None:
        _check_sequence("actions", actions, 'use one sequence of actions a stage, as [["F0", "B0"], ["F0", "B0"]]')
        _check_sequence("slots", slots, 'use ("F", "B") for two slots, ("FB",) for one that admits both')
        for stage, order in enumerate(actions):
            _check_sequence(f"actions of stage {stage}", order, 'use a sequence of single actions, as ["F0", "B0"]')
        orders = tuple(tuple(_as_action(item, stage) for item in order) for stage, order in enumerate(actions))
        object.__setattr__(self, "actions", orders)
        object.__setattr__(self, "slots", tuple(slots))
        object.__setattr__(self, "name", name)
        validate(self)

    @property
    def trains(self) -> bool:
        """Whether there are backward actions."""
        return any(action.kind == "B" for action in self.actions[0])

    @property
    def num_stages(self) -> int:
        """K, the number of stages."""
        return len(self.actions)

    @cached_property
    def num_microbatches(self) -> int:
        """M, one more than the highest micro-batch."""
        return 1 + max(action.microbatch for order in self.actions for action in order)

    @cached_property
    def num_chunks(self) -> int:
        """V, one more than the highest chunk."""
        return 1 + max(action.chunk for order in self.actions for action in order)

    @cached_property
    def ticks(self) -> "TickTable":
        """The lowered table, as `jpipe.ticks.lower(self)`."""
        from jpipe.schedules.ticks import lower

        return lower(self)

    def __str__(self) -> str:
        """The grid: a line for each stage, a column for each slot in time, "." where the stage idles."""
        times = place(self)
        width = len(self.slots)
        num_ticks = max(times.values()) // width + 1
        labels = {(stage, tau): str(action) for (stage, action), tau in times.items()}
        cell = max(map(len, labels.values()))
        lines = [
            f"{self.name}: K={self.num_stages} stages, M={self.num_microbatches} micro-batches, "
            f"V={self.num_chunks} chunks; slots of a tick: {', '.join(self.slots)}",
            _line("tick", [[str(tick)] + [""] * (width - 1) for tick in range(num_ticks)], cell),
        ]
        for stage in range(self.num_stages):
            cells = [[labels.get((stage, tick * width + i), ".") for i in range(width)] for tick in range(num_ticks)]
            lines.append(_line(f"stage {stage}", cells, cell))
        return "\n".join(lines)


def _line(label: str, ticks: list[list[str]], cell: int) -> str:
    return f"{label:<8}|" + "".join("".join(f"{text:<{cell + 1}}" for text in tick) + "|" for tick in ticks)


def _check_sequence(label: str, value: Any, remedy: str) -> None:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(f"{label} must be a sequence, got {value!r}; {remedy}")


def _as_action(item: Action | tuple[Any, ...] | str, stage: int) -> Action:
    if isinstance(item, Action):
        parts = (item.kind, item.microbatch, item.chunk)
    elif isinstance(item, str):
        match = re.fullmatch(r"([A-Za-z]+)(-?\d+)(?:\.(\d+))?", item.strip())
        parts = (match[1], int(match[2]), int(match[3] or 0)) if match else ()
    else:
        parts = (*item, 0) if isinstance(item, tuple) and len(item) == 2 else item
    match parts:
        case (str(kind), Integral() as microbatch, Integral() as chunk) if not isinstance(microbatch, bool):
            return Action(kind, int(microbatch), int(chunk))
    raise TypeError(f'stage {stage} has the action {item!r}; use Action("F", 0), ("F", 0), ("F", 0, 1), "F0" or "F0.1"')


# --- validity ---------------------------------------------------------------------------------------------------------


def validate(schedule: Schedule) -> None:
    """Checks that a schedule can be executed: kinds, slots, every action once on every stage, order without deadlock.

    Raises:
      ValueError: naming the first fault: the stage, the action, what it lacks or waits for, and the remedy.
    """
    _check_slots(schedule)
    for stage, order in enumerate(schedule.actions):
        for action in order:
            _check_action(schedule, stage, action)
    _check_complete(schedule)
    place(schedule)


def _check_slots(schedule: Schedule) -> None:
    if not schedule.slots:
        raise ValueError('slots=() is empty; name the kinds of each slot of a tick, as ("F", "B")')
    for kinds in schedule.slots:
        if not isinstance(kinds, str) or not kinds or len(set(kinds)) < len(kinds):
            raise ValueError(f'slot {kinds!r} of {schedule.slots} must be a string of different kinds, as "F" or "FB"')
        for kind in kinds:
            _check_kind(kind, f"slot {kinds!r} of slots={schedule.slots}")


def _check_action(schedule: Schedule, stage: int, action: Action) -> None:
    where = f"action {action} on stage {stage}"
    _check_kind(action.kind, where)
    if not any(action.kind in kinds for kinds in schedule.slots):
        raise ValueError(f"{where}: no slot admits {action.kind}; add it to slots={schedule.slots} or drop the action")
    if action.microbatch < 0 or action.chunk < 0:
        raise ValueError(f"{where} is out of range; micro-batches and chunks count from 0")


def _check_kind(kind: str, where: str) -> None:
    if kind not in ACTION_KINDS:
        known = ", ".join(name for name in ACTION_KINDS if ACTION_KINDS[name].executed)
        raise ValueError(f"{where} has the unknown kind {kind!r}; use one of {known}")
    if not ACTION_KINDS[kind].executed:
        raise ValueError(f"{where}: weight-gradient actions ({kind}) are not executed yet; leave them to B")


def _check_complete(schedule: Schedule) -> None:
    highest = max(
        ((action.microbatch, stage, action) for stage, order in enumerate(schedule.actions) for action in order),
        key=lambda item: item[0],
        default=None,
    )
    if highest is None:
        raise ValueError(f'a schedule of {schedule.num_stages} stages has no actions; give each stage some, as ["F0"]')
    used = {action.kind for order in schedule.actions for action in order}
    required = {"F"} | used | {before for kind in used for before in ACTION_KINDS[kind].after}
    pairs = [(m, v) for m in range(schedule.num_microbatches) for v in range(schedule.num_chunks)]
    for stage, order in enumerate(schedule.actions):
        counts = Counter(order)
        for action in (Action(kind, m, v) for kind in ACTION_KINDS if kind in required for m, v in pairs):
            if counts[action] == 1:
                continue
            if counts[action] > 1:
                raise ValueError(f"stage {stage} has {action} {counts[action]} times; keep one of them")
            raise ValueError(
                f"stage {stage} lacks {action}: {action.kind} of every micro-batch and chunk must be on every stage, "
                f"here of {schedule.num_microbatches} micro-batches ({highest[2]} on stage {highest[1]} is the last) "
                f"and {schedule.num_chunks} chunks; add {action} to stage {stage} or drop it from the others"
            )


# --- placing ----------------------------------------------------------------------------------------------------------


def boundary_source(schedule: Schedule, stage: int, action: Action) -> Placed | None:
    """The stage and action whose result `action` receives over a boundary; None at the end of the chain."""
    flow = ACTION_KINDS[action.kind].flow
    source = action.chunk * schedule.num_stages + stage - flow
    if flow == 0 or not 0 <= source < schedule.num_stages * schedule.num_chunks:
        return None
    return source % schedule.num_stages, Action(action.kind, action.microbatch, source // schedule.num_stages)


def needs(schedule: Schedule, stage: int, action: Action) -> list[Placed]:
    """All that must have run in an earlier slot: the kinds before it on its own virtual stage, then the neighbour."""
    own = [(stage, Action(kind, action.microbatch, action.chunk)) for kind in ACTION_KINDS[action.kind].after]
    source = boundary_source(schedule, stage, action)
    return own if source is None else [*own, source]


def place(schedule: Schedule) -> dict[Placed, int]:
    """The slot time of every action, each as soon as its stage's order, its slots and its dependencies allow.

    Slot time tau is slot `tau % len(slots)` of tick `tau // len(slots)`.

    Raises:
      ValueError: the order deadlocks; the message names an action, what it waits for, and the remedy.
    """
    times: dict[Placed, int] = {}
    waiting = [list(reversed(order)) for order in schedule.actions]  # a stage's next action is its list's last
    tau = idle = 0
    while any(waiting):
        admitted = schedule.slots[tau % len(schedule.slots)]
        ready = [
            (stage, rest[-1])
            for stage, rest in enumerate(waiting)
            if rest and rest[-1].kind in admitted and all(need in times for need in needs(schedule, stage, rest[-1]))
        ]
        for stage, action in ready:
            times[stage, action] = tau
            waiting[stage].pop()
        idle = 0 if ready else idle + 1
        if idle == len(schedule.slots):  # every slot was tried in vain, so nothing will ever change
            raise ValueError(_deadlock(schedule, times, waiting))
        tau += 1
    return times


def _deadlock(schedule: Schedule, times: dict[Placed, int], waiting: list[list[Action]]) -> str:
    """Follows who waits for whom round to a circle and names in it the first action that stands too late in its order.

    There is one, since dependencies alone have no circle.
    """

    def wanted(stage: int) -> Placed:
        return next(need for need in needs(schedule, stage, waiting[stage][-1]) if need not in times)

    stage = next(stage for stage, rest in enumerate(waiting) if rest)
    seen: list[int] = []
    while stage not in seen:
        seen.append(stage)
        stage = wanted(stage)[0]
    kinds = list(ACTION_KINDS)  # forwards first: one that comes too late is the usual reason, and the easier to see
    circle = sorted(seen[seen.index(stage) :], key=lambda stage: (kinds.index(waiting[stage][-1].kind), stage))
    stage = next(stage for stage in circle if waiting[wanted(stage)[0]][-1] != wanted(stage)[1])
    source, late = wanted(stage)
    blocker = waiting[source][-1]
    return (
        f"stage {stage} waits forever at {waiting[stage][-1]}: it needs {late} of stage {source}, which comes after "
        f"{blocker} there, and {blocker} cannot run before it; put {late} before {blocker} on stage {source}"
    )
