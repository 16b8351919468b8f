"""AmoebaNet-B and -D (arXiv 1802.01548) as GPipe (arXiv 1811.06965) scales them, one layer a cell.

The cells and what joins them follow TensorFlow's reference, tensorflow/tpu models/official/amoeba_net (model_specs.py,
network_utils.py, model_builder.py), without its auxiliary head and its dropped paths. B(18, 512) has the 557,277,864
parameters of the paper's ImageNet model; Table 1 is about D. B's 5x5 convolution is called dilated there, and isn't.
Every boundary between cells carries two tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from .precision import at_least_float32, dtypes

_CHANNELS = (None, None, None, "model")  # a mesh axis `model` splits the channels that a convolution gives
_init = nn.with_partitioning(nn.initializers.variance_scaling(2.0, "fan_out", "truncated_normal"), _CHANNELS)


@dataclass(frozen=True)
class Genotype:
    """What a cell computes from its states 0 and 1.

    Attributes:
      pairs: each appends the sum of two operations, given as (index of a state, operation).
      outputs: the states that are concatenated.
    """

    pairs: tuple[tuple[tuple[int, str], tuple[int, str]], ...]
    outputs: tuple[int, ...]


NORMAL = {
    "B": Genotype(
        (
            ((1, "1x1"), (1, "max_3x3")),
            ((1, "none"), (0, "separable_3x3")),
            ((1, "1x1"), (0, "separable_3x3")),
            ((2, "1x1"), (2, "none")),
            ((1, "avg_3x3"), (5, "1x1")),
        ),
        (0, 3, 4, 6),
    ),
    "D": Genotype(
        (
            ((1, "1x1"), (1, "max_3x3")),
            ((1, "none"), (0, "1x7_7x1")),
            ((0, "1x1"), (0, "1x7_7x1")),
            ((2, "max_3x3"), (2, "none")),
            ((1, "avg_3x3"), (5, "1x1")),
        ),
        (0, 3, 4, 6),
    ),
}
REDUCTION = {
    "B": Genotype(
        (
            ((0, "max_2x2"), (0, "max_3x3")),
            ((2, "none"), (1, "3x3")),
            ((2, "separable_5x5"), (2, "max_3x3")),
            ((3, "none"), (1, "separable_3x3")),
            ((4, "avg_3x3"), (3, "1x1")),
        ),
        (5, 6),
    ),
    "D": Genotype(
        (
            ((0, "max_2x2"), (0, "max_3x3")),
            ((2, "none"), (1, "3x3")),
            ((2, "1x7_7x1"), (2, "max_3x3")),
            ((3, "none"), (1, "max_2x2")),
            ((2, "avg_3x3"), (3, "1x1")),
        ),
        (4, 5, 6),
    ),
}


def amoebanet(
    num_layers: int,
    num_filters: int,
    num_classes: int = 1000,
    *,
    variant: str = "D",
    stem: str = "imagenet",
    dropout: float = 0.5,
    decay: float = 0.9997,
    dtype: Any = jnp.float32,
) -> list[nn.Module]:
    """Images `[B, H, W, C]` to logits `[B, num_classes]`, float32 or float64.

    Args:
      num_layers: L, the normal cells in three stacks; a multiple of 3.
      num_filters: D, the filters of the first stack, a multiple of 8; reduction cells double them.
      num_classes: of the logits.
      variant: "B" or "D".
      stem: "imagenet" takes an eighth of the size (a strided convolution and two reduction cells), "small" keeps it.
      dropout: the fraction dropped before the classifier.
      decay: of BatchNorm's running averages.
      dtype: to compute in; parameters are float32, or float64 with it.
    """
    if variant not in NORMAL or stem not in ("imagenet", "small"):
        raise ValueError(f"variant={variant!r}, stem={stem!r}: use 'B' or 'D', and 'imagenet' or 'small'")
    if num_layers % 3 or num_filters % 8:
        raise ValueError(f"num_layers={num_layers}, num_filters={num_filters}: use multiples of 3 and 8")
    normal = lambda scale: Cell(NORMAL[variant], num_filters * scale, 1, decay, dtype)
    reduction = lambda filters: Cell(REDUCTION[variant], filters, 2, decay, dtype)
    layers: list[nn.Module] = [Stem(2 if stem == "imagenet" else 1, decay, dtype)]
    if stem == "imagenet":
        layers += [reduction(num_filters // 4), reduction(num_filters // 2)]
    for scale in (1, 2, 4):
        layers += [reduction(num_filters * scale)] if scale > 1 else []
        layers += [normal(scale) for _ in range(num_layers // 3)]
    return [*layers, Classifier(num_classes, dropout)]


def loss_fn(logits: jax.Array, batch: dict[str, jax.Array], label_smoothing: float = 0.0) -> jax.Array:
    """Nats an image: the mean over `batch["targets"]` `[B]`. The reference smooths the labels by 0.1."""
    labels = optax.smooth_labels(
        jax.nn.one_hot(batch["targets"], logits.shape[-1], dtype=logits.dtype), label_smoothing
    )
    return optax.softmax_cross_entropy(logits, labels).mean()


class Stem(nn.Module):
    """A 3x3 convolution to 32 filters: `[B, H, W, C]` to `[B, H, W, 32]`, or to half the size with a stride of 2."""

    stride: int
    decay: float
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x, train: bool):
        padding = "SAME" if self.stride == 1 else "VALID"
        x = x.astype(self.dtype)
        x = nn.Conv(32, (3, 3), self.stride, padding, use_bias=False, kernel_init=_init, **dtypes(self.dtype))(x)
        return _norm(x, self.decay, self.dtype, train)


class Cell(nn.Module):
    """`(net, prev)`, the last two cells' outputs, to (this cell's output, `net`).

    `net` is `[B, H, W, C]`, `prev` of that or twice the size, with any channels; the first cell has none, and takes
    `net` for it. The output is `[B, H/stride, W/stride, filters * len(genotype.outputs)]`.
    """

    genotype: Genotype
    filters: int
    stride: int
    decay: float
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, net, prev=None, *, train: bool):
        first = ConvNorm(self.filters, decay=self.decay, dtype=self.dtype)(net, train)
        states = [first, net if prev is None else self._fit(prev, net, train)]
        # Only what comes from outside of the cell is strided.
        operate = lambda i, name: self._operate(states[i], name, self.stride if i < 2 else 1, train)
        for left, right in self.genotype.pairs:
            states.append(operate(*left) + operate(*right))
        return jnp.concatenate([states[i] for i in self.genotype.outputs], axis=-1), net

    def _fit(self, prev, net, train):
        """`prev` with the size of `net` and this cell's filters."""
        if prev.shape[1:3] != net.shape[1:3]:
            return FactorizedReduction(self.filters, self.decay, self.dtype)(prev, train)
        if prev.shape[-1] != self.filters:
            return ConvNorm(self.filters, decay=self.decay, dtype=self.dtype)(prev, train)
        return prev

    def _operate(self, x, name, stride, train):
        """One operation: `[B, H, W, C]` to `[B, H/stride, W/stride, filters]`."""
        conv = partial(ConvNorm, decay=self.decay, dtype=self.dtype)
        few, many, strides = max(1, self.filters // 4), self.filters, (stride, stride)
        if name == "none" and stride == 1 and x.shape[-1] == many:
            return x
        if name in _POOLS:
            x = _POOLS[name](x, strides=strides).astype(x.dtype)  # an average is of float32 else
            return x if x.shape[-1] == many else conv(many, relu=False)(x, train)
        if name in ("none", "1x1"):
            chain = [conv(many, (1, 1), strides)]
        elif name == "3x3":
            chain = [conv(few), conv(few, (3, 3), strides), conv(many)]
        elif name == "1x7_7x1":
            chain = [conv(few), conv(few, (1, 7), (1, stride)), conv(few, (7, 1), (stride, 1)), conv(many)]
        else:
            kernel = {"separable_3x3": (3, 3), "separable_5x5": (5, 5)}[name]
            chain = [conv(many, kernel, strides, separable=True), conv(many, kernel, separable=True)]
        for layer in chain:
            x = layer(x, train)
        return x


class Classifier(nn.Module):
    """`(net, prev)` to logits `[B, num_classes]`; `prev` is not used."""

    num_classes: int
    dropout: float

    @nn.compact
    def __call__(self, net, prev, *, train: bool):
        del prev
        x = jnp.mean(at_least_float32(nn.relu(net)), axis=(1, 2))
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        return nn.Dense(self.num_classes, **dtypes(x.dtype))(x)


class ConvNorm(nn.Module):
    """ReLU, a convolution without bias (if separable a depthwise one and a 1x1), BatchNorm."""

    features: int
    kernel: tuple[int, int] = (1, 1)
    strides: tuple[int, int] = (1, 1)
    decay: float = 0.9997
    dtype: Any = jnp.float32
    separable: bool = False
    relu: bool = True

    @nn.compact
    def __call__(self, x, train):
        conv = partial(nn.Conv, use_bias=False, kernel_init=_init, **dtypes(self.dtype))
        x = nn.relu(x) if self.relu else x
        if self.separable:
            init, channels = nn.initializers.he_normal(), x.shape[-1]
            x = conv(channels, self.kernel, self.strides, feature_group_count=channels, kernel_init=init)(x)
            x = conv(self.features, (1, 1))(x)
        else:
            x = conv(self.features, self.kernel, self.strides)(x)
        return _norm(x, self.decay, self.dtype, train)


class FactorizedReduction(nn.Module):
    """`[B, H, W, C]` to `[B, H/2, W/2, features]`: half of them from the even pixels, half from the odd ones."""

    features: int
    decay: float
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x, train):
        x = nn.relu(x)
        shifted = jnp.pad(x, ((0, 0), (0, 1), (0, 1), (0, 0)))[:, 1:, 1:]
        conv = partial(nn.Conv, self.features // 2, (1, 1), 2, use_bias=False, kernel_init=_init, **dtypes(self.dtype))
        return _norm(jnp.concatenate([conv()(x), conv()(shifted)], axis=-1), self.decay, self.dtype, train)


def _norm(x: jax.Array, decay: float, dtype: Any, train: bool) -> jax.Array:
    """BatchNorm as a submodule of the caller."""
    return nn.BatchNorm(use_running_average=not train, momentum=decay, epsilon=1e-3, **dtypes(dtype))(x)


_POOLS = {
    "max_2x2": partial(nn.max_pool, window_shape=(2, 2), padding="SAME"),
    "max_3x3": partial(nn.max_pool, window_shape=(3, 3), padding="SAME"),
    "avg_3x3": partial(nn.avg_pool, window_shape=(3, 3), padding="SAME", count_include_pad=False),
}
