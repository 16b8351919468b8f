"""The model as plain JAX functions of `same_model.make_weights`, for peers whose stages are functions of one's own."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from same_model import EPSILON, RATE, Sizes, Tree, make_tokens, make_weights


def norm(x: Any, w: Tree) -> Any:
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + EPSILON) * w["scale"] + w["bias"]


def dense(x: Any, w: Tree) -> Any:
    return x @ w["kernel"] + w["bias"]


def block(x: Any, w: Tree, heads: int) -> Any:
    """A pre-norm block, `[B, T, width]` to the same; attention written out, as JAX has it for CPUs."""
    rows, seq, width = x.shape
    qkv = dense(norm(x, w["norm_attention"]), w["qkv"]).reshape(rows, seq, 3, heads, width // heads)
    q, k, v = (qkv[:, :, i] for i in range(3))
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / (width // heads) ** 0.5
    causal = jnp.tril(jnp.ones((seq, seq), bool))
    shares = jax.nn.softmax(jnp.where(causal, scores, jnp.finfo(scores.dtype).min))
    h = jnp.einsum("bhts,bshd->bthd", shares, v)
    x = x + dense(h.reshape(rows, seq, width), w["out"])
    return x + dense(jax.nn.gelu(dense(norm(x, w["norm_mlp"]), w["up"])), w["down"])


def loss_of_hidden(x: Any, head: Tree, targets: Any) -> Any:
    """The mean cross entropy, from the last block's outputs."""
    logits = dense(norm(x, head["norm"]), head["logits"])
    right = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)
    return -right.mean()


def loss_of(
    weights: Tree, inputs: Any, targets: Any, heads: int, cut: Callable[[Any], Any] = lambda x: x, parts: int = 1
) -> Any:
    """The mean loss; `cut` is called between `parts` runs of blocks."""
    x, count = weights["embedding"][inputs], len(weights["blocks"]) // parts
    for i, w in enumerate(weights["blocks"]):
        x = block(cut(x) if i and i % count == 0 else x, w, heads)
    return loss_of_hidden(x, weights["head"], targets)


def stepped(train: Callable[..., Any], state: Any, batch: Any) -> Callable[[], float]:
    """A step for `serve` from a function of (state, batch) that gives (state, loss)."""

    def step() -> float:
        nonlocal state
        state, loss = train(state, batch)
        jax.block_until_ready(state)
        return float(loss)

    return step


def descended(weights: Tree, gradients: Tree) -> Tree:
    return jax.tree_util.tree_map(lambda w, g: w - RATE * g, weights, gradients)


def single_step(sizes: Sizes, parts: int) -> Callable[[], float]:
    """On one device, the batch in `parts` micro-batches."""
    loss, tree_map = jax.value_and_grad(partial(loss_of, heads=sizes.heads)), jax.tree_util.tree_map

    @partial(jax.jit, donate_argnums=0)
    def train(weights: Tree, batch: Any) -> Any:
        def add(total: Any, part: Any) -> Any:
            return tree_map(jnp.add, total, loss(weights, *part)), None

        zeros = (jnp.zeros(()), tree_map(jnp.zeros_like, weights))
        batch = tree_map(lambda a: a.reshape(parts, -1, *a.shape[1:]), batch)
        total, gradients = tree_map(lambda a: a / parts, jax.lax.scan(add, zeros, batch)[0])
        return descended(weights, gradients), total

    return stepped(train, *tree_map(jnp.asarray, (make_weights(sizes), make_tokens(sizes))))
