"""A model like Llama 3 in NNX, with the partitioning metadata of google-tunix's Llama 3.

Grouped-query attention, rotary positions (half-split rotation), RMSNorm, SwiGLU; the head is the embedding table. The
mask and the positions are side inputs. Everything is computed in float64, which Tunix doesn't.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

import fuzz
import jpipe
from timed import alive

WIDE = jnp.float64
EMBEDDING = ("tp", "fsdp")
Q = KV = ("fsdp", "tp", None)
OUT = ("tp", None, "fsdp")
UP, DOWN = ("fsdp", "tp"), ("tp", "fsdp")
NORM = ("tp",)
ACTIVATIONS = ("fsdp", None, "tp")
HEADS = ("fsdp", None, "tp", None)


@dataclass(frozen=True)
class Config:
    """Sizes.

    Attributes:
      vocabulary, width, hidden: of the table, the activations, and inside of the feed-forward.
      heads, kv_heads, head_dim: of queries; of keys and values; of each.
      blocks: how many.
    """

    vocabulary: int = 16
    width: int = 8
    hidden: int = 16
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 4
    blocks: int = 4


def shard(x: Any, axes: tuple) -> Any:
    """The activations, split over these axes of the mesh in context, if there is one; as Tunix has it."""
    empty = jax.sharding.get_abstract_mesh().empty
    return x if empty else jax.lax.with_sharding_constraint(x, PartitionSpec(*axes))


def rotated(x: Any, positions: Any) -> Any:
    """Rotary positions: the first half of a head's dimensions is turned against the second.

    Args:
      x: `[b, t, n, h]`.
      positions: `[b, t]`.
    """
    half = x.shape[-1] // 2
    angles = positions[..., None] / 500.0 ** (jnp.arange(half, dtype=WIDE) / half)
    sin, cos = jnp.sin(angles)[:, :, None], jnp.cos(angles)[:, :, None]
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def rms(x: Any, weight: Any) -> Any:
    """Divided by the root of the mean square."""
    return weight * x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
    """Grouped-query attention: several heads of queries to one of keys and values; `[b, t, n, h]`.

    Args:
      q: `[b, t, n, h]`.
      k, v: `[b, t, k, h]`.
      mask: `[b, t, t]`, what each step sees.
    """
    b, t, n, h = q.shape
    grouped = q.reshape(b, t, k.shape[2], n // k.shape[2], h)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, k) / h**0.5
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, -1e30))
    return jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(b, t, n, h)


def block(x: Any, side: Any, weights: dict[str, Any]) -> Any:
    """A block's function of its weights."""
    mask, positions = side
    h = rms(x, weights["before"])
    q = shard(jnp.einsum("btd,dnh->btnh", h, weights["q"]), HEADS)
    k = shard(jnp.einsum("btd,dkh->btkh", h, weights["k"]), HEADS)
    v = shard(jnp.einsum("btd,dkh->btkh", h, weights["v"]), HEADS)
    h = attend(rotated(q, positions), rotated(k, positions), v, mask)
    x = x + shard(jnp.einsum("btnh,nhd->btd", h, weights["o"]), ACTIVATIONS)
    h = rms(x, weights["after"])
    h = jax.nn.silu(h @ weights["gate"]) * (h @ weights["up"])
    return x + shard(shard(h, ACTIVATIONS) @ weights["down"], ACTIVATIONS)


def shapes_of(config: Config) -> dict[str, tuple[tuple[int, ...], tuple]]:
    """Shape and metadata of each weight of a block."""
    d, f, n, k, h = config.width, config.hidden, config.heads, config.kv_heads, config.head_dim
    return {
        "before": ((d,), NORM),
        "q": ((d, n, h), Q),
        "k": ((d, k, h), KV),
        "v": ((d, k, h), KV),
        "o": ((n, h, d), OUT),
        "after": ((d,), NORM),
        "gate": ((d, f), UP),
        "up": ((d, f), UP),
        "down": ((f, d), DOWN),
    }


_normal = jax.nn.initializers.normal(0.3, WIDE)


def _param(rngs: nnx.Rngs, shape: tuple, axes: tuple) -> nnx.Param:
    return nnx.Param(_normal(rngs.params(), shape), sharding=axes)


class NnxTable(nnx.Module):
    """Tokens to vectors, and back."""

    def __init__(self, config, rngs):
        self.config = config
        self.table = _param(rngs, (config.vocabulary, config.width), EMBEDDING)

    def __call__(self, tokens):
        return shard(self.table[...][tokens], ACTIVATIONS)

    def attend(self, x):
        return x @ self.table[...].T


class NnxBlock(nnx.Module):
    """A block in NNX."""

    def __init__(self, config, rngs):
        self.config = config
        for name, (shape, axes) in shapes_of(config).items():
            setattr(self, name, _param(rngs, shape, axes))

    def __call__(self, x, side):
        weights = {name: getattr(self, name)[...] for name in shapes_of(self.config)}
        return block(x, side, weights)


class NnxNorm(nnx.Module):
    """The last norm."""

    def __init__(self, width, rngs):
        self.scale = _param(rngs, (width,), NORM)

    def __call__(self, x):
        return rms(x, self.scale[...])


def read_side(batch: Any) -> Any:
    """Mask `[b, t, t]` and positions `[b, t]`."""
    return batch["mask"], batch["positions"]


def make_layers(config: Config) -> list:
    """The layers, as factories."""
    table = jpipe.Shared(lambda rngs: NnxTable(config, rngs))
    blocks = [lambda rngs: NnxBlock(config, rngs) for _ in range(config.blocks)]
    last = lambda rngs: NnxNorm(config.width, rngs)
    return [table, *[jpipe.reads(b, read_side) for b in blocks], last, table.using("attend")]


def make_batch(config: Config, size: int, steps: int = 4) -> dict[str, np.ndarray]:
    """Tokens, padded at random; a causal mask without the padding; weights."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, config.vocabulary, (size, steps + 1)).astype(np.int32)
    valid = np.arange(steps) < rng.integers(2, steps + 1, size)[:, None]
    return {
        "inputs": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "weights": valid.astype(np.float64),
        "mask": np.tril(np.ones((steps, steps), bool)) & valid[:, None, :],
        "positions": np.cumsum(valid, 1) - 1.0,
    }


def loss_fn(logits: Any, batch: Any) -> Any:
    """(sum, weight) over the tokens that aren't padding."""
    found = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["targets"][..., None], -1)[..., 0]
    return -(found * batch["weights"]).sum(), batch["weights"].sum()


def make_case(shape: tuple, *, explicit: bool, **options: Any) -> fuzz.Case:
    """The model on a mesh (stage, fsdp, tp) of this shape."""
    config = Config()
    sizes = {"num_stages": shape[0], "num_microbatches": 2, "num_chunks": 1}
    defaults = {"schedule": "1f1b", "remat": "layer", "balance": "even"}
    return fuzz.Case(
        make_layers(config),
        loss_fn,
        make_batch(config, 8),
        (tuple(shape), ("stage", "fsdp", "tp")),
        explicit,
        set_mesh=False,
        options={**sizes, **defaults, **options},
        names=["llama"],
    )


def check(shape: list, explicit: bool, options: dict) -> int:
    """Compares the model with plain Flax; the number of comparisons. For a worker of `timed`."""
    with jax.enable_x64(True):
        alive("reference")
        with nnx.use_eager_sharding(False):  # there is no mesh
            case = make_case(tuple(shape), explicit=explicit, **options)
            truth = fuzz.truth_of(case, 0)
        return fuzz.check_case(case, *truth)
