"""Counts the cycles of a compiled step by action: its loops are counted as often as they turn.

The compiler notes cycles beside each operation, and how often loops turn follows from the step: that over ticks from
the table, those over layers from the ranges of each virtual stage, those of a layer's own from their conditions.
"""

from __future__ import annotations

from dataclasses import dataclass

from jpipe.forecasting.compiled_program import Loop
from jpipe.planning.step import Step
from jpipe.schedules.simulate import Timeline, Work, in_time


@dataclass(frozen=True)
class StepCycles:
    """Cycles of a step.

    Attributes:
      actions: by kind, the cycles of one action of each virtual stage `[K*V]`.
      ticks: the cycles of all ticks, beyond their actions.
      ends: the cycles of the first and the last layer where all stages compute them together.
      update: the cycles outside of ticks: the optimiser's update above all.
      timeline: the schedule with these actions, in cycles.
    """

    actions: dict[str, tuple[float, ...]]
    ticks: float
    ends: float
    update: float
    timeline: Timeline

    @property
    def total(self) -> float:
        """All cycles of the step."""
        return self.timeline.makespan + self.ticks + self.ends + self.update

    @property
    def of_layers(self) -> float:
        """The cycles of a stage's actions, the mean of all stages."""
        return sum(self.timeline.busy) / len(self.timeline.busy)

    @property
    def bubble(self) -> float:
        """The cycles in which a stage idles, the mean of all stages."""
        return self.timeline.makespan - self.of_layers


def count_cycles(step: Step, program: Loop) -> StepCycles:
    """The cycles of a training step.

    Args:
      step: the step.
      program: the step's compiled program.

    Raises:
      ValueError: the program has no loop over ticks.
    """
    loops = program.find("ticks")
    if len(loops) != 1:
        raise ValueError(f"the compiled program has {len(loops)} loops over ticks; a step has 1")
    (ticks,), schedule = loops, step.schedule
    virtual_stages = range(schedule.placement.num_virtual_stages)
    actions = {kind: tuple(_action(step, ticks, kind, s) for s in virtual_stages) for kind in sorted(schedule.kinds)}
    others = sum(_turned(loop) for loop in program.inner if loop is not ticks)
    return StepCycles(
        actions=actions,
        ticks=float(step.table.num_ticks * (ticks.own - sum(_unlooped(ticks, kind) for kind in actions))),
        ends=_ends(step, ticks),
        update=float(program.own + others),
        timeline=in_time(schedule, Work(actions, [0.0] * len(virtual_stages))),
    )


def _action(step: Step, ticks: Loop, kind: str, virtual_stage: int) -> float:
    """Cycles of one action, the mean of the slots that have a loop for it; 0 of a W that has nothing to do."""
    names = {group.scope(g): g for g, group in enumerate(step.model.groups)}
    layers = (step.ranges.stop - step.ranges.start)[virtual_stage].sum(axis=0)
    passes = int(step.ranges.passes_of[virtual_stage])

    def turned(loop: Loop) -> float:
        if loop.name in names:
            trips = layers[names[loop.name]] / passes
        elif any(inner.name in names for inner in loop.walk()):
            trips = passes
        else:
            return _turned(loop)
        return float(trips * (loop.own + sum(map(turned, loop.inner))))

    if loops := ticks.find(kind):
        return sum(loop.own + sum(map(turned, loop.inner)) for loop in loops) / len(loops)
    inner = [loop for loop in ticks.inner if kind in loop.scope.split("/")]
    return (_unlooped(ticks, kind) + sum(map(turned, inner))) / sum(kind in slot.kinds for slot in step.table.slots)


def _unlooped(ticks: Loop, kind: str) -> float:
    """Cycles of actions that each tick has exactly once (K=1), and no loop around them."""
    if ticks.find(kind):
        return 0.0
    return sum(operation.cycles for operation in ticks.operations if kind in operation.op_name.split("/"))


def _ends(step: Step, ticks: Loop) -> float:
    """Cycles of the first and the last layer, where all stages compute them together."""
    total = 0.0
    for name in ("enter", "leave", "back") if step.ends.shared else ():
        turns = sum(int((getattr(turns, name) >= 0).sum()) for turns in step.ends.turns)
        loops = ticks.find(name)
        total += turns * sum(loop.own + sum(map(_turned, loop.inner)) for loop in loops) / max(1, len(loops))
    return total


def _turned(loop: Loop) -> float:
    """Cycles of a loop whose condition says how often it turns; once, if it doesn't."""
    return (1 if loop.trips is None else loop.trips) * (loop.own + sum(map(_turned, loop.inner)))
