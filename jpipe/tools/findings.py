"""Says in plain words what a profile means, and predicts what other settings would make of a step.

Each prediction starts from the measured times of stages. These are shared among the stages' layers, in proportion to
the times of the layers alone, and then put together anew. Slow processes are found by the same layers, which each times
on a device of its own, and waits for no other. The times of stages can't tell that: a step ends in all processes at
once, and a stage may lie on several hosts.
"""

import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low

import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jpipe.memory.batches import batch_size
from jpipe.mesh.axes import AXIS
from jpipe.model.remat import MODES
from jpipe.planning.costs import Cost
from jpipe.planning.partition import Partition, partition
from jpipe.planning.planner import Planner
from jpipe.processes.tables import bytes_in_words
from jpipe.schedules.orders import has_its_name, make_schedule
from jpipe.schedules.schedule import Schedule
from jpipe.tools.measure import LayerTimes, StageTimes, StepModel, by_stage, stage_of_layers
from jpipe.types import Batch

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


def recomputation_apart(planner: Planner, times: LayerTimes, stages: StageTimes) -> StageTimes:
    """The stages' times as measured, with recomputation apart from the rest of the backward."""
    backward = np.asarray(stages.backward)
    again = backward * np.clip(1.0 - _factors(planner, times.kept, times.here, "backward"), 0.0, 1.0)
    return replace(stages, backward=tuple((backward - again).tolist()), recompute=tuple(again.tolist()))


def _factors(planner: Planner, costs: Sequence[Cost], here: Sequence[Cost], part: str = "total") -> np.ndarray:
    """The seconds of each stage's layers with these costs, over those here, `[K]`; of a part of `Cost`."""
    numerator, denominator = (by_stage(planner, [getattr(cost, part) for cost in times]) for times in (costs, here))
    return numerator / denominator


def layer_shares(planner: Planner, times: LayerTimes, stages: StageTimes) -> StageTimes:
    """The stages' times shared among their layers, `[N]` each, in proportion to what those take alone."""
    on = stage_of_layers(planner)

    def share(seconds: Sequence[float], alone: Sequence[float]) -> tuple[float, ...]:
        sums = by_stage(planner, alone)[on]
        return tuple((np.asarray(alone) * np.asarray(seconds)[on] / np.where(sums, sums, 1.0)).tolist())

    forward, backward = [cost.forward for cost in times.here], [cost.backward for cost in times.here]
    shares = share(stages.forward, forward), share(stages.backward, backward), share(stages.recompute, backward)
    return StageTimes(*shares)


def best_cut(planner: Planner, times: LayerTimes, stages: StageTimes) -> tuple[Partition, StageTimes]:
    """The best cut for the times of single layers, and the times of stages that it would have.

    Equal layers take the same alone. In stages they don't quite, by noise, and cutting after that would follow it.

    Args:
      planner: knows K, V and where virtual stages are.
      times: the times of the layers.
      stages: the times of the stages as they are cut.
    """
    schedule = planner.request.schedule
    seconds = [cost.total for cost in times.here]
    cut = partition(seconds, schedule.num_stages, num_chunks=schedule.num_chunks)
    return cut, layer_shares(planner, times, stages).each(lambda shares: by_stage(planner, shares, cut).tolist())


def other_schedules(planner: Planner, batch: Batch) -> dict[int, Schedule]:
    """The schedule at other numbers of micro-batches, by number: those that batch and schedule allow."""
    here, shards = planner.request.schedule, planner.request.splits.num_shards
    if not has_its_name(here):
        return {}
    counts = [int(here.num_microbatches * factor) for factor in FACTORS if here.num_microbatches * factor % 1 == 0]
    counts = [count for count in counts if batch_size(batch) % (count * shards) == 0]
    return {count: make_schedule(here.name, **here.sizes | {"num_microbatches": count}) for count in counts}


def microbatch_sizes(
    planner: Planner, batch: Batch, model: StepModel, times: LayerTimes, others: Mapping[int, Schedule]
) -> tuple[MicrobatchSize, ...]:
    """The number of micro-batches at hand and others, with what a step takes; in order.

    Args:
      planner: the pipeline's.
      batch: a batch `[B, ...]`.
      model: the model of the step's time.
      times: the times of the layers, at the micro-batches at hand and at others.
      others: schedules with other numbers of micro-batches; those count that layers were timed for.
    """
    here, sizes = model.schedule.num_microbatches, []
    for count in sorted({here, *times.others}):
        schedule, stages, size = model.schedule, model.stages, batch_size(batch) // count
        if count != here:
            schedule, stages = others[count], stages.scaled(_factors(planner, times.others[count], times.here))
        bubble, step = stages.even.timeline(schedule).bubble_fraction, model.step(stages, schedule)
        sizes.append(MicrobatchSize(count, size, sum(stages.total) / size, bubble, step))
    return tuple(sizes)


# --- slow processes ---------------------------------------------------------------------------------------------------


_LONGEST_NAME = 64


@dataclass(frozen=True)
class ProcessTime:
    """The time that one process of several takes for the layers of the whole model.

    Attributes:
      process: its index.
      host: the name of its machine.
      stages: the stages that have devices of this process.
      seconds: the time of all layers, forward and backward, for one micro-batch, alone on one of its devices.
      of_median: `seconds` over the median of all processes; of an even number of processes the lower median.
    """

    process: int
    host: str
    stages: tuple[int, ...]
    seconds: float
    of_median: float

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}"


def process_times(seconds: Sequence[float], hosts: Sequence[str], mesh: Mesh) -> tuple[ProcessTime, ...]:
    """The time of each process; empty if there is one process.

    Args:
      seconds: the time of each process, `[P]`.
      hosts: the names of their machines, `[P]`.
      mesh: the pipeline's.
    """
    if len(seconds) < 2:
        return ()
    stages = np.moveaxis(mesh.devices, mesh.axis_names.index(AXIS), 0)
    processes_of = [{device.process_index for device in devices.flat} for devices in stages]
    stages_of = lambda p: tuple(k for k, processes in enumerate(processes_of) if p in processes)
    times = enumerate(zip(hosts, seconds, strict=True))
    return tuple(ProcessTime(p, host, stages_of(p), alone, alone / median_low(seconds)) for p, (host, alone) in times)


def host_names() -> list[str]:
    """The name of each process's machine, `[P]`; all processes call it."""
    padded = socket.gethostname().encode()[:_LONGEST_NAME].ljust(_LONGEST_NAME, b"\0")
    names = np.asarray(multihost_utils.process_allgather(np.frombuffer(padded, np.uint8)))
    return [name.tobytes().rstrip(b"\0").decode(errors="replace") for name in names]


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
    planner: Planner,
    model: StepModel,
    times: LayerTimes,
    sizes: Sequence[MicrobatchSize],
    processes: Sequence[ProcessTime] = (),
) -> tuple[Finding, ...]:
    """All findings, those that promise the most first.

    None promises less than the noise, nor anything where stages work for a moment only.

    Args:
      planner: the pipeline's.
      model: the model of the step's time.
      times: the times of the layers.
      sizes: other numbers of micro-batches, and the one at hand.
      processes: the time of each of several processes for the same layers.
    """
    findings = list[Finding]()
    if _works(model):
        changes = [*_balance(planner, model, times), *_microbatches(model, sizes)]
        changes += _recomputation(planner, model, times)
        findings = [one for one in changes if one.promise is None or one.promise < 1 - model.noise]
    findings += [*_slow_process(processes), *_around(model)]
    return tuple(sorted(findings, key=lambda finding: 1.0 if finding.promise is None else finding.promise))


def _works(model: StepModel) -> bool:
    """Whether the stages' work, timed alone, takes longer than what is around it."""
    return model.stages.makespan(model.schedule) > model.idle + model.update


def _percent(promise: float) -> str:
    """A step's predicted change in words, as "-12 %"."""
    return f"{100 * (promise - 1):+.0f} %"


def _balance(planner: Planner, model: StepModel, times: LayerTimes) -> Iterator[Finding]:
    """Advises another cut, or other layers, if stages that take equally long would gain enough."""
    total, worth = np.asarray(model.stages.total), max(WORTH, model.noise)
    slowest = int(total.argmax())
    if model.step(model.stages.even) / model.step() > 1 - worth:
        return
    cut, stages = best_cut(planner, times, model.stages)
    promise = model.step(stages) / model.step()
    begin = f"stage {slowest} takes {float(total[slowest] / total.mean()):.2f} times the mean of the stages"
    if promise < 1 - worth and cut.counts != planner.partition.counts:
        new, old = list(cut.counts), list(planner.partition.counts)
        yield Finding(f"{begin}: balance={new} instead of {old}, step {_percent(promise)}", {"balance": new}, promise)
        return
    layers = layer_shares(planner, times, model.stages).total
    heaviest = int(np.argmax(layers))
    name = planner.request.layers[heaviest].name
    yield Finding(
        f"{begin}, and no other cut into as many promises {worth:.0%} less: layer {heaviest} "
        f"({name}) alone takes {layers[heaviest] / total.mean():.0%} of that mean; split it, "
        "or use fewer stages"
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


def _recomputation(planner: Planner, model: StepModel, times: LayerTimes) -> Iterator[Finding]:
    """Advises to keep residuals, if recomputing them takes enough of the step."""
    if planner.request.remat is MODES["none"]:
        return
    kept = model.stages.scaled(_factors(planner, times.kept, times.here))  # to keep residuals takes time too
    promise = model.step(kept) / model.step()
    if promise > 1 - WORTH:
        return
    held = np.asarray(model.stages.timeline(model.schedule).peak_in_flight) / model.schedule.num_chunks
    stored = float((held * by_stage(planner, [cost.residual_bytes for cost in times.kept])).max())
    holds = f"a stage holds up to {bytes_in_words(stored)} of residuals: step {_percent(promise)}"
    yield Finding(f'without recomputation (remat="none") {holds}', {"remat": "none"}, promise)


def _slow_process(processes: Sequence[ProcessTime]) -> Iterator[Finding]:
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
    step, noise = model.step(), model.noise
    set_up, update = (model.slices[name] / step for name in ("transfer and set-up", "weight update"))
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
    if set_up > LARGE:
        each = (model.idle - model.setup) / model.schedule.ticks.num_ticks
        yield Finding(
            f"transfer and set-up take {set_up:.0%} of the step: "
            f"{model.setup * 1e3:.2g} ms once, of which a larger batch has less, and {each * 1e3:.2g} ms in each of "
            f"{model.schedule.ticks.num_ticks} ticks, of which fewer micro-batches or stages have less"
        )
    if update > LARGE:
        once = "it is done once a batch, so a larger batch has less of it"
        yield Finding(f"the weight update takes {update:.0%} of the step: {once}")
