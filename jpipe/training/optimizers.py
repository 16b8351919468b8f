"""Checks that an optimiser may work on a pipeline's variables, before anything is compiled."""

from __future__ import annotations

from functools import partial

import jax
import optax

from jpipe.training.update import update_with_loss
from jpipe.types import Shapes


def wrap_it(example: str) -> str:
    """What to do with a transformation that tells parameters apart."""
    return (
        "wrap that part of it in jpipe.per_layer(...), as in optax.chain(optax.clip_by_global_norm(1.0), "
        f"jpipe.per_layer({example}))"
    )


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
    """Checks that a transformation can be updated with what `train_step` gives it.

    Args:
      tx: an optax transformation.
      params: the parameters' shapes.
      opt_state: the shapes of its state.
      loss: the shape of the loss.

    Raises:
      TypeError: it raised an error; what it needs is named.
    """
    try:
        with jax.numpy_dtype_promotion("standard"):  # what is given is checked, not dtypes
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
    Those without state (the trust ratio of lamb, adaptive gradient clipping) can't be told.

    Args:
      opt_state: the state of the optimiser; `per_layer` keeps what it wraps out of sight.

    Raises:
      ValueError: naming the state that gives it away.
    """
    tells = lambda node: type(node).__name__ in _BY_PARAMETER
    found = [type(node).__name__ for node in jax.tree.leaves(opt_state, is_leaf=tells) if tells(node)]
    if found:
        raise ValueError(
            f"tx tells parameters apart (its state holds a {found[0]}: a mask, labels, or statistics of single "
            "parameters), but a pipeline keeps many layers' leaves in one array; "
            + wrap_it("optax.adamw(1e-3, mask=mask)")
        )
