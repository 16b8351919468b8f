"""ResNets (arXiv 1512.03385), a layer a block. Bottlenecks stride in their 3x3 convolution, as is usual now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax


def resnet50(num_classes: int = 1000, *, dropout: float = 0.0, dtype: Any = jnp.float32) -> list[nn.Module]:
    """ResNet-50: images `[B, 224, 224, 3]` to logits `[B, num_classes]`; 25,557,032 parameters for 1000 classes."""
    return [Stem(64, dtype=dtype), *_blocks(Bottleneck, (3, 4, 6, 3), 64, dtype), Classifier(num_classes, dropout)]


def resnet101(num_classes: int = 1000, *, dropout: float = 0.0, dtype: Any = jnp.float32) -> list[nn.Module]:
    """ResNet-101: images `[B, 224, 224, 3]` to logits `[B, num_classes]`; 44,549,160 parameters for 1000 classes."""
    return [Stem(64, dtype=dtype), *_blocks(Bottleneck, (3, 4, 23, 3), 64, dtype), Classifier(num_classes, dropout)]


def small_resnet(
    num_classes: int,
    sizes: Sequence[int] = (2, 2, 2),
    features: int = 16,
    *,
    dropout: float = 0.0,
    dtype: Any = jnp.float32,
) -> list[nn.Module]:
    """A ResNet of basic blocks for images `[B, H, W, C]` of 8 to 32 pixels.

    Args:
      num_classes: of the logits `[B, num_classes]`.
      sizes: blocks a group; each group after the first halves the image and doubles the channels. (3, 3, 3) with 16
        features is the ResNet-20 of section 4.2.
      features: channels of the first group.
      dropout: the fraction dropped before the classifier.
      dtype: to compute in; parameters are float32.
    """
    stem = Stem(features, small=True, dtype=dtype)
    return [stem, *_blocks(BasicBlock, sizes, features, dtype), Classifier(num_classes, dropout)]


def loss_fn(logits: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
    """Nats an image: the mean over `batch["targets"]` `[B]`."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


class Stem(nn.Module):
    """Images to features at a quarter of the size, or at the full size if they are small."""

    features: int
    small: bool = False
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x, train: bool):
        x = x.astype(self.dtype)
        if self.small:
            return nn.relu(ConvNorm(self.features, 3, dtype=self.dtype)(x, train))
        x = nn.relu(ConvNorm(self.features, 7, 2, dtype=self.dtype)(x, train))
        return nn.max_pool(x, (3, 3), (2, 2), "SAME")


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions past a shortcut: `[B, H, W, C]` to `[B, H/stride, W/stride, 4 features]`."""

    features: int
    stride: int = 1
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x, train: bool):
        h = nn.relu(ConvNorm(self.features, dtype=self.dtype)(x, train))
        h = nn.relu(ConvNorm(self.features, 3, self.stride, dtype=self.dtype)(h, train))
        h = ConvNorm(4 * self.features, dtype=self.dtype)(h, train)
        return nn.relu(h + _shortcut(x, h, self.stride, self.dtype, train))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions past a shortcut: `[B, H, W, C]` to `[B, H/stride, W/stride, features]`."""

    features: int
    stride: int = 1
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x, train: bool):
        h = nn.relu(ConvNorm(self.features, 3, self.stride, dtype=self.dtype)(x, train))
        h = ConvNorm(self.features, 3, dtype=self.dtype)(h, train)
        return nn.relu(h + _shortcut(x, h, self.stride, self.dtype, train))


class Classifier(nn.Module):
    """`[B, H, W, C]` to float32 logits `[B, num_classes]`."""

    num_classes: int
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x, train: bool):
        x = jnp.mean(x, axis=(1, 2), dtype=jnp.float32)
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        return nn.Dense(self.num_classes)(x)


class ConvNorm(nn.Module):
    """A convolution without bias, then BatchNorm; a mesh axis `model` splits the channels that it gives."""

    features: int
    size: int = 1
    stride: int = 1
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x, train: bool):
        shape, init = (self.size, self.size), nn.initializers.variance_scaling(2.0, "fan_out", "normal")
        init = nn.with_partitioning(init, (None, None, None, "model"))
        x = nn.Conv(self.features, shape, self.stride, use_bias=False, kernel_init=init, dtype=self.dtype)(x)
        return nn.BatchNorm(use_running_average=not train, momentum=0.9, dtype=self.dtype)(x)


def _shortcut(x: jax.Array, like: jax.Array, stride: int, dtype: Any, train: bool) -> jax.Array:
    """`x` in the shape of `like`; called by a block, whose submodule the projection is."""
    if x.shape == like.shape:
        return x
    return ConvNorm(like.shape[-1], 1, stride, dtype, name="shortcut")(x, train)


def _blocks(block: Any, sizes: Sequence[int], features: int, dtype: Any) -> list[nn.Module]:
    """Groups of blocks; the first block of a group after the first has stride 2."""
    return [
        block(features * 2**group, 2 if group and not index else 1, dtype)
        for group, size in enumerate(sizes)
        for index in range(size)
    ]
