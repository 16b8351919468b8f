"""The rows of `axes.py`: blocks whose weights and activations are split over mesh axes, by their functions of weights.

A row's function is called by a Linen module, by an NNX module and by plain JAX alike, and says in all of them the same
about how arrays lie: `PartitionSpec`s of weights, constraints of activations, a `jax.shard_map` over named axes.
"""

import contextlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import axes_qwen3
import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P


@dataclass(frozen=True)
class Sizes:
    """Sizes of a block, and of what it works on; the defaults are those of Llama 3 8B.

    Attributes:
      width, hidden: of the activations, and inside of the feed-forward.
      heads, kv_heads: of queries; of keys and values.
      seq: the sequence's length.
      examples: of a micro-batch on each device that examples are split over.
      vocab: of the tied table.
      experts: of a mixture; each token goes to one of them.
      dtype: that is computed in.
      param_dtype: of parameters.
    """

    width: int = 4096
    heads: int = 32
    kv_heads: int = 8
    hidden: int = 14336
    seq: int = 2048
    examples: int = 1
    vocab: int = 128256
    experts: int = 8
    dtype: str = "bfloat16"
    param_dtype: str = "float32"

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


SMALL = Sizes(width=64, heads=8, kv_heads=4, hidden=96, seq=16, vocab=64, experts=8)
"""For simulated devices."""

Weights = dict[str, Any]
Specs = dict[str, tuple[tuple[int, ...], P]]
"""The name of a weight -> its shape, and how it is split."""


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
      name: as `--rows` takes it.
      apply: (sizes, weights, x `[b, t, width]`) -> the same shape.
      specs: sizes -> the block's weights.
      axes: the mesh axes beside `stage`.
      gather: jpipe's `gather=`.
      library: of the module that jpipe is given: "linen" or "nnx".
      kv_heads: if there are fewer than devices: that many a device.
      tied: whether the row is a table that is embedding and head, and the blocks have no weights.
      between: how activations are constrained to lie between blocks.
      within: mesh -> what the block is traced in.
    """

    name: str
    apply: Callable[[Sizes, Weights, Any], Any]
    specs: Callable[[Sizes], Specs]
    axes: dict[str, int]
    gather: str = "step"
    library: str = "linen"
    kv_heads: float | None = None
    tied: bool = False
    between: tuple[str | None, ...] | None = None
    within: Callable[[Mesh], AbstractContextManager] = lambda mesh: contextlib.nullcontext()

    def block(self, sizes: Sizes, weights: Weights, x: Any) -> Any:
        """The block, with its activations constrained at both ends."""
        return self.end(self.apply(sizes, weights, self.end(x)))

    def end(self, x: Any) -> Any:
        """Activations as they are constrained to lie between blocks."""
        return x if self.between is None else shard(x, *self.between)

    @property
    def examples_over(self) -> int:
        """The number of devices that examples are split over."""
        return self.axes.get("fsdp", 1)

    @property
    def num_devices(self) -> int:
        """Of one stage."""
        return math.prod(self.axes.values())

    def sizes(self, sizes: Sizes) -> Sizes:
        """The sizes with what the row says of them."""
        if self.kv_heads is None:
            return sizes
        return Sizes(**{**vars(sizes), "kv_heads": int(self.num_devices * self.kv_heads)})

    def layer(self, sizes: Sizes) -> Any:
        """A Flax module of the block (of the table), as `jpipe.Pipeline` takes it."""
        if self.library == "nnx":
            return lambda rngs: NnxBlock(self, sizes, rngs)
        return Table(self, sizes) if self.tied else LinenBlock(self, sizes)


# --- modules ----------------------------------------------------------------------------------------------------------

_normal = jax.nn.initializers.normal(0.1)


class LinenBlock(nn.Module):
    """A row's block in Linen."""

    row: Row
    sizes: Sizes

    def setup(self):
        make = lambda name, shape, spec: self.param(
            name, nn.with_partitioning(_normal, tuple(spec)), shape, self.sizes.param_dtype
        )
        self.weights = {name: make(name, shape, spec) for name, (shape, spec) in self.row.specs(self.sizes).items()}

    def __call__(self, x):
        return self.row.block(self.sizes, self.weights, x)


class NnxBlock(nnx.Module):
    """A row's block in NNX."""

    def __init__(self, row: Row, sizes: Sizes, rngs: nnx.Rngs):
        self.row, self.sizes = row, sizes
        for name, (shape, spec) in row.specs(sizes).items():
            value = _normal(rngs.params(), shape, sizes.param_dtype)
            setattr(self, name, nnx.Param(value, sharding=tuple(spec)))

    def __call__(self, x):
        weights = {name: getattr(self, name)[...] for name in self.row.specs(self.sizes)}
        return self.row.block(self.sizes, weights, x)


class Table(LinenBlock):
    """A table of vectors: tokens to vectors, and back."""

    def __call__(self, tokens):
        return look_up(self.sizes, self.weights, tokens)

    def attend(self, x):
        return logits(self.sizes, self.weights, x)


# --- parts of blocks --------------------------------------------------------------------------------------------------


def shard(x: Any, *spec: Any) -> Any:
    """The activations, constrained to lie so on the mesh in context, if there is one."""
    empty = jax.sharding.get_abstract_mesh().empty
    return x if empty else jax.lax.with_sharding_constraint(x, P(*spec))


def as_computed(sizes: Sizes, weights: Weights) -> Weights:
    """The weights in the type that is computed in."""
    return {name: jnp.asarray(weight, sizes.dtype) for name, weight in weights.items()}


def rms(x: Any, weight: Any) -> Any:
    """Divided by the root of the mean square, which is computed in float32 or wider."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return weight * (wide * scale).astype(x.dtype)


def rotated(x: Any, positions: Any) -> Any:
    """Rotary positions; `x` `[b, t, n, h]`, `positions` `[t]`."""
    half = x.shape[-1] // 2
    angles = positions[:, None] / 500_000.0 ** (jnp.arange(half, dtype=positions.dtype) / half)
    sin, cos = (f(angles).astype(x.dtype)[:, None] for f in (jnp.sin, jnp.cos))
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def heads_of(sizes: Sizes, w: Weights, h: Any) -> tuple[Any, Any, Any]:
    """Queries `[b, t, n, d]`, keys and values `[b, t, k, d]`, rotated."""
    positions = jnp.arange(sizes.seq, dtype=jnp.promote_types(sizes.dtype, jnp.float32))
    q, k, v = (jnp.einsum("btd,dnh->btnh", h, w[name]) for name in "qkv")
    return rotated(q, positions), rotated(k, positions), v


def swiglu(w: Weights, h: Any) -> Any:
    return (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]


def dense(sizes: Sizes, weights: Weights, x: Any) -> Any:
    """A block as in Llama: grouped-query attention and a gated feed-forward."""
    w = as_computed(sizes, weights)
    q, k, v = heads_of(sizes, w, rms(x, w["before"]))
    x = x + jnp.einsum("btnh,nhd->btd", jax.nn.dot_product_attention(q, k, v, is_causal=True), w["o"])
    return x + swiglu(w, rms(x, w["after"]))


def dense_specs(sizes: Sizes, fsdp: str | None = None, many: str | None = "model") -> Specs:
    """Megatron's splits over `many`; the width of all matrices over `fsdp`."""
    d, f, n, k, h = sizes.width, sizes.hidden, sizes.heads, sizes.kv_heads, sizes.head_dim
    into = {"q": (d, n, h), "k": (d, k, h), "v": (d, k, h), "gate": (d, f), "up": (d, f)}
    out = {"o": (n, h, d), "down": (f, d)}
    return {
        "before": ((d,), P()),
        "after": ((d,), P()),
        **{name: (shape, P(fsdp, many)) for name, shape in into.items()},
        **{name: (shape, P(many, *[None] * (len(shape) - 2), fsdp)) for name, shape in out.items()},
    }


# --- keys and values of fewer heads than devices ----------------------------------------------------------------------


def flat_heads(sizes: Sizes, weights: Weights, x: Any) -> Any:
    """`dense` with flat projections `[width, heads * head_dim]`, as `nn.Dense` makes them."""
    into = {name: weights[name].reshape(sizes.width, -1, sizes.head_dim) for name in "qkv"}
    return dense(sizes, {**weights, **into}, x)


def flat_specs(sizes: Sizes) -> Specs:
    flat = {name: ((sizes.width, n * sizes.head_dim), P(None, "model")) for name, n in _counts(sizes).items()}
    return {**dense_specs(sizes), **flat}


def _counts(sizes: Sizes) -> dict[str, int]:
    return {"q": sizes.heads, "k": sizes.kv_heads, "v": sizes.kv_heads}


def whole_kv_specs(sizes: Sizes) -> Specs:
    """Megatron's splits, with the matrices of keys and values whole on every device."""
    specs = dense_specs(sizes)
    return {**specs, **{name: (specs[name][0], P()) for name in "kv"}}


# --- a tied table -----------------------------------------------------------------------------------------------------


def look_up(sizes: Sizes, weights: Weights, tokens: Any) -> Any:
    return shard(jnp.asarray(weights["table"], sizes.dtype)[tokens], "fsdp")


def logits(sizes: Sizes, weights: Weights, x: Any) -> Any:
    return x @ jnp.asarray(weights["table"], sizes.dtype).T


def table_specs(sizes: Sizes) -> Specs:
    return {"table": ((sizes.vocab, sizes.width), P("tp", "fsdp"))}


# --- mixtures of experts ----------------------------------------------------------------------------------------------


OVER_EXPERT = P(None, "expert", None)


def expert_specs(sizes: Sizes, axis: str = "expert") -> Specs:
    e, d, f = sizes.experts, sizes.width, sizes.hidden
    return {
        "before": ((d,), P()),
        "router": ((d, e), P()),
        "up": ((e, d, f), P(axis)),
        "down": ((e, f, d), P(axis)),
    }


def routed(sizes: Sizes, w: Weights, h: Any) -> tuple[Any, Any]:
    """Of tokens `[s, width]` which expert each goes to, and which place it has there; -1 if all are taken.

    Returns:
      (`[s, experts, places]`, 1 at the token's place, else 0; `[s]`, the probability of its expert).
    """
    scores = jax.nn.softmax((h @ w["router"]).astype(jnp.promote_types(h.dtype, jnp.float32)))
    expert, gate = jnp.argmax(scores, -1), jnp.max(scores, -1)
    is_own = jax.nn.one_hot(expert, sizes.experts, dtype=jnp.int32)
    place = jnp.cumsum(is_own, 0) * is_own - 1
    places = 2 * h.shape[0] // sizes.experts
    return jax.nn.one_hot(place, places, dtype=h.dtype), gate.astype(h.dtype)


def experts_by_einsum(sizes: Sizes, weights: Weights, x: Any) -> Any:
    """Tokens are dispatched by a product with zeros and ones, as in GShard (arXiv 2006.16668)."""
    w = as_computed(sizes, weights)
    h = rms(x, w["before"]).reshape(-1, sizes.width)
    at, gate = routed(sizes, w, h)
    taken = jnp.einsum("sd,sec->ecd", h, at)
    given = jnp.einsum("ecf,efd->ecd", jax.nn.silu(jnp.einsum("ecd,edf->ecf", taken, w["up"])), w["down"])
    return x + jnp.einsum("ecd,sec,s->sd", given, at, gate).reshape(x.shape)


def experts_by_exchange(sizes: Sizes, weights: Weights, x: Any, *, over: P = OVER_EXPERT) -> Any:
    """Each device routes its part of `x`; two exchanges take tokens to their experts and back.

    The one mesh axis that `over` names splits the experts too.
    """
    (axis,) = [name for name in over if name]
    w = as_computed(sizes, weights)

    def run(router: Any, up: Any, down: Any, h: Any) -> Any:
        flat = h.reshape(-1, sizes.width)
        at, gate = routed(sizes, {"router": router}, flat)
        taken = jnp.einsum("sd,sec->ecd", flat, at)
        taken = jax.lax.all_to_all(taken, axis, 0, 1, tiled=True)  # [experts / p, p * places, width]
        counts = jnp.full((taken.shape[0],), taken.shape[1], jnp.int32)
        given = jax.nn.silu(jax.lax.ragged_dot(taken.reshape(-1, sizes.width), up, counts))
        given = jax.lax.ragged_dot(given, down, counts).reshape(taken.shape)
        given = jax.lax.all_to_all(given, axis, 1, 0, tiled=True)
        return jnp.einsum("ecd,sec,s->sd", given, at, gate).reshape(h.shape)

    specs = {"in_specs": (P(), P(axis), P(axis), over), "out_specs": over}
    moved = jax.shard_map(run, axis_names={axis}, check_vma=False, **specs)
    return x + moved(w["router"], w["up"], w["down"], rms(x, w["before"]))


# --- ring attention ---------------------------------------------------------------------------------------------------


def ring(sizes: Sizes, weights: Weights, x: Any) -> Any:
    """`dense`, in whose attention keys and values go round the devices that the sequence is split over."""
    w = as_computed(sizes, weights)
    q, k, v = heads_of(sizes, w, rms(x, w["before"]))
    over = P(None, "context", None, None)
    attend = jax.shard_map(_attend_round, in_specs=(over,) * 3, out_specs=over, axis_names={"context"}, check_vma=False)
    x = x + jnp.einsum("btnh,nhd->btd", attend(q, k, v), w["o"])
    return x + swiglu(w, rms(x, w["after"]))


def _attend_round(q: Any, k: Any, v: Any) -> Any:
    """Attention of a device's queries `[b, t, n, h]` to all keys, which arrive one after the other (2310.01889)."""
    (b, t, n, h), groups = q.shape, k.shape[2]
    count, own = jax.lax.axis_size("context"), jax.lax.axis_index("context")
    wide = jnp.promote_types(q.dtype, jnp.float32)
    q, steps = q.reshape(b, t, groups, n // groups, h), jnp.arange(t)

    def turn(carry: Any, i: Any) -> tuple[Any, None]:
        (k, v), (total, most, result) = carry
        scores = jnp.einsum("btkgh,bskh->bkgts", q, k).astype(wide) / h**0.5
        sees = (own * t + steps)[:, None] >= ((own - i) % count * t + steps)[None, :]
        scores = jnp.where(sees, scores, -1e30)
        highest = jnp.maximum(most, scores.max(-1))
        shares, rest = jnp.exp(scores - highest[..., None]), jnp.exp(most - highest)
        added = jnp.einsum("bkgts,bskh->bkgth", shares.astype(v.dtype), v).astype(wide)
        state = total * rest + shares.sum(-1), highest, result * rest[..., None] + added
        move = lambda a: jax.lax.ppermute(a, "context", [(j, (j + 1) % count) for j in range(count)])
        return ((move(k), move(v)), state), None

    shape = (b, groups, n // groups, t)
    start = jnp.zeros(shape, wide), jnp.full(shape, -1e30, wide), jnp.zeros((*shape, h), wide)
    (_, (total, _, result)), _ = jax.lax.scan(turn, ((k, v), start), jnp.arange(count))
    return jnp.einsum("bkgth->btkgh", result / total[..., None]).reshape(b, t, n, h).astype(q.dtype)


# --- the rows ---------------------------------------------------------------------------------------------------------

MODEL, OVER_MODEL, OVER_FSDP = {"model": 4}, (None, "model", None), ("fsdp",)
by_fsdp = partial(dense_specs, fsdp="fsdp", many=None)
ROWS = (
    Row("dense", dense, dense_specs, MODEL),
    Row("dense-nnx", dense, dense_specs, MODEL, library="nnx"),
    Row("sequence", dense, dense_specs, MODEL, between=OVER_MODEL),
    Row("sequence-nnx", dense, dense_specs, MODEL, library="nnx", between=OVER_MODEL),
    Row("kv-heads", flat_heads, flat_specs, {"model": 16}, kv_heads=0.5),
    Row("kv-heads-whole", dense, whole_kv_specs, {"model": 16}, kv_heads=0.5),
    Row("table", dense, table_specs, {"fsdp": 2, "tp": 2}, tied=True),
    Row("fsdp-step", dense, by_fsdp, {"fsdp": 4}, between=OVER_FSDP),
    Row("fsdp-use", dense, by_fsdp, {"fsdp": 4}, gather="use", between=OVER_FSDP),
    Row("fsdp-model", dense, partial(dense_specs, fsdp="fsdp"), {"fsdp": 2, "model": 2}, "use", between=OVER_FSDP),
    Row("experts", experts_by_einsum, expert_specs, {"expert": 4}),
    Row("experts-exchange", experts_by_exchange, expert_specs, {"expert": 4}, between=tuple(OVER_EXPERT)),
    Row(
        "experts-fsdp",
        partial(experts_by_exchange, over=P("fsdp")),
        partial(expert_specs, axis="fsdp"),
        {"fsdp": 4},
        gather="use",
        between=OVER_FSDP,
    ),
    Row(
        "qwen3",
        axes_qwen3.block,
        axes_qwen3.specs,
        {"fsdp": 4, "tp": 1},
        gather="use",
        between=OVER_FSDP,
        within=axes_qwen3.within,
    ),
    Row("ring", ring, partial(dense_specs, many=None), {"context": 4}, between=(None, "context", None)),
)
