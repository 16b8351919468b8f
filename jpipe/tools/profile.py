"""`jpipe.profile`: shows the slices of a measured training step, and says in plain words what would shorten it.

Each prediction starts from the measured times of stages. These are shared among the stages' layers, in proportion to
the times of the layers alone, and then put together anew.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import jax

from jpipe.checks import check_complete, check_state
from jpipe.model.remat import MODES
from jpipe.pipeline import Pipeline
from jpipe.planning.partition import Partition
from jpipe.processes.progress import task
from jpipe.processes.tables import Table
from jpipe.schedules.schedule import Schedule
from jpipe.schedules.simulate import Timeline
from jpipe.tools import measure
from jpipe.tools.figures import draw_timelines
from jpipe.tools.measure import LayerTimes, StageTimes, StepModel
from jpipe.tools.page import Page, PipelineFacts, facts_of, show
from jpipe.tools.step_cost import Parts, StepCost
from jpipe.training.train_state import TrainState
from jpipe.types import Batch
from jpipe.users_numbers import as_integer

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Profile:
    """The result of `jpipe.profile`. Printed, or shown in a notebook, it is two tables and findings; `plot` draws it.

    Attributes:
      schedule: the schedule.
      partition: which layers each stage has.
      stages: seconds of each stage for one micro-batch, alone: forward, backward, and what the backward computes anew.
      cost: the measured step's seconds by what they go into, of a stage on average, and the bytes on a device.
      contention: the stages' time when all run at once, over their time alone.
      noise: by how much the step differed from round to round: the middle half of the rounds, over their median.
      findings: the findings in words, those first that promise the most.
      predicted: the schedule with the stages' times, in milliseconds.
      facts: the pipeline's numbers, with these times, for `view`.
    """

    schedule: Schedule
    partition: Partition
    stages: StageTimes
    cost: StepCost
    contention: float
    noise: float
    findings: tuple[Finding, ...]
    predicted: Timeline
    facts: PipelineFacts

    @property
    def step(self) -> float:
        """Seconds of a training step, measured."""
        return self.cost.step

    @property
    def slices(self) -> dict[str, float]:
        """The measured step's seconds by what they go into; they add up to `step`."""
        return dict(self.cost.seconds)

    @property
    def memory(self) -> Parts[int]:
        """The bytes on the fullest device of this process, by part."""
        return self.cost.bytes

    def __repr__(self) -> str:
        return f"<Profile of {self.schedule.title}; step {1e3 * self.step:.3g} ms, {len(self.findings)} findings>"

    def __str__(self) -> str:
        return "\n\n".join(table.described() for table in self._tables())

    def _repr_html_(self) -> str:
        return "<br>".join(table.html() for table in self._tables())

    def _tables(self) -> list[Table]:
        """The stages; the step's slices and bytes, and below them how far to trust them, and the findings."""
        stages, cost = stage_table(self.schedule, self.partition, self.stages), self.cost.table()
        trust = (
            f"stages take {self.contention:.2f} times as long together as each alone",
            f"rounds of the step differ by {self.noise:.0%}, and no change is named that promises less",
        )
        findings = [f"finding: {finding.text}" for finding in self.findings] or ["findings: none"]
        return [stages, replace(cost, notes=[*trust, *findings])]

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Draws the timeline that the stages' times make, and below it the micro-batches that each stage holds.

        Args:
          path: where to save the picture; None draws into a new pyplot figure.

        Raises:
          ImportError: matplotlib is not installed; `pip install 'jpipe[plot]'`.
        """
        return draw_timelines([self.predicted], path, "ms", width=7.0)

    def view(self, *, path: str | os.PathLike[str] | None = None) -> Page:
        """The page of `pipe.view()` with the stages' times as measured, and the bytes of this state's optimiser."""
        return show(self.facts, path)


def profile(pipe: Pipeline, state: TrainState, batch: Batch, *, rounds: int = 5) -> Profile:
    """Measures a training step on the devices at hand, and says what its time goes into and what would shorten it.

        profile = jpipe.profile(pipe, state, batch)
        print(profile)
        profile.plot("step.png")

    Each stage is timed in the step's own program with all other stages idle (`jpipe.tools.measure`); the slices are
    those of the GPipe paper's breakdown (NeurIPS version, section 3). `state` stays as it is: a copy of it is trained,
    which needs memory, as the gradients do. Compiles the step once more, and each distinct layer; a terminal shows how
    far it is. In a cluster all processes call it.

    Args:
      pipe: a pipeline.
      state: its training state.
      batch: a batch `[B, ...]`, as for training. It is brought to the devices once; the step doesn't count that.
      rounds: the number of times that everything is timed; medians count.

    Raises:
      TypeError: `pipe` is no pipeline, or `state` no state.
      ValueError: `rounds` is less than 1; state or batch aren't the pipeline's, as for `train_step`; or the step is too
        short to be taken apart.
    """
    if not isinstance(pipe, Pipeline):
        raise TypeError(f"pipe is a {type(pipe).__name__}; jpipe.profile(pipe, state, batch) takes a jpipe.Pipeline")
    check_state(state)
    as_integer("rounds", rounds, "everything has to be timed at least once")
    planner = pipe.planner
    planner.for_training(batch)
    check_complete(pipe.plan, state.variables)
    # With actions left out, and in layers alone on random numbers, what is computed means nothing.
    with task("profiling a training step"), jax.debug_nans(False), jax.debug_infs(False), jax.transfer_guard("allow"):
        program = measure.Program(pipe, state, batch)
        model = measure.measure_step(pipe, program, state, rounds)
        with task("timing layers alone"):
            times = measure.measure_layers(planner, batch)
        stages = times.with_recomputation(model.stages)
        model = replace(model, stages=stages)
        cost = replace(model.what_if(), bytes=measure.memory_of(program, state))
        facts = facts_of(planner, repr(pipe), batch)
    in_ms = stages.scaled(1e3)
    measured = {
        "unit": "ms",
        "times": "Times are measured, of each stage alone.",
        "forward": in_ms.forward.tolist(),
        "backward": (in_ms.backward + in_ms.recompute).tolist(),
        "recompute": in_ms.recompute.tolist(),
        "optimizer": cost.bytes["optimizer"],
    }
    return Profile(
        schedule=pipe.schedule,
        partition=pipe.partition,
        stages=stages,
        cost=cost,
        contention=model.contention,
        noise=model.noise,
        findings=find(model, times),
        predicted=in_ms.timeline(pipe.schedule),
        facts=facts | measured,
    )


def stage_table(schedule: Schedule, cut: Partition, stages: StageTimes) -> Table:
    """A row for each stage: its layers, and its milliseconds for one micro-batch."""
    total, stage_of = stages.total, schedule.placement.stage_of
    in_ms = lambda seconds: f"{seconds * 1e3:.3g}" if seconds >= 5e-7 else "0"
    layers = lambda stage: ", ".join(text for s, text in enumerate(cut.ranges) if stage_of(s) == stage)
    columns = zip(stages.forward, stages.backward, stages.recompute, total, strict=True)
    rows = [
        (str(stage), layers(stage), *map(in_ms, times), f"{times[-1] / total.mean():.2f}")
        for stage, times in enumerate(columns)
    ]
    header = ("stage", "layers", "forward", "backward", "recompute", "all", "of mean")
    return Table("Stages: milliseconds for one micro-batch, each stage alone", header, rows)


# --- findings ---------------------------------------------------------------------------------------------------------


WORTH = 0.05
"""The share of a step from which on a change is worth a word."""
LARGE = 0.2
"""The share of a step from which on a bubble is worth a word."""


@dataclass(frozen=True)
class Finding:
    """Something about a step that its owner should know.

    Attributes:
      text: the finding in words.
      change: arguments of `Pipeline` that would change it; empty if there are none.
      promise: the predicted step with them over the measured one; None without a change.
    """

    text: str
    change: dict[str, object] = field(default_factory=dict)
    promise: float | None = None

    def __str__(self) -> str:
        return self.text


def find(model: StepModel, times: LayerTimes) -> tuple[Finding, ...]:
    """All findings, those that promise the most first.

    None promises less than the noise; none promises anything where stages work for a moment only.

    Args:
      model: the model of the step's time.
      times: the times of the layers.
    """
    work, step = model.stages.timeline(model.schedule).makespan, model.measured
    if work <= model.idle + model.update:
        text = (
            f"stages alone work for {work / step:.0%} of the step, which is less than what is around their work takes: "
            "too little to promise anything; use a larger batch or model"
        )
        return (Finding(text),)
    worth = max(WORTH, model.noise)
    findings = [*_balance(model, times, worth), *_recomputation(model, times, worth)]
    if (bubble := model.what_if().seconds["bubble"] / step) > LARGE:
        text = (
            f"the bubble takes {bubble:.0%} of the step, with M={model.schedule.num_microbatches}: "
            "more micro-batches leave less, and jpipe.plan predicts what a step takes with them"
        )
        findings.append(Finding(text))
    return tuple(sorted(findings, key=lambda finding: 1.0 if finding.promise is None else finding.promise))


def _percent(promise: float) -> str:
    """A step's predicted change in words, as "-12 %"."""
    return f"{100 * (promise - 1):+.0f} %"


def _balance(model: StepModel, times: LayerTimes, worth: float) -> Iterator[Finding]:
    """Advises another cut, or other layers, if stages that take equally long would gain enough."""
    total = model.stages.total
    if model.what_if(model.stages.even).step / model.measured > 1 - worth:
        return
    cut, stages = times.best_cut(model.stages)
    promise = model.what_if(stages).step / model.measured
    new, old = list(cut.counts), list(times.planner.partition.counts)
    begin = f"stage {total.argmax()} takes {float(total.max() / total.mean()):.2f} times the mean of the stages"
    if promise < 1 - worth and new != old:
        yield Finding(f"{begin}: balance={new} instead of {old}, step {_percent(promise)}", {"balance": new}, promise)
    else:
        yield Finding(f"{begin}, and no other cut promises {worth:.0%} less: split its layers, or use fewer stages")


def _recomputation(model: StepModel, times: LayerTimes, worth: float) -> Iterator[Finding]:
    """Advises to keep residuals, if recomputing them takes enough of the step."""
    kept = model.stages.scaled(times.over_here(times.kept))  # to keep residuals takes time too
    promise = model.what_if(kept).step / model.measured
    if times.planner.request.remat is MODES["none"] or promise > 1 - worth:
        return
    fits = "if its residuals fit, which print(pipe) predicts"
    text = f'without recomputation (remat="none"): step {_percent(promise)}, {fits}'
    yield Finding(text, {"remat": "none"}, promise)
