"""`TrainState`: the state that a step of training reads and returns, and how it lies on the devices."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jpipe.arrays.host import on_host
from jpipe.memory.layout import TELLS_APART, StageTree, laid_out, may_go
from jpipe.mesh.axes import AXIS
from jpipe.training.by_slices import initial, updated
from jpipe.training.optimizers import check_is_optimizer, check_optimizer, check_update
from jpipe.training.probing import check_elementwise
from jpipe.types import Leaf, PyTree, Shapes


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
    variables: dict[str, StageTree],
    tx: optax.GradientTransformation,
    key: jax.ShapeDtypeStruct,
    loss: jax.ShapeDtypeStruct,
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
    if params.layout.state_on_hosts:  # what can't be done slice by slice is refused
        with jax.numpy_dtype_promotion("standard"):  # dtypes aren't checked
            jax.eval_shape(partial(updated, tx), params, opt_state, params, loss)
    shardings = state_shardings(opt_state, params, on_hosts=params.layout.state_on_hosts)
    everywhere = NamedSharding(variables["params"].layout.mesh, PartitionSpec())
    place = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    return TrainState(
        step=jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere),
        variables=variables,
        opt_state=jax.tree.map(place, opt_state, shardings),
        key=place(key, everywhere),
        tx=tx,
    )


def checked_opt_state(tx: optax.GradientTransformation, params: StageTree, loss: jax.ShapeDtypeStruct) -> Shapes:
    """The shapes of the state of an optimiser that may work on these parameters; errors as of `abstract_state`."""
    check_is_optimizer(tx)
    try:
        opt_state = jax.eval_shape(tx.init, params)
    except Exception as error:
        if "jpipe.per_layer" in str(error):
            raise
        raise ValueError(TELLS_APART.format(f"or its init raised {type(error).__name__}: {error}")) from error
    check_optimizer(opt_state)
    check_update(tx, params, opt_state, loss)
    check_elementwise(tx)
    return opt_state


def make_opt_state(tx: optax.GradientTransformation, params: StageTree, shardings: PyTree) -> PyTree:
    """Makes an optimiser's state for these parameters, which lies as `shardings` say."""
    return jax.jit(partial(initial, tx), out_shardings=shardings)(params)


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

    def of_node(node: Leaf | StageTree) -> PyTree:
        """The shardings of a leaf, or of a part of the state that mirrors the parameters, buffer by buffer."""
        if not is_tree(node):
            return guess(node)
        shapes = node.layout.shapes

        def of_leaf(buffer: jax.ShapeDtypeStruct, leaf: Leaf) -> NamedSharding:
            if leaf.shape != buffer.shape:
                return guess(leaf)
            goes = on_hosts and may_go(leaf, buffer, by_layer=node.layout != layout)
            return on_host(buffer.sharding) if goes else buffer.sharding

        return StageTree({n: jax.tree.map(partial(of_leaf, shapes[n]), node[n]) for n in node}, node.layout)

    is_tree = lambda node: isinstance(node, StageTree)
    return jax.tree.map(of_node, opt_state, is_leaf=is_tree)
