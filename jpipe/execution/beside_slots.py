"""Does what goes on beside the slots of a tick: shared ends (`ends="shared"`), rows that go to the host (`offload=`).

The executor calls the functions of this file before, in and after the ticks:

    before the ticks    first_carry                   what the carry needs
    before a slot       rows_back                     rows that come back
                        before_slot                   enter: the first layer's forward
    in an action        with_end                      what the layers between take from the ends
    after a slot        after_slot                    leave: the last layer, the loss, their backward;
                                                      back: the first layer's backward
                        send_rows                     the slot's own row leaves

If each end runs on its own stage, `Step.ends` has no turns; if no residuals go to the host, `KeptStorage.away` is
empty: then all of these change nothing.

In a turn of the ends all stages compute the first or the last layer together, of the same micro-batch at the same time,
so a turn may hold collectives along `stage`. `jpipe.planning.ends` says which micro-batch has its turn when.

Of rows, here is a stage's part in two ticks of 1F1B; micro-batch 3 goes forward as 1 goes backward, then 4 and 2:

    slot            F3              B1              F4              B2
    comes back      1 -----------|                  2 -----------|
    leaves                          3 -----------|                  4 -----------|

A row starts to come back before a slot and has to be there after it, and so with one that leaves. A compiler may wait
for it before the slot's work. So at the end of a slot all that moved beside it, activations and cotangents too, is tied
to what the slot left: nothing can ask for it before. Only then the slot's own row is sent: else a GPU's compiler, which
sees an array on the host read and written at once, copies it whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp

from jpipe.execution.stage import BackwardWork, ForwardWork, Stage, TickCarry
from jpipe.execution.sweep import Job
from jpipe.jax.in_place import Carry, Index, when
from jpipe.jax.trees import is_float
from jpipe.partitioner.axes import AXIS
from jpipe.planning.ends import Turns
from jpipe.planning.kept import Kept
from jpipe.planning.step import Step
from jpipe.schedules.ticks import Run, SlotTable
from jpipe.schedules.waiting import Away
from jpipe.types import Leaf, PyTree

LEAST_SHARE = {"enter": 0.5, "leave": 1.0, "back": 0.5}
"""If at least this share of a run's ticks has a turn, the others compute it too; the last layer takes longest."""

# --- before the ticks -------------------------------------------------------------------------------------------------


def first_carry(step: Step, forward: ForwardWork, backward: BackwardWork) -> TickCarry:
    """The carry before the first tick: nothing waits yet, so that waiting values, ends and hosts have any values."""
    crossing = {"activation": step.activations.crossing(forward.activation)}
    crossing["cotangent"] = step.cotangents.crossing(backward.cotangent) if step.schedule.trains else {}
    rows = lambda count, arrays: jax.tree.map(lambda a: jax.lax.empty((count, *a.shape), a.dtype), arrays)
    waiting = {name: [rows(len(one), crossing[name]) for one in step.table.waiting[name]] for name in crossing}
    away, entered, left = step.kept.away, [], []
    if step.ends.shared:
        given, taken = (step.activations.record_types[i].leaves for i in (0, step.model.num_layers - 2))
        made = lambda leaves: [jax.lax.empty(leaf.shape, leaf.dtype) for leaf in leaves]
        entered, left = made(given), made(filter(is_float, taken)) if step.schedule.trains else []
    back = {name: away[name].empty_row() for name in _returning(away, step.table.slots[-1])}
    host = {name: storage.empty_host() for name, storage in away.items()}
    return TickCarry(forward, backward, waiting=waiting, entered=entered, left=left, back=back, host=host)


# --- around a slot ----------------------------------------------------------------------------------------------------


def before_slot(stage: Stage, run: Run, turns: list[Turns], slot: int, carry: TickCarry) -> TickCarry:
    """Runs the first layer on all stages, if it has a turn before this slot in any tick of the run."""
    return carry._replace(entered=_take(stage, run, turns, slot, "enter", None, _enter, carry.entered))


def after_slot(stage: Stage, run: Run, turns: list[Turns], slot: int, carry: TickCarry) -> TickCarry:
    """Runs the last layer, then the first one's backward on all stages, if they have turns after this slot."""
    before_last = stage.step.model.num_layers - 2
    taken_by_last = lambda carry: stage.step.activations.read(carry.forward.activation, before_last, 0)
    carry = _take(stage, run, turns, slot, "leave", taken_by_last, _leave, carry)
    given_to_first = lambda carry: stage.step.cotangents.read(carry.backward.cotangent, 0, 0)
    return _take(stage, run, turns, slot, "back", given_to_first, _back, carry)


def _take(
    stage: Stage,
    run: Run,
    turns: list[Turns],
    slot: int,
    name: str,
    reads: Callable[[Carry], list[Leaf]] | None,
    body: Callable[[Stage, Job, list[Leaf], Carry], Carry],
    carry: Carry,
) -> Carry:
    """The carry after `body(stage, job, reads(carry), carry)`, if a turn of this name is taken now.

    `reads` takes from the carry what the layers between have left there, right on one stage alone. It doesn't change in
    the loop: if the body read it, a compiler would compute all that follows from it ahead of the loop, and so in every
    tick. Where idle stages work along, a turn that most ticks of the run have is computed in the others too, and
    doesn't count there.
    """
    if not stage.step.ends.shared:
        return carry
    taken = getattr(stage.step.ends.turns[slot], name)[run.start : run.stop] >= 0
    if not taken.any():
        return carry
    m, g = jnp.asarray(getattr(turns[slot], name)), stage.step.model.last if name == "leave" else 0
    leaves = lambda carry: [] if reads is None else reads(carry)
    with jax.named_scope(name):
        if g in stage.step.idle_work.safe and taken.mean() >= LEAST_SHARE[name]:
            job = Job(jnp.maximum(m, 0), {}, True if taken.all() else m >= 0, g=g)
            return body(stage, job, leaves(carry), carry)
        counted = lambda read, carry: body(stage, Job(read[0], {}, g=g), read[1], carry)
        return when(m >= 0, (m, []), counted, carry, reads=reads and (lambda at, carry: (at[0], leaves(carry))))


def _enter(stage: Stage, job: Job, _: list[Leaf], entered: list[Leaf]) -> list[Leaf]:
    """The first layer's outputs, on all stages; those that don't count are overwritten before they are read."""
    return stage.step.forwards[0](stage.arguments(job, stage.batch_of(job)), [])[0].outputs


def _leave(stage: Stage, job: Job, x: list[Leaf], carry: TickCarry) -> TickCarry:
    """Runs the last layer and the loss, and in training their backward, from one stage's activation `x`.

    It is never taken where it doesn't count (`LEAST_SHARE`).
    """
    step, last = stage.step, job.g
    arguments, mine = stage.arguments(job, stage.batch_of(job)), stage.device == step.schedule.placement.ends[1]
    x = _from_stage(mine, x)
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
    return carry._replace(forward=carry.forward._replace(results=results), backward=backward, left=cotangents)


def _back(stage: Stage, job: Job, cotangents: list[Leaf], carry: TickCarry) -> TickCarry:
    """Runs the first layer's forward again and then its backward, from one stage's cotangents of its outputs."""
    step = stage.step
    cotangents = _from_stage(stage.device == step.schedule.placement.ends[0], cotangents)
    arguments = stage.arguments(job, stage.batch_of(job))
    _, residuals = step.layers[0].forward(arguments, [])
    gradients = step.layers[0].backward(arguments, residuals, cotangents).params
    return carry._replace(backward=stage.add_gradients(job, carry.backward, gradients))


def _from_stage(mine: jax.Array | bool, leaves: Sequence[Leaf]) -> list[jax.Array]:
    """Arrays of one stage, on all of them."""
    return [jax.lax.psum(jnp.where(mine, a, jnp.zeros_like(a)), AXIS).astype(a.dtype) for a in leaves]


# --- rows that go to the host ---------------------------------------------------------------------------------------


def rows_back(
    stage: Stage, slot: SlotTable, now: Mapping[str, Away[Index]], carry: TickCarry
) -> tuple[Kept, TickCarry]:
    """The rows that come back beside this slot, for the next one; and the carry with this slot's own row in `back`.

    That row is copied there if it has stayed. Only stages that have it copy, by a loop of one trip. On GPUs such a loop
    would stop the host, and slices are copied anyway: there layers choose between the two as they read
    (`AwayStorage.read_back`).
    """
    away, back = stage.step.kept.away, dict(carry.back)
    coming = {name: away[name].fetched(carry.host[name], now[name].returns) for name in _returning(away, slot)}
    for name in () if stage.step.plan.request.splits.on_gpu else back:
        if slot.away[name].stays.any():
            copy = lambda at, _, of=away[name]: of.leaving(*at)
            back[name] = when(now[name].stays > 0, (carry.forward.kept[name], now[name].row), copy, back[name])
    return coming, carry._replace(back=back)


def send_rows(
    stage: Stage, slot: SlotTable, now: Mapping[str, Away[Index]], moved: tuple[Kept, PyTree], carry: TickCarry
) -> tuple[PyTree, TickCarry]:
    """Ends what moved beside a slot, and sends the slot's own row.

    Args:
      stage, slot, now: this device, the slot, and its rows now.
      moved: the rows that come back, and what crosses between stages.
      carry: as the slot left it.

    Returns:
      What crossed, and the carry with the row on its way to the host, and what came back in `back`.
    """
    away = stage.step.kept.away
    if not away:
        return moved[1], carry
    names = [name for name in away if (slot.away[name].sent_to >= 0).any()]
    leaving = {name: away[name].leaving(carry.forward.kept[name], now[name].row) for name in names}
    left = carry.forward.activation, carry.backward.cotangent
    (back, crossed), host, leaving, left = jax.lax.optimization_barrier((moved, carry.host, leaving, left))
    host |= {name: away[name].sent(host[name], leaving[name], now[name].sent_to) for name in names}
    forward, backward = carry.forward._replace(activation=left[0]), carry.backward._replace(cotangent=left[1])
    return crossed, carry._replace(forward=forward, backward=backward, back=back, host=host)


def _returning(names: Iterable[str], slot: SlotTable) -> list[str]:
    """The names of the buffers from which a row comes back beside this slot."""
    return [name for name in names if (slot.away[name].returns >= 0).any()]
