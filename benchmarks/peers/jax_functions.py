"""The model as plain JAX functions of `same_model.make_weights`, for peers whose stages are functions of one's own."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from same_model import EPSILON, RATE, Sizes, Tree, make_tokens, make_weights
from turns import parse_variant, serve, take_standard_output


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


# --- two stages whose weights are stacked, by GSPMD ---


def name_of(i: int, part: str, name: str) -> str:
    """What block i of a stage calls a weight."""
    return f"w{i}_{part}_{name}"


def stacked(blocks: list[Tree]) -> Tree:
    """Weights of the blocks of two stages, by name, each `[2, ...]`."""
    count = len(blocks) // 2
    return {
        name_of(i, part, name): np.stack([blocks[i][part][name], blocks[i + count][part][name]])
        for i in range(count)
        for part in blocks[i]
        for name in blocks[i][part]
    }


def run_stage(x: Any, blocks: list[Tree], weight: Callable[[str], Any], heads: int) -> Any:
    """The blocks of one stage; `weight` gives its weight of a name, `blocks` are all, which tell the names."""
    for i, like in enumerate(blocks[: len(blocks) // 2]):
        w = {part: {name: weight(name_of(i, part, name)) for name in like[part]} for part in like}
        x = block(x, w, heads)
    return x


def stacked_step(
    sizes: Sizes,
    loss: Callable[[Tree, Any, Any], Any],
    blocks: Any,
    mesh: Mesh,
    context: Callable[[], AbstractContextManager] = nullcontext,
) -> Callable[[], float]:
    """On a mesh of an axis "stage".

    Args:
      sizes: of model and batch.
      loss: of weights as `make_weights` gives them, but with these blocks; inputs; and targets.
      blocks: the blocks' weights, each leaf `[2, ...]`.
      mesh: of two devices.
      context: in which steps are called, besides the mesh's.
    """
    split, whole = (NamedSharding(mesh, PartitionSpec(*names)) for names in (["stage"], []))
    weights = make_weights(sizes) | {"blocks": blocks}
    places = {"embedding": whole, "blocks": split, "head": whole}
    weights = {name: jax.device_put(weights[name], place) for name, place in places.items()}

    @partial(jax.jit, donate_argnums=0)
    def train(weights: Tree, batch: Any) -> Any:
        total, gradients = jax.value_and_grad(loss)(weights, *batch)
        return descended(weights, gradients), total

    step = stepped(train, weights, jax.device_put(make_tokens(sizes), whole))

    def within() -> float:
        with mesh, context():
            return step()

    return within


def serve_variant(doc: str, pipelined_step: Callable[[Sizes, str], Callable[[], float]]) -> None:
    """A peer's process: of "single", with or without "accumulated", or of "simulated" and a word for `pipelined_step`.

    Args:
      doc: the script's docstring.
      pipelined_step: of sizes and that word, on two devices.
    """
    _, sizes, (kind, *words) = parse_variant(doc)
    answers = take_standard_output()
    devices = 1 if kind == "single" else 2
    os.environ["XLA_FLAGS"] = f"--xla_cpu_multi_thread_eigen=false --xla_force_host_platform_device_count={devices}"
    jax.config.update("jax_platforms", "cpu")
    if kind == "single":
        step = single_step(sizes, sizes.microbatches if "accumulated" in words else 1)
    else:
        step = pipelined_step(sizes, words[0])
    serve(step, answers)
