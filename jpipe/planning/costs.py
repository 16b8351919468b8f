"""Costs: what each layer takes in a training step, so that the partition can make the stages equal.

A cost is for one micro-batch, forward and backward, what remat computes again included. Layers of one kind have one
cost and are looked at once; nothing here touches the model's variables.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.extend.core import ClosedJaxpr
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import Mesh

from jpipe.jax_tools.random_keys import example_key
from jpipe.jax_tools.tracing import no_mesh, trace
from jpipe.model.groups import Sequential
from jpipe.model.layer_step import LayerStep, given_shapes
from jpipe.planning.flops import Flops, count_flops

BALANCES = ("flops", "time", "size", "even")

PARAMETER_COPIES = 4
"""Arrays like a parameter that training holds: itself, its gradient, and two moments of an optimiser such as Adam."""


@dataclass(frozen=True)
class Cost:
    """What a layer takes in a training step, for one micro-batch; whoever needs a sum adds.

    Attributes:
      forward: its part of a forward action, in FLOPs or seconds.
      backward: its part of a backward action, what remat computes again included, without gradients of parameters.
      weight_gradient: what those take besides.
      parameter_bytes: of its parameters, shared ones at every use.
      state_bytes: of its other variables.
      residual_bytes: of what waits for its backward.
    """

    forward: float
    backward: float
    weight_gradient: float
    parameter_bytes: int
    state_bytes: int
    residual_bytes: int

    @property
    def total(self) -> float:
        """Forward and backward, in FLOPs or seconds."""
        return self.forward + self.backward + self.weight_gradient

    @property
    def size(self) -> float:
        """Bytes that training holds for it, with one micro-batch in flight."""
        return float(PARAMETER_COPIES * self.parameter_bytes + self.state_bytes + self.residual_bytes)

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.forward + other.forward,
            self.backward + other.backward,
            self.weight_gradient + other.weight_gradient,
            self.parameter_bytes + other.parameter_bytes,
            self.state_bytes + other.state_bytes,
            self.residual_bytes + other.residual_bytes,
        )


def layer_costs(
    model: Sequential,
    steps: tuple[LayerStep, ...],
    batch: Any,
    unit: str,
    *,
    mesh: Mesh,
    warn: Callable[[str], None],
) -> list[Cost]:
    """The cost of each of the user's layers.

    Args:
      model: the traced layers.
      steps: their forward and backward, by kind; the final one includes the loss.
      batch: one micro-batch, a pytree of ShapeDtypeStructs.
      unit: "flops" (floating-point operations, counted on the traced programs by `jpipe.planning.flops`: the same
        number whatever the devices) or "time" (seconds on a device at hand, the median of several runs).
      mesh: the devices; times are taken on one of them, or on another of the same kind.
      warn: is given a message for each layer with a part whose FLOPs can't be counted.

    Raises:
      ValueError: unit is "time", and there is no device like those of the mesh.
    """
    if unit == "time":
        device = _device_like(mesh)
        actions = [list(_seconds(step, batch, device)) for step in steps]
        if jax.process_count() > 1:  # all have to cut alike
            actions = multihost_utils.broadcast_one_to_all(np.asarray(actions)).tolist()
    else:
        counts = [_flops(step, batch) for step in steps]
        _warn_of_unknown(model, [sum(parts, Flops()) for parts in counts], warn)
        actions = [[part.flops for part in parts] for parts in counts]
    by_kind = [Cost(f, b, w, *_bytes(step, batch)) for (f, b, w), step in zip(actions, steps, strict=True)]
    costs = [by_kind[c] for c in model.kind_of]
    # What the added ends cost belongs to their neighbours.
    first, last = model.first, model.first + model.num_layers - 1
    costs[first] = sum(costs[:first], costs[first])
    costs[last] = sum(costs[last + 1 :], costs[last])
    return costs[first : last + 1]


def _flops(step: LayerStep, batch: Any) -> tuple[Flops, Flops, Flops]:
    """Of the forward, of the backward but for gradients of parameters, and of those."""
    given = given_shapes(step, batch)
    whole = step.whole(given)
    kept = count_flops(whole.forward)
    forward, again = kept, count_flops(_without_first(whole.derive, 0))
    if step.remat.keep_inputs:
        forward, again = count_flops(trace(step.forward, given, list(whole.inputs))[0]), again + kept
    backward, inputs_only = count_flops(whole.backward), count_flops(_without_first(whole.backward, len(given.params)))
    gradients = Flops(max(0.0, backward.flops - inputs_only.flops), unknown=backward.unknown)
    return forward, again + inputs_only, gradients


def _without_first(program: ClosedJaxpr, count: int) -> ClosedJaxpr:
    """A program without its first results, and without what only they need."""
    wanted = [i >= count for i in range(len(program.jaxpr.outvars))]
    return ClosedJaxpr(dce_jaxpr(program.jaxpr, wanted, instantiate=True)[0], program.consts)


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


def _seconds(step: LayerStep, batch: Any, device: Any) -> tuple[float, float, float]:
    # On one device, whatever the mesh, and for real even if the caller is being traced.
    with no_mesh(), jax.ensure_compile_time_eval(), jax.default_device(device):
        shapes = given_shapes(step, batch)
        tape = step.tape(shapes)
        given, x, cotangents = jax.tree.map(_example, (shapes, list(tape.inputs), list(tape.outputs)))
        forward, backward = jax.jit(tape.forward), jax.jit(tape.backward)
        inputs_only = jax.jit(lambda *arguments: tape.backward(*arguments)[1])
        stored = forward(given, x)[1]
        first = again = _median_seconds(lambda: forward(given, x))
        if step.remat.keep_inputs:
            alone = jax.jit(step.traced(shapes))
            first = _median_seconds(lambda: alone(given, x))
        seconds = _median_seconds(lambda: backward(given, stored, cotangents))
        without = min(seconds, _median_seconds(lambda: inputs_only(given, stored, cotangents)))
        return first, without + again * step.remat.keep_inputs, seconds - without


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


def _bytes(step: LayerStep, batch: Any) -> tuple[int, int, int]:
    """Of parameters, other variables and residuals."""
    kind, tape = step.kind, step.whole(given_shapes(step, batch))
    size = lambda tree: sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
    state = {name: tree for name, tree in kind.variables.items() if name != "params"}
    return size(kind.variables.get("params")), size(state), size(tape.stored)
