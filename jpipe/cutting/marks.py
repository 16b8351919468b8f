"""`jpipe.cut`: says in a model where a stage may begin."""

from __future__ import annotations

import jax
from jax.ad_checkpoint import checkpoint_name

from jpipe.types import PyTree

CUT = "jpipe.cut"
"""The name under which marked values are found in a trace."""


def cut(x: PyTree) -> PyTree:
    """Marks a value of a model: a stage may begin behind it. Where a model has such marks, only these places are used.

    It does nothing outside of a pipeline. A mark isn't seen in a loop that doesn't go over blocks, in a function with
    derivatives of its own (`jax.custom_vjp`), or on a value that follows from the batch alone.

    Args:
      x: an activation, any pytree of arrays.

    Returns:
      The same.
    """
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, CUT), x)
