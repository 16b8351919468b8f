"""`zero_bubble`: fills the bubble of any schedule with weight gradients, by backwards in two parts.

The orders that papers print for this (`jpipe.schedules.published`) are grids of unit times for stages that are programs
of their own. In lockstep, where neighbours wait for one another after each slot, a rule for any schedule does better.
"""

from collections import deque
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from jpipe.schedules.actions import Action
from jpipe.schedules.schedule import Schedule
from jpipe.users_numbers import integer_or_none


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
        raise ValueError(
            f"{schedule!r} has no backward that is whole; pass one that has, as jpipe.make_schedule('1f1b', ...)"
        )
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
