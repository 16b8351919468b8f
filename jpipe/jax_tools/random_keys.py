"""Random keys: whose they are, and how to speak of their types."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Keys for different ends are kept apart: one key may serve initialisation and a step.
_INIT, _STEP = 0x1217, 0x57E9


def init_key(key: Any, layer: Any) -> Any:
    """The random key from which a layer's variables are made; it depends on nothing else."""
    return jax.random.fold_in(jax.random.fold_in(key, _INIT), layer)


def layer_key(key: Any, layer: Any, microbatch: Any) -> Any:
    """The random key of one layer for one micro-batch of a step; it depends on nothing else."""
    layer = jnp.maximum(layer, 0)  # the ends added to a model, at -1 and N, draw nothing
    return jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, _STEP), layer), microbatch)


def key_shape(key: Any = None) -> jax.ShapeDtypeStruct:
    """The type of a random key, or of JAX's default implementation's."""
    return jax.eval_shape(lambda: jax.random.key(0)) if key is None else jax.ShapeDtypeStruct(key.shape, key.dtype)


def example_key(kind: jax.ShapeDtypeStruct) -> jax.Array:
    """A key of a type, always the same."""
    found: list[Any] = []  # JAX tells the implementation of keys alone, not of their types
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), kind)
    return jax.random.key(0, impl=found[0])


def as_key(key: Any) -> jax.Array:
    """A typed random key of either kind of key.

    Raises:
      TypeError: it is no key.
    """
    if hasattr(key, "dtype"):
        if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.shape == ():
            return key
        if key.dtype == np.uint32 and key.ndim == 1:
            return _wrapped(key)
    raise TypeError(f"key is {key!r}, which is no random key; use jax.random.key(0)")


def _wrapped(key: Any) -> jax.Array:
    """A raw key as one of JAX's default implementation: nothing in it says which it is of.

    Raises:
      TypeError: it has another length.
    """
    default = jax.random.key(0)
    expected = jax.random.key_data(default).shape
    if key.shape != expected:
        raise TypeError(
            f"key is a raw key of shape {key.shape}, but those of JAX's default implementation "
            f"({jax.random.key_impl(default)!r}) have {expected}; pass a key with a type, as "
            "jax.random.key(0, impl='rbg') or jax.random.wrap_key_data(key, impl='rbg')"
        )
    return jax.random.wrap_key_data(key)
