"""Runs a step on the devices: one scan over ticks, inside one `shard_map` over the stages.

It follows the tick table (`jpipe.schedules.ticks`) and knows no schedule by name. In each slot a device runs the action
that the table names for it, or nothing. Here is 1F1B with K=2 stages and M=2 micro-batches, slots for F and B:

    tick       0       1       2       3
    slot     F   B   F   B   F   B   F   B
    stage 0  F0  .   F1  .   .   B0  .   B1
    stage 1  .   .   F0  B0  F1  B1  .   .

The arrays that change are those of `TickCarry`. Each stage has its own:

- Tick 0. Stage 0 runs F0: it reads the batch, writes residuals into its row 0, and leaves an activation in
  `carry.forward.activation`. During the B slot that activation crosses to stage 1, which writes it into row 0 of
  `carry.waiting["activation"]` at the end of the slot.
- Tick 1. Stage 0 runs F1 (residuals into row 1). Stage 1 runs F0: it reads row 0 of its waiting activations, writes
  residuals, and adds the loss to `carry.forward.results`. Then stage 1 runs B0: it starts from the loss, reads the
  residuals, adds to `carry.backward.gradients`, and leaves a cotangent in `carry.backward.cotangent`. During this B
  slot F1's activation crosses. It takes row 0 on stage 1 again, since F0 has read that row.
- Tick 2. Stage 1 runs F1. During that F slot B0's cotangent crosses to stage 0, into row 0 of its
  `carry.waiting["cotangent"]`. In the B slot stage 0 runs B0 from that row, and stage 1 runs B1.
- Tick 3. B1's cotangent crosses during the F slot, in which no stage has an action. Stage 0 runs B1.

A value is sent by `ppermute` while the next slot computes, if that slot admits no action that receives along this flow
(`crosses_beside`). Else such an action may need the value, and it is sent at once, before that slot. All stages take
part in each `ppermute`, also those that have nothing to send: the table tells the receiver into which row to write, and
names an unused row where nothing of use arrives (or -1, no write, if values arrive by several routes in this slot).
With the schedule "v" all that arrives may be written by the transfer itself, since each route has a row of its own
(`arrival_rows` says when). After the ticks come `psum`s over the stages: of the loss or the outputs, and of the
gradients of shared weights.

A slot's action is a loop of one trip or none, and no `lax.cond`, because a `lax.cond` would copy the carry.
With `ends="shared"`, all stages compute the ends before and after slots; with `offload=`, rows move beside them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial, reduce
from operator import or_

import jax
import jax.numpy as jnp
import numpy as np

from jpipe.execution.before_ticks import loss_at_once
from jpipe.execution.stage import ACTIONS, BackwardWork, ForwardWork, Now, Stage, TickCarry, from_stage
from jpipe.execution.sweep import Counts, Job
from jpipe.jax.in_place import Carry, Index, put_row, take_row, when
from jpipe.jax.trees import accumulator_dtype, is_float
from jpipe.memory.layout import add_stage_axis
from jpipe.memory.storage import Buffers
from jpipe.model.groups import GRADIENT
from jpipe.partitioner.axes import AXIS
from jpipe.partitioner.shardings import PARTIAL
from jpipe.planning.ends import Turns
from jpipe.planning.kept import Kept
from jpipe.planning.step import Step
from jpipe.schedules.actions import FLOWS, crosses_beside
from jpipe.schedules.ticks import Run, SlotTable
from jpipe.types import Leaf, PyTree

Arrivals = dict[int, dict[int, Buffers]]
"""The values that arrive beside a slot or before it, by flow and route."""

SENT = {+1: "activation", -1: "cotangent"}
"""What is sent along each flow."""


# --- the two programs -------------------------------------------------------------------------------------------------


def run_inference(stage: Stage) -> list[jax.Array]:
    """Forward only, on one device of a `shard_map`.

    Returns:
      The leaves of the outputs, `[M, b, ...]`, or the sums [loss_sum, weight_sum, ...], on all stages.
    """
    step = stage.step
    if step.outputs_step is not None:
        return _with_loss_at_once(stage)[0]
    of_all = lambda leaf: jnp.zeros((step.schedule.num_microbatches, *leaf.shape), leaf.dtype)
    results = list(map(of_all if step.loss is None else _accumulator, step.outputs))
    forward = ForwardWork(activation=step.activations.empty(), kept={}, state={}, results=results)
    backward = BackwardWork(cotangent={}, gradients={}, shared_gradients={}, overwritten={})
    carry = _first_carry(step, forward, backward)
    for tick, entries in _scans(stage):
        with jax.named_scope("ticks"):
            carry = jax.lax.scan(tick, carry, entries)[0]
    results = carry.forward.results
    # Outputs are zero on all stages but the last. JAX sums bools as integers, so they are cast back.
    over_stages = lambda x: jax.lax.psum(x, AXIS).astype(x.dtype)
    return _total_loss(step, results) if step.loss is not None else list(map(over_stages, results))


def run_training(stage: Stage) -> tuple[list[jax.Array], dict[str, Buffers], Buffers]:
    """Forward and backward, on one device of a `shard_map`, in a step with backward actions.

    Returns:
      (sums, new state by collection, gradients): the sums of the loss on all stages, the rest this stage's own buffers
      `[1, ...]`, as they lie at rest.
    """
    (at_once, stage), step = _with_loss_at_once(stage), stage.step
    params = step.plan.at_work["params"]
    gradients = params.zeros(accumulator_dtype)
    activation, cotangent = step.activations.empty(), step.cotangents.empty()
    state = {name: jax.tree.map(_accumulator, stage.variables[name]) for name in step.collections("state")}
    lowest = lambda leaf: jnp.full(leaf.shape, -jnp.inf, accumulator_dtype(leaf.dtype))
    overwritten = {name: jax.tree.map(lowest, stage.variables[name]) for name in step.collections(GRADIENT)}
    # Of shared ends each stage adds gradients of its own part to `gradients` (`Stage.add_gradients`), so they need no
    # accumulator and no sum over stages.
    types = step.storages["params"].record_types  # of the parameters, of which there may be narrow copies alone
    zeros = lambda now, whole: jnp.zeros(now.shape, accumulator_dtype(whole.dtype))
    shared = {v: weights["params"] for v, weights in stage.shared.items() if v not in step.ends.sets}
    shared_gradients = {v: list(map(zeros, leaves, types[v].leaves)) for v, leaves in shared.items()}
    forward = ForwardWork(activation, step.kept.empty(), state, results=list(map(_accumulator, step.outputs)))
    carry = _first_carry(step, forward, BackwardWork(cotangent, gradients, shared_gradients, overwritten))
    for tick, entries in _scans(stage):
        with jax.named_scope("ticks"):
            carry = jax.lax.scan(tick, carry, entries)[0]
    if stage.only is not None:
        # The step is only timed. If it has no ticks, the carry is made of constants. The barrier hides that from the
        # compiler, which would drop the code after the ticks, though its time is to be measured.
        carry = jax.lax.optimization_barrier(carry)
    gradients = stage.summed_gradients(carry.backward)
    # A maximum starts from -inf. Where it is still -inf no layer owns the place: such places hold zeros.
    filled = lambda old, new: jnp.where(jnp.isneginf(new), 0, new).astype(old.dtype)
    new = {name: jax.tree.map(filled, stage.variables[name], tree) for name, tree in carry.backward.overwritten.items()}
    sums, new = at_once or _total_loss(step, carry.forward.results), stage.merged_state(carry.forward.state) | new
    with jax.named_scope("reduce"):
        gradients = params.reduced(gradients, step.gradient_sums.partial_along)
        gradients = {name: gradients[name].astype(a.dtype) for name, a in params.rest.storage.named_buffers}
    return sums, add_stage_axis(new), add_stage_axis(gradients)


def _with_loss_at_once(stage: Stage) -> tuple[list[jax.Array], Stage]:
    """(the sums of a loss that is computed at once, else none; the stage that knows its gradient at the outputs)."""
    if (forward := stage.step.outputs_step) is None:
        return [], stage
    outputs = run_inference(replace(stage, step=forward))
    sums, gradients = loss_at_once(stage.step, outputs, forward.outputs_at, stage.batch, stage.key)
    return sums, replace(stage, known=gradients)


def _accumulator(array: Leaf) -> jax.Array:
    """Zeros to sum up values like these in."""
    return jnp.zeros(array.shape, accumulator_dtype(array.dtype))


def _total_loss(step: Step, sums: list[jax.Array]) -> list[jax.Array]:
    """The sums of the loss over the last stage's devices, copied to all devices; on other stages `sums` are zero.

    Over an axis of the stage along which a sum is replicated, every device has it already.
    """
    totals = []
    for leaf, sharding in zip(sums, step.outputs_at, strict=True):
        partial_axes = [axis.names for p, axis in zip(sharding, step.model.axes, strict=True) if p == PARTIAL]
        totals.append(jax.lax.psum(leaf, (AXIS, *itertools.chain(*partial_axes))))
    return totals


# --- ticks ------------------------------------------------------------------------------------------------------------


def _first_carry(step: Step, forward: ForwardWork, backward: BackwardWork) -> TickCarry:
    """The carry before the first tick: nothing waits yet, so that waiting values, ends and hosts have any values."""
    crossing = {"activation": step.activations.crossing(forward.activation)}
    crossing["cotangent"] = step.cotangents.crossing(backward.cotangent) if step.schedule.trains else {}
    rows = lambda count, arrays: jax.tree.map(lambda a: jax.lax.empty((count, *a.shape), a.dtype), arrays)
    waiting = {name: [rows(len(one), crossing[name]) for one in step.table.waiting[name]] for name in crossing}
    away, from_first, from_last = step.kept.away, [], []
    if step.ends.turns:
        given, taken = (step.activations.record_types[i].leaves for i in (0, step.model.num_layers - 2))
        made = lambda leaves: [jax.lax.empty(leaf.shape, leaf.dtype) for leaf in leaves]
        from_first, from_last = made(given), made(filter(is_float, taken)) if step.schedule.trains else []
    back = {name: away[name].empty_row() for name in _returning(step, step.table.slots[-1])}
    host = {name: storage.empty_host() for name, storage in away.items()}
    return TickCarry(forward, backward, waiting, from_first, from_last, back=back, host=host)


def _scans(stage: Stage) -> Iterator[tuple[Callable[..., tuple[TickCarry, None]], PyTree]]:
    """Yields what is scanned, run by run: the function of a tick, and for all of them what `_run_tick` calls entries.

    With `stage.only` there is one run, of as many ticks as it has, in which stages idle where it is 0.
    """
    step, only, slots = stage.step, stage.only, stage.step.table.slots
    table, runs = jnp.asarray(list(map(jax.tree.leaves, slots))), step.table.runs  # [slots, columns, T, K]
    if only is not None:
        num_ticks = only.shape[1]
        table = table[:, :, :num_ticks].at[:, 0].multiply(only)
        runs = (Run(0, num_ticks, ("",) * len(slots)),)  # stages idle that have an action in the table
    mine = jnp.moveaxis(take_row(jnp.moveaxis(table, -1, 0), stage.device), -1, 0)  # [T, slots, columns]
    for run in runs:
        ticks = slice(run.start, run.stop)
        turns = [Turns(*(jnp.asarray(column[ticks]) for column in of_slot)) for of_slot in step.ends.turns]
        yield partial(_run_tick, stage, run), (mine[ticks], turns)


def _run_tick(
    stage: Stage, run: Run, carry: TickCarry, entries: tuple[jax.Array, list[Turns]]
) -> tuple[TickCarry, None]:
    """Runs the slots of a tick of this device.

    Args:
      stage: this device.
      run: the ticks to which this one belongs.
      carry: as the tick before left it.
      entries: this device's entries of the table, `[slots, columns]`; for each slot its `Turns` in this tick, scalars,
        the same on all stages, or none if each end runs on its own stage.
    """
    (columns, turns), slots = entries, stage.step.table.slots
    for i, slot in enumerate(slots):
        now = jax.tree.unflatten(jax.tree.structure(slot), [columns[i, j] for j in range(columns.shape[1])])
        # 1. What the slot before left is sent, where it may cross beside this slot's work. (Before the first slot that
        #    is the last one of the tick before, whose results are in the carry.)
        crossing = _crossing(stage, run, i - 1, carry, beside=True)
        coming, carry = _rows_back(stage, slot, now, carry)
        carry = carry._replace(from_first=_turn(stage, run, i, "enter", turns, carry.from_first))
        # 2. This slot's action: if not all stages compute it, a loop of no trip or one, since a `lax.cond` would copy
        #    the carry.
        for kind in run.together[i] or slot.kinds:
            codes = slot.codes(kind)
            with jax.named_scope(f"slot{i}"), jax.named_scope(kind):
                if run.together[i]:
                    carry = ACTIONS[kind](stage, _counts(run, slot, kind, now), now, carry)
                elif np.isin(slot.kind[run.start : run.stop], codes).any() or stage.only is not None:
                    carry = when(now.kind == codes[0], now, partial(ACTIONS[kind], stage, True), carry)
        for name in ("leave", "back"):
            carry = _turn(stage, run, i, name, turns, carry)
        if any(crossing.values()) and stage.step.model.axes:
            crossing, carry = _held(crossing, carry, together=bool(run.together[i]))
        crossing, carry = _send_rows(stage, slot, now, (coming, crossing), carry)
        # 3. What it left is sent at once, where the next slot admits an action that receives along its flow. No flow is
        #    in `crossing` already: the kinds that send along a flow also receive along it, so nothing of that flow
        #    crosses beside a slot that sends along it.
        crossing |= _crossing(stage, run, i, carry, beside=False)
        # 4. Arrivals are written last: the action has read its row by then, so they may take it.
        carry = _receive(stage, slot, now, crossing, carry)
    return carry, None


def _counts(run: Run, slot: SlotTable, kind: str, now: Now) -> Counts:
    """Whether what all stages compute together counts here: it doesn't if the stage idles, or has another part of B."""
    codes = slot.codes("B" + kind if kind in "IW" else kind)
    if np.isin(slot.kind[run.start : run.stop], codes).all():
        return True
    return reduce(or_, [now.kind == code for code in codes])


def _held(crossing: Arrivals, carry: TickCarry, *, together: bool) -> tuple[Arrivals, TickCarry]:
    """Puts what a slot left behind an `optimization_barrier`; returns what crosses beside the slot, and the carry.

    It is for meshes with more axes than `stage`: along these layers may send too. XLA's scheduler places the operations
    of a tick from the last to the first. Where a loop that sends and the end of a transfer could both stand in front of
    what is placed already, it places the loop. The transfer then ends before the loop begins, with nothing beside it.
    With something behind the loop, the end of the transfer is placed first.

    In a slot without a loop around it, more is needed. What crosses is behind a second barrier, with what the slot
    left: else a loop over layers may still be placed first. What waits is behind the first one: it is read before
    anything is written there, else a TPU's compiler copies it all.
    """
    left, waiting = jax.lax.optimization_barrier((_boundaries(carry), carry.waiting if together else {}))
    if together:
        crossing, left = jax.lax.optimization_barrier((crossing, left))
    return crossing, _with_boundaries(carry, left)._replace(waiting=waiting or carry.waiting)


def _crossing(stage: Stage, run: Run, i: int, carry: TickCarry, *, beside: bool) -> Arrivals:
    """The values, by flow and route, that slot `i` left and that cross beside the slot after it, or else before it.

    They are what a neighbour, or this stage itself, left at its boundary.
    """
    step, slots, crossing = stage.step, stage.step.table.slots, Arrivals()
    for flow in _flows(slots, run, i):
        if crosses_beside(step.schedule.slots, flow, i) == beside:
            boundaries, left = stage.at_boundary(SENT[flow], carry)
            sent, columns = boundaries.crossing(left), getattr(slots[(i + beside) % len(slots)], f"{SENT[flow]}_in")
            routes = enumerate(step.schedule.placement.routes(flow))
            crossing[flow] = {r: moved(sent, route, stage.device) for r, route in routes if (columns[r] >= 0).any()}
    return crossing


def _flows(slots: Sequence[SlotTable], run: Run, i: int) -> list[int]:
    """The directions in which a slot's actions send in the ticks of a run; slot -1 is the last of the tick before."""
    slot, earlier = slots[i], int(i < 0)
    codes = np.unique(slot.kind[max(0, run.start - earlier) : run.stop - earlier])
    kinds = {slot.kinds[code - 1] for code in codes if code}
    return [flow for flow, sending in FLOWS.items() if kinds & {*sending}]


def moved(sent: Buffers, pairs: list[tuple[int, int]], device: Index) -> Buffers:
    """The values that arrive here, if each of `pairs` (from stage, to stage) sends; those to the stage itself stay.

    On GPUs a ring is sent by two permutes, one up the stages and one down. Under `xla_gpu_enable_pipelined_p2p` XLA
    splits rings itself, and where a permute has several, one for each place along the other mesh axes, all but one of
    the devices at which they close get zeros (openxla/xla#45222).
    """
    stays, up, down = ([(a, b) for a, b in pairs if np.sign(b - a) == way] for way in (0, 1, -1))

    def by(ways: list[list[tuple[int, int]]], leaf: jax.Array) -> jax.Array:
        *few, most = sorted(filter(None, ways), key=len)
        arrives = lambda way: leaf if way is stays else jax.lax.ppermute(leaf, AXIS, way)
        arrived = arrives(most)
        for way in few:
            arrived = jnp.where(reduce(or_, [device == receiver for _, receiver in way]), arrives(way), arrived)
        return arrived

    whole, by_way = partial(by, [stays, sorted(up + down)]), partial(by, [stays, up, down])
    if not (up and down):
        return jax.tree.map(whole, sent)
    return jax.tree.map(lambda leaf: jax.lax.platform_dependent(leaf, default=whole, cuda=by_way, rocm=by_way), sent)


def _receive(stage: Stage, slot: SlotTable, now: Now, crossing: Arrivals, carry: TickCarry) -> TickCarry:
    """The carry with what arrived in a slot, by flow and route, in its rows.

    Where the table has a row in each tick, it is always written: if nothing new arrived, the row is no longer needed,
    or has the same value.
    """

    def put(arrival: tuple[Index, Buffers], waiting: Buffers) -> Buffers:
        row, values = arrival
        return jax.tree.map(lambda a, new: put_row(a, new, row), waiting, values)

    for flow, arrived in crossing.items():
        name = SENT[flow]
        columns, rows, numbers = getattr(slot, f"{name}_in"), getattr(now, f"{name}_in"), stage.step.table.waiting[name]
        waiting = [*carry.waiting[name]]
        for route, values in arrived.items():
            i = route if len(waiting) > 1 else 0
            writes = bool((columns[route] >= 0).all()) or rows[route] >= 0
            waiting[i] = when(writes, (rows[route] - numbers[i].start, values), put, waiting[i])
        carry = carry._replace(waiting=carry.waiting | {name: waiting})
    return carry


# --- ends that all stages compute together ----------------------------------------------------------------------------
#
# In a turn of the ends all stages compute the first or the last layer together, of the same micro-batch at the same
# time, so a turn may hold collectives along `stage`. `jpipe.planning.ends` says which micro-batch has its turn when. If
# each end runs on its own stage, `Step.ends` has no turns, and nothing here is done.


def _turn(stage: Stage, run: Run, i: int, name: str, turns: list[Turns], carry: Carry) -> Carry:
    """The carry after a turn of the ends around slot `i`, if there is one of this name in any tick of the run.

    A turn reads (`TURNS`) what the layers between have left in the carry, right on one stage alone. It doesn't change
    in the loop: if the body read it, a compiler would compute all that follows from it ahead of the loop, and so in
    every tick. Where idle stages work along, a turn that most ticks of the run have is computed in the others too, and
    doesn't count there.
    """
    step = stage.step
    taken = getattr(step.ends.turns[i], name)[run.start : run.stop] >= 0 if step.ends.turns else np.zeros(0)
    if not taken.any():
        return carry
    (least_share, reads, body), g = TURNS[name], step.model.last if name == "leave" else 0
    m = jnp.asarray(getattr(turns[i], name))
    with jax.named_scope(name):
        if g in step.idle_work.safe and taken.mean() >= least_share:
            job = Job(jnp.maximum(m, 0), {}, True if taken.all() else m >= 0, g=g)
            return body(stage, job, reads(step, carry) if reads else [], carry)
        counted = lambda read, carry: body(stage, Job(read[0], {}, g=g), read[1], carry)
        return when(m >= 0, (m, []), counted, carry, reads=reads and (lambda at, carry: (at[0], reads(step, carry))))


def _enter(stage: Stage, job: Job, _: list[Leaf], from_first: list[Leaf]) -> list[Leaf]:
    """The first layer's outputs, on all stages; those that don't count are overwritten before they are read."""
    return stage.step.forwards[0](stage.arguments(job, stage.batch_of(job)), [])[0].outputs


def _leave(stage: Stage, job: Job, x: list[Leaf], carry: TickCarry) -> TickCarry:
    """Runs the last layer and the loss, and in training their backward, from one stage's activation `x`.

    It is never taken where it doesn't count (`TURNS`).
    """
    step, last = stage.step, job.g
    arguments, mine = stage.arguments(job, stage.batch_of(job)), stage.device == step.schedule.placement.ends[1]
    x = [from_stage(mine, a) for a in x]
    backward, cotangents = carry.backward, []
    if step.schedule.trains:
        values, residuals = step.layers[last].forward(arguments, x)
        gradients, _, cotangents = step.layers[last].backward(arguments, residuals, stage.of_loss())
        backward = stage.add_gradients(job, backward, gradients)
    else:
        values, _ = step.forwards[last](arguments, x)
    # All stages have the same outputs, and results are summed over stages at the end: one stage's are counted.
    outputs = [jnp.where(mine, leaf, jnp.zeros_like(leaf)) for leaf in values.outputs]
    results = stage.collected(job, carry.forward.results, outputs)
    return carry._replace(forward=carry.forward._replace(results=results), backward=backward, from_last=cotangents)


def _back(stage: Stage, job: Job, cotangents: list[Leaf], carry: TickCarry) -> TickCarry:
    """Runs the first layer's forward again and then its backward, from one stage's cotangents of its outputs."""
    step = stage.step
    mine = stage.device == step.schedule.placement.ends[0]
    cotangents = [from_stage(mine, a) for a in cotangents]
    arguments = stage.arguments(job, stage.batch_of(job))
    _, residuals = step.layers[0].forward(arguments, [])
    gradients = step.layers[0].backward(arguments, residuals, cotangents).params
    return carry._replace(backward=stage.add_gradients(job, carry.backward, gradients))


TURNS: dict[str, tuple[float, Callable[..., list[Leaf]] | None, Callable[..., PyTree]]] = {
    "enter": (0.5, None, _enter),
    "leave": (1.0, lambda step, at: step.activations.read(at.forward.activation, step.model.num_layers - 2, 0), _leave),
    "back": (0.5, lambda step, at: step.cotangents.read(at.backward.cotangent, 0, 0), _back),
}
"""For each turn: if at least this share of a run's ticks has it, the others compute it too (the last layer takes
longest); what it reads from the carry; and what it does, (stage, job, what it reads, carry) -> the carry."""


# --- rows that go to the host -----------------------------------------------------------------------------------------
#
# Here is a stage's part in two ticks of 1F1B; micro-batch 3 goes forward as 1 goes backward, then 4 and 2:
#
#     slot            F3              B1              F4              B2
#     comes back      1 -----------|                  2 -----------|
#     leaves                          3 -----------|                  4 -----------|
#
# A row starts to come back before a slot and has to be there after it, and so with one that leaves. A compiler may wait
# for it before the slot's work. So at the end of a slot all that moved beside it, activations and cotangents too, is
# tied to what the slot left: nothing can ask for it before. Only then the slot's own row is sent: else a GPU's
# compiler, which sees an array on the host read and written at once, copies it whole.


def _rows_back(stage: Stage, slot: SlotTable, now: Now, carry: TickCarry) -> tuple[Kept, TickCarry]:
    """The rows that come back beside this slot, for the next one; and the carry with this slot's own row in `back`.

    That row is copied there if it has stayed. Only stages that have it copy, by a loop of one trip. On GPUs such a loop
    would stop the host, and slices are copied anyway: there layers choose between the two as they read
    (`AwayStorage.read_back`).
    """
    away, back, names = stage.step.kept.away, dict(carry.back), _returning(stage.step, slot)
    coming = {name: away[name].fetched(carry.host[name], now.away[name].returns) for name in names}
    for name in () if stage.step.plan.request.splits.on_gpu else back:
        if slot.away[name].stays.any():
            copy = lambda at, _, of=away[name]: of.leaving(*at)
            at = carry.forward.kept[name], now.away[name].row
            back[name] = when(now.away[name].stays > 0, at, copy, back[name])
    return coming, carry._replace(back=back)


def _send_rows(
    stage: Stage, slot: SlotTable, now: Now, beside: tuple[Kept, Arrivals], carry: TickCarry
) -> tuple[Arrivals, TickCarry]:
    """Ends what moved beside a slot, the rows that come back and what crosses between stages; sends the slot's own row.

    Returns:
      What crossed, and the carry with the row on its way to the host, and what came back in `back`.
    """
    if not (away := stage.step.kept.away):
        return beside[1], carry
    names = [name for name in away if (slot.away[name].sent_to >= 0).any()]
    leaving = {name: away[name].leaving(carry.forward.kept[name], now.away[name].row) for name in names}
    together = beside, carry.host, leaving, _boundaries(carry)
    (back, crossed), host, leaving, left = jax.lax.optimization_barrier(together)
    host |= {name: away[name].sent(host[name], leaving[name], now.away[name].sent_to) for name in names}
    return crossed, _with_boundaries(carry, left)._replace(back=back, host=host)


def _returning(step: Step, slot: SlotTable) -> list[str]:
    """The names of the buffers from which a row comes back beside this slot."""
    return [name for name in step.kept.away if (slot.away[name].returns >= 0).any()]


def _boundaries(carry: TickCarry) -> tuple[Buffers, Buffers]:
    """The boundary buffers that a slot's action has left."""
    return carry.forward.activation, carry.backward.cotangent


def _with_boundaries(carry: TickCarry, left: tuple[Buffers, Buffers]) -> TickCarry:
    """The carry with others in their place."""
    forward, backward = carry.forward._replace(activation=left[0]), carry.backward._replace(cotangent=left[1])
    return carry._replace(forward=forward, backward=backward)
