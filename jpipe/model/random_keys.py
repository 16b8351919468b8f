"""Derives a random key for each layer and micro-batch from the user's key, and checks users' keys."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jpipe.jax.in_place import Index
from jpipe.types import Leaf

Key = jax.Array
"""A typed random key, a scalar."""

# A user may pass one key both to initialise and for a step, which are to draw different numbers.
_INIT, _STEP, _LOSS = 0x1217, 0x57E9, 0x1055


def init_key(key: Key, layer: Index, *, of_model: bool = False) -> Key:
    """The random key from which a layer's variables are made; it depends on nothing else.

    A piece of a model gets the user's key, as the model's own `init` would.
    """
    return key if of_model else jax.random.fold_in(jax.random.fold_in(key, _INIT), layer)


def layer_key(key: Key, layer: Index, microbatch: Index, *, of_model: bool = False) -> Key:
    """The random key of one layer for one micro-batch of a step; it depends on nothing else.

    All pieces of a model get the same one, the user's with the micro-batch folded in.
    """
    if of_model:
        return jax.random.fold_in(key, microbatch)
    return jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, _STEP), layer), microbatch)


def loss_key(key: Key) -> Key:
    """Derives the random key of the loss for one micro-batch from that of the last layer (`layer_key`)."""
    return jax.random.fold_in(key, _LOSS)


def key_shape(key: Key | None = None) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of a random key; without one, of a key of JAX's default implementation."""
    return jax.eval_shape(lambda: jax.random.key(0)) if key is None else jax.ShapeDtypeStruct(key.shape, key.dtype)


def example_key(shape: jax.ShapeDtypeStruct) -> Key:
    """Makes a random key of the implementation of `shape`, always the same."""
    implementations = []  # JAX tells them of keys, not of their dtypes
    jax.eval_shape(lambda key: implementations.append(jax.random.key_impl(key)), shape)
    return jax.random.key(0, impl=implementations[0])


def as_key(key: Leaf) -> Key:
    """Makes a typed random key of a user's, which may be typed or raw.

    Nothing in a raw key says of which implementation it is; it is taken to be of JAX's default one.

    Raises:
      TypeError: it is no key, or a raw one of another length than those of the default implementation.
    """
    dtype = getattr(key, "dtype", object)
    if jnp.issubdtype(dtype, jax.dtypes.prng_key) and key.shape == ():
        return key
    if dtype != np.uint32 or key.ndim != 1:
        raise TypeError(f"key is {key!r:.60}, which is no random key; use jax.random.key(0)")
    default = jax.random.key(0)
    expected = jax.random.key_data(default).shape
    if key.shape != expected:
        fault = f"key is a raw key of shape {key.shape}, but those of {jax.random.key_impl(default)!r} have {expected}"
        raise TypeError(f"{fault}; pass a typed one: jax.random.wrap_key_data(key, impl='rbg')")
    return jax.random.wrap_key_data(key)
