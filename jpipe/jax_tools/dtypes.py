"""What dtypes mean for training: which leaves have gradients, and in which dtype values are summed."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np


def is_float(leaf: Any) -> bool:
    """Whether a leaf has a floating-point (or complex) dtype, so that it can be summed and has gradients."""
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def accumulator_dtype(dtype: Any) -> Any:
    """The dtype in which values of `dtype` are summed: at least float32, integers as they are."""
    narrow = jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize < 4
    return np.dtype(np.float32) if narrow else dtype
