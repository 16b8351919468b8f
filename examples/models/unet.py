"""U-Net (arXiv 1505.04597), padded so that sizes are kept: its skips are `jpipe.stash` and `jpipe.pop`."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jpipe


def unet(
    num_classes: int, levels: int = 4, channels: int = 64, *, norm: bool = True, dtype: Any = jnp.float32
) -> list[Any]:
    """Images `[B, H, W, C]` to logits `[B, H, W, num_classes]`; H and W are multiples of 2**levels.

    Args:
      num_classes: of the pixels.
      levels: how often the image is halved, the number of skips.
      channels: at full size; each level doubles them.
      norm: BatchNorm after the 3x3 convolutions, instead of biases.
      dtype: to compute in; parameters are float32.
    """
    width = [channels * 2**level for level in range(levels + 1)]
    down = [jpipe.stash(Encoder(width[i], i > 0, norm, dtype), f"skip {i}") for i in range(levels)]
    up = [jpipe.pop(Decoder(width[i], norm, dtype), f"skip {i}") for i in reversed(range(levels))]
    head = nn.Conv(num_classes, (1, 1), dtype=jnp.float32)
    return [*down, Encoder(width[levels], levels > 0, norm, dtype), *up, head]


def loss_fn(logits: jax.Array, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """(nats, number of pixels) over `batch["targets"]` `[B, H, W]`; pixels with a negative label don't count."""
    labelled = batch["targets"] >= 0
    targets = jnp.where(labelled, batch["targets"], 0)
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return jnp.sum(jnp.where(labelled, nats, 0.0)), jnp.sum(labelled.astype(jnp.float32))


class Encoder(nn.Module):
    """`[B, H, W, C]` to `[B, H, W, features]`, or to half the size if it pools first."""

    features: int
    pool: bool
    norm: bool = True
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x, train: bool):
        x = x.astype(self.dtype)
        if self.pool:
            x = nn.max_pool(x, (2, 2), (2, 2))
        return TwoConvs(self.features, self.norm, self.dtype)(x, train)


class Decoder(nn.Module):
    """`x` `[B, H, W, 2 features]` and what was kept, `[B, 2H, 2W, features]`, to the latter's shape."""

    features: int
    norm: bool = True
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x, skip, train: bool):
        x = nn.ConvTranspose(self.features, (2, 2), (2, 2), dtype=self.dtype)(x)
        return TwoConvs(self.features, self.norm, self.dtype)(jnp.concatenate([skip, x], axis=-1), train)


class TwoConvs(nn.Module):
    """Two 3x3 convolutions, each followed by BatchNorm if wanted, and a ReLU.

    A mesh axis `model` splits the channels that they give.
    """

    features: int
    norm: bool
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x, train: bool):
        for _ in range(2):
            init = nn.with_partitioning(nn.initializers.he_normal(), (None, None, None, "model"))
            x = nn.Conv(self.features, (3, 3), use_bias=not self.norm, kernel_init=init, dtype=self.dtype)(x)
            if self.norm:
                x = nn.BatchNorm(use_running_average=not train, momentum=0.9, dtype=self.dtype)(x)
            x = nn.relu(x)
        return x
