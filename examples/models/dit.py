"""DiT, the diffusion Transformer of Peebles and Xie (arXiv 2212.09748), as a list of layers.

Each block is modulated by what an image is conditioned on, its time and its class: by shifts, scales and gates, all of
which begin at zero (adaLN-Zero). DiT-XL/2 has 28 blocks of width 1152 with 16 heads on patches of 2x2. The paper's
predicts a variance too (twice as many outputs as channels), and is trained to; the loss here is of noise alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from models.precision import at_least_float32, dtypes
from models.transformer_l import sinusoids

FREQUENCIES = 256
"""Cosines and sines that a time is embedded by."""


def dit(
    num_blocks: int,
    width: int = 1152,
    heads: int = 16,
    patch: int = 2,
    outputs: int = 4,
    classes: int = 1000,
    start: nn.initializers.Initializer = nn.initializers.zeros,
    dtype: Any = jnp.float32,
) -> list[nn.Module]:
    """An embedding, equal blocks, an output layer.

    It takes `(latents [B, H, H, C], times [B], classes [B])` and gives `[B, H, H, outputs]`, the noise in the latents.
    From layer to layer goes `(x [B, T, width], condition [B, width])`.

    Args:
      num_blocks: equal ones.
      width: of the hidden states, a multiple of 4.
      heads: of attention, a divisor of `width`.
      patch: latents are cut into squares of as many points a side, a divisor of H.
      outputs: channels that are predicted.
      classes: the classes are 0 to this one, which stands for none.
      start: kernels of modulations and of the output. Zeros, as in the paper, make the untrained model give zeros.
      dtype: to compute in.
    """
    if width % heads or width % 4:
        raise ValueError(f"width={width} has to be a multiple of 4 and of heads={heads}; use {4 * heads} or a multiple")
    blocks = [Block(heads, start, dtype) for _ in range(num_blocks)]
    return [Embedding(width, patch, classes, dtype), *blocks, Output(patch, outputs, start, dtype)]


def loss_fn(noise: jax.Array, batch: dict[str, Any]) -> jax.Array:
    """The mean squared error of the noise predicted, `batch["targets"]` `[B, H, H, outputs]`."""
    return jnp.mean(jnp.square(at_least_float32(noise) - at_least_float32(batch["targets"])))


def sample(denoise: Callable[[tuple], jax.Array], noise: jax.Array, classes: jax.Array, steps: int) -> jax.Array:
    """Latents `[B, H, H, C]` from noise by DDIM (arXiv 2010.02502, no fresh noise): `steps` times through the model.

    Args:
      denoise: `(latents, times, classes) -> noise`, the model.
      noise: `[B, H, H, C]`, of variance 1.
      classes: `[B]`.
      steps: 1 or more, evenly over the 1000 times of training, whose noise has variances from 1e-4 to 0.02.
    """
    kept = jnp.cumprod(1 - jnp.linspace(1e-4, 0.02, 1000, dtype=noise.dtype))  # of the image, by time
    times = jnp.round(jnp.linspace(999, 0, steps)).astype("int32")
    after = jnp.append(kept[times[1:]], jnp.ones(1, noise.dtype))

    def step(x, now):
        index, kept_now, kept_after = now
        found = denoise((x, jnp.full(len(x), index, x.dtype), classes)).astype(x.dtype)
        clean = (x - jnp.sqrt(1 - kept_now) * found) / jnp.sqrt(kept_now)
        return jnp.sqrt(kept_after) * clean + jnp.sqrt(1 - kept_after) * found, None

    return jax.lax.scan(step, noise, (times, kept[times], after))[0]


class Embedding(nn.Module):
    """`(latents [B, H, H, C], times [B], classes [B])` to patches `[B, T, width]` and condition `[B, width]`."""

    width: int
    patch: int
    classes: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, latents, times, classes):
        types, patch = dtypes(self.dtype), (self.patch, self.patch)
        patches = nn.Conv(self.width, patch, patch, "VALID", **types)(latents.astype(self.dtype))
        x = (patches + positions(patches.shape[1], self.width, patches.dtype)).reshape(len(latents), -1, self.width)
        rates = jnp.exp(jnp.arange(FREQUENCIES // 2, dtype=times.dtype) * (-math.log(10000.0) / (FREQUENCIES // 2)))
        angles = times[:, None] * rates
        waves = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1).astype(self.dtype)
        small = {"kernel_init": nn.initializers.normal(0.02), **types}
        condition = nn.Dense(self.width, **small)(nn.silu(nn.Dense(self.width, **small)(waves)))
        table = nn.Embed(self.classes + 1, self.width, embedding_init=nn.initializers.normal(0.02), **types)
        return x, condition + table(classes)


class Block(nn.Module):
    """`(x [B, T, width], condition [B, width])` to the same: attention, then a feed-forward network, both gated.

    A mesh axis `model` splits heads, the inside of the feed-forward network, and the modulations.
    """

    heads: int
    start: nn.initializers.Initializer
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x, condition):
        width, types = x.shape[-1], dtypes(self.dtype)
        modulations = nn.Dense(6 * width, kernel_init=split(self.start, None, "model"), **types)(nn.silu(condition))
        shift, scale, gate, *others = jnp.split(modulations[:, None], 6, axis=-1)
        into, out = split(XAVIER, None, None, "model", None), split(XAVIER, "model", None, None)
        qkv = nn.DenseGeneral((3, self.heads, width // self.heads), kernel_init=into, **types)(
            modulated(x, shift, scale)
        )
        h = attention(*(qkv[:, :, i] for i in range(3)))
        x = x + gate * nn.DenseGeneral(width, axis=(-2, -1), kernel_init=out, **types)(h)
        shift, scale, gate = others
        h = nn.Dense(4 * width, kernel_init=split(XAVIER, None, "model"), **types)(modulated(x, shift, scale))
        h = nn.Dense(width, kernel_init=split(XAVIER, "model", None), **types)(nn.gelu(h))
        return x + gate * h, condition


class Output(nn.Module):
    """`(x [B, T, width], condition [B, width])` to `[B, H, H, outputs]`."""

    patch: int
    outputs: int
    start: nn.initializers.Initializer
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x, condition):
        types = {"kernel_init": self.start, **dtypes(self.dtype)}
        modulations = nn.Dense(2 * x.shape[-1], **types)(nn.silu(condition))
        x = modulated(x, *jnp.split(modulations[:, None], 2, axis=-1))
        x = nn.Dense(self.patch**2 * self.outputs, **types)(x)
        side = math.isqrt(x.shape[1])
        x = x.reshape(-1, side, side, self.patch, self.patch, self.outputs)
        return x.swapaxes(2, 3).reshape(-1, side * self.patch, side * self.patch, self.outputs)


XAVIER = nn.initializers.xavier_uniform()


def split(start: nn.initializers.Initializer, *axes: str | None) -> nn.initializers.Initializer:
    """Of a kernel: which mesh axis each of its dimensions is split over, on a mesh that has it."""
    return nn.with_partitioning(start, axes)


def attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Of all to all, `[B, T, heads, D]` each; JAX's own takes its softmax in float32, also of float64."""
    scores = at_least_float32(jnp.einsum("bqnd,bknd->bnqk", query, key)) / math.sqrt(query.shape[-1])
    return jnp.einsum("bnqk,bknd->bqnd", jax.nn.softmax(scores).astype(value.dtype), value)


def modulated(x: jax.Array, shift: jax.Array, scale: jax.Array) -> jax.Array:
    """Normalised, then shifted and scaled, `[B, T, width]`; to be called in a module's `__call__`."""
    norm = nn.LayerNorm(epsilon=1e-6, use_scale=False, use_bias=False, dtype=x.dtype)
    return norm(x) * (1 + scale) + shift


def positions(side: int, width: int, dtype: Any) -> jax.Array:
    """Sines and cosines, `[side, side, width]`: of the column in the first half of the width, then of the row."""
    one = sinusoids(side, width // 2, dtype)
    column, row = jnp.broadcast_to(one, (side, *one.shape)), jnp.broadcast_to(one[:, None], (side, *one.shape))
    return jnp.concatenate([column, row], axis=-1)
