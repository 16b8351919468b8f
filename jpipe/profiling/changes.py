"""Predicts what other settings would make of a step: another cut, other numbers of micro-batches, another remat.

Each is predicted from what was measured: stages' times are shared among their layers as those take alone, and put
together anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from jpipe.batches.microbatches import batch_size
from jpipe.planning.costs import Cost
from jpipe.planning.partition import Partition, partition
from jpipe.planning.planner import Planner
from jpipe.profiling.layer_times import LayerTimes, by_stage, recomputed, stage_of_layers
from jpipe.profiling.measure import Measured
from jpipe.profiling.prediction import StageTimes, StepModel
from jpipe.schedules.orders import make_schedule
from jpipe.schedules.schedule import Schedule
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


def recomputation_apart(planner: Planner, times: LayerTimes, measured: Measured) -> StageTimes:
    """The stages' times as measured, with recomputation apart from the rest of the backward."""
    again = np.asarray(measured.backward) * recomputed(planner, times)
    kept = np.asarray(measured.backward) - again
    return StageTimes(measured.forward, tuple(kept.tolist()), tuple(again.tolist()), measured.weight)


def without_remat(planner: Planner, times: LayerTimes, stages: StageTimes) -> StageTimes:
    """Predicts the stages' times if residuals were kept, which takes time too."""
    return stages.scaled(_factors(planner, times.kept, times.here))


def _factors(planner: Planner, costs: Sequence[Cost], here: Sequence[Cost]) -> np.ndarray:
    """How many times as long each stage's layers take with these costs as here, `[K]`."""
    total = lambda costs: by_stage(planner, [cost.total for cost in costs])
    return total(costs) / total(here)


def layer_shares(planner: Planner, times: LayerTimes, stages: StageTimes) -> StageTimes:
    """The stages' times shared among their layers, `[N]` each, in proportion to what those take alone."""
    on = stage_of_layers(planner)

    def share(seconds: Sequence[float], of: Sequence[float]) -> tuple[float, ...]:
        sums = by_stage(planner, of)[on]
        return tuple((np.asarray(of) * np.asarray(seconds)[on] / np.where(sums, sums, 1.0)).tolist())

    forward = [cost.forward for cost in times.here]
    backward = [cost.backward for cost in times.here]
    return StageTimes(
        share(stages.forward, forward), share(stages.backward, backward), share(stages.recompute, backward)
    )


def best_cut(planner: Planner, times: LayerTimes, stages: StageTimes) -> tuple[Partition, StageTimes]:
    """The best cut for the times of single layers, and the times of stages that it would have.

    Equal layers take the same alone. In stages they don't quite, by noise, and cutting after that would follow it.

    Args:
      planner: knows K, V and where virtual stages are.
      times: of the layers.
      stages: what the stages take as they are cut.
    """
    schedule = planner.request.schedule
    seconds = [cost.total for cost in times.here]
    cut = partition(seconds, schedule.num_stages, num_chunks=schedule.num_chunks)
    put = lambda shares: by_stage(planner, shares, cut).tolist()
    return cut, layer_shares(planner, times, stages).each(put)


def other_schedules(planner: Planner, batch: Batch) -> dict[int, Schedule]:
    """The schedule at other numbers of micro-batches, by number: those that batch and schedule allow."""
    given, shards = planner.request.schedule, planner.request.splits.num_shards
    counts = [int(given.num_microbatches * factor) for factor in FACTORS if given.num_microbatches * factor % 1 == 0]
    with suppress(ValueError):  # a custom schedule may be called anything, what it isn't too
        if make_schedule(given.name, **given.sizes) == given:
            with_count = lambda count: make_schedule(given.name, **given.sizes | {"num_microbatches": count})
            return {count: with_count(count) for count in counts if batch_size(batch) % (count * shards) == 0}
    return {}


def microbatch_sizes(
    planner: Planner, batch: Batch, model: StepModel, times: LayerTimes, others: Mapping[int, Schedule]
) -> tuple[MicrobatchSize, ...]:
    """The number of micro-batches at hand and others, with what a step takes; in order.

    Args:
      planner: the pipeline's.
      batch: a batch `[B, ...]`.
      model: what the step takes.
      times: of the layers, at the micro-batches at hand and at others.
      others: schedules with other numbers of micro-batches; those count that layers were timed for.
    """
    size = batch_size(batch)
    rows = [_row(model.schedule, model.stages, size, model.step())]
    for num_microbatches, costs in times.others.items():
        schedule, stages = others[num_microbatches], model.stages.scaled(_factors(planner, costs, times.here))
        rows.append(_row(schedule, stages, size, model.step(stages, schedule)))
    return tuple(sorted(rows, key=lambda row: row.num_microbatches))


def _row(schedule: Schedule, stages: StageTimes, size: int, step: float) -> MicrobatchSize:
    num_microbatches = schedule.num_microbatches
    each = size // num_microbatches
    bubble = stages.even.timeline(schedule).bubble_fraction
    return MicrobatchSize(num_microbatches, each, sum(stages.total) / each, bubble, step)
