"""Predicts a step from its stages' times, by the simulator, and divides it into its six slices.

K is the number of stages, M of micro-batches. A step is the work of the stages in the order of the schedule, what is
done without any of them (transfers, set-up), and the optimiser's update:

    step = contention * makespan + idle + update

`makespan` is `simulate`'s, of stages that were timed alone. `contention` is what is left to explain the measured step:
how many times as long stages take when all run at once. On accelerators of their own it is about 1; simulated devices
share cores, so it is more. A stage's V chunks count as equally long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jpipe.schedules.schedule import Schedule
from jpipe.schedules.simulate import Timeline, simulate

MILLISECONDS = 1e3
"""Timelines are in milliseconds, as pictures and traces have them."""

SLICES = ("computation", "recomputation", "bubble", "imbalance", "transfer and set-up", "weight update")
"""What a step's time goes into (GPipe, NeurIPS version, section 3: the breakdown of the time step)."""


@dataclass(frozen=True)
class StageTimes:
    """Seconds for one micro-batch, `[K]` each, by stage, all its chunks together.

    Attributes:
      forward: the forward.
      backward: the backward, without what it computes anew.
      recompute: the part of the backward that computes the forward anew (remat).
      weight: the part of the backward that W takes, where it is split; else empty.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    recompute: tuple[float, ...]
    weight: tuple[float, ...] = ()

    @property
    def total(self) -> tuple[float, ...]:
        """Seconds by stage, forward and backward."""
        return tuple(map(sum, zip(self.forward, self.backward, self.recompute, strict=True)))

    @property
    def even(self) -> StageTimes:
        """The same work, shared equally among the stages."""
        return self.each(lambda times: [float(np.mean(times))] * len(times))

    def each(self, function: Callable[[tuple[float, ...]], Sequence[float]]) -> StageTimes:
        """Applies a function to the times of forwards, of backwards, of recomputation and of W."""
        parts = (self.forward, self.backward, self.recompute, self.weight)
        return StageTimes(*(tuple(function(times)) if times else () for times in parts))

    def scaled(self, factors: Sequence[float] | np.ndarray) -> StageTimes:
        """Times multiplied by a factor for each stage, `[K]`."""
        return self.each(lambda times: (np.asarray(times) * np.asarray(factors)).tolist())

    def timeline(self, schedule: Schedule) -> Timeline:
        """The schedule with these times, in milliseconds."""
        unit = self.scaled([MILLISECONDS] * len(self.forward))
        weight = (schedule.splits and unit.weight) or None
        return simulate(schedule, unit.forward, unit.backward, weight=weight, recompute=unit.recompute)

    def makespan(self, schedule: Schedule) -> float:
        """Seconds that the schedule takes with these times."""
        return self.timeline(schedule).makespan / MILLISECONDS


@dataclass(frozen=True)
class StepModel:
    """The time of a step by its parts, as the module's docstring puts them together.

    Attributes:
      schedule: the schedule it was measured under.
      stages: what the stages take alone.
      idle: seconds of a step without actions and without update.
      setup: the seconds of `idle` that remain without ticks.
      update: seconds of the optimiser's update.
      contention: how many times as long stages take when all run at once.
    """

    schedule: Schedule
    stages: StageTimes
    idle: float
    setup: float
    update: float
    contention: float

    def step(self, stages: StageTimes | None = None, schedule: Schedule | None = None) -> float:
        """Seconds that a step would take with other times of stages, or another schedule of as many stages.

        A tick without actions takes as long in any of them, whatever the size of what is sent.
        """
        chosen, stages = schedule or self.schedule, stages or self.stages
        ticks = (self.idle - self.setup) * chosen.ticks.num_ticks / self.schedule.ticks.num_ticks
        return self.contention * stages.makespan(chosen) + self.setup + ticks + self.update

    @property
    def slices(self) -> dict[str, float]:
        """Seconds of the step by `SLICES`, of a stage on average; they add up to the step.

        Imbalance is the time that stages wait beyond what they would if all took equally long; the bubble is the rest
        of their waiting. (Stages of unlike forwards and backwards may wait less: then there is no imbalance.)
        """
        num_microbatches, stages = self.schedule.num_microbatches, self.stages
        even = stages.even
        computation = num_microbatches * (even.forward[0] + even.backward[0])
        recomputation = num_microbatches * even.recompute[0]
        makespan = stages.makespan(self.schedule)
        imbalance = max(0.0, makespan - even.makespan(self.schedule))
        bubble = max(0.0, makespan - computation - recomputation - imbalance)  # where nobody waits 0 but for rounding
        of_stages = [self.contention * seconds for seconds in (computation, recomputation, bubble, imbalance)]
        return dict(zip(SLICES, [*of_stages, self.idle, self.update], strict=True))


def fit(
    schedule: Schedule, stages: StageTimes, *, idle: float, setup: float = 0.0, update: float, step: float
) -> StepModel:
    """Fits the model that takes as long as the measured step.

    Args:
      schedule: the schedule of the step.
      stages: what the stages take alone.
      idle, setup, update: seconds, as in `StepModel`.
      step: seconds of the whole step.

    Raises:
      ValueError: the step took less than what was measured around the stages' work: it is too short to be taken apart.
    """
    contention = (step - update - idle) / stages.makespan(schedule)
    if contention <= 0:
        raise ValueError(
            f"the step takes {step * 1e3:.3g} ms, what isn't work of stages {(idle + update) * 1e3:.3g} ms: "
            "it is too short to be taken apart on this machine; use a larger batch or model, or more rounds"
        )
    return StepModel(schedule, stages, idle, setup, update, contention)
