"""The executor: one scan over ticks, inside one `shard_map` over the stages.

It follows the tick table and knows no schedule by name. In every slot a device runs the action that its column of the
table says, or nothing. What it leaves at its boundaries crosses by `ppermute`, the only collective between stages
inside of the loop, and is written into the rows that the table gives it. It crosses while the next slot runs, unless
that one may need it: where a tick has a slot for each kind, forwards send beside backwards and backwards beside
forwards.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jpipe.execution.program import Program
from jpipe.execution.stages import Carry, Gather, Stage
from jpipe.jax_tools.dtypes import accumulator_dtype
from jpipe.jax_tools.indexing import put_row, take_row
from jpipe.jax_tools.loops import anchor, when
from jpipe.memory.storage import Row
from jpipe.schedules.actions import ACTION_KINDS
from jpipe.schedules.ticks import SlotTable, crosses_beside
from jpipe.sharding.meshes import AXIS
from jpipe.sharding.shardings import PARTIAL


def run_forward(program: Program, stage: Stage) -> list[Any]:
    """Forward only, on one device of a `shard_map`.

    Returns:
      The leaves of the outputs, `[M, ...]`, or the sums [loss_sum, weight_sum, ...], on all stages.
    """
    carry = _initial(program)
    if program.final.loss_fn is None:
        shape = (program.schedule.num_microbatches,)
        carry["outputs"] = [jnp.zeros(shape + leaf.shape, leaf.dtype) for leaf in program.outputs]
        return list(map(_from_last_stage, _run_ticks(program, stage, carry)["outputs"]))
    carry["loss"] = _no_loss(program)
    return _total_loss(program, _run_ticks(program, stage, carry)["loss"])


def run_training(program: Program, stage: Stage, grads: Any) -> tuple[list[Any], dict[str, Any], Any]:
    """Forward and backward, on one device of a `shard_map`.

    Args:
      program: a program with backward actions.
      stage: this device.
      grads: zero buffers to add up gradients in.

    Returns:
      (sums, new state by collection, gradients): the sums of the loss on all stages, the rest this stage's own buffers;
      gradients as sums over the device's own examples, not divided by the weight yet.
    """
    assert program.residuals is not None
    carry = _initial(program)
    carry["loss"] = _no_loss(program)
    carry["grads"] = grads
    carry["updates"] = {name: _accumulators(stage.variables[name]) for name in program.storages if name != "params"}
    carry["residuals"] = program.residuals.empty()
    carry["dx"] = program.cotangents.empty()
    carry["shared"] = {
        home: [jnp.zeros(leaf.shape, accumulator_dtype(leaf.dtype)) for leaf in leaves]
        for home, leaves in stage.shared.items()
    }
    carry["gradients"] = _rows(program.cotangents.crossing(carry["dx"]), program.table.rows_written("cotangent"))
    carry = _run_ticks(program, stage, carry)
    grads = _gather_shared(program, stage, carry["grads"], carry["shared"])
    return _total_loss(program, carry["loss"]), stage.merged_state(carry["updates"]), grads


def _accumulators(buffers: Any) -> Any:
    """Zeros to sum up values like these in."""
    return {name: jnp.zeros(array.shape, accumulator_dtype(array.dtype)) for name, array in buffers.items()}


def _total_loss(program: Program, sums: list[Any]) -> list[Any]:
    """The sums of the last stage's devices, on all devices."""
    at = zip(sums, program.outputs_at, strict=True)
    partial_over = lambda s: [axis.names for p, axis in zip(s, program.model.axes, strict=True) if p == PARTIAL]
    return [jax.lax.psum(leaf, (AXIS, *itertools.chain(*partial_over(sharding)))) for leaf, sharding in at]


def send_shared(program: Program, variables: dict[str, Any], device: Any, gather: Gather) -> dict[int, list[Any]]:
    """Shared parameters from their homes to all stages, by home; with the data axes gathered."""
    storage = program.storages["params"]
    found = {}
    for home in range(len(program.model.kinds), len(storage.shelves)):
        mine = storage.shelves[home].cells[0] == device
        leaves = gather(home, storage.read(variables["params"], home, 0))
        found[home] = [jax.lax.psum(jnp.where(mine, leaf, jnp.zeros_like(leaf)), AXIS) for leaf in leaves]
    return found


def _gather_shared(program: Program, stage: Stage, grads: Any, sums: dict[int, list[Any]]) -> Any:
    """Adds up the stages' gradients of shared parameters, at their homes."""
    storage = program.storages["params"]
    for home, leaves in sums.items():
        total = [jax.lax.psum(leaf, AXIS) for leaf in leaves]
        mine = storage.shelves[home].cells[0] == stage.device
        add = lambda i, buffers, home=home, total=total: (i, storage.add(buffers, home, 0, total))
        grads = when(mine, add, grads)
    return grads


def _initial(program: Program) -> Carry:
    x = program.carrier.empty()
    return {"x": x, "activations": _rows(program.carrier.crossing(x), program.table.rows_written("activation"))}


def _rows(tree: Any, count: int) -> Any:
    return jax.tree.map(lambda leaf: jax.lax.empty((count, *leaf.shape), leaf.dtype), tree)


def _no_loss(program: Program) -> list[Any]:
    return [jnp.zeros((), accumulator_dtype(leaf.dtype)) for leaf in program.outputs]


def _from_last_stage(leaf: Any) -> Any:
    """A value that is zero on all stages but the last, on all stages."""
    if leaf.dtype == jnp.bool_:
        return _from_last_stage(leaf.astype(jnp.int8)).astype(jnp.bool_)
    return jax.lax.psum(leaf, AXIS)


def _run_ticks(program: Program, stage: Stage, carry: Carry) -> Carry:
    slots = program.table.slots
    kinds = [slot.kinds for slot in slots]
    table = jnp.asarray([[getattr(slot, name) for name in _COLUMNS] for slot in slots])
    mine = jnp.moveaxis(take_row(jnp.moveaxis(table, -1, 0), stage.device), -1, 0)

    def tick(carry: Carry, row: Any) -> tuple[Carry, None]:
        for i, slot in enumerate(slots):
            cell = {name: row[i, j] for j, name in enumerate(_COLUMNS)}
            before = [kind for kind in slots[i - 1].kinds if crosses_beside(kinds, kind, i - 1)]
            crossing = {kind: _send(program, kind, carry) for kind in before if _arrives(slot, kind)}
            for kind in slot.kinds:
                action = partial(_act, program, stage, kind, cell)
                with jax.named_scope(kind):
                    carry = when(_active(slot, kind, cell), action, carry)
            now = [kind for kind in slot.kinds if not crosses_beside(kinds, kind, i)]
            crossing |= {kind: _send(program, kind, carry) for kind in now if _arrives(slot, kind)}
            for kind, values in crossing.items():
                carry = _receive(kind, cell, values, carry)
        return carry, None

    with jax.named_scope("ticks"):
        return jax.lax.scan(tick, carry, mine)[0]


def _act(program: Program, stage: Stage, kind: str, cell: dict[str, Any], trip: Any, carry: Carry) -> tuple[Any, Carry]:
    cell, trip = anchor(cell, trip)
    return trip, _ACTIONS[kind](program, stage, cell, carry)


_COLUMNS = ("kind", "microbatch", "chunk", "activation", "cotangent", "residual", "activation_in", "cotangent_in")


def _active(slot: SlotTable, kind: str, cell: dict[str, Any]) -> Any:
    """Whether this device does an action of `kind` now: a Python bool where that never changes."""
    code = 1 + slot.kinds.index(kind)
    if (slot.kind == code).all():
        return True
    return cell["kind"] == code


def _virtual_stage(program: Program, stage: Stage, cell: dict[str, Any]) -> Any:
    if program.route.start.shape[0] == 1:
        return 0
    return cell["chunk"] * program.schedule.num_stages + stage.device


def _forward(program: Program, stage: Stage, cell: dict[str, Any], carry: Carry) -> Carry:
    save = None if program.residuals is None or program.remat.keep_inputs else Row(cell["residual"], stage.device)
    keys = [name for name in ("residuals", "updates", "loss", "outputs") if name in carry]
    work = {name: carry[name] for name in keys} | {"x": _activation(program, cell, carry)}
    return carry | stage.forward(_virtual_stage(program, stage, cell), cell["microbatch"], work, save)


def _backward(program: Program, stage: Stage, cell: dict[str, Any], carry: Carry) -> Carry:
    virtual_stage, microbatch = _virtual_stage(program, stage, cell), cell["microbatch"]
    residuals, saved = carry["residuals"], Row(cell["residual"], stage.device)
    if program.remat.keep_inputs:
        saved = Row(0, stage.device)
        again = {"residuals": residuals, "x": _activation(program, cell, carry)}
        residuals = stage.forward(virtual_stage, microbatch, again, saved)["residuals"]
    dx = program.cotangents.arrived(carry["dx"], _row(carry["gradients"], cell["cotangent"]))
    work = {"grads": carry["grads"], "shared": carry["shared"], "dx": dx}
    work = stage.backward(virtual_stage, microbatch, work, residuals, saved)
    return carry | {"residuals": residuals} | work


_ACTIONS = {"F": _forward, "B": _backward}


def _activation(program: Program, cell: dict[str, Any], carry: Carry) -> Any:
    return program.carrier.arrived(carry["x"], _row(carry["activations"], cell["activation"]))


def _row(buffers: Any, row: Any) -> Any:
    """The boundary value in a row. The first virtual stage (row -1) has none, and doesn't look at what it gets."""

    def take(buffer: Any) -> Any:
        if buffer.shape[0] == 0:  # nothing arrives anywhere
            return jax.lax.empty(buffer.shape[1:], buffer.dtype)
        return take_row(buffer, jnp.maximum(row, 0))

    return jax.tree.map(take, buffers)


def _arrives(slot: SlotTable, kind: str) -> bool:
    """Whether anything that an action of `kind` left ever arrives in this slot."""
    flow = ACTION_KINDS[kind].flow
    return bool(flow) and bool((getattr(slot, _BUFFERS[flow][1]) >= 0).any())


def _send(program: Program, kind: str, carry: Carry) -> Any:
    """What the neighbours left at the boundary towards this stage, after an action of `kind`."""
    flow = ACTION_KINDS[kind].flow
    sent = program.carrier.crossing(carry["x"]) if flow > 0 else program.cotangents.crossing(carry["dx"])
    num_stages = program.schedule.num_stages
    pairs = [(k, (k + flow) % num_stages) for k in range(num_stages)]
    if program.schedule.num_chunks == 1:
        pairs = [(a, b) for a, b in pairs if b - a == flow]
    return jax.tree.map(lambda leaf: jax.lax.ppermute(leaf, AXIS, pairs), sent)


def _receive(kind: str, cell: dict[str, Any], values: Any, carry: Carry) -> Carry:
    """Writes what arrived into its row; where nothing did, the row holds nothing that anybody needs."""
    buffers, arrival = _BUFFERS[ACTION_KINDS[kind].flow]
    write = lambda buffer, leaf: put_row(buffer, leaf, cell[arrival])
    return carry | {buffers: jax.tree.map(write, carry[buffers], values)}


_BUFFERS = {1: ("activations", "activation_in"), -1: ("gradients", "cotangent_in")}
