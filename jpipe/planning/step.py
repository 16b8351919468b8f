"""A step as plain data: which layers each stage runs, where everything lies, and when it happens.

`make_step` puts together what the other folders decide (groups of equal layers, cuts, schedule, remat) for the shapes
of one micro-batch. The executor then only follows it. Shapes are in the letters of ARCHITECTURE.md: K stages, V chunks,
S virtual stages, M micro-batches, G groups, T ticks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import jax
import numpy as np

from jpipe.jax.trees import is_float
from jpipe.memory.storage import Boundaries, Storage, make_boundaries
from jpipe.model.groups import Model, role_of
from jpipe.model.layer_function import LayerFunction
from jpipe.model.loss import TracedLoss
from jpipe.model.merging import Merging, make_merging
from jpipe.model.traced_layer import DeviceForward, DeviceLayer, TracedLayer, partition_once, trace_forward
from jpipe.partitioner.conversions import convert, sent_in
from jpipe.partitioner.shardings import PARTIAL, Axis, Sharding
from jpipe.planning.costs import warn_of_unsplit
from jpipe.planning.ends import Ends, as_they_lie, check_end, make_shared_ends
from jpipe.planning.kept import KeptStorage, lay_out_rows
from jpipe.planning.layer_loops import IdleWork, LayerRanges, make_ranges, plan_idle_work
from jpipe.planning.plan import Plan, whole_batch
from jpipe.processes.progress import warn_once
from jpipe.schedules.schedule import Schedule
from jpipe.schedules.ticks import TickTable
from jpipe.types import Leaf, Shapes


class GradientSums(NamedTuple):
    """How the sums of gradients lie: partial along some mesh axes until the end of a step.

    A gradient may be left partial along axes that don't split its parameter, of which it is a sum over parts of the
    batch or of the sequence: then it is added up once a step, and not for each micro-batch. Gradients that are added up
    in one buffer have to be alike, so that where some are partial along an axis, the others are made so: the first
    device has the gradient, the others zeros.

    Attributes:
      axes: what arrays are split over.
      partial: by buffer, for each of the axes whether the leaves in it are partial along it.
    """

    axes: tuple[Axis, ...]
    partial: dict[str, tuple[bool, ...]]

    @property
    def partial_along(self) -> dict[str, tuple[str, ...]]:
        """The mesh axes along which each buffer is partial."""
        names = lambda flags: tuple(n for axis, yes in zip(self.axes, flags, strict=True) if yes for n in axis.names)
        return {buffer: names(flags) for buffer, flags in self.partial.items()}

    def converted(
        self, buffers: Sequence[str], gradients: Sequence[Leaf | None], now: Sequence[Sharding]
    ) -> list[Leaf | None]:
        """A layer's gradients, those that there are, which lie as `now` says, as the sums in these buffers lie."""

        def as_sum(name: str, leaf: Leaf, at: Sharding) -> Leaf:
            wanted = tuple(PARTIAL if yes else s for yes, s in zip(self.partial[name], at, strict=True))
            return convert(leaf, self.axes, at, wanted)

        lying = zip(buffers, gradients, [at[: len(self.axes)] for at in now], strict=True)
        return [None if leaf is None else as_sum(name, leaf, at) for name, leaf, at in lying]


def make_gradient_sums(
    model: Model, layers: Sequence[DeviceLayer], storage: Storage, axes: tuple[Axis, ...]
) -> GradientSums:
    """Decides how the sums lie, by how the layers of each group give their gradients; empty without layers."""
    partial: dict[str, tuple[bool, ...]] = {}
    for group, layer in zip(model.groups, layers, strict=False):
        buffers = () if group.variable_set is None else storage.record_types[group.variable_set].buffers
        for name, own in zip(buffers, layer.gradients_at, strict=True):
            # All leaves of a buffer are split alike, so that they differ in nothing else.
            flags = partial.get(name, (False,) * len(axes))
            # Ends that all stages compute together have a last axis, `stage`, along which nothing is partial.
            partial[name] = tuple(yes or along == PARTIAL for yes, along in zip(flags, own, strict=False))
    return GradientSums(axes, partial)


@dataclass(frozen=True, eq=False)
class Step:
    """One step of training, or forward only.

    Attributes:
      plan: the pipeline's.
      schedule: the order of actions.
      model: the layers.
      functions: what the layers of each group compute.
      forwards: for each of the G groups, its forward in an action F, as one device runs it: that of `layers` if
        residuals are stored, else one that keeps nothing.
      layers: forward with residuals and backward of each group, as one device runs them; empty if forward only.
      mergings: how each group's state is merged over micro-batches; empty if forward only.
      stores_residuals: whether forward actions leave residuals for backward ones: in training, unless remat keeps
        inputs in their place.
      gradient_sums: how the sums of gradients lie.
      kept: the places of residuals, and of what else actions keep; none if forward only.
      activations: the format of activations at the boundaries.
      cotangents: the format of their cotangents.
      ranges: which layers each virtual stage runs.
      idle_work: the layers that idle stages compute along; none on CPUs, and on TPUs only where layers send.
      table: when each action runs, T ticks of K stages.
      ends: how the first and the last layer run.
      outputs_step: the step forward only that gives the outputs of which the loss is computed at once
        (`TracedLoss.at_once`); None if micro-batches have parts of the loss.
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
    kept: KeptStorage
    activations: Boundaries
    cotangents: Boundaries
    ranges: LayerRanges
    idle_work: IdleWork
    table: TickTable
    ends: Ends
    outputs_step: Step | None = None

    @property
    def loss(self) -> TracedLoss | None:
        """The loss that follows the last layer; None in a step that gives the model's outputs (`apply`, generation)."""
        return self.functions[self.model.last].loss

    @property
    def batch(self) -> Shapes:
        """The shapes of a batch, `[B, ...]`."""
        return whole_batch(self.model, self.schedule.num_microbatches)

    @property
    def storages(self) -> dict[str, Storage]:
        """The places of the variables at work, within a step, by collection.

        At rest, between steps, they lie as `plan.layouts` says.
        """
        return {name: layout.storage for name, layout in self.plan.at_work.items()}

    def collections(self, *roles: str) -> list[str]:
        """The collections of variables that have one of these roles (`groups.role_of`)."""
        return [name for name in self.plan.layouts if role_of(name, self.plan.model.groups[0].rules) in roles]

    def groups_in(self, kind: str) -> list[int]:
        """The groups with layers on virtual stages that have actions of a kind: others never run in such a one."""
        place, ranges = self.schedule.placement, self.ranges
        kinds = kind + "B" * (kind in "IW" and self.table.joins_parts)
        stages = {place.virtual_stage(k, action.chunk) for k, action in self.schedule.placed if action.kind in kinds}
        lies = np.any(ranges.stop > ranges.start, axis=1)  # [S, G]
        return np.flatnonzero(lies[sorted(stages)].any(axis=0)).tolist()

    @property
    def outputs(self) -> list[jax.ShapeDtypeStruct]:
        """The last layer's results for a micro-batch, as one device has them: outputs, or the sums of the loss."""
        return self.forwards[self.model.last].results.outputs

    @property
    def outputs_at(self) -> list[Sharding]:
        """How the leaves of `outputs` lie on the devices of the last stage."""
        # If all stages compute the last layer together, its shardings have one more entry, the last, for `stage`; it is
        # left out.
        lying = self.forwards[self.model.last].results_at[: len(self.outputs)]
        return [at[: len(self.model.axes)] for at in lying]

    def described(self) -> str:
        """How much there is to compile, in words."""
        schedule = self.schedule
        chunks = f"V={schedule.num_chunks}, " * (schedule.num_chunks > 1)
        sizes = f"K={schedule.num_stages}, {chunks}M={schedule.num_microbatches}"
        return f"{self.model.described()}, {schedule.name}, {sizes}"


def make_step(
    plan: Plan,
    model: Model,
    schedule: Schedule,
    functions: Sequence[LayerFunction],
    trained: Sequence[TracedLayer] = (),
    known: dict | None = None,
    *,
    idles_work: bool = True,
    outputs: Step | None = None,
) -> Step:
    """Lays out a step for the shapes of one micro-batch.

    Args:
      plan: cuts and layout.
      model: the layers, traced at these shapes.
      schedule: the order of actions.
      functions: what the layers of each group compute.
      trained: their forward and backward, in the same order; empty for a step without backward.
      known: what devices run of layers, each made once for all steps that have it; default: nothing is there yet.
      idles_work: whether idle stages may compute along (`jpipe.planning.layer_loops`), as they do but on CPUs.
      outputs: the step that gives the outputs of which the loss is computed at once.

    Raises:
      ValueError: as `check_end` and `make_merging`.

    Warns:
      UserWarning: as `warn_of_unsplit`.
    """
    request, bounds, known = plan.request, plan.partition.bounds, {} if known is None else known
    splits, stores_residuals = request.splits, schedule.trains and not request.remat.keep_inputs
    crossed, over_stages = [stop - 1 for _, stop in bounds[:-1]], request.shares_ends
    if over_stages:
        functions, trained = as_they_lie(model, plan.layouts, functions, trained)
        # Virtual stages run layers 1 to N-2, and keep nothing of the ends. One with an end alone passes its input on.
        bounds = [(max(start, 1), max(1, min(stop, model.num_layers - 1))) for start, stop in bounds]
    over = lambda g: replace(splits, over_stages=over_stages and g in (0, model.last))
    layers: list[DeviceLayer] = []
    for g, one in enumerate(trained):
        layer = partition_once(one, over(g), known)
        layers.append(layer.in_two_parts if schedule.splits else layer)
        if over(g).over_stages:
            check_end(one.function.group, layers[g])  # at once: to partition the others takes time
    warn_of_unsplit(trained, layers)
    alone = [] if stores_residuals else [(function, over(g)) for g, function in enumerate(functions)]
    known |= {pair: trace_forward(*pair) for pair in alone if pair not in known}
    forwards = [layer.forward for layer in layers] if stores_residuals else [known[pair] for pair in alone]
    ranges = make_ranges(model, bounds)
    along = idles_work and not splits.on_cpu
    idle_work = plan_idle_work(model, forwards, layers, ranges, schedule.num_chunks, splits) if along else IdleWork()
    table, kept = lay_out_rows(request, model, schedule, bounds, (trained, layers), along=bool(idle_work.trips))
    step = Step(
        plan=plan,
        schedule=schedule,
        model=model,
        functions=tuple(functions),
        forwards=tuple(forwards),
        layers=tuple(layers),
        mergings=tuple(make_merging(layer.function, schedule.num_microbatches, splits) for layer in trained),
        stores_residuals=stores_residuals,
        gradient_sums=make_gradient_sums(model, layers, plan.at_work["params"].storage, splits.axes),
        kept=kept,
        activations=make_boundaries(model.boundaries, crossed),
        cotangents=make_boundaries([list(filter(is_float, leaves)) for leaves in model.boundaries], crossed),
        ranges=ranges,
        idle_work=idle_work,
        table=table,
        ends=make_shared_ends(model, schedule, table, keep_inputs=request.remat.keep_inputs) if over_stages else Ends(),
        outputs_step=outputs,
    )
    _warn_of_skipped(step)
    return step


def _warn_of_skipped(step: Step) -> None:
    """Warns, once, of each group of layers that send in a loop that other stages skip.

    On CPUs and GPUs devices know who takes part.
    """
    splits, table = step.plan.request.splits, step.table
    if splits.on_cpu or splits.on_gpu or step.schedule.num_stages == 1:
        return
    slots = product(table.runs, enumerate(table.slots))
    of_kinds = any(slot.kind[run.start : run.stop].any() and not run.together[i] for run, (i, slot) in slots)
    for g, (group, layer) in enumerate(zip(step.model.groups, step.layers, strict=False)):
        why = "actions of several kinds share a slot of the schedule" if of_kinds else ""
        if g not in step.idle_work.trips:
            why = "stages have unequally many; use equal stages, or ends='shared' for the first and the last layer"
        jaxprs = layer.forward.jaxpr.jaxpr, layer.backward_jaxpr.jaxpr
        sent = [one for jaxpr in jaxprs for one in sent_in(jaxpr, splits.mesh.shape)]
        if why and sent and step.ranges.most[g]:
            where = f"{', '.join(sent[0].axes)} ({sent[0].line or 'of no line'})"
            warn_once(
                f"{group.in_words}: {sent[0].collective} over {where} lies in a loop that other stages skip: {why}. "
                "A device that waits there for other stages' would hang"
            )
