"""The model in Spectrax (spectrax-lib): one process of two devices, its stages dispatched as programs of their own.

Variants are "simulated" and a schedule; or "single" for `jax.jit` of the same functions on one device, with
"accumulated" where it takes micro-batches. The model is cut by `sxstage_iter`, and a schedule's backward recomputes a
stage's forward: Spectrax has no other way at this version.
"""

import os
from collections.abc import Callable
from functools import partial

import jax
import numpy as np
from jax_functions import descended, loss_of, serve_variant
from same_model import Sizes, Tree, make_tokens, make_weights

updated = jax.jit(descended, donate_argnums=0)


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


if __name__ == "__main__":
    os.environ["LOGGING_LEVEL_ED"] = "WARNING"  # else two lines a step
    serve_variant(__doc__, pipelined_step)
