"""Checks that an optimiser may work on a pipeline's variables, computes its update, and sees whether it was skipped.

The update hands the loss to an optimiser that asks for it, and tells whether it was skipped.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import optax

from jpipe.arrays.trees import accumulator_dtype
from jpipe.layers.functions import signature_of
from jpipe.memory.layout import TELLS_APART
from jpipe.types import Leaf, PyTree, Shapes


def check_is_optimizer(tx: object) -> None:
    """Checks that `tx` is an optax transformation.

    Raises:
      TypeError: it isn't.
    """
    if not isinstance(tx, optax.GradientTransformation):
        raise TypeError(
            f"tx is a {type(tx).__name__}; pass an optax transformation, such as optax.adamw(1e-3) "
            "(of an optax.MultiSteps its gradient_transformation())"
        )


def check_update(tx: optax.GradientTransformation, params: Shapes, opt_state: Shapes, loss: Shapes) -> None:
    """Checks that a transformation takes the arguments that `train_step` gives its update.

    Args:
      tx: an optax transformation.
      params: the parameters' shapes.
      opt_state: the shapes of its state.
      loss: the shape of the loss.

    Raises:
      TypeError: it raised an error, which is shown.
    """
    try:
        with jax.numpy_dtype_promotion("standard"):  # the arguments are checked, not their dtypes
            jax.eval_shape(partial(update_with_loss, tx), params, opt_state, params, loss)
    except Exception as error:
        raise TypeError(
            f"tx.update raised {type(error).__name__}: {error}. train_step gives it gradients, state, parameters and "
            "value=loss, and nothing that computes the loss again (value_fn, grad_fn); use another transformation, or "
            "write a step of your own with pipe.value_and_grad"
        ) from error


_BY_PARAMETER = ("MaskedState", "PartitionState", "MultiTransformState", "FactoredState", "ScaleByTrustRatioState")


def check_optimizer(opt_state: Shapes) -> None:
    """Checks that no transformation outside of `per_layer` tells parameters apart.

    Under a layout leaves of many layers lie in one array: a mask, a label or a norm of a parameter would be another's.
    A transformation without state (the trust ratio of lamb, adaptive gradient clipping) isn't noticed here, but by
    `jpipe.training.probing`.

    Args:
      opt_state: the state of the optimiser; the states of transformations inside of `per_layer` can't be seen in it.

    Raises:
      ValueError: naming the state that gives it away.
    """
    is_by_parameter = lambda node: type(node).__name__ in _BY_PARAMETER
    for node in filter(is_by_parameter, jax.tree.leaves(opt_state, is_leaf=is_by_parameter)):
        raise ValueError(TELLS_APART.format(f"its state holds a {type(node).__name__}: a mask, labels, or statistics"))


# --- the update -------------------------------------------------------------------------------------------------------


def global_norm(grads: PyTree) -> jax.Array:
    """The Euclidean norm of all gradients together, summed in float32 or better."""
    wide = [leaf.astype(accumulator_dtype(leaf.dtype)) for leaf in jax.tree.leaves(grads)]
    return jnp.sqrt(sum(jnp.sum(jnp.square(jnp.abs(leaf))) for leaf in wide))


def update_with_loss(
    tx: optax.GradientTransformation, grads: PyTree, opt_state: PyTree, params: PyTree, loss: Leaf
) -> tuple[PyTree, PyTree]:
    """Calls `tx.update`, with the loss as `value` if it takes one: (changes of the parameters, new state)."""
    update = optax.with_extra_args_support(tx).update
    parameters = signature_of(update)
    takes_value = "value" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return update(grads, opt_state, params, **({"value": loss} if takes_value else {}))


def skips(before: PyTree, after: PyTree) -> list[jax.Array]:
    """Whether an update was skipped: a bool for each part of an optimiser that may skip; empty if none may.

    `optax.apply_if_finite` counts the updates that it skips; the state of a `MultiSteps` with `should_skip_update_fn`
    says whether the last one was.

    Args:
      before: the optimiser's state before the update.
      after: its state after the update.
    """
    values = lambda state, name: [value for _, value in optax.tree_utils.tree_get_all_with_path(state, name)]
    counts = zip(values(after, "total_notfinite"), values(before, "total_notfinite"), strict=True)
    # The count and not `last_finite`, which may be of an earlier step.
    return [*(new != old for new, old in counts), *map(jnp.asarray, values(after, "should_skip"))]
