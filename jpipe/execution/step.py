"""A step as plain data: which layers each stage runs, where everything lies, and when it happens.

`build_step` puts together what the other folders decide (groups of equal layers, cuts, schedule, remat) for the shapes
of one micro-batch. The executor then only follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import jax

from jpipe.execution.layer_ranges import LayerRanges, make_ranges
from jpipe.jax_tools.dtypes import is_float
from jpipe.jax_tools.memory_order import Order
from jpipe.memory.boundaries import Boundaries, make_boundaries
from jpipe.memory.storage import Storage, build_storage, each_apart
from jpipe.model.groups import Model, Shapes
from jpipe.model.layer_function import LayerFunction
from jpipe.model.loss import LossFn, metric_names
from jpipe.model.merging import Merging, make_merging
from jpipe.model.remat import Remat
from jpipe.model.traced_layer import DeviceForward, DeviceLayer, TracedLayer, partition_layer, trace_forward
from jpipe.partitioner.shardings import Sharding
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
    """

    key: jax.ShapeDtypeStruct | None
    loss_fn: LossFn | None
    remat: Remat
    schedule: Schedule
    merge: Mapping[str, str]


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
      residuals: the places of the residuals; None if forward only.
      activations: the format of activations at the boundaries.
      cotangents: the format of their cotangents.
      ranges: which layers each virtual stage runs.
      table: when each action runs.
      batch: the shapes of one micro-batch `[b, ...]`, whole (not a device's part).
    """

    spec: StepSpec
    model: Model
    functions: tuple[LayerFunction, ...]
    forwards: tuple[DeviceForward, ...]
    layers: tuple[DeviceLayer, ...]
    mergings: tuple[Merging, ...]
    storages: dict[str, Storage]
    residuals: Storage | None
    activations: Boundaries
    cotangents: Boundaries
    ranges: LayerRanges
    table: TickTable
    batch: Shapes

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

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of what the loss function gives besides the loss."""
        return metric_names(self.spec.loss_fn, self.model.outputs, self.batch)


def layer_functions(model: Model, spec: StepSpec) -> tuple[LayerFunction, ...]:
    """What the layers of each group compute in a step; the loss follows the last."""
    loss = lambda g: spec.loss_fn if g == model.last else None
    return tuple(LayerFunction(group, spec.key, spec.remat, loss(g)) for g, group in enumerate(model.groups))


def build_step(
    plan: Plan,
    model: Model,
    spec: StepSpec,
    batch: Shapes,
    *,
    traced: Sequence[TracedLayer],
    orders: Callable[[LayerFunction, DeviceForward], list[Order | None]],
) -> Step:
    """Lays out a step for the shapes of one micro-batch.

    Args:
      plan: cuts and layout.
      model: the layers as the stages run them, traced at these shapes.
      spec: what the step is for.
      batch: the shapes of one micro-batch `[b, ...]`, whole.
      traced: for each group its traced forward and backward; empty for a step without backward.
      orders: a layer and its forward -> in which order of dimensions each of its residuals lies in memory.
    """
    schedule, remat, bounds, splits = spec.schedule, spec.remat, plan.bounds, plan.splits
    functions = layer_functions(model, spec)
    arguments = [function.shapes(batch) for function in functions]

    def each(make: Callable[[int], T]) -> tuple[T, ...]:
        """For each group what `make` makes; groups that compute the same (an unrolled model has some) share a call."""
        made: dict[int, T] = {}
        for g in dict.fromkeys(model.traced_as):
            made[g] = make(g)
        return tuple(made[g] for g in model.traced_as)

    local = lambda g: partition_layer(traced[g], functions[g].shardings(arguments[g], splits))
    layers = each(local) if schedule.trains else ()
    alone = remat.keep_inputs or not schedule.trains  # a forward of which nothing is kept
    forwards = each(lambda g: trace_forward(functions[g], arguments[g], splits) if alone else layers[g].forward)
    table = lower(schedule, keep_inputs=remat.keep_inputs)
    residuals = None
    if schedule.trains:
        virtual_stage_of = [s for s, (start, stop) in enumerate(bounds) for _ in range(start, stop)]
        leaves = [layer.residuals for layer in layers]
        residuals = build_storage(
            leaves,
            [[virtual_stage_of[i] for i in group.indices] for group in model.groups],
            device_of=[schedule.placement.stage_of(s) for s in range(len(bounds))],
            # Where inputs are kept, residuals live within one backward action alone.
            rows=(1,) * schedule.num_stages if remat.keep_inputs else table.residual_rows,
            orders=each(lambda g: orders(functions[g], layers[g].forward)),
            tags=each_apart(leaves) if plan.options.unroll else None,
        )
    boundaries, cuts = model.boundaries, [stop - 1 for _, stop in bounds[:-1]]
    return Step(
        spec=spec,
        model=model,
        functions=functions,
        forwards=forwards,
        layers=layers,
        mergings=each(lambda g: make_merging(functions[g], arguments[g], spec.merge, splits)),
        storages={name: layout.storage for name, layout in plan.layouts.items()},
        residuals=residuals,
        activations=make_boundaries(boundaries, cuts),
        cotangents=make_boundaries([list(filter(is_float, leaves)) for leaves in boundaries], cuts),
        ranges=make_ranges(model, bounds),
        table=table,
        batch=batch,
    )
