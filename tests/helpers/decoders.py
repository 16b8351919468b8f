"""Decoders in float64, layer by layer, and what they generate by the plainest way: without a cache."""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jpipe
from cases import run_layers

VOCABULARY, WIDTH, TRAINED = 18, 8, 6


def embed(**options: Any) -> nn.Embed:
    return nn.Embed(VOCABULARY, WIDTH, param_dtype=jnp.float64, embedding_init=nn.initializers.normal(1.0), **options)


class Block(nn.Module):
    """Attention of Flax's, and a feed-forward."""

    decode: bool = False

    @nn.compact
    def __call__(self, x):
        mask = None if self.decode else nn.make_causal_mask(x[..., 0])
        attention = nn.MultiHeadDotProductAttention(2, decode=self.decode, param_dtype=jnp.float64)
        x = x + attention(nn.LayerNorm(param_dtype=jnp.float64)(x), mask=mask)
        init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        return x + nn.Dense(WIDTH, kernel_init=init, param_dtype=jnp.float64)(nn.gelu(x))


class Causal(nn.Module):
    """Attention that takes any number of tokens at a time in decode mode, as Flax's doesn't."""

    decode: bool = False

    @nn.compact
    def __call__(self, x):
        query, key, value = jnp.split(nn.Dense(3 * WIDTH, param_dtype=jnp.float64)(x), 3, axis=-1)
        first = 0
        if self.decode:
            ready = self.has_variable("cache", "place")
            place = self.variable("cache", "place", lambda: jnp.zeros((), jnp.int32))
            kept = [self.variable("cache", name, jnp.zeros, x.shape, x.dtype) for name in ("key", "value")]
            if ready:
                first, place.value = place.value, place.value + x.shape[1]
                for leaf, new in zip(kept, (key, value), strict=True):
                    leaf.value = jax.lax.dynamic_update_slice_in_dim(leaf.value, new, first, axis=1)
            key, value = (leaf.value for leaf in kept)
        seen = jnp.arange(key.shape[1]) <= first + jnp.arange(x.shape[1])[:, None]
        scores = jnp.where(seen, jnp.einsum("bqd,bkd->bqk", query, key), -jnp.inf)
        return x + jax.nn.softmax(scores) @ value


class Counting(nn.Module):
    """A layer that keeps a cache, and changes nothing."""

    decode: bool = False

    @nn.compact
    def __call__(self, x):
        if self.decode:
            self.variable("cache", "count", lambda: jnp.zeros((), jnp.int32))
        return x


class NnxBlock(nnx.Module):
    """A block in nnx, with a dropout that has nothing to do as it decodes."""

    def __init__(self, rngs):
        options = {"param_dtype": jnp.float64, "rngs": rngs}
        self.norm = nnx.LayerNorm(WIDTH, **options)
        self.attention = nnx.MultiHeadAttention(2, WIDTH, decode=False, **options)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.linear = nnx.Linear(WIDTH, WIDTH, **options)

    def __call__(self, x):
        mask = None if self.attention.decode else nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.norm(x), mask=mask)
        return x + self.linear(self.dropout(nnx.gelu(x)))


def loss_fn(logits: Any, batch: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def batch_of(rows: int = 8) -> dict:
    tokens = prompts_of(rows, TRAINED + 1, seed=0)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


def prompts_of(rows: int, length: int, seed: int = 1, dtype: str = "int32") -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCABULARY, (rows, length)).astype(dtype)


def chosen(logits: Any, place: int, key: Any, temperature: float) -> Any:
    """The next token of each row, as documented."""
    if not temperature:
        return jnp.argmax(logits, -1)
    own = lambda row, logits: jax.random.categorical(
        jax.random.fold_in(jax.random.fold_in(key, row), place), logits / temperature
    )
    return jax.vmap(own)(jnp.arange(len(logits)), logits)


def without_cache(
    apply: Callable, prompts: np.ndarray, num_tokens: int, key: Any = None, temperature: float = 0.0
) -> np.ndarray:
    """The whole sequence through the model for each token: the slowest way, and the plainest."""
    length = prompts.shape[1] + num_tokens
    tokens, apply = np.pad(prompts, ((0, 0), (0, num_tokens))), jax.jit(apply)
    for place in range(prompts.shape[1], length):
        tokens[:, place] = chosen(apply(tokens)[:, place - 1], place, key, temperature)  # what follows isn't looked at
    return tokens


def check_generated(
    layers: list,
    prompts: np.ndarray,
    num_tokens: int,
    *drawn: Any,
    plain: list | None = None,
    asked: dict | None = None,
    **options: Any,
) -> jpipe.Pipeline:
    """What a pipeline of these layers generates is what the plain model says without a cache.

    Args:
      layers: Linen modules, some of them shared; `plain` are those of the plain model, if they are others.
      prompts: `[rows, length]`.
      num_tokens: how many tokens are generated.
      *drawn: a key and a temperature, or nothing.
      plain: see `layers`.
      asked: further arguments of `generate`.
      **options: of the pipeline.
    """
    pipe = jpipe.Pipeline(layers, loss_fn, **{"num_stages": 2, "num_microbatches": 2} | options)
    variables = pipe.init(jax.random.key(1), batch_of())
    modules = plain or [layer.layer if isinstance(layer, jpipe.Shared) else layer for layer in layers]
    apply = partial(run_layers, modules, jax.device_get(pipe.layer_variables(variables)))
    found = pipe.generate(variables, prompts, num_tokens, *drawn, **asked or {})
    np.testing.assert_array_equal(found, without_cache(apply, prompts, num_tokens, *drawn))
    return pipe
