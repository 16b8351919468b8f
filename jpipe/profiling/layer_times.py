"""Times single layers at several micro-batch sizes, with recomputation and without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import jax
import numpy as np

from jpipe.batches.rows import cut_batch
from jpipe.model.groups import Model
from jpipe.model.random_keys import key_shape
from jpipe.model.remat import MODES
from jpipe.model.traced_layer import TracedLayer, trace_layer
from jpipe.planning.costs import Cost, timed_costs
from jpipe.planning.partition import Partition
from jpipe.planning.planner import Planner
from jpipe.types import Batch


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of each layer alone for one micro-batch, `[N]`, on one device, all timed by turns.

    On a mesh with data axes: for the examples that one device has of a micro-batch.

    Attributes:
      here: the layers as the pipeline runs them.
      kept: where residuals are kept and nothing is computed anew (remat "none").
      others: by another number of micro-batches, what `here` would be with it.
      by_process: seconds that each process took for all layers of `here`, `[P]`; the times above are process 0's.
    """

    here: list[Cost]
    kept: list[Cost]
    others: Mapping[int, list[Cost]] = field(default_factory=dict)
    by_process: tuple[float, ...] = ()


def measure_layers(planner: Planner, batch: Batch, others: Sequence[int] = ()) -> LayerTimes:
    """Times each layer alone.

    Args:
      planner: the pipeline's.
      batch: a batch `[B, ...]`.
      others: numbers of micro-batches to try too. Those are left out whose micro-batches the model doesn't take, and
        all of them if no device has memory for them.
    """
    model, layers = _layers(planner, batch, planner.request.schedule.num_microbatches)
    variants = [(model, layers)]
    if planner.request.remat is not MODES["none"]:
        with planner.tracing():
            kept = [trace_layer(replace(layer.function, remat=MODES["none"])) for layer in layers]
            variants.append((model, kept))
    tried = {}
    for num_microbatches in others:
        with suppress(Exception):  # whatever a layer or the loss raises of a size that nobody asked for
            tried[num_microbatches] = _layers(planner, batch, num_microbatches)
    try:
        timed = timed_costs([*variants, *tried.values()], planner.request.mesh)
    except jax.errors.JaxRuntimeError:
        tried, timed = {}, timed_costs(variants, planner.request.mesh)
    by_process = tuple(sum(cost.total for cost in costs[0]) for costs in timed)
    first = timed[0]
    others_timed = dict(zip(tried, first[len(variants) :], strict=True))
    return LayerTimes(first[0], first[len(variants) - 1], others_timed, by_process)


def _layers(planner: Planner, batch: Batch, num_microbatches: int) -> tuple[Model, Sequence[TracedLayer]]:
    micro = cut_batch(batch, num_microbatches * planner.request.splits.num_shards)
    return planner.model(micro), planner.layers(micro, key_shape())


def by_stage(planner: Planner, values: Sequence[float], cut: Partition | None = None) -> np.ndarray:
    """Sums `[K]` over each stage's layers.

    Args:
      planner: knows which stage each virtual stage is on.
      values: `[N]`.
      cut: where the virtual stages begin; the pipeline's own if not given.
    """
    return np.bincount(stage_of_layers(planner, cut), values, minlength=planner.request.schedule.num_stages)


def stage_of_layers(planner: Planner, cut: Partition | None = None) -> np.ndarray:
    """`[N]`, the stage that each layer is on, in the pipeline or under another cut."""
    counts = (cut or planner.partition).counts
    return np.repeat(planner.request.schedule.placement.stage_of(np.arange(len(counts))), counts)
