"""`Orders`: computes when each action runs, as early as its order, the slots and dependencies allow; finds deadlocks.

Stages work in lockstep ticks. A tick is a sequence of slots, and in each slot a stage does one action or idles. What
is sent at the end of a slot can be used from the next slot on. With the slots ("F", "B") a forward's hop to the next
stage therefore costs a tick, while on the last stage the backward follows its own forward in the same tick.

A *slot time* counts slots from the start: slot time tau is slot `tau % len(slots)` of tick `tau // len(slots)`.
"""

import itertools
from dataclasses import dataclass
from functools import cache, cached_property

from jpipe.schedules.actions import ACTION_KINDS, FLOWS, Action, Placed, admitted
from jpipe.schedules.placement import Placement


@dataclass(frozen=True)
class Orders:
    """Each stage's order of actions, not checked yet; `jpipe.Schedule` is one that is known to be valid.

    Attributes:
      actions: K orders, the actions of each stage from first to last.
      slots: the slots of a tick, each named by the kinds of action that it admits (`admitted`).
      style: how virtual stages are dealt out to stages, "loop" or "v" (`jpipe.schedules.placement`).
    """

    actions: tuple[tuple[Action, ...], ...]
    slots: tuple[str, ...]
    style: str = "loop"

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

    @property
    def sizes(self) -> dict[str, int]:
        """K, M and V by their names."""
        return {name: getattr(self, name) for name in ("num_stages", "num_microbatches", "num_chunks")}

    @cached_property
    def placed(self) -> frozenset[Placed]:
        """All actions, each with its stage."""
        return frozenset((stage, action) for stage, order in enumerate(self.actions) for action in order)

    @cached_property
    def kinds(self) -> frozenset[str]:
        """The kinds that occur."""
        return frozenset(action.kind for order in self.actions for action in order)

    @cached_property
    def placement(self) -> Placement:
        """Which virtual stage each chunk of each stage is."""
        return Placement(self.num_stages, self.num_chunks, self.style)

    @cached_property
    def slot_times(self) -> dict[Placed, int]:
        """The slot time of every action of every stage, as early as can be, in the order of time.

        Raises:
          ValueError: the orders deadlock; the message names an action, what it waits for, and the remedy.
        """
        return _slot_times(self)


def needs(orders: Orders, stage: int, action: Action) -> list[Placed]:
    """The actions that must have run in an earlier slot.

    First come those on the action's own virtual stage. The last is the one whose result it receives over a boundary, if
    it isn't at the end of the chain: for a backward the B or the I of the virtual stage after it, whichever there is.
    """
    kind, microbatch, chunk = action
    flow, kinds = ACTION_KINDS[kind].flow, orders.kinds
    actions = [(stage, Action(before, microbatch, chunk)) for before in ACTION_KINDS[kind].after if before in kinds]
    if source := orders.placement.sources.get((flow, stage, chunk)):
        actions += [(source[0], Action(sent, microbatch, source[1])) for sent in FLOWS[flow] if sent in kinds]
    # Only where a backward may be whole or in parts, or an R be there or not, does a kind that occurs not say enough.
    return [placed for placed in actions if placed in orders.placed] if len(kinds) > 3 or "R" in kinds else actions


def _slot_times(orders: Orders) -> dict[Placed, int]:
    """Lets each stage run its actions in order, until one needs an action that hasn't run, for which it waits."""
    times: dict[Placed, int] = {}
    waiting = [list(reversed(order)) for order in orders.actions]  # a stage's next action is the last of its list
    before = [-1] * orders.num_stages  # the slot time of each stage's latest action
    waiters: dict[Placed, list[int]] = {}  # for each action, the stages that wait for it
    ready = list(range(orders.num_stages))
    while ready:
        stage = ready.pop()
        rest = waiting[stage]
        while rest:
            needed = needs(orders, stage, rest[-1])
            needed_times = [times.get(need, -1) for need in needed]
            if -1 in needed_times:
                waiters.setdefault(needed[needed_times.index(-1)], []).append(stage)
                break
            placed = stage, rest.pop()
            after = max([before[stage], *needed_times])
            before[stage] = times[placed] = after + _wait(orders.slots, placed[1].kind, after % len(orders.slots))
            ready += waiters.pop(placed, ())
    if any(waiting):
        raise ValueError(_deadlock(orders, times, waiting))
    return dict(sorted(times.items(), key=lambda entry: (entry[1], entry[0][0])))


@cache
def _wait(slots: tuple[str, ...], kind: str, slot: int) -> int:
    """Counts the slots from this one to the next one that admits a kind."""
    return next(wait for wait in itertools.count(1) if kind in admitted(slots[(slot + wait) % len(slots)]))


def _deadlock(orders: Orders, times: dict[Placed, int], waiting: list[list[Action]]) -> str:
    """Makes the message for orders that deadlock.

    Every stage with actions left waits for an action of some stage that has not run. Going from stage to stage along
    these waits leads into a cycle. Not every stage of the cycle can wait for the next action of another: dependencies
    alone have no cycle. So one waits for an action that comes later in its stage's order, and the message names it.

    Args:
      orders: the orders of all stages.
      times: the slot times of the actions that have run.
      waiting: for each stage the actions that have not run, the next one last.
    """

    def wanted(stage: int) -> Placed:
        return next(need for need in needs(orders, stage, waiting[stage][-1]) if need not in times)

    stage = next(stage for stage, rest in enumerate(waiting) if rest)
    seen: list[int] = []
    while stage not in seen:
        seen.append(stage)
        stage = wanted(stage)[0]
    kinds = list(ACTION_KINDS)  # forwards first: one that comes too late is the usual reason, and the easier to see
    cycle = sorted(seen[seen.index(stage) :], key=lambda stage: (kinds.index(waiting[stage][-1].kind), stage))
    stage = next(stage for stage in cycle if waiting[wanted(stage)[0]][-1] != wanted(stage)[1])
    source, late = wanted(stage)
    blocker = waiting[source][-1]
    return (
        f"stage {stage} waits forever at {waiting[stage][-1]}: it needs {late} of stage {source}, which comes after "
        f"{blocker} there, and {blocker} cannot run before it; put {late} before {blocker} on stage {source}"
    )
