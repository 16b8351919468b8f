"""A step as plain data: which layers each stage runs, where everything lies, and when it happens.

`build_step` puts together what the other folders decide (groups of equal layers, cuts, schedule, remat) for the shapes
of one micro-batch. The executor then only follows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import jax

from jpipe.execution.gradient_sums import GradientSums, make_gradient_sums
from jpipe.execution.layer_ranges import LayerRanges, make_ranges
from jpipe.execution.unsplit import warn_of_unsplit
from jpipe.jax_tools.dtypes import is_float
from jpipe.jax_tools.memory_order import result_orders
from jpipe.memory.boundaries import Boundaries, make_boundaries
from jpipe.memory.storage import Storage, build_storage, each_apart
from jpipe.model.groups import Model, role_of
from jpipe.model.layer_function import LayerFunction
from jpipe.model.loss import TracedLoss
from jpipe.model.merging import Merging, make_merging
from jpipe.model.traced_layer import DeviceForward, DeviceLayer, TracedLayer, partition_layer, trace_forward
from jpipe.partitioner.shardings import Sharding
from jpipe.planning.plan import Plan
from jpipe.schedules.schedule import Schedule
from jpipe.schedules.ticks import TickTable, lower

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Step:
    """One step of training, or forward only.

    Attributes:
      plan: the pipeline's.
      schedule: the order of actions.
      model: the layers.
      functions: what the layers of each group compute.
      forwards: the forward of each group in a forward action, as one device runs it.
      layers: forward with residuals and backward of each group, as one device runs them; empty if forward only.
      mergings: how each group's state is merged over micro-batches; empty if forward only.
      stores_residuals: whether forward actions leave residuals for backward ones.
      gradient_sums: how the sums of gradients lie.
      residuals: the places of the residuals; none if forward only.
      activations: the format of activations at the boundaries.
      cotangents: the format of their cotangents.
      ranges: which layers each virtual stage runs.
      table: when each action runs.
    """

    plan: Plan
    schedule: Schedule
    model: Model
    functions: tuple[LayerFunction, ...]
    forwards: tuple[DeviceForward, ...]
    layers: tuple[DeviceLayer, ...]
    mergings: tuple[Merging, ...]
    stores_residuals: bool
    gradient_sums: GradientSums
    residuals: Storage
    activations: Boundaries
    cotangents: Boundaries
    ranges: LayerRanges
    table: TickTable

    @property
    def loss(self) -> TracedLoss | None:
        """The loss, if it follows the last layer."""
        return self.functions[self.model.last].loss

    @property
    def storages(self) -> dict[str, Storage]:
        """The places of the variables, by collection."""
        return {name: layout.storage for name, layout in self.plan.layouts.items()}

    def collections(self, *roles: str) -> list[str]:
        """The collections of variables that have one of these roles (`groups.role_of`)."""
        return [name for name in self.plan.layouts if role_of(name, self.plan.request.rules) in roles]

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
        schedule = self.schedule
        chunks = f"V={schedule.num_chunks}, " * (schedule.num_chunks > 1)
        sizes = f"K={schedule.num_stages}, {chunks}M={schedule.num_microbatches}"
        return f"{self.model.described()}, {schedule.name}, {sizes}"


def build_step(
    plan: Plan,
    traced: Model,
    schedule: Schedule,
    functions: Sequence[LayerFunction],
    trained: Sequence[TracedLayer] = (),
) -> Step:
    """Lays out a step for the shapes of one micro-batch.

    Args:
      plan: cuts and layout.
      traced: the layers, traced at these shapes.
      schedule: the order of actions.
      functions: what the layers of each group compute.
      trained: their forward and backward; empty for a step without backward.
    """
    request, bounds = plan.request, plan.partition.bounds
    model, splits = plan.arranged(traced), request.splits
    stores_residuals = schedule.trains and not request.remat.keep_inputs

    def spread(made: Sequence[T]) -> tuple[T, ...]:
        """What was made for each group as traced, if anything was, for each group of `model`."""
        return tuple(made[g] for g in model.traced_as) if made else ()

    layers = [partition_layer(layer, splits) for layer in trained]
    warn_of_unsplit(trained, layers)
    kept = [layer.forward for layer in layers]
    table = lower(schedule, keep_inputs=request.remat.keep_inputs)
    virtual_stage_of = [s for s, (start, stop) in enumerate(bounds) for _ in range(start, stop)]
    leaves = spread([layer.residuals for layer in layers])
    residuals = build_storage(
        leaves,
        [[virtual_stage_of[i] for i in group.indices] for group in (model.groups if layers else ())],
        device_of=[schedule.placement.stage_of(s) for s in range(len(bounds))],
        # Where inputs are kept, residuals live within one backward action alone.
        rows=table.residual_rows if stores_residuals else (1,) * schedule.num_stages,
        orders=spread([result_orders(run.jaxpr, run.residuals_at, request.mesh) for run in kept]),
        tags=each_apart(leaves) if request.options.unroll else None,
    )
    boundaries, cuts = model.boundaries, [stop - 1 for _, stop in bounds[:-1]]
    return Step(
        plan=plan,
        schedule=schedule,
        model=model,
        functions=spread(functions),
        forwards=spread(kept if stores_residuals else [trace_forward(function, splits) for function in functions]),
        layers=spread(layers),
        mergings=spread([make_merging(layer.function, splits) for layer in trained]),
        stores_residuals=stores_residuals,
        gradient_sums=make_gradient_sums(model, spread(layers), plan.layouts["params"].storage, splits.axes),
        residuals=residuals,
        activations=make_boundaries(boundaries, cuts),
        cotangents=make_boundaries([list(filter(is_float, leaves)) for leaves in boundaries], cuts),
        ranges=make_ranges(model, bounds),
        table=table,
    )
