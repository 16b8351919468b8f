"""A small language model in float64, untied and tied, and a loss that sums over its vocabulary."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jpipe

WORDS, WIDTH = 192, 16
wide = {"param_dtype": jnp.float64}
norm = functools.partial(nn.LayerNorm, force_float32_reductions=False, **wide)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(WIDTH, **wide)(nn.gelu(nn.Dense(2 * WIDTH, **wide)(norm()(x))))


class Head(nn.Module):
    words: int = WORDS

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.words, **wide)(norm()(x))


def cross_entropy(outputs, batch):
    """With a mask, smoothed labels and a z-loss."""
    labels = optax.smooth_labels(jax.nn.one_hot(batch["targets"], outputs.shape[-1], dtype=outputs.dtype), 0.1)
    plain = optax.softmax_cross_entropy_with_integer_labels(outputs, batch["targets"])
    z = 1e-2 * jax.nn.logsumexp(outputs, axis=-1) ** 2
    losses = plain + z + optax.softmax_cross_entropy(outputs, labels)
    return jnp.sum(losses * batch["mask"]), jnp.sum(batch["mask"])


def untied(words=WORDS):
    return [nn.Embed(words, WIDTH, **wide), *[Block() for _ in range(4)], Head(words)]


def tied():
    table = jpipe.Shared(nn.Embed(WORDS, WIDTH, **wide))
    return [table, *[Block() for _ in range(4)], table.using("attend")]


def batch_of(words=WORDS):
    rng = np.random.default_rng(0)
    ids = {name: rng.integers(0, words, (8, 6)) for name in ("inputs", "targets")}
    return ids | {"mask": rng.integers(0, 2, (8, 6)).astype(np.float64)}


def pipeline(layers, k, m, *, loss_fn=cross_entropy, ends="shared", **options):
    defaults = {"remat": "none", "balance": "even"}
    return jpipe.Pipeline(layers, loss_fn, num_stages=k, num_microbatches=m, ends=ends, **defaults | options)
