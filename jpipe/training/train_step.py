"""Does one step of training (loss, gradients, update or its skip, metrics), and keeps a pipeline's compiled steps."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp
import optax

from jpipe.layers.fingerprint import fingerprint
from jpipe.memory.layout import StageTree
from jpipe.training.by_slices import updated
from jpipe.training.optimizers import global_norm, skips
from jpipe.training.train_state import TrainState
from jpipe.types import Batch

MOST_TRAIN_STEPS = 8
"""How many compiled training steps are kept, one for each optimiser; the oldest goes first."""

Variables = dict[str, StageTree]
"""All variables, by collection."""
Metrics = dict[str, jax.Array]
StepT = TypeVar("StepT")
"""The type of a step as plain data, which is only handed on here."""
ValueAndGrad = Callable[[StepT, Variables, Batch, jax.Array], tuple[tuple[jax.Array, Variables, Metrics], StageTree]]
"""`(step, variables, batch, key) -> ((loss, new state by collection, metrics), gradients)`."""
CompiledStep = Callable[[StepT, TrainState, Batch], tuple[TrainState, Metrics]]


def train_step(
    value_and_grad: ValueAndGrad[StepT], step: StepT, state: TrainState, batch: Batch
) -> tuple[TrainState, Metrics]:
    """Does one step: (the state after it, the metrics); to be traced."""
    key = jax.random.fold_in(state.key, state.step)
    (loss, updates, metrics), grads = value_and_grad(step, state.variables, batch, key)
    with jax.named_scope("update"):
        return apply_update(state, loss, updates, metrics, grads)


def apply_update(
    state: TrainState, loss: jax.Array, updates: Variables, metrics: Metrics, grads: StageTree
) -> tuple[TrainState, Metrics]:
    """Does the rest of a step, from the results of `ValueAndGrad`: (the new state, all metrics)."""
    params = state.variables["params"]
    new_params, opt_state = updated(state.tx, grads, state.opt_state, params, loss)
    if skipped := skips(state.opt_state, opt_state):  # a skipped batch changes no other collection either
        unless = partial(jnp.where, jnp.stack(skipped).any())
        updates = {name: jax.tree.map(unless, state.variables[name], tree) for name, tree in updates.items()}
    variables = state.variables | {"params": new_params, **updates}
    norm = global_norm(grads)
    # If a gradient isn't finite, the norm isn't. The norm overflows first (at 1e19), where an update is as bad.
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    metrics = {"loss": loss, "grad_norm": norm, "finite": finite, **metrics}  # a loss function's own have other names
    return state.replace(step=state.step + 1, variables=variables, opt_state=opt_state), metrics


class TrainSteps(Generic[StepT]):
    """The compiled training steps of a pipeline, one for each optimiser.

    An optimiser made anew from the same numbers and functions runs the step that was compiled for the first one.

    Args:
      value_and_grad: the loss and gradients of a batch, to be traced.
      shapes: `tx` -> the state as shapes with shardings.
    """

    def __init__(
        self, value_and_grad: ValueAndGrad[StepT], shapes: Callable[[optax.GradientTransformation], TrainState]
    ):
        self._value_and_grad, self._shapes = value_and_grad, shapes
        self._compiled: dict[Hashable, tuple[optax.GradientTransformation, CompiledStep[StepT]]] = {}

    def clear(self) -> None:
        """Drops all compiled steps."""
        self._compiled.clear()

    def of(self, tx: optax.GradientTransformation) -> tuple[optax.GradientTransformation, CompiledStep[StepT]]:
        """(the first optimiser seen that equals `tx`, the jitted `train_step`, which donates the state).

        The first one is used in place of `tx`, since it is static: another object would compile anew.
        """
        key = fingerprint(tx)
        if key not in self._compiled:
            shardings = jax.tree.map(lambda leaf: leaf.sharding, self._shapes(tx))
            step = partial(train_step, self._value_and_grad)
            step = jax.jit(step, static_argnums=0, donate_argnums=1, out_shardings=(shardings, shardings.step))
            while len(self._compiled) >= MOST_TRAIN_STEPS:
                del self._compiled[next(iter(self._compiled))]
            self._compiled[key] = (tx, step)
        return self._compiled[key]
