"""In which types the models compute: as narrow as they are asked to, but for parameters and losses."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def dtypes(dtype: Any) -> dict[str, Any]:
    """For a Flax module that computes in `dtype`: its parameters are float32, or float64 to compute in float64."""
    return {"dtype": dtype, "param_dtype": _at_least_float32(dtype)}


def at_least_float32(x: jax.Array) -> jax.Array:
    """As losses take it: float32, or float64 where that is given."""
    return x.astype(_at_least_float32(x.dtype))


def _at_least_float32(dtype: Any) -> Any:
    return jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32
