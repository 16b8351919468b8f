"""The schedules that have names: naive, GPipe, 1F1B, interleaved, V-shaped, zero-bubble and forward-only.

Each is a function of (K, M, V) that returns a `Schedule`, of one chunk if it knows no others. A new one is a function
here and an entry in `SCHEDULES`, and touches nothing else. K is the number of stages, M of micro-batches, V of chunks a
stage. `zero_bubble` fills the bubble of any schedule with weight gradients.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import groupby, pairwise, product

import numpy as np

from jpipe.schedules.actions import Action
from jpipe.schedules.schedule import Schedule
from jpipe.users_numbers import as_integer, integer_or_none


def naive(num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """One micro-batch at a time, forth and back: one stage works while the others wait.

    >>> print(naive(2, 2))
    naive: K=2 stages, M=2 micro-batches, V=1 chunks; slots of a tick: F, B
    tick    |0     |1     |2     |3     |4     |5     |
    stage 0 |F0 .  |.  .  |.  B0 |F1 .  |.  .  |.  B1 |
    stage 1 |.  .  |F0 B0 |.  .  |.  .  |F1 B1 |.  .  |
    """
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
    order = [Action(kind, m) for kind in "FB" for m in range(num_microbatches)]
    return Schedule([order] * num_stages, name="gpipe")


def one_f_one_b(num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """One forward, one backward (PipeDream-Flush): the bubble of GPipe, memory that does not grow with M.

    A hop to the next stage costs a tick. So stage k starts with 2(K-1-k)+1 forwards before its first backward, and
    never holds more micro-batches than that.

    >>> print(one_f_one_b(2, 4))
    1f1b: K=2 stages, M=4 micro-batches, V=1 chunks; slots of a tick: F, B
    tick    |0     |1     |2     |3     |4     |5     |
    stage 0 |F0 .  |F1 .  |F2 B0 |F3 B1 |.  B2 |.  B3 |
    stage 1 |.  .  |F0 B0 |F1 B1 |F2 B2 |F3 B3 |.  .  |
    """
    return interleaved(num_stages, num_microbatches).named("1f1b")


def interleaved(num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """1F1B over V chunks a stage (Megatron-LM, arXiv 2104.04473, section 2.2): the bubble shrinks to (K-1)/(VM+K-1).

    Each stage has forwards to warm up, then a backward and a forward in turn, then the backwards left over. Chunk 1 of
    a micro-batch on stage 0 follows its chunk 0 on the last stage. It costs V times the hops, and with fewer
    micro-batches than stages the bubble is larger than that.

    >>> print(interleaved(2, 2, 2))
    interleaved: K=2 stages, M=2 micro-batches, V=2 chunks; slots of a tick: F, B
    tick    |0         |1         |2         |3         |4         |5         |6         |7         |
    stage 0 |F0   .    |F1   .    |F0.1 .    |F1.1 .    |.    B0.1 |.    B1.1 |.    B0   |.    B1   |
    stage 1 |.    .    |F0   .    |F1   .    |F0.1 B0.1 |F1.1 B1.1 |.    B0   |.    B1   |.    .    |
    """
    waves = _waves(num_stages, num_microbatches)
    forwards = _chunked("F", waves, range(num_chunks))
    backwards = _chunked("B", waves, range(num_chunks)[::-1])
    wave_size = max(num_stages, *map(len, waves))
    orders = []
    for stage in range(num_stages):
        # The first backward starts on the last stage when the first wave reaches its last chunk there, and is back on
        # this stage K-1-k ticks later; forwards go on until then.
        warm_up = min(len(forwards), (num_chunks - 1) * wave_size + 2 * (num_stages - 1 - stage) + 1)
        order = forwards[:warm_up]
        for i, backward in enumerate(backwards):
            order += [backward, *forwards[warm_up + i : warm_up + i + 1]]
        orders.append(order)
    return Schedule(orders, name="interleaved")


def v_shaped(num_stages: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """1F1B there and back: chunk 1 runs from the last stage to the first (the placement of arXiv 2405.15362).

    The bubble is that of 1F1B. Every stage holds K micro-batches in flight, a chunk as half of one, where 1F1B in
    lockstep holds 2K-1 on the first stage. The first and the last layers are both on stage 0.

    >>> print(v_shaped(2, 2))
    v: K=2 stages, M=2 micro-batches, V=2 chunks; slots of a tick: F, B
    tick    |0         |1         |2         |3         |4         |5         |6         |7         |8         |
    stage 0 |F0   .    |F1   .    |.    .    |F0.1 B0.1 |.    .    |F1.1 B1.1 |.    B0   |.    .    |.    B1   |
    stage 1 |.    .    |F0   .    |F0.1 .    |F1   .    |F1.1 B0.1 |.    B0   |.    B1.1 |.    B1   |.    .    |
    """
    orders = [_there_and_back(stage, num_stages, num_microbatches, "FB") for stage in range(num_stages)]
    return Schedule(orders, style="v", name="v")


def without_bubble(num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """1F1B, or interleaved, with weight gradients apart, most of which run in its bubble (`jpipe.zero_bubble`).

    With several chunks at most k of them wait on stage k: more would only take memory, since a stage waits for its
    neighbours after every slot.

    >>> print(without_bubble(2, 4))
    zero_bubble: K=2 stages, M=4 micro-batches, V=1 chunks; slots of a tick: FW, BW
    tick    |0     |1     |2     |3     |4     |5     |
    stage 0 |F0 .  |F1 .  |F2 B0 |F3 B1 |.  B2 |.  B3 |
    stage 1 |.  .  |F0 I0 |F1 B1 |F2 B2 |F3 I3 |W0 W3 |
    """
    base = interleaved(num_stages, num_microbatches, num_chunks)
    return zero_bubble(base, most_waiting=range(num_stages) if num_chunks > 1 else None).named("zero_bubble")


def forward_only(num_stages: int, num_microbatches: int, num_chunks: int = 1, style: str = "loop") -> Schedule:
    """Forward only, for inference and evaluation; nothing is kept for a backward. Virtual stages lie as `style` says.

    >>> print(forward_only(2, 3))
    forward: K=2 stages, M=3 micro-batches, V=1 chunks; slots of a tick: F
    tick    |0  |1  |2  |3  |
    stage 0 |F0 |F1 |F2 |.  |
    stage 1 |.  |F0 |F1 |F2 |
    """
    if style == "v":
        orders = [_there_and_back(stage, num_stages, num_microbatches, "F") for stage in range(num_stages)]
    else:
        orders = [_chunked("F", _waves(num_stages, num_microbatches), range(num_chunks))] * num_stages
    return Schedule(orders, slots=("F",), style=style, name="forward")


def _there_and_back(stage: int, num_stages: int, num_microbatches: int, kinds: str) -> list[Action]:
    """A stage's order in a "v", by the ticks in which its actions run: a micro-batch starts every other tick."""
    turn = 2 * num_stages - 1  # when the first micro-batch is back on stage 0: its F.1, and its B.1
    starts = {("F", 0): stage, ("F", 1): turn - stage, ("B", 1): turn + stage, ("B", 0): 2 * turn - stage}
    pairs = product(starts.items(), range(num_microbatches))
    ticks = [(start + 2 * m, Action(kind, m, chunk)) for ((kind, chunk), start), m in pairs if kind in kinds]
    return [action for _, action in sorted(ticks, key=lambda entry: (entry[0], entry[1].kind == "B"))]


def _waves(num_stages: int, num_microbatches: int) -> list[range]:
    """The micro-batches in waves of K or somewhat more, as even as can be; fewer than K are one wave.

    A stage runs all micro-batches of a wave through one chunk before it turns to the next chunk. With K of them the
    first is back at stage 0 just when the last has left. Fewer would leave a gap, and where K does not divide M, a wave
    of the remainder alone would even deadlock.
    """
    count = max(1, num_microbatches // num_stages)
    return [range(first, last) for first, last in pairwise(i * num_microbatches // count for i in range(count + 1))]


def _chunked(kind: str, waves: list[range], chunks: range) -> list[Action]:
    """Actions of one kind, wave by wave; within a wave chunk by chunk, in the order of `chunks`."""
    return [Action(kind, m, chunk) for wave in waves for chunk in chunks for m in wave]


SCHEDULES: dict[str, Callable[[int, int, int], Schedule]] = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "v": v_shaped,
    "zero_bubble": without_bubble,
    "forward": forward_only,
}


def make_schedule(name: str | Schedule, *, num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """The schedule of that name; a `Schedule` of one's own is checked against the three numbers and returned.

    Args:
      name: one of `SCHEDULES` ("naive", "gpipe", "1f1b", "interleaved", "v", "zero_bubble", "forward"), or a
        `Schedule`.
      num_stages: K.
      num_microbatches: M.
      num_chunks: V, the virtual stages of each stage; more than 1 with "interleaved", "zero_bubble" and
        "forward" only, 2 with "v".

    Raises:
      TypeError: a number is no integer, or `name` neither a string nor a `Schedule`.
      ValueError: a number is less than 1, the name is unknown, the schedule has no chunks, or the numbers disagree.

    >>> make_schedule("1f1b", num_stages=4, num_microbatches=8).ticks.num_ticks
    14
    """
    sizes = {"num_stages": num_stages, "num_microbatches": num_microbatches, "num_chunks": num_chunks}
    sizes = {label: as_integer(label, size, "use 1 or more") for label, size in sizes.items()}
    if isinstance(name, Schedule):
        for label, size in name.sizes.items():
            if sizes[label] != size:
                raise ValueError(f"{label}={sizes[label]}, but the schedule {name.name!r} was made for {size}; use it")
        return name
    names = ", ".join(map(repr, SCHEDULES))
    if not isinstance(name, str):
        raise TypeError(f"schedule={name!r} must be a name or a jpipe.Schedule; the names are {names}")
    if name not in SCHEDULES:
        raise ValueError(f"schedule={name!r} is unknown; use one of {names}, or a jpipe.Schedule of your own")
    schedule = SCHEDULES[name](*sizes.values())
    if schedule.num_chunks != num_chunks:
        raise ValueError(f"{num_chunks=} with {name!r}; use schedule='interleaved' or num_chunks={schedule.num_chunks}")
    return schedule


# --- any schedule with its bubble filled ------------------------------------------------------------------------------


def zero_bubble(schedule: Schedule, *, most_waiting: int | Sequence[int] | None = None) -> Schedule:
    """The schedule with backwards in two parts where that fills its bubble; the rest is as it was.

    A backward B can be I, the gradients of the inputs, at the same time, and later W, those of the weights, for which
    no other stage waits (arXiv 2401.10241). In each tick a stage does as many W as it lacks actions that another stage
    has, and one more if all stages can: its own B stays whole, and those that have waited longest run in idle slots.
    All W that are left over run at the end.

    With several chunks in a loop each stage waits for the one before it in every slot, even the first for the last. So
    W has a slot of its own there, the last of a tick, and every B is split.

    Args:
      schedule: one whose backwards are whole.
      most_waiting: the most W that may wait on a stage after a tick, one number or K of them; None: as many as come.
        With `range(K)` less is kept for them, and the bubble is larger.

    Raises:
      TypeError: `schedule` is no `Schedule`.
      ValueError: it has no backward or one that is split, or `most_waiting` isn't K whole numbers from 0 on.

    >>> print(zero_bubble(make_schedule("1f1b", num_stages=3, num_microbatches=5)))
    zero_bubble of 1f1b: K=3 stages, M=5 micro-batches, V=1 chunks; slots of a tick: FW, BW
    tick    |0     |1     |2     |3     |4     |5     |6     |7     |8     |
    stage 0 |F0 .  |F1 .  |F2 .  |F3 .  |F4 B0 |.  B1 |.  B2 |.  B3 |.  B4 |
    stage 1 |.  .  |F0 .  |F1 .  |F2 I0 |F3 B1 |F4 I2 |.  B3 |.  B4 |W0 W2 |
    stage 2 |.  .  |.  .  |F0 I0 |F1 I1 |F2 B2 |F3 I3 |F4 I4 |W0 W1 |W3 W4 |
    """
    if not isinstance(schedule, Schedule):
        raise TypeError(f"schedule={schedule!r} must be a Schedule; make one with jpipe.make_schedule")
    if not schedule.trains or schedule.splits:
        raise ValueError(f"{schedule!r} has no whole backward; pass one that has, as jpipe.make_schedule('1f1b', ...)")
    num_stages, width = schedule.num_stages, len(schedule.slots)
    array = np.asarray(most_waiting, object)
    limits = list(array) if array.ndim == 1 else [most_waiting] * num_stages
    counts = [math.inf if limit is None else integer_or_none(limit) for limit in limits]
    most = [count for count in counts if count is not None and count >= 0]
    if not len(most) == len(limits) == num_stages:
        raise ValueError(f"most_waiting={most_waiting!r} must be one or {num_stages} numbers, whole and at least 0")
    waits = [deque[Action]() for _ in range(num_stages)]
    orders: list[list[Action]] = [[] for _ in range(num_stages)]
    in_a_ring = schedule.num_chunks > 1 and schedule.style == "loop"
    for _, tick in groupby(schedule.slot_times.items(), key=lambda entry: entry[1] // width):
        placed = {(stage, tau % width): action for (stage, action), tau in tick}
        rows = [[placed.get((stage, slot)) for slot in range(width)] for stage in range(num_stages)]
        num_used, is_full = len({slot for _, slot in placed}), len(placed) == num_stages * width
        lacks = [num_used - width + row.count(None) for row in rows]  # the slots in which only others work
        # The W that stages could do: those that stay parts of their B, and one in each idle slot.
        could = [_num_backwards(row) + min(row.count(None), len(wait)) for row, wait in zip(rows, waits, strict=True)]
        longer = all(most > lack for most, lack in zip(could, lacks, strict=True))
        for row, order, waiting, limit, lack in zip(rows, orders, waits, most, lacks, strict=True):
            if not in_a_ring:
                order += _filled(row, waiting, limit, lack + longer)
                continue
            order += [_first_part(action, waiting) if action.kind == "B" else action for action in row if action]
            if waiting and (is_full or lack or len(waiting) > limit):
                order.append(waiting.popleft())
    slots = (*schedule.slots, "W") if in_a_ring else tuple(slot.replace("W", "") + "W" for slot in schedule.slots)
    orders = [[*order, *waiting] for order, waiting in zip(orders, waits, strict=True)]
    return Schedule(orders, slots=slots, style=schedule.style, name=f"zero_bubble of {schedule.name}")


def _num_backwards(row: Sequence[Action | None]) -> int:
    return sum(action is not None and action.kind == "B" for action in row)


def _filled(row: Sequence[Action | None], waiting: deque[Action], limit: float, due: int) -> list[Action]:
    """A stage's actions in a tick with up to `due` W: first those of its own B, which stay whole, then in idle slots.

    Args:
      row: its action in each slot; None where it idles.
      waiting: the W that wait on it, longest first.
      limit: the most that may wait.
      due: the most W that it does.
    """
    whole = min(due, _num_backwards(row))
    due -= whole
    filled: list[Action] = []
    for action in row:
        if action is None:
            if due and waiting:
                filled.append(waiting.popleft())
                due -= 1
        elif action.kind == "B" and not whole and len(waiting) < limit:
            filled.append(_first_part(action, waiting))
        else:
            filled.append(action)
            whole -= whole and action.kind == "B"
    return filled


def _first_part(backward: Action, waiting: deque[Action]) -> Action:
    """Returns the I of a B, and lets its W wait from now on."""
    waiting.append(backward._replace(kind="W"))
    return backward._replace(kind="I")
