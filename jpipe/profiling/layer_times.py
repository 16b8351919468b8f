"""What single layers take, at the micro-batch at hand and at others, and how much of it is recomputation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jpipe.execution.batches import microbatch_shapes
from jpipe.execution.planner import Planner
from jpipe.model.remat import MODES
from jpipe.model.traced_layer import trace_layer
from jpipe.planning.costs import Cost, Layer, layer_costs
from jpipe.sharding.meshes import num_shards, shapes_only


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of each layer alone for one micro-batch, `[N]`, on one device.

    Attributes:
      here: as the pipeline runs them.
      kept: where residuals are kept and nothing is computed anew (remat "none").
    """

    here: list[Cost]
    kept: list[Cost]


def layer_times(planner: Planner, batch: Any, num_microbatches: int) -> list[Cost]:
    """Seconds of each layer alone, `[N]`, for one micro-batch of a batch cut into `num_microbatches`.

    On a mesh with data axes: for the examples that one device has of it.
    """
    model, layers = _layers(planner, batch, num_microbatches)
    return layer_costs(model, layers, "time", mesh=planner.mesh, warn=_quiet)


def _layers(planner: Planner, batch: Any, num_microbatches: int) -> tuple[Any, list[Layer]]:
    shapes = microbatch_shapes(batch, num_microbatches * num_shards(planner.mesh))
    with shapes_only(planner.mesh):
        model = planner.model(shapes)
        return model, planner.layers_of(model, shapes)


def measure_layers(planner: Planner, batch: Any) -> LayerTimes:
    """Times of layers at the micro-batches of the pipeline."""
    model, layers = _layers(planner, batch, planner.schedule.num_microbatches)
    here = layer_costs(model, layers, "time", mesh=planner.mesh, warn=_quiet)
    if planner.remat is MODES["none"]:
        return LayerTimes(here, here)
    with shapes_only(planner.mesh):
        without = [_without_remat(layer) for layer in layers]
    return LayerTimes(here, layer_costs(model, without, "time", mesh=planner.mesh, warn=_quiet))


def _without_remat(layer: Layer) -> Layer:
    function = replace(layer.function, remat=MODES["none"])
    return Layer(function, layer.arguments, trace_layer(function, layer.arguments))


def recomputed(planner: Planner, times: LayerTimes) -> np.ndarray:
    """Of each stage's backward the share that computes anew what a forward computed before, `[K]`."""
    backward = lambda costs: by_stage(
        planner, [cost.backward + cost.weight_gradient for cost in costs], planner.partition.bounds
    )
    return np.clip(1.0 - backward(times.kept) / backward(times.here), 0.0, 1.0)


def by_stage(planner: Planner, values: Sequence[float], bounds: Sequence[tuple[int, int]]) -> np.ndarray:
    """Sums `[K]` over each stage's layers.

    Args:
      planner: knows which stage each virtual stage is on.
      values: `[N]`.
      bounds: `[K*V]`, `(start, stop)` by virtual stage.
    """
    sums = np.zeros(planner.schedule.num_stages)
    for virtual_stage, (start, stop) in enumerate(bounds):
        sums[planner.schedule.placement.stage_of(virtual_stage)] += sum(values[start:stop])
    return sums


def _quiet(message: str) -> None:
    """Costs warn of what has no FLOPs; here they are times."""
    del message
