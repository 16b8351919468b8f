"""`Plan`: the cuts and layouts that a pipeline decides once, from its first batch, with warnings of uneven cuts.

Cuts and layout follow from the layers' costs and stay as they are, so that variables keep their meaning; batches of
other sizes are only compiled anew.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import jax
import numpy as np

from jpipe.cutting.whole import CutModel
from jpipe.layers.base import AnyLayer, describe
from jpipe.memory.at_work import WorkLayout
from jpipe.memory.layout import Layout, StageTree, make_layouts
from jpipe.model.groups import WEIGHTS, Model, role_of, same_type
from jpipe.model.loss import TracedLoss
from jpipe.model.merging import check_collections
from jpipe.model.traced_layer import TracedLayer
from jpipe.planning.costs import NEGLIGIBLE, Cost, layer_costs
from jpipe.planning.partition import Partition, cut_layers, unit_of, unmeasured_costs
from jpipe.planning.request import Request
from jpipe.processes.progress import warn_user
from jpipe.types import PyTree, Shapes

TOLERATED_SHARE = 1.1
"""How many times the mean cost of a stage a single layer may have without a warning."""


@dataclass(frozen=True, eq=False)
class Plan:
    """Cuts and layout of a pipeline.

    Attributes:
      request: what they were made for.
      layers: those of the user's list, or the pieces of a model that is one module, for the first batch.
      model: the layers, traced at the shapes of one micro-batch of the first batch.
      loss: what follows them; None if the pipeline only applies and generates.
      partition: the cuts into K*V virtual stages (K stages of V chunks), and the costs.
      layouts: where the variables lie between steps, by collection.
      costs: what each layer takes; empty if `balance` is "even" or gives costs. Where it gives counts of layers, their
        FLOPs, to be shown.
      cut: of a model that is one module, where it is cut.
    """

    request: Request
    layers: tuple[AnyLayer, ...]
    model: Model
    loss: TracedLoss | None
    partition: Partition
    layouts: dict[str, Layout]
    costs: tuple[Cost, ...]
    cut: CutModel | None = None

    @property
    def batch(self) -> Shapes:
        """The shapes of the first batch."""
        return whole_batch(self.model, self.request.schedule.num_microbatches)

    @cached_property
    def at_work(self) -> dict[str, WorkLayout]:
        """Where they lie in a step, by collection."""
        splits, joins = self.request.splits, self.request.ends == "spread"
        gathers = splits.batch_axes if splits.gather == "step" else ()
        return {name: WorkLayout(layout, gathers, joins) for name, layout in self.layouts.items()}

    @cached_property
    def stage_times(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The times of a micro-batch's forward and backward on each stage, `[K]` each, all its chunks together.

        In FLOPs or measured seconds. Where no layer was looked at, because `balance` is "even" or gives costs, in the
        unit of these, a third of it forward. A stage takes at least a millionth of all, since the simulator's times
        are positive; a model without costs 1 and 2.
        """
        by_layer = [(cost.forward, cost.backward) for cost in self.costs]
        by_layer = by_layer or [(cost / 3, 2 * cost / 3) for cost in self.partition.layer_costs]
        if self.request.shares_ends:
            by_layer[0] = by_layer[-1] = (0.0, 0.0)
        times = np.zeros((self.request.schedule.num_stages, 2))
        for s, (start, stop) in enumerate(self.partition.bounds):
            times[self.request.schedule.placement.stage_of(s)] += np.sum(by_layer[start:stop], axis=0)
        forward, backward = np.maximum(times, times.sum() / 1e6 or [1.0, 2.0]).T.tolist()
        return tuple(forward), tuple(backward)

    @property
    def shapes(self) -> dict[str, StageTree]:
        """Shapes, dtypes and shardings of all variables, by collection."""
        return {name: layout.shapes for name, layout in self.layouts.items()}

    @cached_property
    def shardings(self) -> dict[str, PyTree]:
        """The shardings of all variables, by collection."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.shapes)

    def known_loss(self) -> TracedLoss:
        """The loss; without one a ValueError."""
        self.request.check_has_loss()
        assert self.loss is not None
        return self.loss

    def check_model(self, model: Model) -> None:
        """Checks that the model traced at other shapes still has the variables of this plan.

        Raises:
          ValueError: naming the first layer that differs.
        """
        for index in range(model.num_layers):
            old, new = self.model.group_at(index), model.group_at(index)
            now, before = describe(model.called_with(index)), describe(self.model.called_with(index))
            fault = f"layer {index} ({old.layer.name}) takes {now} from this batch but took {before} at init"
            if not same_type(old.variables, new.variables):
                raise ValueError(f"{fault}, and would have other variables; give batches of the same features")
            if old.indices != new.indices:
                raise ValueError(f"{fault}, and equals other layers than then; cast the batch to the first's dtypes")


def whole_batch(model: Model, count: int) -> Shapes:
    """The shapes of a batch of so many micro-batches."""
    whole = lambda a: jax.ShapeDtypeStruct((a.shape[0] * count, *a.shape[1:]), a.dtype)
    return jax.tree.map(whole, model.batch)


def make_plan(
    request: Request,
    layers: tuple[AnyLayer, ...],
    model: Model,
    loss: TracedLoss | None,
    trained: Sequence[TracedLayer],
    cut: CutModel | None = None,
) -> Plan:
    """Measures the layers and cuts the model; the layouts of its variables follow.

    Args:
      request: what the user asked for.
      layers: those of the list, or the pieces of one module.
      model: the same, traced at the shapes of one micro-batch.
      loss: what the loss function gives for it, if there is one.
      trained: forward and backward of each group, if layers are to be measured.
      cut: of a model that is one module, where it is cut.

    Raises:
      ValueError: the request has a rule for a collection that no layer has; or shared ends that have state.

    Warns:
      UserWarning: nothing is split over a mesh axis; a layer alone costs more than the
        share of a stage, and the model more than next to nothing; or it has a part whose FLOPs can't be counted.
    """
    check_collections(request.merge, model.groups)
    if request.shares_ends:
        _check_ends(model)
    _warn_of_idle_axes(request, model, loss)
    unit = unit_of(request.balance)
    costs = layer_costs(model, trained, unit, request.mesh) if unit else []
    measured = [cost.size if request.balance == "size" else cost.total for cost in costs]
    if measured and request.shares_ends:
        measured[0] = measured[-1] = 0.0  # which stage they are cut to makes no difference
    shared_out = measured or unmeasured_costs(request.balance, model.num_layers)
    partition = cut_layers(request.balance, shared_out, request.schedule)
    is_large = unit != "flops" or math.fsum(partition.layer_costs) >= NEGLIGIBLE
    if partition.objective != "counts" and is_large:  # where cuts are the user's own, costs are only shown
        _warn_of_heavy_layers(model, partition)
    layouts = make_layouts(model, partition.bounds, request.schedule.placement, request.mesh, ends=request.ends)
    if request.offload.optimizer:
        layouts["params"] = replace(layouts["params"], state_on_hosts=True)
    if cut is not None:
        layouts = {n: replace(layout, model_tree=cut.model_tree(n, layout.users)) for n, layout in layouts.items()}
    return Plan(request, layers, model, loss, partition, layouts, tuple(costs), cut)


def _check_ends(model: Model) -> None:
    """Checks that ends that all stages are to compute together have no state, before any variable is made."""
    for group in (model.groups[0], model.groups[model.last]):
        if changing := [name for name in group.variables if role_of(name, group.rules) not in WEIGHTS]:
            raise ValueError(f"ends='shared': {group.in_words} has {changing}, which changes; use ends='spread'")


def _warn_of_idle_axes(request: Request, model: Model, loss: TracedLoss | None) -> None:
    """Names the axes of the mesh along which all devices of a stage hold and compute the same."""
    specs = [spec for group in model.groups for of_collection in group.specs.values() for spec in of_collection]
    constrained = [group.constrained for group in model.groups] + ([] if loss is None else [loss.constrained])
    named = set().union(jax.tree.leaves(list(map(tuple, specs))), *constrained)
    for name in request.splits.idle(named):
        warn_user(
            f"nothing is split over the mesh axis {name!r}: its {request.mesh.shape[name]} devices compute the same. "
            "Name it in batch_axes= or layers' metadata (nn.with_partitioning, nn.logical_axis_rules), or leave it out"
        )


def _warn_of_heavy_layers(model: Model, partition: Partition) -> None:
    """Warns of the costliest layer if it alone is over the share of a stage, so that no cut can balance the stages."""
    total, parts = math.fsum(partition.layer_costs), len(partition.costs)
    cost = max(partition.layer_costs)
    if parts == 1 or cost * parts <= TOLERATED_SHARE * total:
        return
    index = partition.layer_costs.index(cost)
    stages = "virtual stages" if partition.num_chunks > 1 else "stages"
    warn_user(
        f"layer {index} ({model.group_at(index).layer.name}) alone takes {cost / total:.0%} of the model's cost, more "
        f"than the share of one of {parts} {stages} ({1 / parts:.0%}): the slowest takes {partition.imbalance:.2f} "
        f"times the mean. Split the layer, or use fewer {stages}"
    )
