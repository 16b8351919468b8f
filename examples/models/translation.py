"""T(L, H, A): the translation model of section 5 of GPipe (arXiv 1811.06965), encoder and decoder in one sequence.

Decoder layers pass `(x, memory)` on, so the encoder's output reaches every one of them. Tokens and padding masks don't
travel: each layer reads them from its own micro-batch. One matrix embeds the tokens of both sides (all languages have
one vocabulary) and a second one gives the logits. Linear maps are without biases; with them T(32, 16384, 32) would have
3.086B parameters, not 3.084B.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jpipe

from .precision import at_least_float32, dtypes
from .transformer_l import sinusoids, split

PADDING = 0  # as a decoder's input also the start of a sentence
CHANNELS = 64  # of an attention head


def translation(
    num_layers: int,
    hidden: int,
    heads: int,
    width: int = 1024,
    vocab: int = 64000,
    *,
    scale_init: bool = True,
    clip_logits: float | None = None,
    dtype: Any = jnp.float32,
) -> list[Any]:
    """T(L, H, A): L encoder layers, then L decoder layers.

    It takes `batch["inputs"]`, source tokens `[B, S]`, and gives logits `[B, T, vocab]` for `batch["targets"]`,
    tokens `[B, T]`; both are padded with zeros on the right.

    Args:
      num_layers: L.
      hidden: H, width of the feed-forward networks.
      heads: A, attention heads of 64 channels.
      width: of the hidden states.
      vocab: the number of tokens, padding included.
      scale_init: divides the initial weights of the feed-forward networks by L, for stability at depth.
      clip_logits: the largest magnitude that logits may have, for the same reason.
      dtype: to compute in; parameters are float32, or float64 with it.
    """
    scale = 1 / num_layers if scale_init else 1.0
    tokens = jpipe.Shared(Vocabulary(vocab, width, dtype))
    return [
        tokens,
        *(jpipe.reads(EncoderLayer(hidden, heads, scale, dtype), source_mask) for _ in range(num_layers)),
        nn.LayerNorm(**dtypes(dtype)),
        jpipe.reads(tokens.using("start_decoder"), target_tokens),
        *(jpipe.reads(DecoderLayer(hidden, heads, scale, dtype), source_mask) for _ in range(num_layers)),
        Head(vocab, clip_logits, dtype),
    ]


def source_mask(batch: dict[str, jax.Array]) -> jax.Array:
    """Which source tokens are no padding, `[B, S]`."""
    return batch["inputs"] != PADDING


def target_tokens(batch: dict[str, jax.Array]) -> jax.Array:
    """What the decoder has to say, `[B, T]`."""
    return batch["targets"]


def loss_fn(logits: jax.Array, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """(nats, number of tokens), padding left out: jpipe divides once, so every token of a batch weighs the same."""
    targets = batch["targets"]
    nats = optax.softmax_cross_entropy_with_integer_labels(at_least_float32(logits), targets)
    weights = (targets != PADDING).astype(nats.dtype)
    return jnp.sum(nats * weights), jnp.sum(weights)


class Vocabulary(nn.Module):
    """Tokens `[B, T]` to hidden states `[B, T, width]`, positions included."""

    vocab: int
    width: int
    dtype: Any = jnp.float32

    def setup(self):
        self.table = nn.Embed(self.vocab, self.width, **dtypes(self.dtype))

    def __call__(self, tokens):
        positions = sinusoids(tokens.shape[1], self.width, dtypes(self.dtype)["param_dtype"])
        return self.table(tokens) * math.sqrt(self.width) + positions.astype(self.dtype)

    def start_decoder(self, memory, targets):
        """The encoder's output `[B, S, width]` to `(x, memory)`, x the targets `[B, T]` one place later, embedded."""
        return self(jnp.pad(targets, ((0, 0), (1, 0)), constant_values=PADDING)[:, :-1]), memory


class EncoderLayer(nn.Module):
    """`[B, S, width]` to the same; `mask` `[B, S]` says where there are tokens."""

    hidden: int
    heads: int
    scale: float = 1.0
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x, mask):
        h = nn.LayerNorm(**dtypes(self.dtype))(x)
        x = x + Attention(self.heads, self.dtype)(h, h, mask[:, None, None, :])
        return x + FeedForward(self.hidden, self.scale, self.dtype)(x)


class DecoderLayer(nn.Module):
    """`(x, memory)`, `[B, T, width]` and `[B, S, width]`, to the same; `mask` `[B, S]` is of the memory."""

    hidden: int
    heads: int
    scale: float = 1.0
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, carried, mask):
        x, memory = carried
        h = nn.LayerNorm(**dtypes(self.dtype))(x)
        x = x + Attention(self.heads, self.dtype)(h, h, is_causal=True)
        h = nn.LayerNorm(**dtypes(self.dtype))(x)
        x = x + Attention(self.heads, self.dtype)(h, memory, mask[:, None, None, :])
        return x + FeedForward(self.hidden, self.scale, self.dtype)(x), memory


class Attention(nn.Module):
    """From `x` `[B, T, width]` to `source` `[B, S, ...]`, under a mask `[B, 1, 1, S]`."""

    heads: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x, source, mask=None, is_causal=False):
        linear = partial(nn.DenseGeneral, use_bias=False, **dtypes(self.dtype))
        shape = (self.heads, CHANNELS)
        query = linear(shape, kernel_init=split(None, "model", None))(x)
        both = linear((2, *shape), kernel_init=split(None, None, "model", None))(source)
        h = attend(query, both[:, :, 0], both[:, :, 1], mask, is_causal)
        return linear(x.shape[-1], axis=(-2, -1), kernel_init=split("model", None, None))(h)


def attend(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array | None, is_causal: bool) -> jax.Array:
    """Attention, `[B, T, heads, 64]`; in float64 Flax's, since JAX's own takes the softmax in float32 all the same."""
    if query.dtype != jnp.float64:
        return jax.nn.dot_product_attention(query, key, value, mask=mask, is_causal=is_causal)
    causal = nn.make_causal_mask(query[:, :, 0, 0]) if is_causal else None
    return nn.dot_product_attention(query, key, value, mask=nn.combine_masks(mask, causal, dtype=bool))


class FeedForward(nn.Module):
    """`[..., width]` to the same, pre-norm; its initial weights are multiplied by `scale`."""

    hidden: int
    scale: float = 1.0
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x):
        linear = partial(nn.Dense, use_bias=False, **dtypes(self.dtype))
        h = nn.LayerNorm(**dtypes(self.dtype))(x)
        h = nn.relu(linear(self.hidden, kernel_init=split(None, "model", scale=self.scale))(h))
        return linear(x.shape[-1], kernel_init=split("model", None, scale=self.scale))(h)


class Head(nn.Module):
    """`(x, memory)` to logits `[B, T, vocab]`."""

    vocab: int
    clip_logits: float | None = None
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x, memory):
        del memory
        x = nn.LayerNorm(**dtypes(self.dtype))(x)
        logits = nn.Dense(self.vocab, use_bias=False, kernel_init=split(None, "model"), **dtypes(self.dtype))(x)
        return logits if self.clip_logits is None else jnp.clip(logits, -self.clip_logits, self.clip_logits)
