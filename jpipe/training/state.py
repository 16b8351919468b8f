"""The state of training: what a step reads and returns, and how an optimiser's state lies on the devices."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jpipe.jax_tools.dtypes import accumulator_dtype
from jpipe.layers.functions import signature_of
from jpipe.memory.layout import StageTree
from jpipe.sharding.meshes import AXIS


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """What a training step reads and returns.

    Attributes:
      step: int32 scalar, the number of steps done.
      variables: the model's variables by collection.
      opt_state: the optimiser's state.
      key: the random key that all steps' keys are derived from.
      tx: the optax transformation (static).
    """

    step: Any
    variables: dict[str, Any]
    opt_state: Any
    key: Any
    tx: optax.GradientTransformation = field(metadata={"static": True})

    def replace(self, **changes: Any) -> TrainState:
        """A copy with some fields changed."""
        return replace(self, **changes)


def global_norm(grads: Any) -> jax.Array:
    """The Euclidean norm of all gradients together, summed in float32 or better."""
    wide = [leaf.astype(accumulator_dtype(leaf.dtype)) for leaf in jax.tree.leaves(grads)]
    return jnp.sqrt(sum(jnp.sum(jnp.square(jnp.abs(leaf))) for leaf in wide))


def update_with_loss(tx: Any, grads: Any, opt_state: Any, params: Any, loss: Any) -> tuple[Any, Any]:
    """`tx.update`, with the loss as `value` if it takes one: (changes of the parameters, new state)."""
    update = optax.with_extra_args_support(tx).update
    parameters = signature_of(update)
    takes_value = "value" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return update(grads, opt_state, params, **({"value": loss} if takes_value else {}))


def state_shardings(opt_state: Any, params: StageTree) -> Any:
    """Shardings for an optimiser's state: of each leaf that mirrors a parameter, that parameter's.

    Args:
      opt_state: `jax.eval_shape(tx.init, params)`.
      params: the parameters, or their shapes.
    """
    layout = params.layout
    place = lambda spec: NamedSharding(layout.mesh, spec)

    def guess(leaf: Any) -> NamedSharding:
        """A statistic of the parameters' arrays is split over the stages, any other is on all of them."""
        whole = leaf.ndim > 1 and leaf.shape[0] == layout.num_stages
        return place(PartitionSpec(AXIS) if whole else PartitionSpec())

    def of_tree(tree: StageTree) -> StageTree:
        shapes, specs = tree.layout.shapes, tree.layout.specs
        same = lambda name, leaf: leaf.shape == shapes[name].shape
        choose = lambda name, leaf: place(specs[name]) if same(name, leaf) else guess(leaf)
        return StageTree({n: jax.tree.map(lambda leaf, n=n: choose(n, leaf), tree[n]) for n in tree}, tree.layout)

    is_tree = lambda node: isinstance(node, StageTree)
    return jax.tree.map(lambda node: of_tree(node) if is_tree(node) else guess(node), opt_state, is_leaf=is_tree)
