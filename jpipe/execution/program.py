"""A compiled step as plain data: which layers each stage runs, where everything lies, and when it happens.

`build_program` puts together what the modules before it decide (kinds, cuts, schedule, remat) for the shapes of one
micro-batch. The executor then only follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jpipe.jax_tools.dtypes import is_float
from jpipe.jax_tools.memory_order import Order
from jpipe.memory.boundaries import Carrier, make_carrier
from jpipe.memory.storage import Storage, build_storage
from jpipe.model.groups import Sequential
from jpipe.model.layer_step import LayerStep, given_shapes
from jpipe.model.loss import metric_names
from jpipe.model.remat import Remat
from jpipe.model.state import Merging, make_merging
from jpipe.model.tape import Forward, Tape
from jpipe.schedules.schedule import Schedule
from jpipe.schedules.ticks import TickTable, lower
from jpipe.sharding.shardings import Sharding
from jpipe.sharding.splits import Splits


@dataclass(frozen=True, eq=False)
class Route:
    """Which layers each virtual stage runs, as loop bounds.

    A stage goes through the kinds in order and runs a range of members of each. Where a kind comes back after another
    (A, B, A, B), it takes as many rounds.

    Attributes:
      start: int32 `[S, R, C]`, the first member of kind c that virtual stage s runs in round r.
      stop: int32 `[S, R, C]`, one past the last.
    """

    start: np.ndarray
    stop: np.ndarray

    @property
    def num_rounds(self) -> np.ndarray:
        """int32 `[S]`: the rounds of each virtual stage."""
        used = np.any(self.stop > self.start, axis=-1)
        return used.shape[1] - np.argmax(used[:, ::-1], axis=1).astype(np.int32)


def make_route(model: Sequential, bounds: Sequence[tuple[int, int]]) -> Route:
    """The loop bounds for virtual stages of contiguous layers (ends included in the numbering)."""
    ordinal = [model.kinds[c].members.index(i) for i, c in enumerate(model.kind_of)]
    plans: list[list[dict[int, tuple[int, int]]]] = []
    for first, last in bounds:
        rounds: list[dict[int, tuple[int, int]]] = [{}]
        for i in range(first, last):
            c = model.kind_of[i]
            if i > first and model.kind_of[i - 1] == c:
                rounds[-1][c] = (rounds[-1][c][0], ordinal[i] + 1)
                continue
            if rounds[-1] and c <= max(rounds[-1]):
                rounds.append({})
            rounds[-1][c] = (ordinal[i], ordinal[i] + 1)
        plans.append(rounds)
    shape = (len(bounds), max(map(len, plans)), len(model.kinds))
    start, stop = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for s, rounds in enumerate(plans):
        for r, ranges in enumerate(rounds):
            for c, (a, b) in ranges.items():
                start[s, r, c], stop[s, r, c] = a, b
    return Route(start, stop)


@dataclass(frozen=True, eq=False)
class Program:
    """One compiled step.

    Attributes:
      model: the layers.
      steps: forward and backward of each kind.
      forwards: the forward of each kind in a forward action, as one device runs it.
      tapes: forward with residuals and backward of each kind; empty in a forward-only program.
      mergings: how each kind's state is merged over micro-batches.
      rates: functions that give how fast the running averages of each kind move, in training.
      storages: the places of the variables, by collection.
      residuals: the places of the residuals; None in a forward-only program.
      carrier: the common type of activations at the boundaries.
      cotangents: the common type of their cotangents.
      route: which layers each virtual stage runs.
      table: when.
      schedule: what `table` was lowered from.
      remat: what waits between forward and backward.
      outputs: the leaves of the final layer's outputs, or of the sums of the loss, as one device has them.
      outputs_at: how they lie on the devices of the last stage.
      metrics: the names of what the loss function gives besides the loss.
      batch: one micro-batch, a pytree of ShapeDtypeStructs.
    """

    model: Sequential
    steps: tuple[LayerStep, ...]
    forwards: tuple[Forward, ...]
    tapes: tuple[Tape, ...]
    mergings: tuple[Merging, ...]
    rates: tuple[Callable[[], list[Any]], ...]
    storages: dict[str, Storage]
    residuals: Storage | None
    carrier: Carrier
    cotangents: Carrier
    route: Route
    table: TickTable
    schedule: Schedule
    remat: Remat
    outputs: list[jax.ShapeDtypeStruct]
    outputs_at: list[Sharding]
    metrics: tuple[str, ...]
    batch: Any

    @property
    def final(self) -> LayerStep:
        """The step of the final layer."""
        return self.steps[self.model.kind_of[-1]]


@dataclass(frozen=True, eq=False)
class Purpose:
    """What a step is compiled for.

    Attributes:
      key: the type of the step's random key in training, None in evaluation.
      read_inputs: batch -> the model's inputs.
      loss_fn: the user's loss; None to return the model's outputs.
      remat: the rematerialisation mode.
      schedule: the order of actions.
      merge: the rules by collection that the user set.
    """

    key: jax.ShapeDtypeStruct | None
    read_inputs: Callable[[Any], Any]
    loss_fn: Callable[[Any, Any], Any] | None
    remat: Remat
    schedule: Schedule
    merge: Mapping[str, str]


def build_program(
    model: Sequential,
    purpose: Purpose,
    batch: Any,
    *,
    bounds: Sequence[tuple[int, int]],
    storages: dict[str, Storage],
    splits: Splits,
    orders_of: Callable[[int, Tape], list[Order | None]],
    apart: bool,
) -> Program:
    """Lays out a step for the shapes of one micro-batch.

    Args:
      model: the layers, traced at these shapes.
      purpose: what for.
      batch: one micro-batch, a pytree of ShapeDtypeStructs.
      bounds: for each virtual stage, its first layer and one past its last, ends included in the numbering.
      storages: the places of the variables, by collection.
      splits: what arrays are split over.
      orders_of: index of a kind and its tape -> how its residuals lie in memory.
      apart: each residual of a kind has a buffer of its own.
    """
    schedule, remat = purpose.schedule, purpose.remat

    def each(make: Callable[[int], Any]) -> tuple[Any, ...]:
        """What is made from the index of a kind, once for those that are the same."""
        made = {c: make(c) for c in dict.fromkeys(model.traced_as)}
        return tuple(made[c] for c in model.traced_as)

    steps = each(lambda c: LayerStep(model.kinds[c], purpose.key, purpose.read_inputs, purpose.loss_fn, remat))
    given = each(lambda c: given_shapes(steps[c], batch))
    tapes = each(lambda c: steps[c].tape(given[c], splits)) if schedule.trains else ()
    alone = remat.keep_inputs or not schedule.trains  # a forward that nothing is kept of
    forwards = each(lambda c: steps[c].traced(given[c], splits) if alone else tapes[c].forward)
    mergings = each(lambda c: make_merging(model.kinds[c], purpose.merge))
    means = lambda c: [mean for mean, _ in mergings[c].moments]
    rates = () if purpose.key is None else each(lambda c: steps[c].state_rates(given[c], means(c), splits))
    table = lower(schedule, keep_inputs=remat.keep_inputs)
    boundaries = model.boundaries
    floats = [[leaf for leaf in boundary if is_float(leaf)] for boundary in boundaries]
    cuts = [stop - 1 for _, stop in bounds[:-1]]
    residuals = None
    if schedule.trains:
        stage_of = [s for s, (first, last) in enumerate(bounds) for _ in range(first, last)]
        residuals = build_storage(
            [tape.stored for tape in tapes],
            [[stage_of[i] for i in kind.members] for kind in model.kinds],
            num_devices=schedule.num_stages,
            rows=(1,) * schedule.num_stages if remat.keep_inputs else table.residual_rows,
            orders=each(lambda c: orders_of(c, tapes[c])),
            apart=apart,
        )
    final = forwards[model.kind_of[-1]]
    return Program(
        model=model,
        steps=steps,
        forwards=forwards,
        tapes=tapes,
        mergings=mergings,
        rates=rates,
        storages=storages,
        residuals=residuals,
        carrier=make_carrier(boundaries, cuts),
        cotangents=make_carrier(floats, cuts),
        route=make_route(model, bounds),
        table=table,
        schedule=schedule,
        remat=remat,
        outputs=final.outcome.outputs,
        outputs_at=final.outcome_at[: len(final.outcome.outputs)],
        metrics=metric_names(purpose.loss_fn, model.kinds[model.kind_of[-1]].gives, batch),
        batch=batch,
    )
