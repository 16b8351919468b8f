"""An optimiser's update, given the loss if it asks for it, and the norm of all gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jpipe.jax_tools.dtypes import accumulator_dtype
from jpipe.layers.functions import signature_of


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
