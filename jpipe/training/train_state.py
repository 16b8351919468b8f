"""`TrainState`: what a step of training reads and returns, and how it lies; the step itself, and those compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jpipe.jax.in_place import on_host
from jpipe.memory.layout import Layout, StageTree, laid_out, may_go
from jpipe.partitioner.axes import AXIS
from jpipe.training.by_slices import by_buffer, initial, updated
from jpipe.training.optimizers import checked_opt_state, global_norm, skips
from jpipe.types import Batch, Leaf, PyTree, Shapes

Variables = dict[str, StageTree]
"""All variables, by collection."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The state that a training step reads and returns.

    Attributes:
      step: int32 scalar, the number of steps done.
      variables: the model's variables by collection, a `StageTree` each.
      opt_state: the optimiser's state.
      key: the random key that all steps' keys are derived from.
      tx: the optax transformation (static).
    """

    step: Leaf
    variables: dict[str, StageTree]
    opt_state: PyTree
    key: Leaf
    tx: optax.GradientTransformation = field(metadata={"static": True})

    def replace(self, **changes: PyTree) -> TrainState:
        """A copy with some fields changed."""
        return replace(self, **changes)


def abstract_state(
    variables: Variables, tx: optax.GradientTransformation, key: jax.ShapeDtypeStruct, loss: jax.ShapeDtypeStruct
) -> TrainState:
    """The shapes, dtypes and shardings of a training state, and a check that the optimiser may work on these variables.

    No array of the state is made; `check_elementwise` alone computes: it tries `tx` on a few small arrays.

    Args:
      variables: shapes with shardings, by collection.
      tx: the optimiser.
      key: the type of the random key.
      loss: the type of the loss, which an optimiser may ask for as `value`.

    Raises:
      TypeError: `tx` is no optax transformation, or needs more than a step gives it.
      ValueError: it treats a parameter by its name, shape or norm, while a buffer holds many parameters.
    """
    params = variables["params"]
    opt_state = checked_opt_state(tx, params, loss)
    shardings = state_shardings(opt_state, params, on_hosts=params.layout.state_on_hosts)
    everywhere = NamedSharding(variables["params"].layout.mesh, PartitionSpec())
    place = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)
    return TrainState(step, variables, jax.tree.map(place, opt_state, shardings), place(key, everywhere), tx)


def make_opt_state(tx: optax.GradientTransformation, params: StageTree, shardings: PyTree) -> PyTree:
    """Makes an optimiser's state for these parameters, which lies as `shardings` say."""
    return jax.jit(partial(initial, tx, shardings), out_shardings=shardings)(params)


def state_to_place(
    state: PyTree, params: StageTree, optimizer: tuple[optax.GradientTransformation, jax.ShapeDtypeStruct] | None
) -> tuple[PyTree, PyTree]:
    """(The state of any training loop, shardings for it).

    A `TrainState` comes back as one whose optimiser's state lies where `params` say, on the hosts or on the devices.

    Args:
      state: a `TrainState`, or any pytree.
      params: the shapes of the parameters.
      optimizer: the loop's optimiser and the type of its loss, to be checked as by `abstract_state`; None without one.
    """
    if optimizer is not None:
        tx, loss = optimizer
        checked_opt_state(tx, params, loss)
    if not isinstance(state, TrainState):
        return state, state_shardings(jax.eval_shape(lambda tree: tree, state), params)
    on_hosts = params.layout.state_on_hosts
    own, opt_state = laid_out((state.variables["params"], state.opt_state), state_on_hosts=on_hosts)
    state = state.replace(variables=state.variables | {"params": own}, opt_state=opt_state)
    shapes = jax.eval_shape(lambda tree: tree, state)
    moments = state_shardings(shapes.opt_state, params, on_hosts=on_hosts)
    return state, state_shardings(shapes, params).replace(opt_state=moments)


def state_shardings(opt_state: Shapes, params: StageTree, *, on_hosts: bool = False) -> PyTree:
    """Shardings for an optimiser's state, a tree like it: a leaf that has the shape of its buffer lies as the buffer.

    Args:
      opt_state: `jax.eval_shape(tx.init, params)`.
      params: the parameters, or their shapes: buffers `[K, ...]` of K stages.
      on_hosts: whether floats that lie as buffers do lie in the memory of the hosts.
    """
    layout = params.layout

    def guess(leaf: Leaf) -> NamedSharding:
        """Splits a leaf over the stages if it looks like a statistic of buffers, `[K, ...]`; others lie on all."""
        is_by_stage = leaf.ndim > 1 and leaf.shape[0] == layout.num_stages  # a vector `[K]` is none
        return NamedSharding(layout.mesh, PartitionSpec(AXIS) if is_by_stage else PartitionSpec())

    def of_leaf(of_node: Layout, buffer: jax.ShapeDtypeStruct, leaf: Leaf) -> NamedSharding:
        goes = on_hosts and may_go(leaf, buffer, by_layer=of_node != layout)
        return on_host(buffer.sharding) if goes else buffer.sharding

    return by_buffer(opt_state, of_leaf, guess)


# --- a step -----------------------------------------------------------------------------------------------------------


MOST_TRAIN_STEPS = 8
"""How many compiled training steps are kept, one for each optimiser; the oldest goes first."""

Metrics = dict[str, jax.Array]
ValueAndGrad = Callable[..., tuple[tuple[jax.Array, Variables, Metrics], StageTree]]
"""`(step, variables, batch, key) -> ((loss, new state by collection, metrics), gradients)`, of a step as plain data."""


def train_step(run: ValueAndGrad, step: object, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    """Does one step: (the state after it, the metrics); to be traced."""
    (loss, updates, metrics), grads = run(step, state.variables, batch, jax.random.fold_in(state.key, state.step))
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
    # A loss function's own metrics have other names.
    metrics = {"loss": loss, "grad_norm": norm, "finite": jnp.isfinite(loss) & jnp.isfinite(norm), **metrics}
    return state.replace(step=state.step + 1, variables=variables, opt_state=opt_state), metrics


def steps_for(run: ValueAndGrad, shapes: Callable[[optax.GradientTransformation], TrainState]):
    """`(tx, plan)` -> `train_step` for this optimiser, jitted, which donates the state; the newest few are kept.

    Args:
      run: the loss and gradients of a batch, to be traced.
      shapes: `tx` -> the state as shapes with shardings, of the plan of now.
    """

    def step_for(tx: optax.GradientTransformation, _: object) -> Callable[..., tuple[TrainState, Metrics]]:
        shardings = jax.tree.map(lambda leaf: leaf.sharding, shapes(tx))
        step, out_shardings = partial(train_step, run), (shardings, shardings.step)
        return jax.jit(step, static_argnums=0, donate_argnums=1, out_shardings=out_shardings)

    return lru_cache(MOST_TRAIN_STEPS)(step_for)
