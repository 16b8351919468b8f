"""Schedules as plain data: which stage does what, in which order.

A pipeline's schedule decides its bubble and its memory, and nothing else about the result. So it is kept apart from
the program that executes it: a `Schedule` is one ordered list of actions a stage, checked when it is made, and a new
schedule is a new order of some twenty lines. `jpipe.ticks` lowers any of them to the table that the executor and the
simulator read.

K is the number of stages, M of micro-batches, V of chunks a stage. Chunk v of stage k is virtual stage v*K + k, so
a micro-batch goes through all stages once for each chunk (the interleaving of Megatron-LM, arXiv 2104.04473).

Stages work in lockstep ticks. A tick is a row of slots, and in each slot a stage does one action or idles. What is sent
at the end of a slot can be used from the next slot on. With the slots ("F", "B") a forward's hop to the next stage
therefore costs a tick, while on the last stage the backward follows its own forward in the same tick.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from numbers import Integral
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jpipe.ticks import TickTable


@dataclass(frozen=True)
class Kind:
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


KINDS = {
    "F": Kind(flow=+1, after=""),
    "B": Kind(flow=-1, after="F"),
    "W": Kind(flow=0, after="B", executed=False),  # weight gradients apart from B: kept for zero-bubble orders
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
        from jpipe.ticks import lower

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
    if kind not in KINDS:
        known = ", ".join(name for name in KINDS if KINDS[name].executed)
        raise ValueError(f"{where} has the unknown kind {kind!r}; use one of {known}")
    if not KINDS[kind].executed:
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
    required = {"F"} | used | {before for kind in used for before in KINDS[kind].after}
    pairs = [(m, v) for m in range(schedule.num_microbatches) for v in range(schedule.num_chunks)]
    for stage, order in enumerate(schedule.actions):
        counts = Counter(order)
        for action in (Action(kind, m, v) for kind in KINDS if kind in required for m, v in pairs):
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
    flow = KINDS[action.kind].flow
    source = action.chunk * schedule.num_stages + stage - flow
    if flow == 0 or not 0 <= source < schedule.num_stages * schedule.num_chunks:
        return None
    return source % schedule.num_stages, Action(action.kind, action.microbatch, source // schedule.num_stages)


def needs(schedule: Schedule, stage: int, action: Action) -> list[Placed]:
    """All that must have run in an earlier slot: the kinds before it on its own virtual stage, then the neighbour."""
    own = [(stage, Action(kind, action.microbatch, action.chunk)) for kind in KINDS[action.kind].after]
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
    kinds = list(KINDS)  # forwards first: one that comes too late is the usual reason, and the easier to see
    circle = sorted(seen[seen.index(stage) :], key=lambda stage: (kinds.index(waiting[stage][-1].kind), stage))
    stage = next(stage for stage in circle if waiting[wanted(stage)[0]][-1] != wanted(stage)[1])
    source, late = wanted(stage)
    blocker = waiting[source][-1]
    return (
        f"stage {stage} waits forever at {waiting[stage][-1]}: it needs {late} of stage {source}, which comes after "
        f"{blocker} there, and {blocker} cannot run before it; put {late} before {blocker} on stage {source}"
    )


# --- orders -----------------------------------------------------------------------------------------------------------


def naive(num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """One micro-batch at a time, forth and back: one stage works while the others wait.

    >>> print(naive(2, 2))
    naive: K=2 stages, M=2 micro-batches, V=1 chunks; slots of a tick: F, B
    tick    |0     |1     |2     |3     |4     |5     |
    stage 0 |F0 .  |.  .  |.  B0 |F1 .  |.  .  |.  B1 |
    stage 1 |.  .  |F0 B0 |.  .  |.  .  |F1 B1 |.  .  |
    """
    _check_one_chunk("naive", num_chunks)
    order = [Action(kind, m) for m in range(num_microbatches) for kind in "FB"]
    return Schedule([order] * num_stages, name="naive")


def gpipe(num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """All forwards, then all backwards (GPipe, arXiv 1811.06965, figure 2): M micro-batches in flight on every stage.

    The backwards run in the order of the forwards too, so that a stage's stored values are freed first in, first out.

    >>> print(gpipe(2, 3))
    gpipe: K=2 stages, M=3 micro-batches, V=1 chunks; slots of a tick: F, B
    tick    |0     |1     |2     |3     |4     |5     |6     |
    stage 0 |F0 .  |F1 .  |F2 .  |.  .  |.  B0 |.  B1 |.  B2 |
    stage 1 |.  .  |F0 .  |F1 .  |F2 B0 |.  B1 |.  B2 |.  .  |
    """
    _check_one_chunk("gpipe", num_chunks)
    order = [Action(kind, m) for kind in "FB" for m in range(num_microbatches)]
    return Schedule([order] * num_stages, name="gpipe")


def one_f_one_b(num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """One forward, one backward (PipeDream-Flush): the bubble of GPipe, memory that does not grow with M.

    A hop costs a tick, so stage k starts with 2(K-1-k)+1 forwards, which is what it then holds.

    >>> print(one_f_one_b(2, 4))
    1f1b: K=2 stages, M=4 micro-batches, V=1 chunks; slots of a tick: F, B
    tick    |0     |1     |2     |3     |4     |5     |
    stage 0 |F0 .  |F1 .  |F2 B0 |F3 B1 |.  B2 |.  B3 |
    stage 1 |.  .  |F0 B0 |F1 B1 |F2 B2 |F3 B3 |.  .  |
    """
    _check_one_chunk("1f1b", num_chunks)
    return Schedule(_one_f_one_b_orders(num_stages, num_microbatches, 1), name="1f1b")


def interleaved(num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """1F1B over V chunks a stage (Megatron-LM, arXiv 2104.04473, section 2.2): the bubble shrinks to (K-1)/(VM+K-1).

    Chunk 1 of a micro-batch on stage 0 follows its chunk 0 on the last stage. It costs V times the hops, and with fewer
    micro-batches than stages the bubble is larger than that.

    >>> print(interleaved(2, 2, 2))
    interleaved: K=2 stages, M=2 micro-batches, V=2 chunks; slots of a tick: F, B
    tick    |0         |1         |2         |3         |4         |5         |6         |7         |
    stage 0 |F0   .    |F1   .    |F0.1 .    |F1.1 .    |.    B0.1 |.    B1.1 |.    B0   |.    B1   |
    stage 1 |.    .    |F0   .    |F1   .    |F0.1 B0.1 |F1.1 B1.1 |.    B0   |.    B1   |.    .    |
    """
    return Schedule(_one_f_one_b_orders(num_stages, num_microbatches, num_chunks), name="interleaved")


def forward(num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """Forward only, for inference and evaluation; nothing is kept for a backward.

    >>> print(forward(2, 3))
    forward: K=2 stages, M=3 micro-batches, V=1 chunks; slots of a tick: F
    tick    |0  |1  |2  |3  |
    stage 0 |F0 |F1 |F2 |.  |
    stage 1 |.  |F0 |F1 |F2 |
    """
    order = _chunked("F", _groups(num_stages, num_microbatches), range(num_chunks))
    return Schedule([order] * num_stages, slots=("F",), name="forward")


def _one_f_one_b_orders(num_stages: int, num_microbatches: int, num_chunks: int) -> list[list[Action]]:
    groups = _groups(num_stages, num_microbatches)
    forwards = _chunked("F", groups, range(num_chunks))
    backwards = _chunked("B", groups, range(num_chunks)[::-1])
    orders = []
    for stage in range(num_stages):
        # The first backward starts on the last stage when the first group reaches its last chunk there, and is back on
        # this stage K-1-k ticks later; forwards go on until then.
        group_size = max(num_stages, *map(len, groups))
        warm_up = min(len(forwards), (num_chunks - 1) * group_size + 2 * (num_stages - 1 - stage) + 1)
        order = forwards[:warm_up]
        for i, backward in enumerate(backwards):
            order += [backward, *forwards[warm_up + i : warm_up + i + 1]]
        orders.append(order)
    return orders


def _groups(num_stages: int, num_microbatches: int) -> list[range]:
    """Micro-batches in groups of K or somewhat more, as even as can be; fewer than K are one group.

    A group passes one chunk after another. With K of them its first is back at stage 0 just when its last has left;
    fewer would leave a gap, and where K does not divide M a group of the remainder alone would even deadlock.
    """
    count = max(1, num_microbatches // num_stages)
    bounds = [i * num_microbatches // count for i in range(count + 1)]
    return [range(first, last) for first, last in pairwise(bounds)]


def _chunked(kind: str, groups: list[range], chunks: range) -> list[Action]:
    return [Action(kind, m, chunk) for group in groups for chunk in chunks for m in group]


def _check_one_chunk(name: str, num_chunks: int) -> None:
    if num_chunks > 1:
        raise ValueError(
            f"schedule={name!r} has one chunk a stage, got num_chunks={num_chunks}; "
            "use schedule='interleaved' or num_chunks=1"
        )


SCHEDULES: dict[str, Callable[[int, int, int], Schedule]] = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "forward": forward,
}


def make_schedule(name: str | Schedule, *, num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """The schedule of that name; a `Schedule` of one's own is checked against the three numbers and returned.

    Args:
      name: one of `SCHEDULES` ("naive", "gpipe", "1f1b", "interleaved", "forward"), or a `Schedule`.
      num_stages: K.
      num_microbatches: M.
      num_chunks: V, the virtual stages a stage; more than 1 with "interleaved" and "forward" only.

    Raises:
      TypeError: a number is not an int, or `name` neither a string nor a `Schedule`.
      ValueError: a number is less than 1, the name is unknown, the schedule has no chunks, or the numbers disagree.

    >>> make_schedule("1f1b", num_stages=4, num_microbatches=8).ticks.num_ticks
    14
    """
    sizes = {"num_stages": num_stages, "num_microbatches": num_microbatches, "num_chunks": num_chunks}
    for label, size in sizes.items():
        _check_size(label, size)
    if isinstance(name, Schedule):
        for label, size in sizes.items():
            if getattr(name, label) != size:
                raise ValueError(
                    f"{label}={size}, but the schedule {name.name!r} was made for {getattr(name, label)}; "
                    f"use {label}={getattr(name, label)} or another schedule"
                )
        return name
    if not isinstance(name, str):
        raise TypeError(f"schedule={name!r} must be a name or a jpipe.Schedule; the names are {_known()}")
    if name not in SCHEDULES:
        raise ValueError(f"schedule={name!r} is unknown; use one of {_known()}, or a jpipe.Schedule of your own")
    return SCHEDULES[name](int(num_stages), int(num_microbatches), int(num_chunks))


def _known() -> str:
    return ", ".join(map(repr, SCHEDULES))


def _check_size(label: str, size: Any) -> None:
    if isinstance(size, bool) or not isinstance(size, Integral):
        raise TypeError(f"{label}={size!r} must be an int, got {type(size).__name__}; use 1 or more")
    if int(size) < 1:
        raise ValueError(f"{label}={size} must be 1 or more")
