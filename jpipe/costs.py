"""Costs: what each layer takes in a training step, so that the partition can make the stages equal.

A cost is for one micro-batch, forward and backward, what remat computes again included. Layers of one kind have one
cost and are looked at once; nothing here touches the model's variables.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jpipe.kinds import Sequential
from jpipe.steps import LayerStep, given_shapes
from jpipe.tracing import example_key, no_mesh

BALANCES = ("flops", "time", "size", "even")

PARAMETER_COPIES = 4
"""Arrays like a parameter that training holds: itself, its gradient, and two moments of an optimiser such as Adam."""


def layer_costs(model: Sequential, steps: tuple[LayerStep, ...], batch: Any, balance: str) -> list[float]:
    """The cost of each of the user's layers.

    Args:
      model: the traced layers.
      steps: their forward and backward, by kind; the final one includes the loss.
      batch: one micro-batch, a pytree of ShapeDtypeStructs.
      balance: "flops" (floating-point operations counted by the compiler, which takes the body of a loop once), "time"
        (seconds on a device at hand, the median of several runs), "size" (bytes: `PARAMETER_COPIES` of the parameters,
        shared ones at every use, state, and the layer's residuals of a micro-batch), or "even" (1 each).
    """
    if balance == "even":
        return [1.0] * model.num_layers
    measure: Callable[[LayerStep, Any], float] = {"flops": _flops, "time": _seconds, "size": _bytes}[balance]
    by_kind = [measure(step, batch) for step in steps]
    if balance == "time" and jax.process_count() > 1:  # all have to cut alike
        by_kind = multihost_utils.broadcast_one_to_all(np.asarray(by_kind)).tolist()
    costs = [by_kind[c] for c in model.kind_of]
    # What the added ends cost belongs to their neighbours.
    first, last = model.first, model.first + model.num_layers - 1
    costs[first] += sum(costs[:first])
    costs[last] += sum(costs[last + 1 :])
    return costs[first : last + 1]


def _arguments(step: LayerStep, batch: Any) -> tuple[Any, list[Any], list[Any]]:
    """Shapes of what a layer is given, takes, and is sent back as cotangents."""
    given = given_shapes(step, batch)
    tape = step.tape(given)
    return given, list(tape.inputs), list(tape.outputs)


def _flops(step: LayerStep, batch: Any) -> float:
    def train(given: Any, x: list[Any], cotangents: list[Any]) -> Any:
        outcome, vjp = step.differentiate(given, x)
        return outcome, vjp(cotangents)

    given, takes, cotangents = _arguments(step, batch)
    # What the compiler can't count (a custom call) counts -1.
    count = lambda lowered: max(0.0, float((lowered.cost_analysis() or {}).get("flops", 0.0)))
    again = count(jax.jit(step.forward).lower(given, takes)) if step.remat.keep_inputs else 0.0
    return again + count(jax.jit(train).lower(given, takes, cotangents))


def _seconds(step: LayerStep, batch: Any) -> float:
    # On one device, whatever the mesh, and for real even if the caller is being traced.
    with no_mesh(), jax.ensure_compile_time_eval(), jax.default_device(jax.local_devices()[0]):
        shapes = _arguments(step, batch)
        tape = step.tape(shapes[0])
        given, x, cotangents = jax.tree.map(_example, shapes)
        forward, backward = jax.jit(tape.forward), jax.jit(tape.backward)
        stored = forward(given, x)[1]
        seconds = _median_seconds(lambda: forward(given, x))
        times = 2 if step.remat.keep_inputs else 1
        return times * seconds + _median_seconds(lambda: backward(given, stored, cotangents))


def _median_seconds(run: Callable[[], Any]) -> float:
    jax.block_until_ready(run())
    times: list[float] = []
    while len(times) < 5 or (sum(times) < 0.02 and len(times) < 50):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _example(leaf: Any) -> Any:
    """Values of a type: random numbers, since zeros may take less time; zeros where they may be indices."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return example_key(leaf)
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return jnp.zeros(leaf.shape, leaf.dtype)
    return jnp.asarray(np.random.default_rng(0).standard_normal(leaf.shape), leaf.dtype)


def _bytes(step: LayerStep, batch: Any) -> float:
    kind, tape = step.kind, step.tape(given_shapes(step, batch))
    size = lambda tree: sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
    state = {name: tree for name, tree in kind.variables.items() if name != "params"}
    return float(PARAMETER_COPIES * size(kind.variables.get("params")) + size(state) + size(tape.stored))
