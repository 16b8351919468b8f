"""Models as people write them, one module each, in float64; and what each is trained with."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

VOCABULARY, WIDTH, LENGTH, ROWS = 32, 16, 6, 8
FLOAT = jnp.float64


class Attention(nn.Module):
    """Causal attention with dropout behind it."""

    rate: float = 0.0

    @nn.compact
    def __call__(self, x, mask, train: bool = False):
        y = nn.MultiHeadDotProductAttention(2, param_dtype=FLOAT)(x, mask=mask)
        return nn.Dropout(self.rate, deterministic=not train)(y)


class Mlp(nn.Module):
    """A feed-forward, whose weights may be split over an axis."""

    @nn.compact
    def __call__(self, x):
        split = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        return nn.Dense(x.shape[-1], param_dtype=FLOAT)(
            nn.gelu(nn.Dense(4 * WIDTH, kernel_init=split, param_dtype=FLOAT)(x))
        )


class Block(nn.Module):
    """A block of a transformer; `nn.scan` goes over its first argument."""

    rate: float = 0.0
    train: bool = False

    @nn.compact
    def __call__(self, x, mask):
        x = x + Attention(self.rate, name="attention")(nn.LayerNorm(param_dtype=FLOAT)(x), mask, self.train)
        return x + Mlp(name="mlp")(nn.LayerNorm(param_dtype=FLOAT)(x)), None


class Transformer(nn.Module):
    """A decoder.

    Attributes:
      depth: how many blocks it has.
      style: "loop", "scan", "remat" (a scan over blocks that are computed again) or "remat around" (in a loop).
      tied: whether the table is the head, too.
      rate: of dropout.
    """

    depth: int = 3
    style: str = "loop"
    tied: bool = False
    rate: float = 0.0

    @nn.compact
    def __call__(self, tokens, train: bool = False):
        table = nn.Embed(VOCABULARY, WIDTH, param_dtype=FLOAT, name="table")
        positions = self.param("positions", nn.initializers.normal(1.0), (LENGTH, WIDTH), FLOAT)
        x, mask = table(tokens) + positions, nn.make_causal_mask(tokens)
        block = nn.remat(Block) if "remat" in self.style else Block
        if self.style in ("scan", "remat"):
            rngs = {"params": True, "dropout": True}
            stack = nn.scan(
                block,
                {"params": 0},
                split_rngs=rngs,
                length=self.depth,
                in_axes=nn.broadcast,
                metadata_params={nn.PARTITION_NAME: None},
            )
            x, _ = stack(self.rate, train, name="blocks")(x, mask)
        else:
            for i in range(self.depth):
                x, _ = block(self.rate, train, name=f"h_{i}")(x, mask)
        x = nn.LayerNorm(param_dtype=FLOAT, name="norm")(x)
        return table.attend(x) if self.tied else nn.Dense(VOCABULARY, param_dtype=FLOAT, name="head")(x)


class ResNet(nn.Module):
    """Convolutions with running averages."""

    @nn.compact
    def __call__(self, x, train: bool = False):
        norm = lambda: nn.BatchNorm(use_running_average=not train, param_dtype=FLOAT, momentum=0.9)
        x = nn.relu(norm()(nn.Conv(4, (3, 3), param_dtype=FLOAT)(x)))
        for width in (4, 4, 8, 4, 4):
            y = nn.relu(norm()(nn.Conv(width, (3, 3), param_dtype=FLOAT)(x)))
            y = norm()(nn.Conv(width, (3, 3), param_dtype=FLOAT)(y))
            x = nn.relu(y + (x if x.shape == y.shape else nn.Conv(width, (1, 1), param_dtype=FLOAT)(x)))
        return nn.Dense(VOCABULARY, param_dtype=FLOAT)(x.mean((1, 2)))


class UNet(nn.Module):
    """Skips that wait while what lies between them is computed."""

    @nn.compact
    def __call__(self, x):
        conv = lambda width, **options: nn.Conv(width, (3, 3), param_dtype=FLOAT, **options)
        residual = lambda x: x + conv(x.shape[-1])(nn.silu(conv(x.shape[-1])(x)))
        x, skips = conv(4)(x), []
        for width in (4, 8):
            x = residual(x)
            skips.append(x)
            x = conv(2 * width, strides=2)(x)
        x = residual(x)
        for width in (8, 4):
            size = (x.shape[0], 2 * x.shape[1], 2 * x.shape[2], x.shape[3])
            x = residual(conv(width)(jnp.concatenate([jax.image.resize(x, size, "nearest"), skips.pop()], -1)))
        return conv(3)(x)


class Translation(nn.Module):
    """An encoder and a decoder that looks at its output in every block."""

    @nn.compact
    def __call__(self, source, target):
        table = nn.Embed(VOCABULARY, WIDTH, param_dtype=FLOAT, name="table")
        attention = lambda: nn.MultiHeadDotProductAttention(2, param_dtype=FLOAT)
        memory, mask = table(source), nn.make_causal_mask(target)
        for _ in range(2):
            memory = memory + attention()(memory)
            memory = memory + Mlp()(memory)
        x = table(target)
        for _ in range(2):
            x = x + attention()(x, mask=mask)
            x = x + attention()(x, memory)
            x = x + Mlp()(x)
        return nn.Dense(VOCABULARY, param_dtype=FLOAT)(x)


class NnxBlock(nnx.Module):
    """A block of nnx."""

    def __init__(self, rngs: nnx.Rngs, rate: float):
        options: dict[str, Any] = {"dtype": FLOAT, "param_dtype": FLOAT, "rngs": rngs}
        self.norm, self.norm2 = nnx.LayerNorm(WIDTH, **options), nnx.LayerNorm(WIDTH, **options)
        self.attention = nnx.Linear(WIDTH, 3 * WIDTH, **options)
        self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, **options), nnx.Linear(4 * WIDTH, WIDTH, **options)
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x, mask):
        query, key, value = jnp.split(self.attention(self.norm(x)), 3, -1)
        weights = jax.nn.softmax(jnp.where(mask[:, 0], query @ key.mT, -1e9))
        x = x + self.dropout(weights @ value)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class NnxTransformer(nnx.Module):
    """The decoder in nnx."""

    def __init__(self, rngs: nnx.Rngs, rate: float = 0.0, depth: int = 3):
        self.table = nnx.Embed(VOCABULARY, WIDTH, dtype=FLOAT, param_dtype=FLOAT, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(rngs, rate) for _ in range(depth)])
        self.norm = nnx.LayerNorm(WIDTH, dtype=FLOAT, param_dtype=FLOAT, rngs=rngs)

    def __call__(self, tokens):
        x, mask = self.table(tokens), nnx.make_causal_mask(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.table.attend(self.norm(x))


class Case(NamedTuple):
    """A model and what it is trained with.

    Attributes:
      model: the module.
      batch: a batch `[B, ...]`.
      loss: of outputs and a micro-batch.
      inputs: batch -> what the model is called with, if it isn't `batch["inputs"]`.
    """

    model: Any
    batch: Any
    loss: Callable
    inputs: Callable | None = None


def cross_entropy(logits, batch):
    """The mean over all tokens."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def tokens(*names: str) -> dict:
    """A batch of token ids `[B, T]` by name."""
    draw = np.random.default_rng(0).integers
    return {name: draw(0, VOCABULARY, (ROWS, LENGTH)).astype(np.int32) for name in names}


def images(size: int = 8) -> dict:
    """A batch of images and their classes."""
    rng = np.random.default_rng(0)
    return {"inputs": rng.normal(size=(ROWS, size, size, 3)), "targets": rng.integers(0, VOCABULARY, ROWS)}


def cases() -> dict[str, Case]:
    """All models by name."""
    words, square = tokens("inputs", "targets"), lambda outputs, batch: (outputs**2).mean()
    pair = lambda batch: (batch["source"], batch["inputs"])
    styles = {style: Transformer(style=style) for style in ("loop", "scan", "remat", "remat around")}
    return {
        **{name: Case(model, words, cross_entropy) for name, model in styles.items()},
        "tied": Case(Transformer(tied=True), words, cross_entropy),
        "dropout": Case(Transformer(rate=0.3, style="scan"), words, cross_entropy),
        "resnet": Case(ResNet(), images(), cross_entropy),
        "unet": Case(UNet(), images(), square),
        "translation": Case(Translation(), tokens("source", "inputs", "targets"), cross_entropy, pair),
    }
