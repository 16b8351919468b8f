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
from jax.sharding import Mesh

from jpipe.flops import Flops, count_flops
from jpipe.kinds import Sequential
from jpipe.steps import LayerStep, given_shapes
from jpipe.tracing import example_key, no_mesh, trace

BALANCES = ("flops", "time", "size", "even")

PARAMETER_COPIES = 4
"""Arrays like a parameter that training holds: itself, its gradient, and two moments of an optimiser such as Adam."""


def layer_costs(
    model: Sequential,
    steps: tuple[LayerStep, ...],
    batch: Any,
    balance: str,
    *,
    mesh: Mesh,
    warn: Callable[[str], None],
) -> list[float]:
    """The cost of each of the user's layers.

    Args:
      model: the traced layers.
      steps: their forward and backward, by kind; the final one includes the loss.
      batch: one micro-batch, a pytree of ShapeDtypeStructs.
      balance: "flops" (floating-point operations, counted on the traced programs by `jpipe.flops`: the same number
        whatever the devices), "time" (seconds on a device at hand, the median of several runs), "size" (bytes:
        `PARAMETER_COPIES` of the parameters, shared ones at every use, state, and the layer's residuals of a
        micro-batch), or "even" (1 each).
      mesh: the devices; times are taken on one of them, or on another of the same kind.
      warn: is given a message for each layer with a part that "flops" can't count.

    Raises:
      ValueError: balance is "time", and there is no device like those of the mesh.
    """
    if balance == "even":
        return [1.0] * model.num_layers
    if balance == "flops":
        counts = [_flops(step, batch) for step in steps]
        _warn_of_unknown(model, counts, warn)
        by_kind = [count.flops for count in counts]
    elif balance == "time":
        device = _device_like(mesh)
        by_kind = [_seconds(step, batch, device) for step in steps]
    else:
        by_kind = [_bytes(step, batch) for step in steps]
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
    tape = step.whole(given)
    return given, list(tape.inputs), list(tape.outputs)


def _flops(step: LayerStep, batch: Any) -> Flops:
    def train(given: Any, x: list[Any], cotangents: list[Any]) -> Any:
        outcome, vjp = step.differentiate(given, x)
        return outcome, vjp(cotangents)

    given, takes, cotangents = _arguments(step, batch)
    again = count_flops(trace(step.forward, given, takes)[0]) if step.remat.keep_inputs else Flops()
    return again + count_flops(trace(train, given, takes, cotangents)[0])


def _warn_of_unknown(model: Sequential, counts: list[Flops], warn: Callable[[str], None]) -> None:
    """Names the first layer of each kind with a part that couldn't be counted."""
    for kind, count in zip(model.kinds, counts, strict=True):
        if count.unknown:
            index = min(max(kind.members[0] - model.first, 0), model.num_layers - 1)
            warn(
                f'balance="flops": layer {index} ({model.kind_at(index).layer.name}) has '
                f'{"; ".join(sorted(count.unknown))}. If that is far off, use balance="time", or pass one cost a layer '
                "as floats"
            )


def _device_like(mesh: Mesh) -> Any:
    """A device of this process that is one of the mesh or like one of them.

    Raises:
      ValueError: there is none.
    """
    wanted = mesh.devices.flat[0]
    try:
        at_hand = jax.local_devices(backend=wanted.platform)
    except RuntimeError:  # no such backend
        at_hand = []
    found = [device for device in at_hand if device.device_kind == wanted.device_kind]
    if not found:
        raise ValueError(
            f'balance="time" measures on a device of the mesh, but no {wanted.device_kind} is present here; use '
            'balance="flops", or times measured on one: pass one cost a layer as floats'
        )
    return next((device for device in found if device in set(mesh.devices.flat)), found[0])


def _seconds(step: LayerStep, batch: Any, device: Any) -> float:
    # On one device, whatever the mesh, and for real even if the caller is being traced.
    with no_mesh(), jax.ensure_compile_time_eval(), jax.default_device(device):
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
    kind, tape = step.kind, step.whole(given_shapes(step, batch))
    size = lambda tree: sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
    state = {name: tree for name, tree in kind.variables.items() if name != "params"}
    return float(PARAMETER_COPIES * size(kind.variables.get("params")) + size(state) + size(tape.stored))
