"""When each action runs: as soon as its stage's order, the slots and the actions that it needs allow.

Stages work in lockstep ticks. A tick is a sequence of slots, and in each slot a stage does one action or idles. What
is sent at the end of a slot can be used from the next slot on. With the slots ("F", "B") a forward's hop to the next
stage therefore costs a tick, while on the last stage the backward follows its own forward in the same tick.

A *slot time* counts slots from the start: slot time tau is slot `tau % len(slots)` of tick `tau // len(slots)`.
"""

from jpipe.schedules.actions import ACTION_KINDS, Action, Orders, Placed
from jpipe.schedules.placement import Placement


def boundary_source(placement: Placement, stage: int, action: Action) -> Placed | None:
    """The stage and action whose result `action` on `stage` receives over a boundary; None at the end of the chain."""
    flow = ACTION_KINDS[action.kind].flow
    source = placement.neighbour(placement.virtual_stage(stage, action.chunk), -flow)  # the sender lies upstream
    if flow == 0 or source is None:
        return None
    return placement.stage_of(source), Action(action.kind, action.microbatch, placement.chunk_of(source))


def needs(placement: Placement, stage: int, action: Action) -> list[Placed]:
    """All that must have run in an earlier slot: first on `action`'s own virtual stage, then over the boundary."""
    own = [(stage, Action(kind, action.microbatch, action.chunk)) for kind in ACTION_KINDS[action.kind].after]
    source = boundary_source(placement, stage, action)
    return own if source is None else [*own, source]


def slot_times(orders: Orders) -> dict[Placed, int]:
    """The slot time of every action of every stage, as early as can be.

    Raises:
      ValueError: the orders deadlock; the message names an action, what it waits for, and the remedy.
    """
    times: dict[Placed, int] = {}
    waiting = [list(reversed(order)) for order in orders.actions]  # a stage's next action is its list's last
    tau = idle = 0
    while any(waiting):
        admitted = orders.slots[tau % len(orders.slots)]
        ready = [
            (stage, rest[-1])
            for stage, rest in enumerate(waiting)
            if rest
            and rest[-1].kind in admitted
            and all(need in times for need in needs(orders.placement, stage, rest[-1]))
        ]
        for stage, action in ready:
            times[stage, action] = tau
            waiting[stage].pop()
        idle = 0 if ready else idle + 1
        if idle == len(orders.slots):  # every slot was tried in vain, so nothing will ever change
            raise ValueError(_deadlock(orders.placement, times, waiting))
        tau += 1
    return times


def _deadlock(placement: Placement, times: dict[Placed, int], waiting: list[list[Action]]) -> str:
    """The message for orders that deadlock.

    Every stage with actions left waits for an action that has not run, of some stage. Going from stage to stage along
    these waits leads into a cycle. Not every stage of the cycle can wait for the next action of another: dependencies
    alone have no cycle. So one waits for an action that comes later in its stage's order, and the message names it.

    Args:
      placement: where the virtual stages lie.
      times: the slot times of the actions that have run.
      waiting: for each stage the actions that have not, the next one last.
    """

    def wanted(stage: int) -> Placed:
        return next(need for need in needs(placement, stage, waiting[stage][-1]) if need not in times)

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
