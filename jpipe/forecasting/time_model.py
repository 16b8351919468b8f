"""A step's time, of a chip that need not be there, without compiling: kernels of layers, the schedule simulated.

What layers take is `roofline`'s, of their traced forwards and backwards; nothing is fitted to steps. The compiled steps
of `benchmarks/time_model.py` show how far it is off (`docs/time-model.md`).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np
import optax

from jpipe.execution.step import Step
from jpipe.forecasting.hardware import Chip
from jpipe.forecasting.roofline import pass_seconds, roofline
from jpipe.jax_tools.random_keys import key_shape
from jpipe.jax_tools.trees import bytes_of
from jpipe.model.traced_layer import TracedLayer
from jpipe.pipeline import Pipeline
from jpipe.planning.holdings import holdings
from jpipe.profiling.communication import BACKWARD, ENDS, FORWARD, STEP, Communication
from jpipe.schedules.simulate import Timeline, Work, in_time
from jpipe.types import Batch, PyTree


@dataclass(frozen=True)
class StepTime:
    """Seconds of a training step, by part.

    Attributes:
      computation: of the stages' actions, of a stage on average, and of ends that all compute together.
      bubble: what stages wait: for each other, and for what crosses boundaries.
      collectives: once a step, over axes other than `stage`, and of ends that all stages compute together; those of
        other layers are in their computation.
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
    apart = 0.0
    if sends_more(pipe):
        found = sent or pipe.communication(batch)
        _add_collectives(pipe, found, chip, by_group)
        apart = found.bytes(STEP) + schedule.num_microbatches * found.bytes(ENDS)
    if schedule.splits:
        by_group[:, 4] = _stash_seconds(pipe.planner.training_step(batch), chip, len(layers))
    by_layer, shared = by_group[list(plan.traced.group_of)], 0.0
    if plan.request.shares_ends:
        shared = schedule.num_microbatches * float(by_layer[[0, -1], :3].sum()) / num_stages
        by_layer[[0, -1]] = 0.0
    by_stage = np.array([by_layer[start:stop].sum(axis=0) for start, stop in plan.partition.bounds])
    forward, backward, again, weight, stashing = by_stage.T
    times = {"F": forward, "R": again, "B": backward, "I": backward - weight + stashing, "W": weight}
    work = Work({kind: seconds.tolist() for kind, seconds in times.items()}, again.tolist())
    cuts = [plan.traced.group_at(stop - 1).gives for _, stop in plan.partition.bounds[:-1]]
    hop = max((bytes_of(gives) for gives in cuts), default=0) / devices / chip.link_bandwidth
    timeline = in_time(schedule, work, hop)
    busy = float(np.mean(timeline.busy))
    passes = _update_passes(pipe, [layer.results.outputs for layer in layers])
    moved = passes * holdings(plan).device["params"].bytes + 2 * _state_bytes(pipe, batch, tx)
    return StepTime(
        computation=busy + shared,
        bubble=timeline.makespan - busy,
        collectives=apart / chip.link_bandwidth,
        update=moved / chip.pass_bandwidth,
        timeline=timeline,
    )


def sends_more(pipe: Pipeline) -> bool:
    """Whether its devices send more than what crosses boundaries."""
    return pipe.mesh.size > pipe.schedule.num_stages or pipe.planner.request.shares_ends


def _layer_seconds(layer: TracedLayer, chip: Chip) -> tuple[float, float, float, float, float]:
    """Of a layer's forward, its backward, what is computed anew before that where stages keep their inputs alone, that
    part of the backward which only gradients of parameters need, and 0 for what it stashes (`_stash_seconds`).
    """
    results, params = (len(jax.tree.leaves(tree)) for tree in (layer.results, layer.gradients.params))
    numbers, gradients = range(len(layer.forward.out_avals)), range(len(layer.backward.out_avals))
    whole = roofline(layer.forward, chip, [i < results or i - results in layer.stored for i in numbers])
    backward = roofline(layer.backward, chip)
    weight = backward - roofline(layer.backward, chip, [i >= params for i in gradients])
    if not layer.function.remat.keep_inputs:
        return whole, backward, 0.0, weight, 0.0
    return roofline(layer.forward, chip, [i < results for i in numbers]), backward, whole, weight, 0.0


def _update_passes(pipe: Pipeline, activations: PyTree) -> int:
    """How often the parameters' bytes are read or written once a step.

    Sums of gradients are filled with zeros and their norm is taken, a pass each; parameters are read, written and read
    with their gradients; and narrow copies of them are made, where layers compute in a narrower dtype.
    """
    narrow = any(leaf.dtype.itemsize < 4 for leaf in jax.tree.leaves(activations))
    return 7 + 2 * (narrow and pipe.planner.request.options.cast == "step")


def _stash_seconds(step: Step, chip: Chip, count: int) -> list[float]:
    """Of writing what the first part of a split backward keeps for the second, for each of `count` traced layers."""
    kept = zip(step.model.traced_as, step.layers, strict=True)
    stashes = {g: layer.split.stash for g, layer in kept if layer.split is not None}
    return [pass_seconds(stashes.get(g, ()), chip) for g in range(count)]


def _add_collectives(pipe: Pipeline, found: Communication, chip: Chip, by_group: np.ndarray) -> None:
    """Adds what layers send to their seconds, `[groups, 5]`."""
    groups = {group.indices[0]: g for g, group in enumerate(pipe.plan.traced.groups)}
    for sent in found.transfers:
        if sent.layer and sent.loop in (FORWARD, BACKWARD):
            first = int(sent.layer.rpartition(" ")[2].partition("-")[0])
            by_group[groups[first], int(sent.loop == BACKWARD)] += sent.bytes / chip.link_bandwidth


def _state_bytes(pipe: Pipeline, batch: Batch, tx: optax.GradientTransformation | None) -> int:
    """Of the optimiser's state, on a device."""
    if tx is None:
        return 0
    leaves = jax.tree.leaves(pipe.abstract_state(batch, tx).opt_state)
    return bytes_of([jax.ShapeDtypeStruct(leaf.sharding.shard_shape(leaf.shape), leaf.dtype) for leaf in leaves])
