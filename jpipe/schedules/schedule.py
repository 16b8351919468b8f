"""`Schedule`: an order of actions for each stage; it is checked when it is made, and printed as a grid.

A pipeline's schedule decides its bubble and its memory, and nothing else about the result. So it is kept apart from
the code that executes it: a `Schedule` is one ordered list of actions for each stage, and a new schedule is a new order
of some twenty lines. `Schedule.ticks` is the table to which any of them is lowered for the executor.

K is the number of stages, M of micro-batches, V of chunks a stage.

Orders are read and written as PyTorch's CSV files too (`torch.distributed.pipelining`, "compute_only"). A cell names a
virtual stage, a kind and a micro-batch, as "5F0", and is empty where the stage idles; PyTorch has no R. Two actions
that PyTorch runs together, "(0F7;7B3)OVERLAP_F_B", run one after the other here.
"""

import csv
import io
import re
from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import TypeAlias

from jpipe.schedules.actions import ACTION_KINDS, STYLES, Action, Orders, Placement, admitted
from jpipe.schedules.ticks import TickTable, lower
from jpipe.users_numbers import integer_or_none


def read_csv(text: str) -> tuple[list[list[Action]], str]:
    """Returns each row's actions in order, and the first style of placement that fits the rows' virtual stages.

    Raises:
      TypeError: `text` is no string.
      ValueError: it has no rows, a cell is no action, or the rows' virtual stages fit no style; the message names it.
    """
    if not isinstance(text, str):
        raise TypeError(f"a schedule is read from text, got {type(text).__name__}; pass Path(...).read_text()")
    if not (rows := list(csv.reader(io.StringIO(text.rstrip())))):
        raise ValueError("the CSV is empty; it has a row of cells for each stage, as 0F0,0F1,0B0,0B1")
    orders = [[part for i, cell in enumerate(row) for part in _parts(cell, k, i)] for k, row in enumerate(rows)]
    virtual_stages = [sorted({s for s, _, _ in order}) for order in orders]
    num_chunks = max(map(len, virtual_stages))
    for style in STYLES if num_chunks == 2 else STYLES[:1]:
        placement = Placement(len(rows), num_chunks, style)
        if all(placement.stage_of(s) == k for k, of_row in enumerate(virtual_stages) for s in of_row):
            return [[Action(kind, m, placement.chunk_of(s)) for s, kind, m in order] for order in orders], style
    runs = "; ".join(f"row {k}: {', '.join(map(str, of_row))}" for k, of_row in enumerate(virtual_stages))
    raise ValueError(
        f"the CSV's rows run virtual stages that fit no placement of {len(rows)} rows ({runs}); "
        f'use "loop", row k with k, K+k, 2K+k ..., or "v", row k with k and 2K-1-k'
    )


def _parts(cell: str, row: int, column: int) -> list[tuple[int, str, int]]:
    """The actions of a cell: virtual stage, kind and micro-batch."""
    together = re.fullmatch(r"\((.*)\)OVERLAP_F_B", cell.strip())
    parts = []
    for part in map(str.strip, together[1].split(";") if together else [cell]):
        if match := re.fullmatch(rf"(\d+)([{''.join(ACTION_KINDS)}])(\d+)", part):
            parts.append((int(match[1]), match[2], int(match[3])))
        elif re.search(r"SEND|RECV|SHARD", part):
            raise ValueError(f"row {row}, cell {column} ({cell!r}) is communication: jpipe sends by itself; drop it")
        elif part and not re.fullmatch(r"\d+REDUCE_GRAD", part):  # which jpipe does at the end of a step
            raise ValueError(
                f'row {row}, cell {column} ({cell!r}) is no action; use virtual stage, kind and micro-batch, as "5F0"'
            )
    return parts


# --- schedules --------------------------------------------------------------------------------------------------------


ActionLike: TypeAlias = Action | tuple[str, int] | tuple[str, int, int] | str


@dataclass(frozen=True, init=False)
class Schedule(Orders):
    """The order of each stage's actions, and the slots of a tick in which they run (see `jpipe.schedules.actions`).

    Args:
      actions: K sequences, the ordered actions of each stage. An action is an `Action`, a tuple `("F", 0)` or
        `("F", 0, 1)`, or a string `"F0"` or `"F0.1"`: kind, micro-batch, chunk.
      slots: the slots of a tick, each named by the kinds that it admits. `("F", "B")`: a forward, then a backward.
        `("FB",)`: either of them. `("F", "B", "W")`: where "B" is admitted, so is "I". `("F",)`: forward only.
      style: "loop": chunk v of stage k is virtual stage v*K + k. "v": chunk 1 of stage k is virtual stage 2K-1-k.
      name: the name in pictures and messages; two schedules that differ in name alone are equal.

    Raises:
      TypeError: an action or the slots are of the wrong type.
      ValueError: it can't be executed: unknown kinds or slots, an action that isn't exactly once on each stage, a
        deadlock. The message names the first fault: the stage, the action, what it lacks or waits for, and the remedy.

    >>> print(Schedule([["F0", "F1", "B0", "B1"], ["F0", "B0", "F1", "B1"]]))
    custom: K=2 stages, M=2 micro-batches, V=1 chunks; slots of a tick: F, B
    tick    |0     |1     |2     |3     |
    stage 0 |F0 .  |F1 .  |.  B0 |.  B1 |
    stage 1 |.  .  |F0 B0 |F1 B1 |.  .  |
    """

    name: str = field(compare=False)

    def __init__(
        self,
        actions: Sequence[Sequence[ActionLike]],
        *,
        slots: Sequence[str] = ("F", "B"),
        style: str = "loop",
        name: str = "custom",
    ) -> None:
        _check_sequence("actions", actions, 'use one sequence of actions a stage, as [["F0", "B0"], ["F0", "B0"]]')
        _check_sequence("slots", slots, 'use ("F", "B") for two slots, ("FB",) for one that admits both')
        for stage, order in enumerate(actions):
            _check_sequence(f"actions of stage {stage}", order, 'use a sequence of single actions, as ["F0", "B0"]')
        orders = tuple(tuple(_as_action(item, stage) for item in order) for stage, order in enumerate(actions))
        super().__init__(orders, tuple(slots), style)
        object.__setattr__(self, "name", name)
        _check_slots(self)
        _check_actions(self)
        _check_complete(self)
        _check_style(self)
        _ = self.slot_times  # raises where they deadlock

    @classmethod
    def from_csv(cls, text: str, *, slots: Sequence[str] | None = None, name: str = "csv") -> "Schedule":
        """A schedule that PyTorch wrote (`torch.distributed.pipelining`, format "compute_only"), or `to_csv`.

        Args:
          text: a row for each stage, cells of virtual stage, kind and micro-batch, as `5F0`; empty where it idles.
            Its actions "REDUCE_GRAD" are left out: jpipe reduces gradients at the end of a step.
          slots: the slots of a tick, which a CSV doesn't tell; None: one slot that admits all kinds that occur.
          name: the name in pictures and messages.

        Raises:
          TypeError, ValueError: it isn't that, or can't be executed; the message names the row and the cell, or stage
            and action.

        >>> print(Schedule.from_csv("0F0,0F1,,0B0,0B1\\n,1F0,1B0,1F1,1B1"))
        csv: K=2 stages, M=2 micro-batches, V=1 chunks; slots of a tick: FB
        tick    |0  |1  |2  |3  |4  |5  |
        stage 0 |F0 |F1 |.  |B0 |.  |B1 |
        stage 1 |.  |F0 |B0 |F1 |B1 |.  |
        """
        actions, style = read_csv(text)
        kinds = {action.kind for order in actions for action in order}
        every = "".join(kind for kind in ACTION_KINDS if kind in kinds)
        return cls(actions, slots=(every,) if slots is None else slots, style=style, name=name)

    def to_csv(self) -> str:
        """Its orders as `from_csv` reads them, a column for each slot in time.

        >>> print(Schedule([["F0", "B0"], ["F0", "B0"]], slots=("FB",)).to_csv())
        0F0,,,0B0
        ,1F0,1B0,
        <BLANKLINE>
        """
        rows = [[""] * (max(self.slot_times.values()) + 1) for _ in self.actions]
        for (stage, (kind, microbatch, chunk)), tau in self.slot_times.items():
            rows[stage][tau] = f"{self.placement.virtual_stage(stage, chunk)}{kind}{microbatch}"
        return "".join(",".join(row) + "\n" for row in rows)

    def named(self, name: str) -> "Schedule":
        """The same schedule by another name."""
        renamed = copy(self)
        object.__setattr__(renamed, "name", name)
        return renamed

    @property
    def trains(self) -> bool:
        """Whether there are backward actions."""
        return any(action.kind != "F" for action in self.actions[0])

    @property
    def splits(self) -> bool:
        """Whether any backward is in two parts, I and W."""
        return "W" in self.kinds

    @cached_property
    def ticks(self) -> TickTable:
        """The schedule lowered to lockstep ticks, as `jpipe.schedules.ticks.lower(self)`."""
        return lower(self)

    @property
    def title(self) -> str:
        """Its name and sizes."""
        return f"{self.name}: K={self.num_stages}, M={self.num_microbatches}, V={self.num_chunks}"

    def __repr__(self) -> str:
        return f"<Schedule {self.title}>"

    def __str__(self) -> str:
        return self.grid(width=120)

    def grid(self, width: int | None = None) -> str:
        """The grid: a line for each stage, a column for each slot in time, "." where the stage idles.

        Args:
          width: the columns of a terminal: ticks in the middle are left out until the others fit, or one at each end
            remains. None for all.

        >>> print(Schedule([[f"F{m}" for m in range(100)]], slots=("F",)).grid(width=50))
        custom: K=1 stages, M=100 micro-batches, V=1 chunks; slots of a tick: F
        tick    |0   |1   |2   |3   | ... |97  |98  |99  |
        stage 0 |F0  |F1  |F2  |F3  | ... |F97 |F98 |F99 |
        93 of 100 ticks are left out; schedule.grid() has all
        """
        times = self.slot_times
        in_tick = len(self.slots)
        num_ticks = max(times.values()) // in_tick + 1
        labels = {(stage, tau): str(action) for (stage, action), tau in times.items()}
        widest, label = max(map(len, labels.values())), max(8, len(f"stage {self.num_stages - 1}"))
        size, shown = in_tick * (widest + 1) + 1, [range(num_ticks)]
        if width is not None and label + 1 + num_ticks * size > width:
            room = max(2, (width - label - len("| ... |")) // size)
            shown = [range(room - room // 2), range(num_ticks - room // 2, num_ticks)]

        def line(name: str, text_at: Callable[[int], str]) -> str:
            tick = lambda t: "".join(f"{text_at(t * in_tick + i):<{widest + 1}}" for i in range(in_tick)) + "|"
            return f"{name:<{label}}|" + " ... |".join("".join(map(tick, part)) for part in shown)

        lines = [
            f"{self.name}: K={self.num_stages} stages, M={self.num_microbatches} micro-batches, "
            f"V={self.num_chunks} chunks; slots of a tick: {', '.join(self.slots)}",
            line("tick", lambda tau: "" if tau % in_tick else str(tau // in_tick)),
            *(line(f"stage {k}", lambda tau, k=k: labels.get((k, tau), ".")) for k in range(self.num_stages)),
        ]
        if left_out := num_ticks - sum(map(len, shown)):
            lines.append(f"{left_out} of {num_ticks} ticks are left out; schedule.grid() has all")
        return "\n".join(lines)


def _check_sequence(label: str, value: object, remedy: str) -> None:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(f"{label} must be a sequence, got {value!r}; {remedy}")


def _as_action(item: ActionLike, stage: int) -> Action:
    """The action that is spelled as an `Action`, a tuple or a string; `stage` is for the message."""
    parts: object = item
    if isinstance(item, str):
        found = re.fullmatch(r"([A-Za-z]+)(-?\d+)(?:\.(\d+))?", item.strip())
        parts = (found[1], int(found[2]), int(found[3] or 0)) if found else ()
    match parts:
        case (str(kind), first) | (str(kind), first, _):
            m, v = integer_or_none(first), integer_or_none(0 if len(parts) == 2 else parts[2])
            if m is not None and v is not None:
                return Action(kind, m, v)
    raise TypeError(f'stage {stage} has the action {item!r}; use Action("F", 0), ("F", 0), ("F", 0, 1), "F0" or "F0.1"')


# --- checks -----------------------------------------------------------------------------------------------------------


def _check_slots(orders: Orders) -> None:
    if not orders.slots:
        raise ValueError('slots=() is empty; name the kinds of each slot of a tick, as ("F", "B")')
    for kinds in orders.slots:
        if not isinstance(kinds, str) or not kinds or len(set(kinds)) < len(kinds):
            raise ValueError(f'slot {kinds!r} of {orders.slots} must be a string of different kinds, as "F" or "FB"')
        for kind in kinds:
            _check_kind(kind, f"slot {kinds!r} of slots={orders.slots}")


def _check_style(orders: Orders) -> None:
    if orders.style not in STYLES:
        raise ValueError(f"style={orders.style!r} is unknown; use one of {', '.join(map(repr, STYLES))}")
    if orders.style == "v" and orders.num_chunks != 2:
        raise ValueError(f'style="v" takes two chunks a stage, there and back; the actions have {orders.num_chunks}')


def _check_actions(orders: Orders) -> None:
    kinds = {*"".join(map(admitted, orders.slots))}
    for stage, order in enumerate(orders.actions):
        for action in order:
            if action.kind in kinds and min(action.microbatch, action.chunk) >= 0:
                continue
            where = f"action {action} on stage {stage}"
            _check_kind(action.kind, where)
            if action.kind not in kinds:
                raise ValueError(f"{where}: no slot admits {action.kind}; add it to slots={orders.slots} or drop it")
            raise ValueError(f"{where} is out of range; micro-batches and chunks count from 0")


def _check_kind(kind: str, where: str) -> None:
    if kind not in ACTION_KINDS:
        raise ValueError(f"{where} has the unknown kind {kind!r}; use one of {', '.join(ACTION_KINDS)}")


def _check_complete(orders: Orders) -> None:
    """Checks that each stage has one F and, if anything trains, one B or an I and a W, of each micro-batch and chunk.

    It may have an R too.
    """
    placed = [(stage, action) for stage, order in enumerate(orders.actions) for action in order]
    if not placed:
        raise ValueError(f'a schedule of {orders.num_stages} stages has no actions; give each stage some, as ["F0"]')
    pairs = set(product(range(orders.num_microbatches), range(orders.num_chunks)))
    for stage, order in enumerate(orders.actions):
        at: dict[str, set[tuple[int, int]]] = {kind: set() for kind in ACTION_KINDS}
        for kind, microbatch, chunk in order:
            at[kind].add((microbatch, chunk))
        if sum(map(len, at.values())) < len(order):
            ((action, count),) = Counter(order).most_common(1)
            raise ValueError(f"stage {stage} has {action} {count} times; keep one of them")
        in_parts = at["I"] | at["W"]
        if twice := in_parts & at["B"]:
            pair = min(twice)
            part = Action("I" if pair in at["I"] else "W", *pair)
            raise ValueError(
                f"stage {stage} has {Action('B', *pair)} and {part}: a backward is whole or in two parts; drop one"
            )
        needed = {"F": pairs}
        if orders.kinds != {"F"}:
            in_parts = in_parts if "B" in orders.kinds else pairs
            needed |= {"B": pairs - in_parts, "I": in_parts, "W": in_parts}
        lacking = [Action(kind, *pair) for kind, pairs_of_kind in needed.items() for pair in pairs_of_kind - at[kind]]
        if lacking:
            lacks = min(lacking, key=lambda action: (action.microbatch, action.chunk))
            where, last = max(placed, key=lambda pair: pair[1].microbatch)
            raise ValueError(
                f"stage {stage} lacks {lacks}: stages need {lacks.kind} of {orders.num_microbatches} micro-batches "
                f"({last} on stage {where} is the last) and {orders.num_chunks} chunks; add it or drop the others"
            )
