"""`jpipe.profile`: measures a training step, takes it apart, and says in plain words what would shorten it.

Each prediction starts from the measured times of stages. These are shared among the stages' layers, in proportion to
the times of the layers alone, and then put together anew. Slow processes are found by the same layers, which each times
on a device of its own, and waits for no other. The times of stages can't tell that: a step ends in all processes at
once, and a stage may lie on several hosts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from html import escape
from typing import TYPE_CHECKING

import jax
import numpy as np

from jpipe.checks import check_complete, check_state
from jpipe.memory.batches import batch_size
from jpipe.model.remat import MODES
from jpipe.pipeline import Pipeline
from jpipe.planning.partition import Partition
from jpipe.planning.planner import Planner
from jpipe.processes.progress import task
from jpipe.processes.tables import Table, bytes_in_words, folded
from jpipe.schedules.orders import has_its_name, make_schedule
from jpipe.schedules.schedule import Schedule
from jpipe.schedules.simulate import Timeline
from jpipe.tools import measure
from jpipe.tools.measure import LayerTimes, ProcessTime, StageTimes, StepModel
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
        others = other_schedules(planner, batch) if other_sizes else {}
        with task("timing layers alone"):
            times = measure.measure_layers(planner, batch, list(others))
        stages = times.with_recomputation(model.stages)
        model = replace(model, stages=stages)
        sizes = microbatch_sizes(batch, model, times, others)
        processes = measure.process_times(times.by_process, measure.host_names(), pipe.mesh)
        alone = stages.makespan(pipe.schedule) + model.idle + model.update
        notes = (prediction_in_words(model.measured, alone, model.noise),)
        cost = replace(model.what_if(), timeline=None, bytes=measure.memory_of(program, state), notes=notes)
        facts = facts_of(planner, repr(pipe), batch)
    in_ms = stages.in_ms
    return Profile(
        schedule=pipe.schedule,
        partition=pipe.partition,
        stages=stages,
        step=model.measured,
        predicted_step=alone,
        cost=cost,
        contention=model.contention,
        noise=model.noise,
        sizes=sizes,
        processes=processes,
        findings=find(model, times, sizes, processes),
        predicted=stages.timeline(pipe.schedule),
        facts=facts
        | {
            "unit": "ms",
            "times": "Times are measured, of each stage alone.",
            "forward": in_ms.forward,
            "backward": list(map(sum, zip(in_ms.backward, in_ms.recompute, strict=True))),
            "recompute": in_ms.recompute,
            "optimizer": cost.bytes.optimizer,
        },
    )


# --- tables ----------------------------------------------------------------------------------------------------------


def stage_table(
    schedule: Schedule, cut: Partition, stages: StageTimes, in_flight: Sequence[int], at_work: Sequence[ProcessTime]
) -> Table:
    """A row for each stage: its layers, and its milliseconds for one micro-batch."""
    total, stage_of = np.asarray(stages.total), schedule.placement.stage_of
    layers = lambda stage: ", ".join(text for s, text in enumerate(cut.ranges) if stage_of(s) == stage)
    columns = zip(stages.forward, stages.backward, stages.recompute, total, strict=True)
    rows = [
        (str(stage), layers(stage), *map(_in_ms, times), f"{times[-1] / total.mean():.2f}", str(in_flight[stage]))
        for stage, times in enumerate(columns)
    ]
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


# --- other settings ---------------------------------------------------------------------------------------------------


FACTORS = (0.25, 0.5, 2, 4)
"""The numbers of micro-batches that are tried, by the one at hand."""


@dataclass(frozen=True)
class MicrobatchSize:
    """A number of micro-batches, and what a step would take with it.

    Attributes:
      num_microbatches: M.
      size: examples in one micro-batch, over all data axes.
      sample_seconds: forward and backward of one example, in such a micro-batch, through all stages.
      bubble: the share of stages' time in which they would wait if all took equally long.
      step: seconds, measured for the M at hand, predicted for others.
    """

    num_microbatches: int
    size: int
    sample_seconds: float
    bubble: float
    step: float


def other_schedules(planner: Planner, batch: Batch) -> dict[int, Schedule]:
    """The schedule at other numbers of micro-batches, by number: those that batch and schedule allow."""
    here, shards = planner.request.schedule, planner.request.splits.num_shards
    if not has_its_name(here):
        return {}
    counts = [int(here.num_microbatches * factor) for factor in FACTORS if here.num_microbatches * factor % 1 == 0]
    counts = [count for count in counts if batch_size(batch) % (count * shards) == 0]
    return {count: make_schedule(here.name, **here.sizes | {"num_microbatches": count}) for count in counts}


def microbatch_sizes(
    batch: Batch, model: StepModel, times: LayerTimes, others: Mapping[int, Schedule]
) -> tuple[MicrobatchSize, ...]:
    """The number of micro-batches at hand and others, with what a step takes; in order.

    Args:
      batch: a batch `[B, ...]`.
      model: the model of the step's time.
      times: the times of the layers, at the micro-batches at hand and at others.
      others: schedules with other numbers of micro-batches; those count that layers were timed for.
    """
    here, sizes = model.schedule.num_microbatches, []
    for count in sorted({here, *times.others}):
        schedule, stages, size = model.schedule, model.stages, batch_size(batch) // count
        if count != here:
            schedule, stages = others[count], stages.scaled(times.over_here(times.others[count]))
        bubble, step = stages.even.timeline(schedule).bubble_fraction, model.what_if(stages, schedule).step
        sizes.append(MicrobatchSize(count, size, sum(stages.total) / size, bubble, step))
    return tuple(sizes)


# --- findings ---------------------------------------------------------------------------------------------------------


WORTH = 0.05
"""The share of a step from which on a change, or a bubble, is worth a word."""
ROUGHLY_WORTH = 0.1
"""The same of another number of micro-batches, for which layers are timed alone and not in the step."""
SMALL = 1.4
"""How many times as long an example has to take in smaller micro-batches for a word about it."""
CONTENDED = 1.25
"""How many times as long all stages together have to take as each alone for a word about it."""
NOISY = 0.1
"""The relative difference between rounds of the step from which on it is worth a word."""
SLOW = 1.2
"""How many times the median a process has to take for the same layers for a word about it."""
LARGE = 0.2
"""The share of a step from which on what isn't the stages' work is worth a word."""


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


def find(
    model: StepModel, times: LayerTimes, sizes: Sequence[MicrobatchSize], processes: Sequence[ProcessTime] = ()
) -> tuple[Finding, ...]:
    """All findings, those that promise the most first.

    None promises less than the noise, nor anything where stages work for a moment only.

    Args:
      model: the model of the step's time.
      times: the times of the layers.
      sizes: other numbers of micro-batches, and the one at hand.
      processes: the time of each of several processes for the same layers.
    """
    findings = list[Finding]()
    if _works(model):
        changes = *_balance(model, times), *_microbatches(model, sizes), *_recomputation(model, times)
        findings = [one for one in changes if one.promise is None or one.promise < 1 - model.noise]
    findings += [*slow_process(processes), *_around(model)]
    return tuple(sorted(findings, key=lambda finding: 1.0 if finding.promise is None else finding.promise))


def _works(model: StepModel) -> bool:
    """Whether the stages' work, timed alone, takes longer than what is around it."""
    return model.stages.makespan(model.schedule) > model.idle + model.update


def _percent(promise: float) -> str:
    """A step's predicted change in words, as "-12 %"."""
    return f"{100 * (promise - 1):+.0f} %"


def _balance(model: StepModel, times: LayerTimes) -> Iterator[Finding]:
    """Advises another cut, or other layers, if stages that take equally long would gain enough."""
    total, worth = np.asarray(model.stages.total), max(WORTH, model.noise)
    if model.what_if(model.stages.even).step / model.measured > 1 - worth:
        return
    cut, stages = times.best_cut(model.stages)
    promise = model.what_if(stages).step / model.measured
    new, old = list(cut.counts), list(times.planner.partition.counts)
    begin = f"stage {total.argmax()} takes {float(total.max() / total.mean()):.2f} times the mean of the stages"
    if promise < 1 - worth and new != old:
        yield Finding(f"{begin}: balance={new} instead of {old}, step {_percent(promise)}", {"balance": new}, promise)
        return
    layers = times.shares(model.stages).total
    heaviest = int(np.argmax(layers))
    name = times.planner.request.layers[heaviest].name
    yield Finding(
        f"{begin}, and no other cut into as many promises {worth:.0%} less: layer {heaviest} ({name}) alone takes "
        f"{layers[heaviest] / total.mean():.0%} of that mean; split it, or use fewer stages"
    )


def _microbatches(model: StepModel, sizes: Sequence[MicrobatchSize]) -> Iterator[Finding]:
    """Advises another number of micro-batches, a larger batch of them, or larger ones."""
    here = next(row for row in sizes if row.num_microbatches == model.schedule.num_microbatches)
    others = [row for row in sizes if row is not here]
    if not others:
        return
    best = min(others, key=lambda row: row.step)
    larger = max(others, key=lambda row: row.num_microbatches)
    promise, begin = best.step / here.step, f"M={here.num_microbatches} leaves a bubble of {here.bubble:.1%}"
    if promise < 1 - ROUGHLY_WORTH:
        text = (
            f"{begin}, M={best.num_microbatches} of {best.bubble:.1%}, and in its micro-batches of {best.size} an "
            f"example takes {best.sample_seconds / here.sample_seconds:.2f} times as long: step {_percent(promise)}"
        )
        yield Finding(text, {"num_microbatches": best.num_microbatches, "schedule": model.schedule.name}, promise)
    elif here.bubble - larger.bubble > WORTH:
        yield Finding(
            f"{begin}, and other numbers of micro-batches of this batch shorten the step by less than "
            f"{ROUGHLY_WORTH:.0%}; use a larger batch of micro-batches as large, M={larger.num_microbatches} leaves "
            f"{larger.bubble:.1%}"
        )
    larger_size = min((row for row in others if row.size > here.size), key=lambda row: row.size, default=here)
    if (ratio := here.sample_seconds / larger_size.sample_seconds) > SMALL:
        yield Finding(
            f"an example takes {ratio:.1f} times as long in micro-batches of {here.size} as of {larger_size.size}: "
            "they are too small to keep a device busy; use a larger batch in as many micro-batches"
        )


def _recomputation(model: StepModel, times: LayerTimes) -> Iterator[Finding]:
    """Advises to keep residuals, if recomputing them takes enough of the step."""
    kept = model.stages.scaled(times.over_here(times.kept))  # to keep residuals takes time too
    promise = model.what_if(kept).step / model.measured
    if times.planner.request.remat is MODES["none"] or promise > 1 - WORTH:
        return
    held = np.asarray(model.stages.timeline(model.schedule).peak_in_flight) / model.schedule.num_chunks
    stored = float((held * times.by_stage([cost.residual_bytes for cost in times.kept])).max())
    holds = f"a stage holds up to {bytes_in_words(stored)} of residuals: step {_percent(promise)}"
    yield Finding(f'without recomputation (remat="none") {holds}', {"remat": "none"}, promise)


def slow_process(processes: Sequence[ProcessTime]) -> Iterator[Finding]:
    """Names the slowest process, if it is far slower than the median."""
    slowest = max(processes, key=lambda process: process.seconds, default=None)
    if slowest and slowest.of_median > SLOW:
        names = ", ".join(map(str, slowest.stages))
        stages = f" (stage{'s' * (len(slowest.stages) > 1)} {names})" * bool(names)
        yield Finding(
            f"{slowest}{stages} takes {slowest.of_median:.2f} times the median of the processes for the same layers, "
            "and every step waits for it: see what else runs on that machine, or run without it"
        )


def _around(model: StepModel) -> Iterator[Finding]:
    """Names what takes long besides the stages' own work, and why the measurement may not be trusted."""
    step, noise, ticks = model.measured, model.noise, model.schedule.ticks.num_ticks
    if noise > NOISY:
        yield Finding(
            f"the step took longer in one round and shorter in another, by {noise:.0%}: something else runs on this "
            "machine; profile on a quiet one, or with more rounds, before you believe a promise"
        )
    if not _works(model):
        yield Finding(
            f"stages alone work for {model.stages.makespan(model.schedule) / step:.0%} of the step, which is less than "
            "what is around their work takes: too little to promise anything; use a larger batch or model"
        )
    elif model.contention > CONTENDED:
        yield Finding(
            f"stages take {model.contention:.1f} times as long together as each alone: the devices share something, "
            "as simulated ones share a machine's cores; shares of the step hold here, and not on accelerators"
        )
    if model.idle / step > LARGE:
        each = (model.idle - model.setup) / ticks
        yield Finding(
            f"transfer and set-up take {model.idle / step:.0%} of the step: {model.setup * 1e3:.2g} ms once, of which "
            f"a larger batch has less, and {each * 1e3:.2g} ms in each of {ticks} ticks, of which fewer micro-batches "
            "or stages have less"
        )
    if model.update / step > LARGE:
        once = "it is done once a batch, so a larger batch has less of it"
        yield Finding(f"the weight update takes {model.update / step:.0%} of the step: {once}")
