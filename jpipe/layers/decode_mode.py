"""Calls layers as they decode: in evaluation mode, with a token or a few at a time, and with caches that they write.

A cache is a collection of its layer's, called `cache`. It is as long as the sequence that the layer is initialised for.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from jpipe.layers.base import Activation, AnyLayer, Context, Inputs, LayerVariables
from jpipe.types import Batch, Shapes

CACHE = "cache"
"""The collection that a decoding layer writes, of Linen modules and of `nnx.Cache` variables."""


def decoding(layer: AnyLayer, takes: Shapes, size: int, length: int) -> AnyLayer:
    """Puts a layer in decode mode, with caches for sequences of a length. One without is called as in evaluation.

    A side input is None, since there is no batch.

    Args:
      layer: any layer.
      takes: the shapes that it takes in training, `[b, T, ...]`.
      size: the sequences that it is called with at a time.
      length: of the longest sequence.
    """
    decoder = token_by_token(layer, length) if layer.decode is None else layer.decode(takes, size, length)
    return replace(decoder, shared=layer.shared, repeats=layer.repeats)


def token_by_token(layer: AnyLayer, length: int) -> AnyLayer:
    """Makes the layer that takes a few tokens at a time: it is always in evaluation mode.

    Args:
      layer: its decode mode, or a layer without one.
      length: of the sequences that it is initialised for.
    """

    def init(key: jax.Array, inputs: Inputs, batch: Batch) -> LayerVariables:
        # Flax makes a cache as long as the inputs of `init` are, so these are whole sequences, [size, length, ...].
        sequences = jax.tree.map(lambda a: jnp.zeros((a.shape[0], length, *a.shape[2:]), a.dtype), inputs)
        return layer.init(key, sequences, batch)

    def apply(variables: LayerVariables, inputs: Inputs, context: Context) -> tuple[Activation, LayerVariables]:
        return layer.apply(variables, inputs, Context(None, False, context.batch))

    return replace(layer, init=init, apply=apply, made_of=("token by token", layer.made_of, length))
