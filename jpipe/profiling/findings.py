"""Says in plain words what a profile means, and which settings to try, with the gain that each promises."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from jpipe.model.remat import MODES
from jpipe.planning.planner import Planner
from jpipe.profiling.changes import MicrobatchSize, best_cut, layer_shares, without_remat
from jpipe.profiling.hosts import ProcessTime
from jpipe.profiling.layer_times import LayerTimes, by_stage
from jpipe.profiling.prediction import StepModel
from jpipe.terminal.tables import bytes_in_words

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
    noise: float = 0.0,
    processes: Sequence[ProcessTime] = (),
) -> tuple[Finding, ...]:
    """All findings, those that promise the most first.

    None promises less than the noise, nor anything where stages work for a moment only.

    Args:
      planner: the pipeline's.
      model: the model of the step's time.
      times: the times of the layers.
      sizes: other numbers of micro-batches, and the one at hand.
      noise: the difference of the step's time from round to round, relative to that time.
      processes: the time of each of several processes for the same layers.
    """
    findings = [*_slow_process(processes), *_around(model, noise)]
    if _works(model):
        changes = [
            *_balance(planner, model, times, max(WORTH, noise)),
            *_microbatches(model, sizes),
            *_recomputation(planner, model, times),
        ]
        findings = [change for change in changes if change.promise is None or change.promise < 1 - noise] + findings
    return tuple(sorted(findings, key=lambda finding: 1.0 if finding.promise is None else finding.promise))


def _works(model: StepModel) -> bool:
    """Whether the stages' work, timed alone, takes longer than what is around it."""
    return model.stages.makespan(model.schedule) > model.idle + model.update


def _percent(promise: float) -> str:
    """A step's predicted change in words, as "-12 %"."""
    return f"{100 * (promise - 1):+.0f} %"


def _balance(planner: Planner, model: StepModel, times: LayerTimes, worth: float) -> Iterator[Finding]:
    """Advises another cut, or other layers, if stages that take equally long would gain enough."""
    total = np.asarray(model.stages.total)
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
    promise = model.step(without_remat(planner, times, model.stages)) / model.step()
    if promise > 1 - WORTH:
        return
    held = np.asarray(model.stages.timeline(model.schedule).peak_in_flight) / model.schedule.num_chunks
    kept = float((held * by_stage(planner, [cost.residual_bytes for cost in times.kept])).max())
    yield Finding(
        f'without recomputation (remat="none") a stage holds up to {bytes_in_words(kept)} of residuals: step '
        f"{_percent(promise)}",
        {"remat": "none"},
        promise,
    )


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


def _around(model: StepModel, noise: float) -> Iterator[Finding]:
    """Names what takes long besides the stages' own work, and why the measurement may not be trusted."""
    step = model.step()
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
