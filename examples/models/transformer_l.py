"""Transformer-L: the language model of Table 1 of GPipe (arXiv 1811.06965), as a list of layers.

A layer has w = 2048, h = 8192: 4 w (w + 1) for attention, 2 w h + h + w for the feed-forward network, 4 w for two layer
norms, all linear maps with biases: 50,358,272 parameters. The embedding has 32000 w, the head 32000 (w + 1). Positions
are sinusoids and the last layer norm is without scale and bias, so they add none.
"""

from __future__ import annotations

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from .precision import dtypes


def transformer_l(
    num_layers: int,
    width: int = 2048,
    hidden: int = 8192,
    heads: int = 32,
    vocab: int = 32000,
    dtype: Any = jnp.float32,
) -> list[nn.Module]:
    """A causal decoder-only Transformer: embedding, L blocks, head.

    It takes tokens `[B, T]` and gives logits `[B, T, vocab]`.

    Args:
      num_layers: L; 3, 13, 103, 415 and 1663 in the paper.
      width: of the hidden states.
      hidden: width of the feed-forward networks.
      heads: of attention, a divisor of `width`.
      vocab: the number of tokens.
      dtype: to compute in; parameters are float32.
    """
    if width % heads:
        raise ValueError(f"heads={heads} does not divide width={width}; use a divisor")
    blocks = [Block(hidden, heads, dtype) for _ in range(num_layers)]
    return [Embedding(vocab, width, dtype), *blocks, Head(vocab, dtype)]


def loss_fn(logits: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
    """Nats a token: the mean over `batch["targets"]` `[B, T]`."""
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


class Embedding(nn.Module):
    """Tokens `[B, T]` to hidden states `[B, T, width]`, positions included."""

    vocab: int
    width: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, tokens):
        hidden = nn.Embed(self.vocab, self.width, dtype=self.dtype)(tokens)
        positions = sinusoids(tokens.shape[1], self.width, dtypes(self.dtype)["param_dtype"])
        return hidden * math.sqrt(self.width) + positions.astype(self.dtype)


class Block(nn.Module):
    """A pre-norm block, `[B, T, width]` to the same: causal self-attention, then a feed-forward network."""

    hidden: int
    heads: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x):
        width = x.shape[-1]
        h = nn.LayerNorm(dtype=self.dtype)(x)
        into, out = split(None, None, "model", None), split("model", None, None)
        qkv = nn.DenseGeneral((3, self.heads, width // self.heads), kernel_init=into, dtype=self.dtype)(h)
        query, key, value = (qkv[:, :, i] for i in range(3))
        h = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        x = x + nn.DenseGeneral(width, axis=(-2, -1), kernel_init=out, dtype=self.dtype)(h)
        h = nn.LayerNorm(dtype=self.dtype)(x)
        h = nn.relu(nn.Dense(self.hidden, kernel_init=split(None, "model"), dtype=self.dtype)(h))
        return x + nn.Dense(width, kernel_init=split("model", None), dtype=self.dtype)(h)


class Head(nn.Module):
    """Hidden states `[B, T, width]` to logits `[B, T, vocab]`."""

    vocab: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm(use_scale=False, use_bias=False, dtype=self.dtype)(x)
        return nn.Dense(self.vocab, kernel_init=split(None, "model"), dtype=self.dtype)(x)


def split(*axes: str | None, scale: float = 1.0) -> nn.initializers.Initializer:
    """Of a kernel, times `scale`: which mesh axis each of its dimensions is split over, on a mesh that has it."""
    init = nn.initializers.variance_scaling(scale**2, "fan_in", "truncated_normal")
    return nn.with_partitioning(init, axes)


def sinusoids(length: int, width: int, dtype: Any = jnp.float32) -> jax.Array:
    """Positions as sines and cosines of geometric wavelengths, `[length, width]` (arXiv 1706.03762, section 3.5)."""
    rates = jnp.exp(jnp.arange(0, width, 2, dtype=dtype) * (-math.log(10000.0) / width))
    angles = jnp.arange(length, dtype=dtype)[:, None] * rates
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
