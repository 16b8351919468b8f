"""An optimiser's update, given the loss if it asks for it; whether it was skipped; and the norm of all gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from jpipe.jax_tools.dtypes import accumulator_dtype
from jpipe.layers.functions import signature_of
from jpipe.types import Leaf, PyTree


def global_norm(grads: PyTree) -> jax.Array:
    """The Euclidean norm of all gradients together, summed in float32 or better."""
    wide = [leaf.astype(accumulator_dtype(leaf.dtype)) for leaf in jax.tree.leaves(grads)]
    return jnp.sqrt(sum(jnp.sum(jnp.square(jnp.abs(leaf))) for leaf in wide))


def update_with_loss(
    tx: optax.GradientTransformation, grads: PyTree, opt_state: PyTree, params: PyTree, loss: Leaf
) -> tuple[PyTree, PyTree]:
    """`tx.update`, with the loss as `value` if it takes one: (changes of the parameters, new state)."""
    update = optax.with_extra_args_support(tx).update
    parameters = signature_of(update)
    takes_value = "value" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return update(grads, opt_state, params, **({"value": loss} if takes_value else {}))


def skips(before: PyTree, after: PyTree) -> list[jax.Array]:
    """Whether an update was skipped, by each of optax's means that an optimiser's state knows; none: it never skips.

    Args:
      before: the optimiser's state before the update.
      after: that after it. `optax.apply_if_finite` counts what it skips, a `MultiSteps` with `should_skip_update_fn`
        says it.
    """
    found = []
    for old, new in zip(_guards(before), _guards(after), strict=True):
        if isinstance(new, optax.ApplyIfFiniteState):
            found.append(new.total_notfinite != old.total_notfinite)  # `last_finite` may be of an earlier step
        elif isinstance(new.skip_state, dict) and "should_skip" in new.skip_state:
            found.append(jnp.asarray(new.skip_state["should_skip"]))
    return found


def _guards(opt_state: PyTree) -> list[PyTree]:
    """The parts of an optimiser's state that may skip updates, those inside of others too."""
    may_skip = lambda node: isinstance(node, optax.ApplyIfFiniteState | optax.MultiStepsState)
    found = [node for node in jax.tree.leaves(opt_state, is_leaf=may_skip) if may_skip(node)]
    return found + [inner for node in found for inner in _guards(tuple(node))]
