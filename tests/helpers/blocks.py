"""A Transformer's block as functions of weights, split as Megatron splits it over an axis `model`."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

WIDTH, HIDDEN = 16, 32
SHAPES = {"g": (WIDTH, HIDDEN), "u": (WIDTH, HIDDEN), "d": (HIDDEN, WIDTH), **dict.fromkeys("qkvo", (WIDTH, WIDTH))}
SPECS = {name: P("model", None) if name in "do" else P(None, "model") for name in SHAPES}


def norm(x):
    return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def feed_forward(x, w):
    h = norm(x)
    return x + (jax.nn.silu(h @ w["g"]) * (h @ w["u"])) @ w["d"]


def attention(x, w):
    h, (b, t, _) = norm(x), x.shape
    q, k, v = ((h @ w[name]).reshape(b, t, 4, -1) for name in "qkv")
    scores = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k))
    return x + jnp.einsum("bhts,bshd->bthd", scores, v).reshape(b, t, -1) @ w["o"]


def flat(x, w):
    """A feed-forward of tokens in one row, of which a device then has several runs."""
    h = jnp.tanh(x).reshape(-1, x.shape[-1])
    return (h + jax.nn.silu(h @ w["g"]) @ w["d"]).reshape(x.shape)


def shared(x, w):
    """What is gathered is read by products of several kinds, piece by piece and whole."""
    h = jnp.tanh(x)
    weights = jax.nn.softmax(h @ w["g"])
    mixed = jnp.einsum("bsf,bsd->bfd", weights, h)
    return x + weights @ mixed + jnp.cumsum(h, 1) @ w["q"] @ w["o"]


def block(x, w):
    return feed_forward(attention(x, w), w)


def gradients(function):
    """Of the sum of the sines of what it gives, by its input and its weights."""
    return jax.grad(lambda x, w: jnp.sum(jnp.sin(function(x, w))), (0, 1))
