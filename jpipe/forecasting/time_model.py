"""A step's time, of a chip that need not be there, without compiling: kernels of layers, the schedule simulated.

What layers take is `roofline`'s, of their traced forwards and backwards; nothing is fitted to steps. The compiled steps
of `benchmarks/time_model.py` show how far it is off (`docs/time-model.md`).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np
import optax

from jpipe.forecasting.hardware import Chip
from jpipe.forecasting.roofline import roofline
from jpipe.jax_tools.random_keys import key_shape
from jpipe.jax_tools.trees import bytes_of
from jpipe.model.traced_layer import TracedLayer
from jpipe.pipeline import Pipeline
from jpipe.planning.holdings import holdings
from jpipe.profiling.communication import BACKWARD, FORWARD, STEP, Communication
from jpipe.schedules.simulate import Timeline, simulate
from jpipe.types import Batch, PyTree


@dataclass(frozen=True)
class StepTime:
    """Seconds of a training step, by part.

    Attributes:
      computation: of the stages' actions, of a stage on average.
      bubble: what stages wait: for each other, and for what crosses boundaries.
      collectives: once a step, over axes other than `stage`; those of layers are in their computation.
      update: of the optimiser, by the bytes that it reads and writes.
      timeline: the schedule, simulated in seconds.
    """

    computation: float
    bubble: float
    collectives: float
    update: float
    timeline: Timeline

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by part; they add up to the step."""
        return {name: getattr(self, name) for name in ("computation", "bubble", "collectives", "update")}

    @property
    def limit(self) -> str:
        """The part that takes longest."""
        return max(self.parts, key=lambda name: self.parts[name])


def predict_time(
    pipe: Pipeline,
    batch: Batch,
    chip: Chip,
    *,
    tx: optax.GradientTransformation | None = None,
    sent: Communication | None = None,
) -> StepTime:
    """What a step of training should take; nothing is compiled.

    The devices of a stage are taken to share its layers' work equally.

    Args:
      pipe: the pipeline.
      batch: a batch `[B, ...]`, or its ShapeDtypeStructs.
      chip: one device (`jpipe.forecasting.hardware.CHIPS`).
      tx: the optimiser, of whose state the bytes count; default: one without state.
      sent: what devices send, as another schedule's; default: `pipe.communication(batch)`.
    """
    plan, schedule = pipe.planner.plan_for(batch), pipe.schedule
    num_stages, devices = schedule.num_stages, pipe.mesh.size // schedule.num_stages
    layers = pipe.planner.layers(pipe.planner.for_training(batch), key_shape())
    by_group = np.array([_layer_seconds(layer, chip) for layer in layers]) / devices
    once = _add_collectives(pipe, sent or pipe.communication(batch), chip, by_group) if devices > 1 else 0.0
    by_layer = by_group[list(plan.traced.group_of)]
    shared = schedule.num_microbatches * by_layer[[0, -1], :3].sum() / num_stages if plan.request.shares_ends else 0.0
    if plan.request.shares_ends:
        by_layer[[0, -1]] = 0.0
    stages = np.zeros((num_stages, 4))
    for s, (start, stop) in enumerate(plan.partition.bounds):
        stages[schedule.placement.stage_of(s)] += by_layer[start:stop].sum(axis=0)
    forward, backward, again, weight = np.maximum(stages, [[1e-12, 1e-12, 0.0, 0.0]]).T.tolist()
    cuts = [plan.traced.group_at(stop - 1).gives for _, stop in plan.partition.bounds[:-1]]
    hop = max((bytes_of(gives) for gives in cuts), default=0) / devices / chip.link_bandwidth
    timeline = simulate(schedule, forward, backward, hop, recompute=again, weight=weight)
    busy = float(np.mean(timeline.busy))
    passes = _update_passes(pipe, [layer.results.outputs for layer in layers])
    moved = passes * holdings(plan).device["params"].bytes + 2 * _state_bytes(pipe, batch, tx)
    return StepTime(busy + shared, timeline.makespan - busy, once, moved / chip.pass_bandwidth, timeline)


def _layer_seconds(layer: TracedLayer, chip: Chip) -> tuple[float, float, float, float]:
    """Of a layer's forward, its backward, what is computed anew before that where stages keep their inputs alone, and
    that part of the backward which only gradients of parameters need.
    """
    results, params = (len(jax.tree.leaves(tree)) for tree in (layer.results, layer.gradients.params))
    numbers, gradients = range(len(layer.forward.out_avals)), range(len(layer.backward.out_avals))
    whole = roofline(layer.forward, chip, [i < results or i - results in layer.stored for i in numbers])
    backward = roofline(layer.backward, chip)
    weight = backward - roofline(layer.backward, chip, [i >= params for i in gradients])
    if not layer.function.remat.keep_inputs:
        return whole, backward, 0.0, weight
    return roofline(layer.forward, chip, [i < results for i in numbers]), backward, whole, weight


def _update_passes(pipe: Pipeline, activations: PyTree) -> int:
    """How often the parameters' bytes are read or written once a step.

    Sums of gradients are filled with zeros and their norm is taken, a pass each; parameters are read, written and read
    with their gradients; and narrow copies of them are made, where layers compute in a narrower dtype.
    """
    narrow = any(leaf.dtype.itemsize < 4 for leaf in jax.tree.leaves(activations))
    return 7 + 2 * (narrow and pipe.planner.request.options.cast == "step")


def _add_collectives(pipe: Pipeline, found: Communication, chip: Chip, by_group: np.ndarray) -> float:
    """Adds what layers send to their seconds, `[groups, 3]`; returns the seconds of what is sent once a step."""
    groups = {group.indices[0]: g for g, group in enumerate(pipe.plan.traced.groups)}
    for sent in found.transfers:
        if sent.layer and sent.loop in (FORWARD, BACKWARD):
            first = int(sent.layer.rpartition(" ")[2].partition("-")[0])
            by_group[groups[first], int(sent.loop == BACKWARD)] += sent.bytes / chip.link_bandwidth
    return found.bytes(STEP) / chip.link_bandwidth


def _state_bytes(pipe: Pipeline, batch: Batch, tx: optax.GradientTransformation | None) -> int:
    """Of the optimiser's state, on a device."""
    if tx is None:
        return 0
    leaves = jax.tree.leaves(pipe.abstract_state(batch, tx).opt_state)
    return bytes_of([jax.ShapeDtypeStruct(leaf.sharding.shard_shape(leaf.shape), leaf.dtype) for leaf in leaves])
