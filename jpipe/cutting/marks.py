"""`jpipe.cut`: says in a model where a stage may begin."""

from __future__ import annotations

import jax
from jax.ad_checkpoint import checkpoint_name

from jpipe.types import PyTree

CUT = "jpipe.cut"
"""The name under which marked values are found in a trace."""


def cut(x: PyTree) -> PyTree:
    """Marks a value of a model: a stage may begin behind it. Where a model has such marks, only these places are used.

    It gives `x` as it is, and does nothing outside of a pipeline.

    Args:
      x: an activation, any pytree of arrays.
    """
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, CUT), x)
