"""The model in Spectrax (spectrax-lib): one process of two devices, its stages dispatched as programs of their own.

Variants are "simulated" and a schedule; or "single" for `jax.jit` of the same functions on one device, with
"accumulated" where it takes micro-batches. The model is cut by `sxstage_iter`, and a schedule's backward recomputes a
stage's forward: Spectrax has no other way at this version.
"""

import argparse
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from model import EPSILON, RATE, Sizes, Tree, make_tokens, make_weights
from serving import serve, take_standard_output


def norm(x: Any, w: Tree) -> Any:
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + EPSILON) * w["scale"] + w["bias"]


def dense(x: Any, w: Tree) -> Any:
    return x @ w["kernel"] + w["bias"]


def block(x: Any, w: Tree, heads: int) -> Any:
    rows, seq, width = x.shape
    qkv = dense(norm(x, w["norm_attention"]), w["qkv"]).reshape(rows, seq, 3, heads, width // heads)
    h = jax.nn.dot_product_attention(*(qkv[:, :, i] for i in range(3)), is_causal=True)
    x = x + dense(h.reshape(rows, seq, width), w["out"])
    return x + dense(jax.nn.gelu(dense(norm(x, w["norm_mlp"]), w["up"])), w["down"])


def loss_of(weights: Tree, inputs: Any, targets: Any, heads: int, cut: Callable[..., Any], parts: int) -> Any:
    """The mean loss; `cut` is called between `parts` runs of blocks."""
    x, count = weights["embedding"][inputs], len(weights["blocks"]) // parts
    for i, w in enumerate(weights["blocks"]):
        x = block(cut(x) if i and i % count == 0 else x, w, heads)
    logits = dense(norm(x, weights["head"]["norm"]), weights["head"]["logits"])
    right = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)
    return -right.mean()


@partial(jax.jit, donate_argnums=0)
def updated(weights: Tree, gradients: Tree) -> Tree:
    return jax.tree.map(lambda w, g: w - RATE * g, weights, gradients)


def updated_by_device(weights: Tree, gradients: Tree) -> Tree:
    """The same, a program for each device's arrays."""
    leaves, structure = jax.tree.flatten(weights)
    slopes, mine = jax.tree.leaves(gradients), {}
    for i, leaf in enumerate(leaves):
        mine.setdefault(next(iter(leaf.devices())), []).append(i)
    for found in mine.values():
        new = updated([leaves[i] for i in found], [slopes[i] for i in found])
        for i, leaf in zip(found, new, strict=True):
            leaves[i] = leaf
    return jax.tree.unflatten(structure, leaves)


def single_step(sizes: Sizes, parts: int) -> Callable[[], float]:
    loss = jax.value_and_grad(partial(loss_of, heads=sizes.heads, cut=lambda x: x, parts=1))

    @partial(jax.jit, donate_argnums=0)
    def train(weights: Tree, batch: Any) -> Any:
        def add(total: Any, part: Any) -> Any:
            return jax.tree.map(jnp.add, total, loss(weights, *part)), None

        zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, weights))
        batch = jax.tree.map(lambda a: a.reshape(parts, -1, *a.shape[1:]), batch)
        total, gradients = jax.tree.map(lambda a: a / parts, jax.lax.scan(add, zeros, batch)[0])
        return jax.tree.map(lambda w, g: w - RATE * g, weights, gradients), total

    weights, batch = jax.tree.map(jnp.asarray, (make_weights(sizes), make_tokens(sizes)))

    def step() -> float:
        nonlocal weights
        weights, total = train(weights, batch)
        jax.block_until_ready(weights)
        return float(total)

    return step


def pipelined_step(sizes: Sizes, name: str) -> Callable[[], float]:
    from jax.sharding import Mesh
    from spectrax.runtime import schedules, sxjit, sxstage_iter, sxvalue_and_grad
    from spectrax.runtime.types import MpMdMesh

    kind = getattr(schedules, name)
    chunks = {"virtual_stages": 2} if name in ("InterleavedH1", "KimiK2") else {}
    schedule = kind(microbatches=sizes.microbatches, **chunks)
    parts = 2 * schedule.virtual_stages_per_rank()
    mesh = MpMdMesh(Mesh(np.array(jax.devices()), ("pp",)), "pp")
    loss = partial(loss_of, heads=sizes.heads, cut=sxstage_iter, parts=parts)
    pipelined = sxvalue_and_grad(sxjit(loss, mesh=mesh, schedule=schedule, batch_argnums=(1, 2)))
    weights, batch, placed = make_weights(sizes), make_tokens(sizes), False  # as numpy's: what lies nowhere is placed

    def step() -> float:
        nonlocal weights, batch, placed
        total, (gradients,) = pipelined(weights, *batch)
        if not placed:  # arrays lie from now on where they are used
            placed, inputs, targets = True, gradients["embedding"], gradients["head"]["logits"]["bias"]
            batch = tuple(jax.device_put(batch, (inputs.sharding, targets.sharding)))
            weights = jax.tree.map(lambda w, g: jax.device_put(w, g.sharding), weights, gradients)
        weights = updated_by_device(weights, gradients)
        jax.block_until_ready(weights)
        return float(total)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("variant")
    parser.add_argument("--index", type=int, default=0, help="of this process; there is one")
    parser.add_argument("--port", type=int, help="not used")
    Sizes.add_arguments(parser)
    options = parser.parse_args()
    answers = take_standard_output()
    sizes, (kind, *words) = Sizes.of(options), options.variant.split(",")
    os.environ["LOGGING_LEVEL_ED"] = "WARNING"  # else two lines a step
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1 if kind == "single" else 2)
    if kind == "single":
        serve(single_step(sizes, sizes.microbatches if "accumulated" in words else 1), answers)
    else:
        serve(pipelined_step(sizes, words[0]), answers)


if __name__ == "__main__":
    main()
