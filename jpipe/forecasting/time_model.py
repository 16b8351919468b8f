"""A step's time, of a chip that need not be there, without compiling: rooflines of layers, the schedule simulated.

A product of matrices takes its FLOPs at the chip's peak or its bytes at the memory's bandwidth, whichever is longer, a
reduction its bytes. Residuals are written and read, sums of gradients read and written. What else is computed element
by element is taken to be fused into these, and costs nothing. No factor is fitted: what a compiler makes of a layer may
take longer, or less where arrays stay on chip. `benchmarks/time_model.py` holds it against the TPU compiler's cycles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import numpy as np
import optax
from jax.extend.core import jaxprs_in_params

from jpipe.forecasting.hardware import Chip
from jpipe.jax_tools.random_keys import key_shape
from jpipe.model.traced_layer import TracedLayer
from jpipe.pipeline import Pipeline
from jpipe.planning.flops import flops_of
from jpipe.planning.holdings import holdings
from jpipe.profiling.communication import BACKWARD, FORWARD, STEP, Communication
from jpipe.schedules.simulate import Timeline, simulate
from jpipe.seam.inside import needed_part
from jpipe.seam.jaxpr_types import ClosedJaxpr, Jaxpr, JaxprEqn
from jpipe.types import Batch

_PRODUCTS = ("dot_general", "ragged_dot_general", "conv_general_dilated", "pallas_call")
_REDUCTIONS = ("reduce", "argm", "cum", "sort", "gather", "scatter")


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
    shared = schedule.num_microbatches * by_layer[[0, -1]].sum() / num_stages if plan.request.shares_ends else 0.0
    if plan.request.shares_ends:
        by_layer[[0, -1]] = 0.0
    stages = np.zeros((num_stages, 3))
    for s, (start, stop) in enumerate(plan.partition.bounds):
        stages[schedule.placement.stage_of(s)] += by_layer[start:stop].sum(axis=0)
    forward, backward, again = np.maximum(stages, [[1e-12, 1e-12, 0.0]]).T.tolist()
    cuts = [plan.traced.group_at(stop - 1).gives for _, stop in plan.partition.bounds[:-1]]
    hop = max((_bytes(jax.tree.leaves(gives)) for gives in cuts), default=0) / devices / chip.link_bandwidth
    timeline = simulate(schedule, forward, backward, hop, recompute=again)
    busy = float(np.mean(timeline.busy))
    moved = 3 * holdings(plan).device["params"].bytes + 2 * _state_bytes(pipe, batch, tx)
    return StepTime(busy + shared, timeline.makespan - busy, once, moved / chip.memory_bandwidth, timeline)


def roofline(jaxpr: ClosedJaxpr | Jaxpr, chip: Chip) -> float:
    """Seconds of a jaxpr on one device, all of its equations one after the other.

    >>> from jpipe.forecasting.hardware import CHIPS
    >>> x = jax.ShapeDtypeStruct((4096, 4096), "bfloat16")
    >>> f"{1e3 * roofline(jax.make_jaxpr(lambda x: x @ x)(x), CHIPS['v5e']):.2f} ms"  # 2 * 4096**3 / 197e12
    '0.70 ms'
    """
    return sum(_seconds(equation, chip) for equation in jaxpr.eqns)


def _seconds(equation: JaxprEqn, chip: Chip) -> float:
    name, params = equation.primitive.name, equation.params
    if name in _PRODUCTS:
        moved = _bytes([v.aval for v in (*equation.invars, *equation.outvars)])
        return max(flops_of(equation).flops / chip.flops, moved / chip.memory_bandwidth)
    if name.startswith(_REDUCTIONS):
        moves = name.startswith(("gather", "scatter"))  # of the operand only the rows that are asked for
        large = equation.invars[2:3] or equation.outvars if moves else equation.invars
        return _bytes([v.aval for v in large]) / chip.memory_bandwidth
    inner = [roofline(jaxpr, chip) for jaxpr in jaxprs_in_params(params)]
    if name == "cond":
        return max(inner)
    shards = math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"]) if name == "shard_map" else 1
    return shards * params["length"] * sum(inner) if name == "scan" else shards * sum(inner)


def _layer_seconds(layer: TracedLayer, chip: Chip) -> tuple[float, float, float]:
    """Of a layer's forward, its backward, and what is computed anew before that where stages keep their inputs alone.

    What follows from the variables alone is casts, which elementwise work's being fused makes free.
    """
    whole, backward = (_needed(jaxpr, len(jaxpr.out_avals), chip) for jaxpr in (layer.forward, layer.backward))
    kept, params = (
        _bytes(jax.tree.leaves(tree)) / chip.memory_bandwidth for tree in (layer.residuals, layer.gradients.params)
    )
    whole, backward = whole + kept, backward + kept + 2 * params
    if not layer.function.remat.keep_inputs:
        return whole, backward, 0.0
    return _needed(layer.forward, len(jax.tree.leaves(layer.results)), chip), backward, whole


def _needed(closed: ClosedJaxpr, outputs: int, chip: Chip) -> float:
    """Of what the first outputs need."""
    return roofline(needed_part(closed, [i < outputs for i in range(len(closed.out_avals))])[0], chip)


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
    return _bytes([jax.ShapeDtypeStruct(leaf.sharding.shard_shape(leaf.shape), leaf.dtype) for leaf in leaves])


def _bytes(avals: list) -> int:
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in avals if hasattr(a, "shape"))
