"""Computes when each action runs, as soon as its order, the slots and the actions it needs allow; finds deadlocks.

Stages work in lockstep ticks. A tick is a sequence of slots, and in each slot a stage does one action or idles. What
is sent at the end of a slot can be used from the next slot on. With the slots ("F", "B") a forward's hop to the next
stage therefore costs a tick, while on the last stage the backward follows its own forward in the same tick.

A *slot time* counts slots from the start: slot time tau is slot `tau % len(slots)` of tick `tau // len(slots)`.
"""

import functools
import itertools

from jpipe.schedules.actions import ACTION_KINDS, FLOWS, Action, Orders, Placed, admitted


def boundary_source(orders: Orders, stage: int, action: Action) -> Placed | None:
    """The stage and action whose result `action` on `stage` receives over a boundary; None at the end of the chain.

    What a stage's backward receives comes from the B or the I of the virtual stage after it, whichever there is.
    """
    kind, microbatch, chunk = action
    flow = ACTION_KINDS[kind].flow
    source = orders.placement.sources.get((flow, stage, chunk))
    if source is None:
        return None
    sent = "".join(other for other in FLOWS[flow] if other in orders.kinds)
    if len(sent) > 1 and (source[0], Action("B", microbatch, source[1])) not in orders.placed:
        sent = "I"
    return source[0], Action(sent[0], microbatch, source[1])


def needs(orders: Orders, stage: int, action: Action) -> list[Placed]:
    """All that must have run in an earlier slot: first on `action`'s own virtual stage, then over the boundary."""
    kind, microbatch, chunk = action
    kinds = orders.kinds
    own = [(stage, Action(before, microbatch, chunk)) for before in ACTION_KINDS[kind].after if before in kinds]
    if "R" in kinds:
        own = [one for one in own if one in orders.placed]
    source = boundary_source(orders, stage, action)
    return own if source is None else [*own, source]


def slot_times(orders: Orders) -> dict[Placed, int]:
    """The slot time of every action of every stage, as early as can be, in their order.

    Raises:
      ValueError: the orders deadlock; the message names an action, what it waits for, and the remedy.
    """
    known = vars(orders)  # as `functools.cached_property` does: lowering, printing and simulating need them too
    if "slot_times" not in known:
        known["slot_times"] = _slot_times(orders)
    return known["slot_times"]


def _slot_times(orders: Orders) -> dict[Placed, int]:
    times: dict[Placed, int] = {}
    waiting = [list(reversed(order)) for order in orders.actions]  # a stage's next action is its list's last
    before = [-1] * orders.num_stages  # the slot time of its last one
    waiters: dict[Placed, list[int]] = {}  # by what they wait for, the stages that do
    ready = list(range(orders.num_stages))
    while ready:
        stage = ready.pop()
        rest = waiting[stage]
        while rest:
            wanted = needs(orders, stage, rest[-1])
            known = [times.get(need, -1) for need in wanted]
            if -1 in known:
                waiters.setdefault(wanted[known.index(-1)], []).append(stage)
                break
            placed = stage, rest.pop()
            after = max([before[stage], *known])
            before[stage] = times[placed] = after + _wait(orders.slots, placed[1].kind, after % len(orders.slots))
            ready += waiters.pop(placed, ())
    if any(waiting):
        raise ValueError(_deadlock(orders, times, waiting))
    return dict(sorted(times.items(), key=lambda entry: (entry[1], entry[0][0])))


@functools.cache
def _wait(slots: tuple[str, ...], kind: str, slot: int) -> int:
    """The number of slots from this one to the next one that admits a kind."""
    return next(wait for wait in itertools.count(1) if kind in admitted(slots[(slot + wait) % len(slots)]))


def _deadlock(orders: Orders, times: dict[Placed, int], waiting: list[list[Action]]) -> str:
    """The message for orders that deadlock.

    Every stage with actions left waits for an action that has not run, of some stage. Going from stage to stage along
    these waits leads into a cycle. Not every stage of the cycle can wait for the next action of another: dependencies
    alone have no cycle. So one waits for an action that comes later in its stage's order, and the message names it.

    Args:
      orders: each stage's.
      times: the slot times of the actions that have run.
      waiting: for each stage the actions that have not, the next one last.
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
