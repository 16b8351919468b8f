"""A step as plain data: which layers each stage runs, where everything lies, and when it happens.

`build_step` puts together what the other folders decide (groups of equal layers, cuts, schedule, remat) for the shapes
of one micro-batch. The executor then only follows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import jax

from jpipe.execution.layer_ranges import LayerRanges, make_ranges
from jpipe.jax_tools.dtypes import is_float
from jpipe.jax_tools.memory_order import result_orders
from jpipe.memory.boundaries import Boundaries, make_boundaries
from jpipe.memory.storage import Storage, build_storage, each_apart
from jpipe.model.groups import Model
from jpipe.model.layer_function import LayerFunction
from jpipe.model.loss import LossFn
from jpipe.model.merging import Merging, make_merging
from jpipe.model.remat import Remat
from jpipe.model.traced_layer import DeviceForward, DeviceLayer, partition_layer, trace_forward
from jpipe.partitioner.shardings import Sharding
from jpipe.planning.costs import TracedGroup
from jpipe.planning.plan import Plan
from jpipe.schedules.schedule import Schedule
from jpipe.schedules.ticks import TickTable, lower

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class StepSpec:
    """What a step is for.

    Attributes:
      key: the type of the step's random key in training, None in evaluation.
      loss_fn: the user's loss; None to return the model's outputs.
      remat: the rematerialisation mode.
      schedule: the order of actions.
      merge: the rules for state, by collection, that the user set.
      metrics: the names of what the loss function gives besides the loss.
    """

    key: jax.ShapeDtypeStruct | None
    loss_fn: LossFn | None
    remat: Remat
    schedule: Schedule
    merge: Mapping[str, str]
    metrics: tuple[str, ...] = ()

    @property
    def stores_residuals(self) -> bool:
        """Whether forward actions leave residuals for backward ones."""
        return self.schedule.trains and not self.remat.keep_inputs


@dataclass(frozen=True, eq=False)
class Step:
    """One step of training, or forward only.

    Attributes:
      spec: what it is for.
      model: the layers.
      functions: what the layers of each group compute.
      forwards: the forward of each group in a forward action, as one device runs it.
      layers: forward with residuals and backward of each group, as one device runs them; empty if forward only.
      mergings: how each group's state is merged over micro-batches.
      storages: the places of the variables, by collection.
      residuals: the places of the residuals; none if forward only.
      activations: the format of activations at the boundaries.
      cotangents: the format of their cotangents.
      ranges: which layers each virtual stage runs.
      table: when each action runs.
    """

    spec: StepSpec
    model: Model
    functions: tuple[LayerFunction, ...]
    forwards: tuple[DeviceForward, ...]
    layers: tuple[DeviceLayer, ...]
    mergings: tuple[Merging, ...]
    storages: dict[str, Storage]
    residuals: Storage
    activations: Boundaries
    cotangents: Boundaries
    ranges: LayerRanges
    table: TickTable

    @property
    def num_microbatches(self) -> int:
        """M."""
        return self.spec.schedule.num_microbatches

    @property
    def outputs(self) -> list[jax.ShapeDtypeStruct]:
        """What the last layer gives for a micro-batch, as one device has it: outputs, or the sums of the loss."""
        return self.forwards[self.model.last].results.outputs

    @property
    def outputs_at(self) -> list[Sharding]:
        """How the leaves of `outputs` lie on the devices of the last stage."""
        return self.forwards[self.model.last].results_at[: len(self.outputs)]

    def described(self) -> str:
        """How much there is to compile, in words."""
        schedule = self.spec.schedule
        chunks = f"V={schedule.num_chunks}, " * (schedule.num_chunks > 1)
        sizes = f"K={schedule.num_stages}, {chunks}M={schedule.num_microbatches}"
        return f"{self.model.described()}, {schedule.name}, {sizes}"


def layer_functions(model: Model, spec: StepSpec) -> tuple[LayerFunction, ...]:
    """What the layers of each group compute in a step; the loss follows the last."""
    loss = lambda g: spec.loss_fn if g == model.last else None
    return tuple(LayerFunction(group, spec.key, spec.remat, loss(g)) for g, group in enumerate(model.groups))


def build_step(plan: Plan, traced: Model, spec: StepSpec, groups: Sequence[TracedGroup] = ()) -> Step:
    """Lays out a step for the shapes of one micro-batch.

    Args:
      plan: cuts and layout.
      traced: the layers, traced at these shapes.
      spec: what the step is for.
      groups: their forward and backward; empty for a step without backward.
    """
    request, bounds = plan.request, plan.partition.bounds
    schedule, remat, splits = spec.schedule, spec.remat, request.splits
    model, functions = plan.arranged(traced), layer_functions(traced, spec)
    calls = [(function, function.shapes(traced.batch)) for function in functions]

    def spread(made: Sequence[T]) -> tuple[T, ...]:
        """What was made for each group as traced, if anything was, for each group of `model`."""
        return tuple(made[g] for g in model.traced_as) if made else ()

    layers = [partition_layer(g.traced, g.function.shardings(g.arguments, splits)) for g in groups]
    forwards = [layer.forward for layer in layers]
    if not spec.stores_residuals:
        forwards = [trace_forward(*call, splits) for call in calls]
    table = lower(schedule, keep_inputs=remat.keep_inputs)
    virtual_stage_of = [s for s, (start, stop) in enumerate(bounds) for _ in range(start, stop)]
    leaves = spread([layer.residuals for layer in layers])
    kept = [layer.forward for layer in layers]
    residuals = build_storage(
        leaves,
        [[virtual_stage_of[i] for i in group.indices] for group in (model.groups if layers else ())],
        device_of=[schedule.placement.stage_of(s) for s in range(len(bounds))],
        # Where inputs are kept, residuals live within one backward action alone.
        rows=table.residual_rows if spec.stores_residuals else (1,) * schedule.num_stages,
        orders=spread([result_orders(run.jaxpr, run.residuals_at, request.mesh) for run in kept]),
        tags=each_apart(leaves) if request.options.unroll else None,
    )
    boundaries, cuts = model.boundaries, [stop - 1 for _, stop in bounds[:-1]]
    return Step(
        spec=spec,
        model=model,
        functions=layer_functions(model, spec),
        forwards=spread(forwards),
        layers=spread(layers),
        mergings=spread([make_merging(*call, spec.merge, splits) for call in calls]),
        storages={name: layout.storage for name, layout in plan.layouts.items()},
        residuals=residuals,
        activations=make_boundaries(boundaries, cuts),
        cotangents=make_boundaries([list(filter(is_float, leaves)) for leaves in boundaries], cuts),
        ranges=make_ranges(model, bounds),
        table=table,
    )
