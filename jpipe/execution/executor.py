"""The executor: one scan over ticks, inside one `shard_map` over the stages.

It follows the tick table and knows no schedule by name. In every slot a device runs the action that its columns of the
table say, or nothing. What it leaves at its boundaries crosses by `ppermute`, the only collective between stages
inside of the loop, and is written into the rows that the table gives it. It crosses while the next slot runs, unless
that one may need it: where a tick has a slot for each kind, forwards send beside backwards and backwards beside
forwards.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jpipe.execution.shared import gather_shared
from jpipe.execution.stage import BackwardWork, ForwardWork, Stage
from jpipe.execution.step import Step
from jpipe.jax_tools.dtypes import accumulator_dtype
from jpipe.jax_tools.indexing import put_row, take_row
from jpipe.jax_tools.loops import tie, when
from jpipe.memory.boundaries import Boundaries
from jpipe.memory.buffers import Index
from jpipe.memory.storage import Buffers, Leaf, Row
from jpipe.schedules.actions import ACTION_KINDS
from jpipe.schedules.ticks import SlotTable, crosses_beside
from jpipe.sharding.meshes import AXIS
from jpipe.sharding.shardings import PARTIAL


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class InferenceCarry:
    """What a device carries from tick to tick, forward only.

    Attributes:
      activation: boundary buffers with what its last action left.
      waiting_activations: activations that have arrived, `[rows, ...]` each buffer.
      results: the sums of the loss so far, scalars; or the outputs of all micro-batches, `[M, b, ...]`.
    """

    activation: Buffers
    waiting_activations: Buffers
    results: list[jax.Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainingCarry:
    """What a device carries from tick to tick, in training.

    Attributes:
      activation: boundary buffers with what its last forward left.
      waiting_activations: activations that have arrived, `[rows, ...]` each buffer.
      cotangent: boundary buffers with what its last backward left.
      waiting_cotangents: cotangents that have arrived, `[rows, ...]` each buffer.
      residuals: buffers of residuals, a row for each micro-batch in flight.
      gradients: buffers with the sums of gradients so far, as variables are laid out.
      shared_gradients: for each shared set of variables, this stage's sums of its gradients so far.
      state: by collection, buffers with the totals of new state so far.
      loss: the sums of the loss so far, scalars; zero but on the last stage.
    """

    activation: Buffers
    waiting_activations: Buffers
    cotangent: Buffers
    waiting_cotangents: Buffers
    residuals: Buffers
    gradients: Buffers
    shared_gradients: dict[int, list[jax.Array]]
    state: dict[str, Buffers]
    loss: list[jax.Array]


Carry = TypeVar("Carry", InferenceCarry, TrainingCarry)


class Now(NamedTuple):
    """What the table says of this device in one slot of one tick, integer scalars: see `SlotTable`."""

    kind: Index
    microbatch: Index
    chunk: Index
    activation: Index
    cotangent: Index
    residual: Index
    activation_in: Index
    cotangent_in: Index


# --- the two programs -------------------------------------------------------------------------------------------------


def run_inference(step: Step, stage: Stage) -> list[jax.Array]:
    """Forward only, on one device of a `shard_map`.

    Returns:
      The leaves of the outputs, `[M, b, ...]`, or the sums [loss_sum, weight_sum, ...], on all stages.
    """
    loses = step.spec.loss_fn is not None
    shape = (step.num_microbatches,)
    results = _no_loss(step) if loses else [jnp.zeros(shape + leaf.shape, leaf.dtype) for leaf in step.outputs]
    activation = step.activations.empty()
    waiting = _rows(step.activations, activation, step.table.rows_written("activation"))
    results = _run_ticks(step, stage, {"F": _infer}, InferenceCarry(activation, waiting, results)).results
    return _total_loss(step, results) if loses else list(map(_from_last_stage, results))


def run_training(step: Step, stage: Stage, gradients: Buffers) -> tuple[list[jax.Array], dict[str, Buffers], Buffers]:
    """Forward and backward, on one device of a `shard_map`.

    Args:
      step: a step with backward actions.
      stage: this device.
      gradients: zero buffers to add up gradients in.

    Returns:
      (sums, new state by collection, gradients): the sums of the loss on all stages, the rest this stage's own buffers;
      gradients as sums over the device's own examples, not divided by the weight yet.
    """
    assert step.residuals is not None
    activation, cotangent = step.activations.empty(), step.cotangents.empty()
    carry = TrainingCarry(
        activation=activation,
        waiting_activations=_rows(step.activations, activation, step.table.rows_written("activation")),
        cotangent=cotangent,
        waiting_cotangents=_rows(step.cotangents, cotangent, step.table.rows_written("cotangent")),
        residuals=step.residuals.empty(),
        gradients=gradients,
        shared_gradients={v: list(map(_accumulator, leaves)) for v, leaves in stage.shared.items()},
        state={name: jax.tree.map(_accumulator, stage.variables[name]) for name in step.storages if name != "params"},
        loss=_no_loss(step),
    )
    carry = _run_ticks(step, stage, {"F": _forward, "B": _backward}, carry)
    gradients = gather_shared(step, stage, carry.gradients, carry.shared_gradients)
    return _total_loss(step, carry.loss), stage.merged_state(carry.state), gradients


def _rows(boundaries: Boundaries, buffers: Buffers, count: int) -> Buffers:
    """As many rows `[count, ...]` of what crosses a boundary, of any values."""
    return jax.tree.map(lambda a: jax.lax.empty((count, *a.shape), a.dtype), boundaries.crossing(buffers))


def _accumulator(array: Leaf) -> jax.Array:
    """Zeros to sum up values like these in."""
    return jnp.zeros(array.shape, accumulator_dtype(array.dtype))


def _no_loss(step: Step) -> list[jax.Array]:
    return [jnp.zeros((), accumulator_dtype(leaf.dtype)) for leaf in step.outputs]


def _total_loss(step: Step, sums: list[jax.Array]) -> list[jax.Array]:
    """The sums of the last stage's devices, on all devices."""
    pairs = zip(sums, step.outputs_at, strict=True)
    partial_over = lambda s: [axis.names for p, axis in zip(s, step.model.axes, strict=True) if p == PARTIAL]
    return [jax.lax.psum(leaf, (AXIS, *itertools.chain(*partial_over(sharding)))) for leaf, sharding in pairs]


def _from_last_stage(leaf: jax.Array) -> jax.Array:
    """A value that is zero on all stages but the last, on all stages."""
    if leaf.dtype == jnp.bool_:
        return _from_last_stage(leaf.astype(jnp.int8)).astype(jnp.bool_)
    return jax.lax.psum(leaf, AXIS)


# --- ticks ------------------------------------------------------------------------------------------------------------

Action = Callable[[Step, Stage, Now, Carry], Carry]


def _run_ticks(step: Step, stage: Stage, actions: Mapping[str, Action], carry: Carry) -> Carry:
    """The carry after all ticks, in which the kinds of actions are carried out by these functions."""
    slots = step.table.slots
    kinds = [slot.kinds for slot in slots]
    table = jnp.asarray([[getattr(slot, name) for name in Now._fields] for slot in slots])  # [slots, columns, T, K]
    mine = jnp.moveaxis(take_row(jnp.moveaxis(table, -1, 0), stage.device), -1, 0)  # [T, slots, columns]

    def tick(carry: Carry, row: jax.Array) -> tuple[Carry, None]:
        for i, slot in enumerate(slots):
            now = Now(*(row[i, j] for j in range(len(Now._fields))))
            before = [kind for kind in slots[i - 1].kinds if crosses_beside(kinds, kind, i - 1)]
            crossing = {kind: _send(step, kind, carry) for kind in before if _arrives(slot, kind)}
            for kind in slot.kinds:
                action = partial(_act, step, stage, actions[kind], now)
                with jax.named_scope(kind):
                    carry = when(_is_active(slot, kind, now), action, carry)
            after = [kind for kind in slot.kinds if not crosses_beside(kinds, kind, i)]
            crossing |= {kind: _send(step, kind, carry) for kind in after if _arrives(slot, kind)}
            for kind, values in crossing.items():
                carry = _receive(kind, now, values, carry)
        return carry, None

    with jax.named_scope("ticks"):
        return jax.lax.scan(tick, carry, mine)[0]


def _is_active(slot: SlotTable, kind: str, now: Now) -> Any:
    """Whether this device does an action of a kind in this slot: a Python bool where that never changes."""
    code = 1 + slot.kinds.index(kind)
    if (slot.kind == code).all():
        return True
    return now.kind == code


def _arrives(slot: SlotTable, kind: str) -> bool:
    """Whether anything that an action of a kind left ever arrives in this slot."""
    column = {0: None, 1: slot.activation_in, -1: slot.cotangent_in}[ACTION_KINDS[kind].flow]
    return column is not None and bool((column >= 0).any())


def _send(step: Step, kind: str, carry: Any) -> Buffers:
    """What the neighbours left at the boundary towards this stage, after an action of a kind."""
    flow = ACTION_KINDS[kind].flow
    sent = step.activations.crossing(carry.activation) if flow > 0 else step.cotangents.crossing(carry.cotangent)
    hops = step.spec.schedule.placement.hops(flow)
    return jax.tree.map(lambda leaf: jax.lax.ppermute(leaf, AXIS, hops), sent)


def _receive(kind: str, now: Now, values: Buffers, carry: Carry) -> Carry:
    """The carry with what arrived in its row; where nothing did, the row holds nothing that anybody needs."""
    write = lambda row: lambda buffer, leaf: put_row(buffer, leaf, row)
    if ACTION_KINDS[kind].flow > 0:
        waiting = jax.tree.map(write(now.activation_in), carry.waiting_activations, values)
        return replace(carry, waiting_activations=waiting)
    assert isinstance(carry, TrainingCarry)
    waiting = jax.tree.map(write(now.cotangent_in), carry.waiting_cotangents, values)
    return replace(carry, waiting_cotangents=waiting)


# --- actions ----------------------------------------------------------------------------------------------------------


def _act(step: Step, stage: Stage, action: Action, now: Now, trip: Index, carry: Carry) -> tuple[Index, Carry]:
    now, trip = tie(now, trip)
    return trip, action(step, stage, now, carry)


def _infer(step: Step, stage: Stage, now: Now, carry: InferenceCarry) -> InferenceCarry:
    activation = _arrived(step.activations, carry.activation, carry.waiting_activations, now.activation)
    activation, results = stage.infer(_virtual_stage(step, stage, now), now.microbatch, activation, carry.results)
    return replace(carry, activation=activation, results=results)


def _forward(step: Step, stage: Stage, now: Now, carry: TrainingCarry) -> TrainingCarry:
    row = None if step.spec.remat.keep_inputs else Row(now.residual, stage.device)
    activation = _arrived(step.activations, carry.activation, carry.waiting_activations, now.activation)
    work = ForwardWork(activation, carry.residuals, carry.state, carry.loss)
    work = stage.forward(_virtual_stage(step, stage, now), now.microbatch, work, row)
    return replace(carry, activation=work.activation, residuals=work.residuals, state=work.state, loss=work.loss)


def _backward(step: Step, stage: Stage, now: Now, carry: TrainingCarry) -> TrainingCarry:
    virtual_stage, residuals, row = _virtual_stage(step, stage, now), carry.residuals, Row(now.residual, stage.device)
    if step.spec.remat.keep_inputs:
        row = Row(0, stage.device)
        activation = _arrived(step.activations, carry.activation, carry.waiting_activations, now.activation)
        residuals = stage.recompute(virtual_stage, now.microbatch, activation, residuals)
    cotangent = _arrived(step.cotangents, carry.cotangent, carry.waiting_cotangents, now.cotangent)
    work = BackwardWork(cotangent, carry.gradients, carry.shared_gradients)
    work = stage.backward(virtual_stage, now.microbatch, work, residuals, row)
    return replace(
        carry,
        residuals=residuals,
        cotangent=work.cotangent,
        gradients=work.gradients,
        shared_gradients=work.shared_gradients,
    )


def _virtual_stage(step: Step, stage: Stage, now: Now) -> Index:
    """A Python integer if there is only one."""
    if step.ranges.num_virtual_stages == 1:
        return 0
    return step.spec.schedule.placement.virtual_stage(stage.device, now.chunk)


def _arrived(boundaries: Boundaries, buffers: Buffers, waiting: Buffers, row: Index) -> Buffers:
    """Boundary buffers with what waits in a row. At the chain's end (row -1) nothing does, and nobody looks at it."""

    def take(buffer: jax.Array) -> jax.Array:
        if buffer.shape[0] == 0:  # nothing arrives anywhere
            return jax.lax.empty(buffer.shape[1:], buffer.dtype)
        return take_row(buffer, jnp.maximum(row, 0))

    return boundaries.arrived(buffers, jax.tree.map(take, waiting))
