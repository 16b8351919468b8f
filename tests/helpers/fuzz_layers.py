"""The layers that `fuzz` puts together: of every kind, for activations of every layout, computed in float64.

Each function takes `Scope` and gives one item of a list of layers, or several. The leaves of a boundary besides the
activations (an auxiliary loss, a bias without examples) pass by a layer inside of `over`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

import jpipe

WIDE = jnp.float64
STEPS = 4
"""T, of sequences."""
VOCABULARY = 8
RATE = 0.1
"""1 - momentum of every BatchNorm."""
MODEL_AXES = ("model", "fsdp", "tp")


@dataclass(frozen=True)
class Scope:
    """What a layer may look at when it is made.

    Attributes:
      rng: makes every choice.
      axes: the names of the mesh's axes.
      plain: whether the layers are for the reference, without a mesh.
      width: D, the size of the activations' last dimension.
      layout: of the activations, a key of `LAYOUTS`.
    """

    rng: np.random.Generator
    axes: tuple[str, ...]
    plain: bool
    width: int
    layout: str

    def pick(self, choices: Any) -> Any:
        """One of the choices."""
        return choices[int(self.rng.integers(len(choices)))]

    def dims(self, count: int) -> tuple:
        """Metadata: for each dimension None, an axis, or two axes; no axis twice."""
        names = [name for name in MODEL_AXES if name in self.axes] or ["model"]
        order = [names[i] for i in self.rng.permutation(len(names))]
        entries: list[Any] = [None] * count
        if len(order) == 2 and self.rng.random() < 0.4:
            order = [tuple(order)]
        for name, place in zip(order, self.rng.permutation(count), strict=False):
            entries[place] = name
        return tuple(entries)


LAYOUTS = ("features", "sequence", "time", "folded", "time folded", "image")
"""`[b, D]`, `[b, T, D]`, `[T, b, D]`, `[b*T, D]`, `[T*b, D]`, `[b, 4, 4, D]`."""


# --- beside the activations -------------------------------------------------------------------------------------------


class Over(nn.Module):
    """A linen module on the first of several values; the others pass by."""

    inner: nn.Module

    @nn.compact
    def __call__(self, x, *others, train: bool = False):
        options = {"train": train} if isinstance(self.inner, Dropped | Normed) else {}
        return (self.inner(x, **options), *others)


class NnxOver(nnx.Module):
    """The same of an nnx module."""

    def __init__(self, inner):
        self.inner = inner

    def __call__(self, x, *others):
        return (self.inner(x), *others)


def over(layer: Any, count: int) -> Any:
    """The layer among `count` further values that pass by."""
    if not count:
        return layer
    if isinstance(layer, nn.Module):
        return Over(layer)
    if isinstance(layer, jpipe.Layer):
        init, apply = layer.init, layer.apply
        return jpipe.Layer(lambda key, x, *others: init(key, x), lambda p, x, *others: (apply(p, x), *others))
    if isinstance(layer, nnx.Module):
        return NnxOver(layer)
    if isinstance(layer, Factory):
        make = layer.make
        return Factory(lambda rngs: NnxOver(make(rngs)))
    return lambda x, *others: (layer(x), *others)


@dataclass(frozen=True)
class Factory:
    """An nnx factory, until the list of layers is complete."""

    make: Callable[[nnx.Rngs], nnx.Module]


def finished(layer: Any) -> Any:
    """The layer as users write it."""
    if not isinstance(layer, Factory):
        return layer
    make = layer.make
    return lambda rngs: make(rngs)


# --- of any layout ----------------------------------------------------------------------------------------------------


def dense(s: Scope) -> Any:
    return nn.Dense(s.width, param_dtype=WIDE)


def narrow_dense(s: Scope) -> Any:
    """Parameters in float32, as Flax has them by default."""
    return nn.Dense(s.width, use_bias=False)


def norm(s: Scope) -> Any:
    return nn.LayerNorm(param_dtype=WIDE)


def activation(s: Scope) -> Any:
    return s.pick([jnp.tanh, nn.gelu, lambda x: x * 0.5 + jnp.sin(x)])


def nnx_factory(s: Scope) -> Any:
    width = s.width
    kind = s.pick(["linear", "norm", "dropout"])
    if kind == "linear":
        return Factory(lambda rngs: nnx.Linear(width, width, param_dtype=WIDE, rngs=rngs))
    if kind == "norm":
        return Factory(lambda rngs: nnx.LayerNorm(width, param_dtype=WIDE, rngs=rngs))
    return Factory(lambda rngs: nnx.Dropout(0.25, rngs=rngs))


def nnx_ready(s: Scope) -> Any:
    return nnx.Linear(s.width, s.width, param_dtype=WIDE, rngs=nnx.Rngs(3))


def nnx_split(s: Scope) -> Any:
    """An nnx module with metadata."""
    width, kernel, bias = s.width, s.dims(2), s.dims(1)
    make = nnx.initializers.lecun_normal(), nnx.initializers.zeros_init()
    return Factory(
        lambda rngs: nnx.Linear(
            width,
            width,
            param_dtype=WIDE,
            kernel_init=nnx.with_partitioning(make[0], kernel),
            bias_init=nnx.with_partitioning(make[1], bias),
            rngs=rngs,
        )
    )


def nnx_batch_norm(s: Scope) -> Any:
    width = s.width
    return Factory(lambda rngs: nnx.BatchNorm(width, momentum=1 - RATE, param_dtype=WIDE, rngs=rngs))


def plain_layer(s: Scope) -> Any:
    """A `jpipe.Layer`, with a scalar, a vector and nested parameters."""
    width = s.width
    return jpipe.Layer(
        lambda key, x: {"w": [jax.random.normal(key, (width, width), WIDE), jnp.ones(width, WIDE)], "b": _zero(key)},
        lambda p, x: x + jnp.tanh(x @ p["w"][0] * p["w"][1] + p["b"]),
    )


def _zero(key: Any) -> Any:
    return jax.random.normal(key, (), WIDE) * 0


class Dropped(nn.Module):
    """Dropout."""

    @nn.compact
    def __call__(self, x, train: bool):
        return nn.Dropout(0.25, deterministic=not train)(x)


class Normed(nn.Module):
    """BatchNorm over all but the last dimension; its statistics in float64, or as Flax has them in float32."""

    axis_name: str | None = None
    narrow: bool = False

    @nn.compact
    def __call__(self, x, train: bool):
        return nn.BatchNorm(
            use_running_average=not train,
            momentum=1 - RATE,
            axis_name=self.axis_name,
            param_dtype=WIDE,
            dtype=WIDE,
            force_float32_reductions=self.narrow,
        )(x)


def dropout(s: Scope) -> Any:
    return Dropped()


def batch_norm(s: Scope) -> Any:
    return Normed(None, bool(s.rng.integers(2)))


def batch_norm_over_data(s: Scope) -> Any:
    """With the name of a mesh axis: statistics over all shards, which is what they are without it, too."""
    return Normed("data" if "data" in s.axes and not s.plain else None)


class SplitBlock(nn.Module):
    """Two matrices with metadata."""

    up: tuple
    down: tuple
    bias: tuple

    @nn.compact
    def __call__(self, x):
        matrix, zeros = nn.initializers.lecun_normal(), nn.initializers.zeros_init()
        h = nn.Dense(
            2 * x.shape[-1],
            param_dtype=WIDE,
            kernel_init=nn.with_partitioning(matrix, self.up),
            bias_init=nn.with_partitioning(zeros, self.bias),
        )(x)
        down = nn.with_partitioning(matrix, self.down)
        return x + nn.Dense(x.shape[-1], param_dtype=WIDE, kernel_init=down, use_bias=False)(nn.tanh(h))


def split_block(s: Scope) -> Any:
    return SplitBlock(s.dims(2), s.dims(2), s.dims(1))


def constrained(s: Scope) -> Any:
    """Constrains how its activations are split, as Tunix's models do."""
    if s.plain or s.layout != "sequence":
        return lambda x: jnp.cos(x)
    spec = PartitionSpec(
        "fsdp" if "fsdp" in s.axes else None, None, next((n for n in ("tp", "model") if n in s.axes), None)
    )
    return lambda x: jnp.cos(jax.lax.with_sharding_constraint(x, spec))


def centred(s: Scope) -> Any:
    """Looks across examples."""
    return lambda x: x - x.mean(0)


def contrasted(s: Scope) -> Any:
    """Every example with every other."""

    def contrast(x):
        y = x.reshape(x.shape[0], -1)
        return (y + jnp.tanh(y @ y.T / 8) @ y / 8).reshape(x.shape)

    return contrast


# --- of one layout ----------------------------------------------------------------------------------------------------


def attention(s: Scope) -> Any:
    return nn.MultiHeadDotProductAttention(2, param_dtype=WIDE, dtype=WIDE)


class FusedAttention(nn.Module):
    """One matrix for queries, keys and values, split over an axis: in other places than between the three."""

    kernel: tuple

    @nn.compact
    def __call__(self, x):
        matrix, width = nn.initializers.lecun_normal(), x.shape[-1]
        qkv = nn.Dense(
            3 * width, param_dtype=WIDE, use_bias=False, kernel_init=nn.with_partitioning(matrix, self.kernel)
        )(x)
        q, k, v = (part.reshape(*x.shape[:-1], 2, width // 2) for part in jnp.split(qkv, 3, axis=-1))
        weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k))
        h = jnp.einsum("bhts,bshd->bthd", weights, v).reshape(x.shape)
        return x + nn.Dense(
            width, param_dtype=WIDE, kernel_init=nn.with_partitioning(matrix, self.kernel[::-1]), use_bias=False
        )(h)


def fused_attention(s: Scope) -> Any:
    names = [name for name in MODEL_AXES if name in s.axes] or ["model"]
    return FusedAttention((None, s.pick([*names, tuple(names)])))


def recurrent(s: Scope) -> Any:
    cell = s.pick([nn.SimpleCell, nn.LSTMCell])(s.width, param_dtype=WIDE)
    return nn.RNN(cell, time_major=s.layout == "time")


def convolution(s: Scope) -> Any:
    """Over a sequence or an image; an image's in groups, too."""
    if s.layout == "sequence":
        return nn.Conv(s.width, (3,), param_dtype=WIDE)
    return nn.Conv(s.width, (3, 3), param_dtype=WIDE, feature_group_count=s.pick([1, 2]))


def nnx_convolution(s: Scope) -> Any:
    width, window = s.width, (3,) if s.layout == "sequence" else (3, 3)
    return Factory(lambda rngs: nnx.Conv(width, width, window, param_dtype=WIDE, rngs=rngs))


def pool(s: Scope) -> Any:
    window = (2,) if s.layout == "sequence" else (2, 2)
    function = s.pick([nn.max_pool, nn.avg_pool])
    return lambda x: x + function(x, window, padding="SAME")


def masked(s: Scope) -> Any:
    """Attention under a mask that it reads from the batch."""
    if s.layout != "sequence":
        return jpipe.reads(lambda x, side: x * _like(x, side.mean(-1)) if _batched(x, side) else x, _mask)
    return jpipe.reads(MaskedAttention(), _mask)


class MaskedAttention(nn.Module):
    """Looks at the unmasked steps."""

    @nn.compact
    def __call__(self, x, mask):
        x, others = (x[0], x[1:]) if isinstance(x, tuple) else (x, None)
        keep = mask[:, None, None, :] > 0
        y = x + nn.MultiHeadDotProductAttention(2, param_dtype=WIDE, dtype=WIDE)(x, mask=keep)
        return y if others is None else (y, *others)


def _mask(batch: Any) -> Any:
    return batch["mask"]


def _batched(x: Any, side: Any) -> bool:
    return not isinstance(x, tuple) and x.shape[0] == side.shape[0]


def _like(x: Any, side: Any) -> Any:
    return side.reshape(-1, *[1] * (x.ndim - 1))


ANYWHERE = (
    *(dense, narrow_dense, norm, activation, nnx_factory, nnx_ready, nnx_split, nnx_batch_norm, plain_layer, dropout),
    *(batch_norm, batch_norm_over_data, split_block, constrained, centred, contrasted),
)
OF_LAYOUT = {
    "features": (),
    "sequence": (attention, fused_attention, recurrent, convolution, nnx_convolution, pool, masked) * 2,
    "time": (recurrent,) * 5,
    "folded": (),
    "time folded": (),
    "image": (convolution, nnx_convolution, pool) * 3,
}


# --- from layout to layout --------------------------------------------------------------------------------------------

Change = tuple[str, Callable[[int], Callable]]
"""The new layout, and width -> the function; widths stay."""

CHANGES: dict[str, tuple[Change, ...]] = {
    "features": (),
    "sequence": (
        ("time", lambda d: lambda x: x.swapaxes(0, 1)),
        ("folded", lambda d: lambda x: x.reshape(-1, d)),
        ("features", lambda d: lambda x: x.mean(1)),
        ("features", lambda d: lambda x: x[:, -1]),
    ),
    "time": (
        ("sequence", lambda d: lambda x: x.swapaxes(0, 1)),
        ("time folded", lambda d: lambda x: x.reshape(-1, d)),
        ("features", lambda d: lambda x: x.sum(0)),
    ),
    "folded": (("sequence", lambda d: lambda x: x.reshape(-1, STEPS, d)),),
    "time folded": (("time", lambda d: lambda x: x.reshape(STEPS, -1, d)),),
    "image": (
        ("sequence", lambda d: lambda x: x.reshape(x.shape[0], 16, d)[:, ::4]),
        ("features", lambda d: lambda x: x.mean((1, 2))),
    ),
}
