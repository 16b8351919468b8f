"""Decides which dtypes have gradients, and in which dtype values are summed."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jpipe.types import Leaf


def is_float(leaf: Leaf) -> bool:
    """Whether a leaf (an array, or its shape and dtype) is floating-point or complex: then it has gradients."""
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def accumulator_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype in which values of `dtype` are summed: float32 for narrower floats, `dtype` itself for all others."""
    narrow = jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize < 4
    return np.dtype(np.float32) if narrow else dtype
