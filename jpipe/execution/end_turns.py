"""Computes the first and the last layer on all stages together, between the slots of a tick (`ends="shared"`).

The executor calls the functions of this file before, in and after the ticks:

    before the ticks    empty, turns_of               what the carry and the scan need for shared ends
    before a slot       before_slot                   enter: the first layer's forward
    in an action        first_input, last_cotangents  what the layers between take from the ends
    after a slot        after_slot                    leave: the last layer, the loss, their backward;
                                                      back: the first layer's backward

If each end runs on its own stage, `Step.ends` has no turns, and all of these change nothing.

In a turn all stages work on the same micro-batch at the same time, so a turn may hold collectives along `stage`.
`jpipe.planning.ends` says which micro-batch has its turn when.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jpipe.arrays.in_place import Carry, Index, when
from jpipe.arrays.trees import is_float
from jpipe.execution.stage import BackwardWork, Stage, TickCarry
from jpipe.execution.sweep import Counts, Job, Turn
from jpipe.memory.boundaries import Boundaries
from jpipe.memory.storage import Buffers
from jpipe.mesh.axes import AXIS
from jpipe.planning.ends import Turns
from jpipe.planning.step import Step
from jpipe.schedules.ticks import Run
from jpipe.types import Leaf

MOST = {"enter": 0.5, "leave": 1.0, "back": 0.5}
"""If at least this share of a run's ticks has a turn, the others compute it too; the last layer takes longest."""

# --- before the ticks -------------------------------------------------------------------------------------------------


def empty(step: Step) -> tuple[list[jax.Array], list[jax.Array]]:
    """Arrays of any values for `TickCarry.entered` and `TickCarry.left`; none if each end runs on its own stage."""
    if not step.ends.shared:
        return [], []
    entered, taken = (step.activations.record_types[i].leaves for i in (0, step.model.num_layers - 2))
    made = lambda leaves: [jax.lax.empty(leaf.shape, leaf.dtype) for leaf in leaves]
    return made(entered), made(filter(is_float, taken)) if step.schedule.trains else []


def turns_of(step: Step, run: Run) -> list[Turns]:
    """The turns of a run's ticks, for each slot, to be scanned over; none if each end runs on its own stage."""
    return jax.tree.map(lambda microbatches: jnp.asarray(microbatches[run.start : run.stop]), [*step.ends.turns])


# --- around a slot ----------------------------------------------------------------------------------------------------


def before_slot(stage: Stage, run: Run, turns: list[Turns], slot: int, carry: TickCarry) -> TickCarry:
    """Runs the first layer on all stages, if it has a turn before this slot in any tick of the run."""
    enter = lambda m, _, counts, entered: _enter(stage, m)  # what doesn't count is overwritten before it is read
    return carry._replace(entered=_take(stage, run, turns, slot, "enter", None, enter, carry.entered))


def after_slot(stage: Stage, run: Run, turns: list[Turns], slot: int, carry: TickCarry) -> TickCarry:
    """Runs the last layer, then the first one's backward on all stages, if they have turns after this slot."""
    before_last = stage.step.model.num_layers - 2
    taken_by_last = lambda carry: stage.step.activations.read(carry.forward.activation, before_last, 0)
    leave = lambda m, x, _, carry: _leave(stage, m, x, carry)  # never taken where it doesn't count (`MOST`)
    carry = _take(stage, run, turns, slot, "leave", taken_by_last, leave, carry)
    given_to_first = lambda carry: stage.step.cotangents.read(carry.backward.cotangent, 0, 0)
    back = lambda m, x, counts, carry: carry._replace(backward=_back(stage, m, x, counts, carry.backward))
    return _take(stage, run, turns, slot, "back", given_to_first, back, carry)


def _take(
    stage: Stage,
    run: Run,
    turns: list[Turns],
    slot: int,
    name: str,
    reads: Callable[[Carry], list[Leaf]] | None,
    body: Callable[[Index, list[Leaf], Counts, Carry], Carry],
    carry: Carry,
) -> Carry:
    """The carry after `body(micro-batch, reads(carry), counts, carry)`, if a turn of this name is taken in this tick.

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
    m = jnp.asarray(getattr(turns[slot], name))
    leaves = lambda carry: [] if reads is None else reads(carry)
    with jax.named_scope(name):
        group = stage.step.model.last if name == "leave" else 0
        if group in stage.step.idle_work.safe and taken.mean() >= MOST[name]:
            counts = True if taken.all() else m >= 0
            m = jnp.maximum(m, 0)
            return body(m, leaves(carry), counts, carry)
        counted = lambda at_hand, carry: body(at_hand[0], at_hand[1], True, carry)
        return when(m >= 0, (m, []), counted, carry, reads=reads and (lambda at, carry: (at[0], leaves(carry))))


def _enter(stage: Stage, microbatch: Index) -> list[Leaf]:
    """The first layer's outputs, on all stages."""
    turn = Turn(0, 0, microbatch, {})
    return stage.step.forwards[0](stage.arguments(turn, stage.batch_of(turn)), [])[0].outputs


def _leave(stage: Stage, microbatch: Index, x: list[Leaf], carry: TickCarry) -> TickCarry:
    """Runs the last layer and the loss, and in training their backward, from one stage's activation `x`."""
    step, last = stage.step, stage.step.model.last
    turn = Turn(last, 0, microbatch, {})
    arguments, mine = stage.arguments(turn, stage.batch_of(turn)), stage.device == step.ends.last
    x = _from_stage(mine, x)
    backward, cotangents = carry.backward, []
    if step.schedule.trains:
        values, residuals = step.layers[last].forward(arguments, x)
        gradients, _, cotangents = step.layers[last].backward(arguments, residuals, stage.of_loss(last))
        backward = stage.add_gradients(turn, backward, gradients)
    else:
        values, _ = step.forwards[last](arguments, x)
    # All stages have the same outputs, and results are summed over stages at the end: one stage's are counted.
    outputs = [jnp.where(mine, leaf, jnp.zeros_like(leaf)) for leaf in values.outputs]
    results = stage.collected(turn, carry.forward.results, outputs)
    return carry._replace(forward=carry.forward._replace(results=results), backward=backward, left=cotangents)


def _back(
    stage: Stage, microbatch: Index, cotangents: list[Leaf], counts: Counts, backward: BackwardWork
) -> BackwardWork:
    """Runs the first layer's forward again and then its backward, from one stage's cotangents of its outputs."""
    step, turn = stage.step, Turn(0, 0, microbatch, {}, counts)
    cotangents = _from_stage(stage.device == step.ends.first, cotangents)
    arguments = stage.arguments(turn, stage.batch_of(turn))
    _, residuals = step.layers[0].forward(arguments, [])
    return stage.add_gradients(turn, backward, step.layers[0].backward(arguments, residuals, cotangents).params)


def _from_stage(mine: jax.Array | bool, leaves: Sequence[Leaf]) -> list[jax.Array]:
    """Arrays of one stage, on all of them."""
    return [jax.lax.psum(jnp.where(mine, a, jnp.zeros_like(a)), AXIS).astype(a.dtype) for a in leaves]


# --- in an action -----------------------------------------------------------------------------------------------------


def first_input(stage: Stage, job: Job, activation: Buffers, carry: TickCarry) -> Buffers:
    """Boundary buffers in which the first virtual stage finds what the first layer gave in its turn."""
    return _with_leaves(stage.step.activations, activation, 0, job.virtual_stage == 0, carry.entered)


def last_cotangents(stage: Stage, job: Job, cotangent: Buffers, carry: TickCarry) -> Buffers:
    """Boundary buffers in which the last virtual stage finds the cotangents that the last layer gave in its turn."""
    is_last = job.virtual_stage == stage.step.schedule.placement.num_virtual_stages - 1
    return _with_leaves(stage.step.cotangents, cotangent, stage.step.model.num_layers - 2, is_last, carry.left)


def _with_leaves(
    boundaries: Boundaries, buffers: Buffers, boundary: int, mine: bool | jax.Array, leaves: list[jax.Array]
) -> Buffers:
    """Boundary buffers with an end's leaves at a boundary, if there are leaves and they are `mine`."""
    if not leaves:
        return buffers
    old = boundaries.read(buffers, boundary, 0)
    chosen = [jnp.where(mine, new, a) for new, a in zip(leaves, old, strict=True)]
    return boundaries.write(buffers, boundary, 0, chosen)
