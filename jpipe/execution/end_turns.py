"""Computes the first and the last layer on all stages together, for one micro-batch (`ends="shared"`).

All stages call these with the same micro-batch at the same time: so they may hold collectives along `stage`.
`left_by_layers` and `come_back` read the values that `leave` and `back` take from the layers between. They are
functions apart because these values are in the carry and don't change: compilers would compute all that follows from
them in every tick if they were read inside of the loops of `leave` and `back`.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jpipe.arrays.indexing import Index
from jpipe.execution.stage import BackwardWork, ForwardWork, Stage, Turn
from jpipe.mesh.axes import AXIS
from jpipe.types import Leaf


def enter(stage: Stage, microbatch: Index) -> list[Leaf]:
    """The first layer's results, on all stages."""
    turn = Turn(0, 0, microbatch, {})
    return stage.step.forwards[0](stage.arguments(turn, stage.batch_of(turn)), [])[0].outputs


def left_by_layers(stage: Stage, forward: ForwardWork) -> list[Leaf]:
    """The last layer's activation, on the stage of the layer before it."""
    return stage.step.activations.read(forward.activation, stage.step.model.num_layers - 2, 0)


def leave(
    stage: Stage, microbatch: Index, x: list[Leaf], forward: ForwardWork, backward: BackwardWork
) -> tuple[ForwardWork, BackwardWork, list[Leaf]]:
    """The last layer and the loss, and if it trains their backward: (both works, cotangents of what it takes)."""
    step, last, ends = stage.step, stage.step.model.last, stage.step.ends
    assert ends is not None
    turn = Turn(last, 0, microbatch, {})
    arguments, mine = stage.arguments(turn, stage.batch_of(turn)), stage.device == ends.last
    x = _from_stage(mine, x)
    cotangents: list[Leaf] = []
    if step.schedule.trains:
        found, residuals = step.layers[last].forward(arguments, x)
        gradients, _, cotangents = step.layers[last].backward(arguments, residuals, stage.of_loss(last))
        backward = stage.add_gradients(turn, backward, gradients)
    else:
        found, _ = step.forwards[last](arguments, x)
    # All stages have the same outputs; those of one stage are counted.
    outputs = [jnp.where(mine, leaf, jnp.zeros_like(leaf)) for leaf in found.outputs]
    return forward._replace(results=stage.collected(turn, forward.results, outputs)), backward, cotangents


def come_back(stage: Stage, backward: BackwardWork) -> list[Leaf]:
    """The cotangents of what the first layer gave, on its successor's stage."""
    return stage.step.cotangents.read(backward.cotangent, 0, 0)


def back(stage: Stage, microbatch: Index, cotangents: list[Leaf], backward: BackwardWork) -> BackwardWork:
    """The first layer's backward, after its forward, which is computed anew."""
    step, turn, ends = stage.step, Turn(0, 0, microbatch, {}), stage.step.ends
    assert ends is not None
    cotangents = _from_stage(stage.device == ends.first, cotangents)
    arguments = stage.arguments(turn, stage.batch_of(turn))
    _, residuals = step.layers[0].forward(arguments, [])
    return stage.add_gradients(turn, backward, step.layers[0].backward(arguments, residuals, cotangents).params)


def _from_stage(mine: jax.Array | bool, leaves: Sequence[Leaf]) -> list[jax.Array]:
    """Arrays of one stage, on all of them."""
    return [jax.lax.psum(jnp.where(mine, a, jnp.zeros_like(a)), AXIS).astype(a.dtype) for a in leaves]
