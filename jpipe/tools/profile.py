"""`jpipe.profile`: measures a training step, takes it apart, and compares it with what it should take."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from html import escape
from typing import TYPE_CHECKING

import jax
import numpy as np

from jpipe.checks import check_complete, check_state
from jpipe.pipeline import Pipeline
from jpipe.planning.partition import Partition
from jpipe.processes.progress import task
from jpipe.processes.tables import Table, folded
from jpipe.schedules.schedule import Schedule
from jpipe.schedules.simulate import Timeline
from jpipe.tools import findings
from jpipe.tools.findings import Finding, MicrobatchSize, ProcessTime
from jpipe.tools.measure import Program, StageTimes, measure, measure_layers, memory_of
from jpipe.tools.page import Page, PipelineFacts, facts_of, show
from jpipe.tools.step_cost import Parts, StepCost
from jpipe.training.train_state import TrainState
from jpipe.types import Batch
from jpipe.users_numbers import as_integer

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Profile:
    """The result of `jpipe.profile`. Printed, or shown in a notebook, it is tables; `plot` draws it, `as_dict` is data.

    Attributes:
      schedule: the schedule.
      partition: which layers each stage has.
      stages: seconds of each stage for one micro-batch, alone: forward, backward, and what the backward computes anew.
      step: seconds of a training step, measured.
      predicted_step: seconds that it would take if stages took as long all together as each alone.
      cost: the measured step's seconds by what they go into, of a stage on average, and the bytes on a device.
      contention: the stages' time when all run at once, over their time alone.
      noise: by how much the step differed from round to round: the middle half of the rounds, over their median.
      sizes: the number of micro-batches at hand and others, and what a step takes with each.
      processes: what each of several processes takes for the same layers; empty if there is one.
      findings: the findings in words, those first that promise the most.
      predicted: the schedule with the stages' times, in milliseconds.
      facts: the pipeline's numbers, with these times, for `view`.
    """

    schedule: Schedule = field(repr=False)
    partition: Partition = field(repr=False)
    stages: StageTimes
    step: float
    predicted_step: float
    cost: StepCost
    contention: float
    noise: float
    sizes: tuple[MicrobatchSize, ...]
    processes: tuple[ProcessTime, ...]
    findings: tuple[Finding, ...]
    predicted: Timeline = field(repr=False)
    facts: PipelineFacts = field(repr=False)

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
        findings = [folded(f"- {finding.text}") for finding in self.findings] or ["none"]
        return "\n\n".join([*(table.described() for table in self._tables()), "\n".join(["Findings", *findings])])

    def _repr_html_(self) -> str:
        items = "".join(f"<li>{escape(finding.text)}</li>" for finding in self.findings) or "<li>none</li>"
        return "<br>".join([*(table.html() for table in self._tables()), f"<b>Findings</b><ul>{items}</ul>"])

    def _tables(self) -> list[Table]:
        stages = stage_table(self.schedule, self.partition, self.stages, self.predicted.peak_in_flight, self.processes)
        processes = [process_table(self.processes)] if self.processes else []
        return [stages, *processes, size_table(self.sizes, self.schedule.num_microbatches), self.cost.table()]

    def as_dict(self) -> dict[str, object]:
        """All numbers as plain data, for JSON; without the timelines (`Timeline.to_chrome_trace` has those)."""
        names = [field.name for field in fields(self) if field.repr and field.name != "cost"]
        numbers = {"schedule": self.schedule.name, **self.schedule.sizes, "counts": self.partition.counts}
        numbers |= {"slices": self.slices, "memory": dict(self.memory), **{name: getattr(self, name) for name in names}}
        return json.loads(json.dumps(numbers, default=asdict))

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Draws what the step goes into, the stages' times, and the timeline that these make.

        Args:
          path: where to save the picture; None draws into a new pyplot figure.

        Raises:
          ImportError: matplotlib is not installed; `pip install 'jpipe[plot]'`.
        """
        from jpipe.tools.figures import draw_profile

        return draw_profile(self.slices, self.stages, self.predicted, path)

    def view(self, *, path: str | os.PathLike[str] | None = None) -> Page:
        """The page of `pipe.view()` with the stages' times as measured, and the bytes of this state's optimiser."""
        return show(self.facts, path)


def profile(pipe: Pipeline, state: TrainState, batch: Batch, *, rounds: int = 5, other_sizes: bool = True) -> Profile:
    """Measures a training step on the devices at hand, and says what its time goes into and what would shorten it.

        profile = jpipe.profile(pipe, state, batch)
        print(profile)
        profile.plot("step.png")

    Each stage is timed in the step's own program with all other stages idle (`jpipe.tools.measure`); the slices are
    those of the GPipe paper's breakdown (NeurIPS version, section 3). `state` stays as it is: a copy of it is trained,
    which needs memory, as the gradients do. Compiles the step once more, and each distinct layer for each number of
    micro-batches that is tried; a terminal shows how far it is. In a cluster all processes call it.

    Args:
      pipe: a pipeline.
      state: its training state.
      batch: a batch `[B, ...]`, as for training. It is brought to the devices once; the step doesn't count that.
      rounds: the number of times that everything is timed; medians count.
      other_sizes: whether layers are timed in micro-batches of other sizes too, as far as the model takes them.

    Raises:
      TypeError: `pipe` is no pipeline, or `state` no state.
      ValueError: `rounds` is less than 1; state or batch aren't the pipeline's, as for `train_step`; or the step is too
        short to be taken apart.
    """
    _check(pipe, state, batch, rounds)
    # With actions left out, and in layers alone on random numbers, what is computed means nothing.
    with task("profiling a training step"), jax.debug_nans(False), jax.debug_infs(False), jax.transfer_guard("allow"):
        planner = pipe.planner
        program = Program(pipe, state, batch)
        measured = measure(pipe, program, state, rounds)
        others = findings.other_schedules(planner, batch) if other_sizes else {}
        with task("timing layers alone"):
            times = measure_layers(planner, batch, list(others))
        stages = findings.recomputation_apart(planner, times, measured.stages)
        model = replace(measured, stages=stages)
        sizes = findings.microbatch_sizes(planner, batch, model, times, others)
        memory = memory_of(program, state)
        processes = findings.process_times(times.by_process, findings.host_names(), pipe.mesh)
        predicted_step = stages.makespan(pipe.schedule) + model.idle + model.update
        notes = (prediction_in_words(model.measured, predicted_step, model.noise),)
        return Profile(
            schedule=pipe.schedule,
            partition=pipe.partition,
            stages=stages,
            step=model.measured,
            predicted_step=predicted_step,
            cost=StepCost("measured", Parts(model.slices), memory, notes=notes),
            contention=model.contention,
            noise=model.noise,
            sizes=sizes,
            processes=processes,
            findings=findings.find(planner, model, times, sizes, processes),
            predicted=stages.timeline(pipe.schedule),
            facts=_measured(facts_of(planner, repr(pipe), batch), stages, memory),
        )


def _measured(facts: PipelineFacts, stages: StageTimes, memory: Parts[int]) -> PipelineFacts:
    """A pipeline's numbers with times and an optimiser's bytes as measured."""
    unit = stages.in_ms
    backward = list(map(sum, zip(unit.backward, unit.recompute, strict=True)))
    times = {"unit": "ms", "times": "Times are measured, of each stage alone.", "forward": unit.forward}
    return facts | times | {"backward": backward, "recompute": unit.recompute, "optimizer": memory.optimizer}


def _check(pipe: object, state: TrainState, batch: Batch, rounds: object) -> None:
    if not isinstance(pipe, Pipeline):
        raise TypeError(f"pipe is a {type(pipe).__name__}; jpipe.profile(pipe, state, batch) takes a jpipe.Pipeline")
    check_state(state)
    as_integer("rounds", rounds, "everything has to be timed at least once")
    pipe.planner.for_training(batch)
    check_complete(pipe.plan, state.variables)


# --- tables ----------------------------------------------------------------------------------------------------------


def stage_table(
    schedule: Schedule, cut: Partition, stages: StageTimes, in_flight: Sequence[int], at_work: Sequence[ProcessTime]
) -> Table:
    """A row for each stage: its layers, and its milliseconds for one micro-batch."""
    total, rows = np.asarray(stages.total), []
    for stage in range(schedule.num_stages):
        times = (stages.forward[stage], stages.backward[stage], stages.recompute[stage], total[stage])
        layers = ", ".join(text for s, text in enumerate(cut.ranges) if schedule.placement.stage_of(s) == stage)
        of_mean = f"{total[stage] / total.mean():.2f}"
        rows.append((str(stage), layers, *map(_in_ms, times), of_mean, str(in_flight[stage])))
    header = ("stage", "layers", "forward", "backward", "recompute", "all", "of mean", "in flight")
    slowest = int(total.argmax())
    whose = ", ".join(str(process) for process in at_work if slowest in process.stages)
    marks = {slowest: f"slowest: {whose}" if whose else "slowest"} if total.max() > 1.02 * total.mean() else {}
    return Table("Stages: milliseconds for one micro-batch, each stage alone", header, rows, marks)


def process_table(processes: Sequence[ProcessTime]) -> Table:
    """A row for each process: its machine, its stages, and its milliseconds for all layers of the model."""
    names = [(str(p.process), p.host, ", ".join(map(str, p.stages))) for p in processes]
    rows = [(*name, _in_ms(p.seconds), f"{p.of_median:.2f}") for name, p in zip(names, processes, strict=True)]
    slowest = max(range(len(processes)), key=lambda p: processes[p].seconds)
    marks = {slowest: "slowest"} if processes[slowest].of_median > 1.02 else {}
    title = "Processes: milliseconds for all layers of a micro-batch, each process alone on one of its devices"
    return Table(title, ("process", "host", "stages", "all layers", "of median"), rows, marks)


def prediction_in_words(step: float, predicted: float, noise: float) -> str:
    """The seconds of a step as predicted from stages alone, beside the measured ones."""
    times = f"{step / predicted:.2f}" if predicted else "-"
    alone = f"predicted from stages alone: {_in_ms(predicted)} ms"
    return f"{alone}, measured {times} times that; rounds differ by {noise:.0%}"


def size_table(sizes: Sequence[MicrobatchSize], num_microbatches: int) -> Table:
    """A row for each number of micro-batches."""
    header = ("M", "examples", "ms an example", "bubble", "step ms")
    in_words = lambda s: (_in_ms(s.sample_seconds), f"{s.bubble:.1%}", _in_ms(s.step))
    rows = [(str(s.num_microbatches), str(s.size), *in_words(s)) for s in sizes]
    marks = {i: "measured" if s.num_microbatches == num_microbatches else "predicted" for i, s in enumerate(sizes)}
    return Table("Numbers of micro-batches of the same batch", header, rows, marks)


def _in_ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds >= 5e-7 else "0"
