"""The plan: what a pipeline decides once, from the shapes of the first batch that it sees.

Cuts and layout follow from the layers' costs and stay as they are, so that variables keep their meaning; batches of
other sizes are only compiled anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jpipe.layers.base import describe
from jpipe.memory.layout import Layout, make_layouts
from jpipe.mesh.splits import Splits
from jpipe.model.groups import Model, same_type, unrolled
from jpipe.planning.costs import BALANCES, MEASURES, Cost, Layer, layer_costs
from jpipe.planning.options import Options
from jpipe.planning.partition import Partition, partition, partition_from_counts
from jpipe.schedules.placement import Placement
from jpipe.terminal.notices import warn_user

Balance = str | tuple[int, ...] | tuple[float, ...]

TOLERATED_SHARE = 1.1
"""By how much a single layer may exceed the mean cost of a stage without a warning."""


@dataclass(frozen=True, eq=False)
class Plan:
    """Cuts and layout of a pipeline.

    Attributes:
      traced: the layers, traced at the first batch's shapes.
      partition: the cuts into K*V virtual stages, and the costs.
      costs: what each layer takes; empty if `balance` is "even" or gives costs.
      layouts: where the variables lie, by collection.
      batch: the shapes of one micro-batch `[b, ...]` of the first batch.
      mesh: the devices.
      splits: over which mesh axes besides `stage` weights and examples are split.
      options: how steps are carried out.
    """

    traced: Model
    partition: Partition
    costs: tuple[Cost, ...]
    layouts: dict[str, Layout]
    batch: Any
    mesh: Mesh
    splits: Splits
    options: Options

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """For each virtual stage its first layer and one past its last."""
        return layer_bounds(self.partition, self.traced.num_layers)

    @cached_property
    def model(self) -> Model:
        """The layers as the stages run them."""
        return self.arranged(self.traced)

    def arranged(self, model: Model) -> Model:
        """A model, traced at whatever shapes, as the stages run it."""
        return unrolled(model, self.bounds) if self.options.unroll else model

    def check_model(self, model: Model) -> None:
        """Checks that the model traced at other shapes still has the variables of this plan.

        Raises:
          ValueError: naming the first layer that differs.
        """
        for index in range(model.num_layers):
            old, new = self.traced.group_at(index), model.group_at(index)
            now, before = describe(model.called_with(index)), describe(self.traced.called_with(index))
            taken = f"{now} from this batch but took {before}"
            if not same_type(old.variables, new.variables):
                raise ValueError(
                    f"layer {index} ({old.layer.name}) takes {taken} at init, and its variables would be other ones: "
                    f"{describe(new.variables)}, not {describe(old.variables)}; give batches of the same features as "
                    "at init, or init a pipeline for these"
                )
            if old.indices != new.indices:
                raise ValueError(
                    f"layer {index} ({old.layer.name}) takes {taken} at init, so that it no longer equals the same "
                    f"layers as then ({list(old.indices)}, now {list(new.indices)}); cast the batch to the dtypes of "
                    "the first one"
                )


def as_balance(balance: Any, num_layers: int, num_parts: int) -> Balance:
    """Checks the user's balance as far as it can be without shapes.

    Raises:
      ValueError: an unknown name, counts that don't fit (length, sum, zeros), or costs that don't.
      TypeError: neither a name nor a sequence of numbers.
    """
    if isinstance(balance, str):
        if balance not in BALANCES:
            raise ValueError(
                f"balance={balance!r} is unknown; use one of {list(BALANCES)}, layer counts such as [4, 5, 5, 4], or "
                "one cost a layer as floats"
            )
        return balance
    if isinstance(balance, Partition):
        raise TypeError("balance is a Partition; pass its layer counts: balance=partition.counts")
    values: tuple[Any, ...] = (None,)
    if isinstance(balance, Iterable) and np.ndim(np.asarray(balance, object)) == 1:
        values = tuple(value.item() if hasattr(value, "item") else value for value in balance)
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in values):
        raise TypeError(f"balance={balance!r} is neither one of {list(BALANCES)} nor a list of layer counts or costs")
    is_costs = any(isinstance(value, float) for value in values)
    return _costs(values, num_layers) if is_costs else _counts(values, num_layers, num_parts)


def _costs(values: tuple, num_layers: int) -> tuple[float, ...]:
    if len(values) != num_layers:
        raise ValueError(
            f"balance has {len(values)} costs but there are {num_layers} layers; give one cost (a float) a layer"
        )
    bad = next((i for i, value in enumerate(values) if not 0 <= value < math.inf), None)
    if bad is not None:
        raise ValueError(f"balance[{bad}]={values[bad]}; a cost must be finite and at least 0")
    return tuple(map(float, values))


def _counts(values: tuple, num_layers: int, num_parts: int) -> tuple[int, ...]:
    if len(values) != num_parts:
        raise ValueError(
            f"balance={list(values)} has {len(values)} layer counts; give num_stages * num_chunks = {num_parts} of "
            "them (or one cost a layer, as floats)"
        )
    if any(value < 1 for value in values):
        raise ValueError(f"balance={list(values)} has a stage without layers; every count has to be at least 1")
    if sum(values) != num_layers:
        raise ValueError(f"balance={list(values)} sums to {sum(values)} but there are {num_layers} layers")
    return values


def cut_layers(
    balance: Balance, num_stages: int, num_chunks: int, measure: Callable[[str], Sequence[float]]
) -> Partition:
    """The cuts for a balance: by measured costs, by the user's costs, or where the user wants them.

    Args:
      balance: as checked by `as_balance`.
      num_stages: K.
      num_chunks: V.
      measure: name of a balance -> cost of each layer.
    """
    if isinstance(balance, str):
        return partition(measure(balance), num_stages, num_chunks=num_chunks)
    if all(isinstance(value, int) for value in balance):
        return partition_from_counts(list(map(int, balance)), measure("flops"), num_chunks)
    return partition(balance, num_stages, num_chunks=num_chunks)


def early_partition(balance: Balance, num_layers: int, num_stages: int, num_chunks: int) -> Partition | None:
    """The partition, or None if it depends on shapes.

    For layer counts every layer's cost is given as 1.0, since costs aren't known yet.
    """
    if isinstance(balance, str) and balance != "even":
        return None
    return cut_layers(balance, num_stages, num_chunks, lambda _: [1.0] * num_layers)


def make_plan(
    model: Model,
    trace_layers: Callable[[], Sequence[Layer]],
    batch: Any,
    *,
    balance: Balance,
    placement: Placement,
    mesh: Mesh,
    splits: Splits,
    options: Options,
) -> Plan:
    """Measures the layers, cuts the model and lays out its variables.

    Args:
      model: the layers, traced at the shapes of one micro-batch.
      trace_layers: traces forward and backward of their groups, if they have to be measured.
      batch: one micro-batch, a pytree of ShapeDtypeStructs.
      balance: as checked by `as_balance`.
      placement: on which stage each virtual stage is.
      mesh: the devices, K of them along `stage`.
      splits: what a stage's arrays are split over.
      options: how steps are carried out.

    Warns:
      UserWarning: a layer alone costs more than the share of a stage, and the model more than next to nothing; or it
        has a part whose FLOPs can't be counted.
    """
    warn = warn_user if isinstance(balance, str) else _ignore
    measured: list[Cost] = []

    def measure(name: str) -> list[float]:
        if name == "even":
            return [1.0] * model.num_layers
        of, unit, counts, _ = MEASURES[name]
        measured[:] = layer_costs(model, trace_layers(), unit, mesh=mesh, warn=warn if counts else _ignore)
        return list(map(of, measured))

    cuts = cut_layers(balance, placement.num_stages, placement.num_chunks, measure)
    negligible = MEASURES[balance].negligible if balance in MEASURES else 0.0
    if cuts.objective != "counts" and math.fsum(cuts.layer_costs) >= negligible:
        _warn_of_heavy_layers(model, cuts)
    bounds = layer_bounds(cuts, model.num_layers)
    arranged = unrolled(model, bounds) if options.unroll else model
    layouts = make_layouts(arranged, bounds, placement, mesh, apart=options.unroll)
    return Plan(model, cuts, tuple(measured), layouts, batch, mesh, splits, options)


def _ignore(message: str) -> None:
    """Where cuts are the user's own, costs are only shown."""
    del message


def _warn_of_heavy_layers(model: Model, cuts: Partition) -> None:
    """Warns of the costliest layer if it alone is over the share of a stage, so that no cut can balance the stages."""
    total, parts = math.fsum(cuts.layer_costs), len(cuts.costs)
    cost = max(cuts.layer_costs)
    if parts == 1 or cost * parts <= TOLERATED_SHARE * total:
        return
    index = cuts.layer_costs.index(cost)
    stages, fewer = ("virtual stages", "stages or chunks") if cuts.num_chunks > 1 else ("stages", "stages")
    warn_user(
        f"layer {index} ({model.group_at(index).layer.name}) alone takes {cost / total:.0%} of the model's cost, more "
        f"than the share of one of {parts} {stages} ({1 / parts:.0%}): the slowest takes {cuts.imbalance:.2f} times "
        f"the mean, and the others wait for it. Split the layer into several, or use fewer {fewer}"
    )


def layer_bounds(cuts: Partition, num_layers: int) -> list[tuple[int, int]]:
    """For each virtual stage its first layer and one past its last."""
    return list(pairwise([0, *cuts.cuts, num_layers]))
