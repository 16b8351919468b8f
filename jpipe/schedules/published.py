"""The zero-bubble schedules of papers, action for action (`zb-h1`, `zb-v`, `dualpipe-v` and others).

The papers made them for stages that are programs of their own, each of which goes on as soon as it can, and for F, I
and W that take the same time. In lockstep there is one slot, in which stages do different kinds, and it takes as long
as the longest of them.

Here the letters F, I, W and B stand for actions of chunk 0, and f, i, w and b for those of chunk 1. "*" is the W that
has waited longest since its I. "+" is the W of chunk 1 that has waited longest, or of chunk 0 if none of chunk 1 waits.

These are grids of unit times. In lockstep, where neighbours wait for one another after each slot, a rule for any
schedule does better: `zero_bubble` fills the bubble with weight gradients, by backwards in two parts.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from jpipe.schedules.actions import Action
from jpipe.schedules.schedule import Schedule
from jpipe.users_numbers import integer_or_none


def zb_h1(num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """1F1B in whose bubble W runs (arXiv 2401.10241): K micro-batches in flight on every stage.

    >>> print(zb_h1(2, 3))
    zb-h1: K=2 stages, M=3 micro-batches, V=1 chunks; slots of a tick: FBW
    tick    |0  |1  |2  |3  |4  |5  |6  |7  |8  |9  |
    stage 0 |F0 |F1 |.  |I0 |W0 |F2 |I1 |W1 |I2 |W2 |
    stage 1 |.  |F0 |I0 |F1 |I1 |W0 |F2 |I2 |W1 |W2 |
    """
    return Schedule(_ahead(1, num_stages, num_microbatches), slots=("FBW",), name="zb-h1")


def zb_h2(num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """Forwards twice as far ahead, 2K-1 in flight (arXiv 2401.10241): no bubble, if steps need not end together.

    >>> print(zb_h2(2, 3))
    zb-h2: K=2 stages, M=3 micro-batches, V=1 chunks; slots of a tick: FBW
    tick    |0  |1  |2  |3  |4  |5  |6  |7  |8  |9  |
    stage 0 |F0 |F1 |F2 |I0 |W0 |I1 |W1 |I2 |W2 |.  |
    stage 1 |.  |F0 |I0 |F1 |I1 |F2 |I2 |W0 |W1 |W2 |
    """
    return Schedule(_ahead(2, num_stages, num_microbatches), slots=("FBW",), name="zb-h2")


def zb_v(num_stages: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """There and back, K micro-batches in flight on every stage (arXiv 2405.15362), as PyTorch orders it.

    >>> print(zb_v(2, 2))
    zb-v: K=2 stages, M=2 micro-batches, V=2 chunks; slots of a tick: FBW
    tick    |0    |1    |2    |3    |4    |5    |6    |7    |8    |9    |10   |11   |12   |13   |
    stage 0 |F0   |F1   |.    |F0.1 |I0.1 |W0.1 |F1.1 |I1.1 |W1.1 |I0   |W0   |.    |I1   |W1   |
    stage 1 |.    |F0   |F0.1 |F1   |F1.1 |I0.1 |W0.1 |I0   |W0   |I1.1 |W1.1 |I1   |W1   |.    |
    """
    K, N = num_stages, max(num_microbatches, 2 * num_stages - 1)
    orders = [
        "F" * (2 * (K - k) - 1) + "fF" * k + "fiw" * (K - k)
        + "FIWfiw" * (N - K)
        + "Ii" * k + "IW" * (K - k) + "w" * K
        for k in range(K)
    ]  # fmt: skip
    return _in_a_v("zb-v", orders, num_microbatches)


def dualpipe_v(num_stages: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Forwards next to backwards, for systems that run one beside the other (DeepSeek's DualPipe, "cut in half").

    Here they run one after the other. With fewer micro-batches than 2K those that lack are left out.

    >>> print(dualpipe_v(2, 4).grid(110))
    dualpipe-v: K=2 stages, M=4 micro-batches, V=2 chunks; slots of a tick: FBW
    tick    |0    |1    |2    |3    |4    |5    |6    |7    | ... |12   |13   |14   |15   |16   |17   |18   |
    stage 0 |F0   |F1   |F2   |F0.1 |I0.1 |W0.1 |F1.1 |F3   | ... |F3.1 |B1   |B3.1 |I2   |W2   |I3   |W3   |
    stage 1 |.    |F0   |F0.1 |F1   |F1.1 |F2   |B0.1 |F2.1 | ... |B1   |B2.1 |B2   |I3.1 |I3   |W3.1 |W3   |
    4 of 19 ticks are left out; schedule.grid() has all
    """
    K, N = num_stages, max(num_microbatches, 2 * num_stages)
    orders = [
        "F" * (2 * (K - k - 1)) + "Ff" * (k + 1) + "iwf" * (K - k - 1)
        + "FbfB" * (N - 2 * K + k + 1)
        + "bfB" * (K - k - 1)
        + "bB" * (k // 2) + ("bB" if k % 2 else "bI") + "iI" * (k - k // 2) + "*I" * (K - k - 1)
        for k in range(K)
    ]  # fmt: skip
    return _in_a_v("dualpipe-v", orders, num_microbatches)


def v_half(num_stages: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """There and back with half of 1F1B's memory, K/2+1 micro-batches (arXiv 2405.15362, not reordered).

    >>> print(v_half(2, 2))
    v-half: K=2 stages, M=2 micro-batches, V=2 chunks; slots of a tick: FBW
    tick    |0    |1    |2    |3    |4    |5    |6    |7    |8    |9    |10   |11   |12   |13   |14   |15   |16   |
    stage 0 |F0   |.    |.    |F0.1 |F1   |I0.1 |W0.1 |F1.1 |.    |.    |I0   |I1.1 |W1.1 |W0   |.    |I1   |W1   |
    stage 1 |.    |F0   |F0.1 |.    |.    |F1   |F1.1 |I0.1 |W0.1 |I0   |W0   |.    |I1.1 |W1.1 |I1   |W1   |.    |
    """
    K, late = num_stages, 0 if num_stages % 2 else 3
    starts = [(2 * k, 3 * K - k - 2, 3 * K + late + 2 * k - 1, 6 * K + late - k - 2) for k in range(K)]
    return _in_a_v("v-half", _repeated(starts, num_microbatches), num_microbatches)


def v_min(num_stages: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """There and back with a third of 1F1B's memory (arXiv 2405.15362, not reordered).

    >>> print(v_min(2, 2))
    v-min: K=2 stages, M=2 micro-batches, V=2 chunks; slots of a tick: FBW
    tick    |0    |1    |2    |3    |4    |5    |6    |7    |8    |9    |10   |11   |12   |13   |14   |
    stage 0 |F0   |.    |.    |F0.1 |I0.1 |W0.1 |F1   |I0   |W0   |F1.1 |I1.1 |W1.1 |.    |I1   |W1   |
    stage 1 |.    |F0   |F0.1 |.    |.    |I0.1 |I0   |F1   |F1.1 |W0.1 |W0   |I1.1 |I1   |W1.1 |W1   |
    """
    K, late = num_stages, 0 if num_stages % 3 else 2
    starts = [(k, 2 * K - k - 1, 2 * K + late + k, 4 * K + late - k - 1) for k in range(K)]
    return _in_a_v("v-min", _repeated(starts, num_microbatches), num_microbatches)


def _ahead(hops: int, num_stages: int, num_microbatches: int) -> list[list[Action]]:
    """Makes orders in which forwards run ahead of I, and I ahead of W.

    Forwards are ahead by `hops` for each stage that comes after, and I by as many for each stage that comes before.
    """
    return [
        _actions("F" * hops * (num_stages - 1 - k) + "FI" * hops * k + "FI*" * num_microbatches, num_microbatches)
        for k in range(num_stages)
    ]


def _repeated(starts: list[tuple[int, int, int, int]], num_microbatches: int) -> list[str]:
    """Each stage's letters in units of time. A micro-batch starts every six, and W are where nothing else is.

    Args:
      starts: by stage the times at which F, f, i and I of the first micro-batch run.
      num_microbatches: M.
    """
    orders = []
    for units in starts:
        at = {unit + 6 * m: letter for unit, letter in zip(units, "FfiI", strict=True) for m in range(num_microbatches)}
        orders.append("".join(at.get(unit, "+") for unit in range(max(at) + 2 * num_microbatches)))
    return orders


def _in_a_v(name: str, orders: Iterable[str], num_microbatches: int) -> Schedule:
    """Makes a schedule in the style "v" of each stage's letters."""
    actions = [_actions(order, num_microbatches) for order in orders]
    return Schedule(actions, slots=("FBW",), style="v", name=name)


def _actions(letters: str, num_microbatches: int) -> list[Action]:
    """The letters as actions, each kind and chunk counted from 0; actions of more than M micro-batches are left out.

    A letter W adds nothing if no I waits for its W. The W that are still due at the end are appended.
    """
    order: list[Action] = []
    counts, waiting = Counter(), []
    for letter in letters:
        kind, chunk = letter.upper(), int(letter.islower())
        if kind in "W*+":
            chunk = max((action.chunk for action in waiting), default=0) if letter == "+" else chunk
            due = [action for action in waiting if letter == "*" or action.chunk == chunk][:1]
            waiting = [action for action in waiting if action not in due]
            order += due
            continue
        flow = "F" if kind == "F" else "B"
        if (number := counts[flow, chunk]) < num_microbatches:
            order.append(Action(kind, number, chunk))
            waiting += [Action("W", number, chunk)] * (kind == "I")
        counts[flow, chunk] += 1
    return [*order, *waiting]


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

    >>> from jpipe.schedules.orders import make_schedule
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
        remedy = "pass one that has, as jpipe.make_schedule('1f1b', ...)"
        raise ValueError(f"{schedule!r} has no backward that is whole; {remedy}")
    num_stages, width = schedule.num_stages, len(schedule.slots)
    array = np.asarray(most_waiting, object)
    limits = list(array) if array.ndim == 1 else [most_waiting] * num_stages
    most = [integer_or_none(limit) for limit in limits]
    are_counts = [m is not None and m >= 0 for limit, m in zip(limits, most, strict=True) if limit is not None]
    if len(most) != num_stages or not all(are_counts):
        raise ValueError(
            f"most_waiting={most_waiting!r} must be one number, or one for each of {num_stages} stages, whole and at "
            "least 0; leave it out for as many as come"
        )
    waits = [deque[Action]() for _ in range(num_stages)]
    orders: list[list[Action]] = [[] for _ in range(num_stages)]
    in_a_ring = schedule.num_chunks > 1 and schedule.style == "loop"
    for _, tick in groupby(schedule.slot_times.items(), key=lambda entry: entry[1] // width):
        placed = {(stage, tau % width): action for (stage, action), tau in tick}
        used = {slot for _, slot in placed}
        stages = [
            _StageTick([placed.get((stage, slot)) for slot in range(width)], len(used), waiting, limit)
            for stage, (waiting, limit) in enumerate(zip(waits, most, strict=True))
        ]
        if in_a_ring:
            full = len(placed) == num_stages * width
            done = [stage.split(full) for stage in stages]
        else:
            longer = all(stage.could > stage.lacks for stage in stages)
            done = [stage.filled(stage.lacks + longer) for stage in stages]
        for order, actions in zip(orders, done, strict=True):
            order += actions
    slots = (*schedule.slots, "W") if in_a_ring else tuple(slot.replace("W", "") + "W" for slot in schedule.slots)
    orders = [[*order, *waiting] for order, waiting in zip(orders, waits, strict=True)]
    return Schedule(orders, slots=slots, style=schedule.style, name=f"zero_bubble of {schedule.name}")


class _StageTick(NamedTuple):
    """A stage in one tick of the schedule to split.

    Attributes:
      actions: its action in each slot; None where it idles.
      used: the number of slots in which any stage does something.
      waiting: the W that wait on it, longest first. Both methods take from it and add to it.
      limit: the most that may wait; None for any number.
    """

    actions: list[Action | None]
    used: int
    waiting: deque[Action]
    limit: int | None

    @property
    def done(self) -> list[Action]:
        """The actions that the stage does in the tick."""
        return [action for action in self.actions if action is not None]

    @property
    def lacks(self) -> int:
        """The number of slots in which it idles while another stage works."""
        return self.used - len(self.done)

    @property
    def backwards(self) -> int:
        """The number of B that the stage does in the tick."""
        return sum(action.kind == "B" for action in self.done)

    @property
    def could(self) -> int:
        """The number of W that it could do: those that stay parts of its B, and one in each idle slot."""
        return self.backwards + min(self.actions.count(None), len(self.waiting))

    def filled(self, due: int) -> list[Action]:
        """The actions with up to so many W: first those of its own B, which stay whole, then others in idle slots."""
        whole = min(due, self.backwards)
        due -= whole
        filled: list[Action] = []
        for action in self.actions:
            if action is None:
                if due and self.waiting:
                    filled.append(self.waiting.popleft())
                    due -= 1
            elif action.kind == "B" and not whole and (self.limit is None or len(self.waiting) < self.limit):
                filled.append(self._first_part(action))
            else:
                filled.append(action)
                whole -= whole and action.kind == "B"
        return filled

    def split(self, full: bool) -> list[Action]:
        """The actions with every B split, and one W at the end if that is due."""
        parts = [self._first_part(action) if action.kind == "B" else action for action in self.done]
        over = self.limit is not None and len(self.waiting) > self.limit
        if self.waiting and (full or self.lacks or over):
            parts.append(self.waiting.popleft())
        return parts

    def _first_part(self, backward: Action) -> Action:
        """Returns the I of a B, and lets its W wait from now on."""
        self.waiting.append(backward._replace(kind="W"))
        return backward._replace(kind="I")
