"""Predicts what other settings would make of a step: another cut, other numbers of micro-batches, another remat.

Each prediction starts from the measured times of stages. These are shared among the stages' layers, in proportion to
the times of the layers alone, and then put together anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jpipe.batches.rows import batch_size
from jpipe.planning.costs import Cost
from jpipe.planning.partition import Partition, partition
from jpipe.planning.planner import Planner
from jpipe.profiling.layer_times import LayerTimes, by_stage, stage_of_layers
from jpipe.profiling.measure import Measured
from jpipe.profiling.prediction import StageTimes, StepModel
from jpipe.schedules.orders import has_its_name, make_schedule
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
    backward = np.asarray(measured.backward)
    again = backward * recomputed(planner, times)
    return StageTimes(measured.forward, tuple((backward - again).tolist()), tuple(again.tolist()), measured.weight)


def recomputed(planner: Planner, times: LayerTimes) -> np.ndarray:
    """The share of each stage's backward that computes anew what a forward computed before, `[K]`."""
    return np.clip(1.0 - _factors(planner, times.kept, times.here, "backward"), 0.0, 1.0)


def without_remat(planner: Planner, times: LayerTimes, stages: StageTimes) -> StageTimes:
    """Predicts the stages' times if residuals were kept, which takes time too."""
    return stages.scaled(_factors(planner, times.kept, times.here))


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
    variants = {model.schedule.num_microbatches: (model.schedule, model.stages)}
    for num_microbatches, costs in times.others.items():
        stages = model.stages.scaled(_factors(planner, costs, times.here))
        variants[num_microbatches] = others[num_microbatches], stages
    sizes = []
    for num_microbatches, (schedule, stages) in sorted(variants.items(), key=lambda item: item[0]):
        size, bubble = batch_size(batch) // num_microbatches, stages.even.timeline(schedule).bubble_fraction
        step = model.step(stages, schedule)
        sizes.append(MicrobatchSize(num_microbatches, size, sum(stages.total) / size, bubble, step))
    return tuple(sizes)
