"""Costs: what each layer takes, so that the partition can make the stages equal.

A cost is for one micro-batch, forward. Layers of one kind have one cost and are looked at once; nothing here
touches the model's variables.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpipe.kinds import Sequential
from jpipe.steps import Given, LayerStep, given_shapes
from jpipe.tracing import no_mesh

BALANCES = ("flops", "time", "size", "even")


def layer_costs(model: Sequential, steps: tuple[LayerStep, ...], batch: Any, balance: str) -> list[float]:
    """The cost of each of the user's layers.

    Args:
      model: the traced layers.
      steps: their forward functions, by kind; the final one includes the loss.
      batch: one micro-batch, a pytree of ShapeDtypeStructs.
      balance: "flops" (floating-point operations counted by the compiler), "time" (seconds on this machine's default
        device, the median of several runs), "size" (bytes of variables and outputs), or "even" (1 each).
    """
    measure: Callable[[LayerStep, Any], float] = {"flops": _flops, "time": _seconds, "size": _bytes, "even": _one}[
        balance
    ]
    by_kind = [measure(step, batch) for step in steps]
    own = range(model.first, model.first + model.num_layers)
    costs = [by_kind[c] for c in model.kind_of]
    # what the added ends cost belongs to their neighbours
    costs[own[0]] += sum(costs[: own[0]]) if balance != "even" else 0.0
    costs[own[-1]] += sum(costs[own[-1] + 1 :]) if balance != "even" else 0.0
    return [costs[i] for i in own]


def _arguments(step: LayerStep, batch: Any) -> tuple[Given, Any]:
    return given_shapes(step, batch), jax.tree.leaves(step.kind.takes)


def _flops(step: LayerStep, batch: Any) -> float:
    counted = jax.jit(step.forward).lower(*_arguments(step, batch)).cost_analysis() or {}
    return float(counted.get("flops", 0.0))


def _seconds(step: LayerStep, batch: Any) -> float:
    arguments = jax.tree.map(_example, _arguments(step, batch))
    run = jax.jit(step.forward)
    times = []
    with no_mesh():  # on one device, whatever the mesh
        jax.block_until_ready(run(*arguments))
        for _ in range(5):
            start = time.perf_counter()
            jax.block_until_ready(run(*arguments))
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def _example(leaf: Any) -> Any:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key(0)
    return jnp.zeros(leaf.shape, leaf.dtype)


def _bytes(step: LayerStep, batch: Any) -> float:
    del batch
    leaves = jax.tree.leaves((step.kind.variables, step.kind.gives))
    return float(sum(np.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves))


def _one(step: LayerStep, batch: Any) -> float:
    del step, batch
    return 1.0
