"""Checks of what users pass to a pipeline, before anything is compiled.

Every error names the offender, its value, what was expected and what to do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jpipe.batches import check_same_structure
from jpipe.kinds import Sequential, describe
from jpipe.layout import StageTree
from jpipe.plan import Plan


def check_variables(plan: Plan, variables: Any) -> None:
    """Checks that variables (some or all collections) are laid out by this plan.

    Raises:
      TypeError: they are no dict of `StageTree`s.
      ValueError: an unknown collection, another layout, or a leaf of another shape.
    """
    if not isinstance(variables, dict) or not variables:
        raise TypeError(
            f"variables is a {type(variables).__name__}; pass what pipe.init returned, a dict by collection"
        )
    for name, tree in variables.items():
        if name not in plan.layouts:
            raise ValueError(f"variables have the unknown collection {name!r}; expected {sorted(plan.layouts)}")
        if not isinstance(tree, StageTree):
            raise TypeError(
                f"variables[{name!r}] is a {type(tree).__name__}, not laid out by a pipeline; "
                "use pipe.from_layer_variables(trees)"
            )
        if tree.layout != plan.layouts[name]:
            raise ValueError(
                f"variables[{name!r}] were laid out by another pipeline (num_stages={tree.layout.num_stages}, here "
                f"{plan.layouts[name].num_stages}; layers, balance or mesh may differ too); translate them: "
                "pipe.from_layer_variables(other.layer_variables(variables))"
            )
        check_same_structure(f"variables[{name!r}]", tree, plan.layouts[name].shapes)
        _check_shapes(f"variables[{name!r}]", tree, plan.layouts[name].shapes)


def check_complete(plan: Plan, variables: dict[str, Any]) -> None:
    """Checks that no collection is missing.

    Raises:
      ValueError: naming the first that is.
    """
    missing = sorted(set(plan.layouts) - set(variables))
    if missing:
        raise ValueError(f"variables lack the collection {missing[0]!r}; pass what pipe.init returned")


def check_key(model: Sequential, key: Any) -> None:
    """Checks that there is a key if a layer draws random numbers.

    Raises:
      ValueError: naming the first layer that does.
    """
    needy = [kind for kind in model.kinds if kind.needs_key]
    if key is None and needy:
        raise ValueError(
            f"layer {needy[0].members[0] - model.first} ({needy[0].layer.name}) draws random numbers, but key=None; "
            "pass key=jax.random.key(...)"
        )


def check_loss(model: Sequential, loss_fn: Callable, batch: Any) -> None:
    """Checks what a loss function returns for one micro-batch.

    Raises:
      ValueError: it is neither a floating-point scalar nor a pair of scalars.
    """
    loss = jax.eval_shape(loss_fn, model.kinds[model.kind_of[-1]].gives, batch)
    parts = loss if isinstance(loss, tuple) else (loss,)
    scalars = [hasattr(part, "shape") and part.shape == () for part in parts]
    if len(parts) not in (1, 2) or not all(scalars):
        raise ValueError(
            f"loss_fn returned {describe(loss)}; it has to return a scalar (the mean loss) or a pair of scalars "
            "(loss_sum, weight_sum)"
        )
    if not jnp.issubdtype(parts[0].dtype, jnp.floating):
        raise ValueError(f"loss_fn returned a loss of dtype {parts[0].dtype}; it has to be floating-point")


def check_item(what: str, own: Any, expected: dict[str, Any]) -> None:
    """Checks one layer's variables by collection against their shapes.

    Raises:
      ValueError: a collection or leaf is missing, or has another shape.
    """
    lacking = [name for name in expected if name not in own]
    if lacking:
        raise ValueError(f"{what} lacks the collection {lacking[0]!r}; got {sorted(own)}")
    for name, tree in expected.items():
        check_same_structure(f"{what}[{name!r}]", own[name], tree)
        _check_shapes(f"{what}[{name!r}]", own[name], tree)


def _check_shapes(what: str, tree: Any, expected: Any) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    for (path, leaf), want in zip(leaves, jax.tree.leaves(expected), strict=True):
        name, shape, dtype = f"{what}{jax.tree_util.keystr(path)}", np.shape(leaf), jnp.result_type(leaf)
        if shape != want.shape:
            raise ValueError(f"{name} has the shape {shape}, not {want.shape} as at init")
        if dtype != want.dtype:
            raise ValueError(f"{name} has the dtype {dtype}, not {want.dtype} as at init; cast it back")


def check_alive(state: Any) -> None:
    """Checks that a state wasn't donated to an earlier step.

    Raises:
      ValueError: it was, so that its arrays are gone.
    """
    for leaf in jax.tree.leaves(state):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted():
            raise ValueError("state was donated to an earlier train_step; use the state that it returned")
