"""Measures what each layer takes in a training step, counted or timed, to make stages equal by.

A cost is for one micro-batch, forward and backward, what remat computes again included. Layers of one group have one
cost and are looked at once; nothing here touches the model's variables. A warning names layers much of which each
device of a stage computes whole, though an operand was split.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jpipe.jax.flops import count_flops, flops_of
from jpipe.jax.inside import line_of, needed_part
from jpipe.jax.tracing import compiled, no_mesh
from jpipe.jax.trees import bytes_of
from jpipe.model.groups import Model
from jpipe.model.random_keys import example_key
from jpipe.model.traced_layer import DeviceLayer, TracedLayer, partition_layer
from jpipe.partitioner.axes import AXIS
from jpipe.partitioner.splits import Splits
from jpipe.processes.progress import task, warn_once
from jpipe.types import Device, PyTree

PARAMETER_COPIES = 4
"""Arrays like a parameter that training holds: itself, its gradient, and two moments of an optimiser such as Adam."""


@dataclass(frozen=True)
class Cost:
    """The cost of a layer in a training step, for one micro-batch.

    Attributes:
      forward: its part of a forward action, in FLOPs or seconds.
      backward: its part of a backward action, what remat computes again included.
      size: the bytes that training holds for it, with one micro-batch in flight; shared parameters at every use.
    """

    forward: float
    backward: float
    size: float

    @property
    def total(self) -> float:
        """Forward and backward, in FLOPs or seconds."""
        return self.forward + self.backward


def layer_costs(model: Model, layers: Sequence[TracedLayer], unit: str, mesh: Mesh) -> list[Cost]:
    """The cost of each layer, `[N]`.

    Args:
      model: the traced layers.
      layers: those of each group in training; the last one's loss is included.
      unit: "flops" (floating-point operations, counted on jaxprs by `jpipe.jax.flops`: the same
        number whatever the devices) or "time" (seconds on a device of this process, the median of several runs).
      mesh: the devices; times are taken on one of them, or on another of the same kind.

    Raises:
      ValueError: unit is "time", and there is no device like those of the mesh.
    """
    if unit == "time":
        return timed_costs(model, [layers], mesh)[0]
    costs = list(map(_counted, layers))
    return [costs[g] for g in model.group_of]


def timed_costs(model: Model, variants: Sequence[Sequence[TracedLayer]], mesh: Mesh) -> list[list[Cost]]:
    """The seconds of each layer, `[variants, N]`, as process 0 took them; all processes call it, and find the same.

    A layer's variants are timed by turns, so that a machine that gets slower slows all of them.

    Args:
      model: the traced layers.
      variants: those of each group in training, as for `layer_costs`; each time with another remat.
      mesh: the devices; times are taken on one of them, or on another of the same kind.

    Raises:
      ValueError: there is no device like those of the mesh.
    """
    device, seconds = _device_like(mesh), []
    with task("measuring costs", total=len(variants[0]), unit="groups of layers") as advance:
        for same in zip(*variants, strict=True):
            seconds.append(_seconds(same, device))
            advance()
    cost = lambda layer, times: Cost(times[0], times[1], _size(layer))
    of_first = multihost_utils.process_allgather(np.asarray(seconds))[0].tolist()  # [groups, variants, 2]
    by_variant = zip(variants, zip(*of_first, strict=True), strict=True)
    costs = [list(map(cost, layers, times)) for layers, times in by_variant]
    return [[of_groups[g] for g in model.group_of] for of_groups in costs]


def _counted(layer: TracedLayer) -> Cost:
    """The cost of a layer in FLOPs."""
    # `remake` is what follows from the variables alone (casts), made again in the backward.
    storing = count_flops(layer.forward)
    forward, again = storing, count_flops(layer.remake)
    if layer.function.remat.keep_inputs:
        number = len(jax.tree.leaves(layer.results))
        alone = needed_part(layer.forward, [i < number for i in range(len(layer.forward.out_avals))])[0]
        forward, again = count_flops(alone), again + storing
    return Cost(forward, again + count_flops(layer.backward), _size(layer))


def _device_like(mesh: Mesh) -> Device:
    """A device of this process that is one of the mesh or like one of them.

    Raises:
      ValueError: there is none.
    """
    wanted = mesh.devices.flat[0]
    try:
        here = jax.local_devices(backend=wanted.platform)
    except RuntimeError:  # no such backend
        here = []
    if not (alike := [device for device in here if device.device_kind == wanted.device_kind]):
        raise ValueError(f'balance="time" measures on the mesh; no {wanted.device_kind} is present here; use "flops"')
    return next((device for device in alike if device in set(mesh.devices.flat)), alike[0])


def _seconds(variants: Sequence[TracedLayer], device: Device) -> list[list[float]]:
    """The seconds of each variant of a layer: of the forward, and of the backward."""
    # On one device, whatever the mesh; random numbers may give NaN.
    with no_mesh(), jax.default_device(device), jax.debug_nans(False), jax.debug_infs(False):
        example = cache(_example)  # the variants share what they have in common, such as parameters
        alone = Splits(Mesh(np.array([device]), (AXIS,)), ())
        times = _median_seconds([run for layer in variants for run in _calls(layer, alone, example)])
    recomputes = [layer.function.remat.keep_inputs for layer in variants]
    by_variant = zip(times[::3], times[1::3], times[2::3], recomputes, strict=True)
    return [[forward, backward + again * anew] for forward, again, backward, anew in by_variant]


Call = tuple[Callable[..., PyTree], tuple[PyTree, ...]]
"""A compiled function, and what to call it with."""


def _calls(layer: TracedLayer, alone: Splits, example: Callable[[int, jax.ShapeDtypeStruct], jax.Array]) -> list[Call]:
    """The forward, that with its residuals, and the backward, as one device runs them that is `alone`."""
    function, local = layer.function, partition_layer(layer, alone)
    outputs = function.differentiated(local.forward.results.outputs)
    leaves, structure = jax.tree.flatten((function.arguments, jax.tree.leaves(function.group.takes), outputs))
    arguments, x, cotangents = jax.tree.unflatten(structure, [example(i, leaf) for i, leaf in enumerate(leaves)])
    storing = compiled(local.forward, arguments, x)
    plain = compiled(lambda *given: local.forward(*given)[0], arguments, x) if function.remat.keep_inputs else storing
    backward_inputs = arguments, storing(arguments, x)[1], cotangents
    backward = compiled(local.backward, *backward_inputs)
    return [(plain, (arguments, x)), (storing, (arguments, x)), (backward, backward_inputs)]


def _median_seconds(runs: Sequence[Call]) -> list[float]:
    """The median seconds of each run; all of them run by turns, after a round to warm up."""
    of_each = lambda: [seconds_of(function, *arguments) for function, arguments in runs]
    of_each()
    rounds: list[list[float]] = []
    while len(rounds) < 5 or (sum(map(sum, rounds)) < 0.02 * len(runs) and len(rounds) < 50):
        rounds.append(of_each())
    return np.median(rounds, axis=0).tolist()


def seconds_of(function: Callable[..., PyTree], *arguments: PyTree) -> float:
    """The seconds of a call until all that it gives is computed."""
    start = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    return time.perf_counter() - start


def _example(index: int, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """Values of a type, an array of its own for each index.

    Random numbers, since zeros may take less time; zeros where they may be indices.
    """
    with jax.ensure_compile_time_eval():
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return example_key(leaf)
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.zeros(leaf.shape, leaf.dtype)
        return jnp.asarray(np.random.default_rng(0).standard_normal(leaf.shape), leaf.dtype)


def _size(layer: TracedLayer) -> float:
    """The bytes of `Cost.size`: of copies of the parameters, of other variables, of what waits for the backward."""
    variables = layer.function.group.variables
    state = {name: tree for name, tree in variables.items() if name != "params"}
    return float(PARAMETER_COPIES * bytes_of(variables.get("params")) + bytes_of(state) + bytes_of(layer.residuals))


MUCH = 0.1
"""The share of a layer's operations from which on it is worth a warning."""
NEGLIGIBLE = 1e6
"""Floating-point operations for one micro-batch that take next to nothing, so that nobody is warned of them: a CPU core
does so many in about a tenth of a millisecond, no more than a tick takes whatever it computes."""
FELT = 1e-3
"""The share of the model's operations from which on it is worth a warning."""


def unsplit_in(traced: TracedLayer, layer: DeviceLayer) -> dict[tuple[str, str], float]:
    """The operations of a layer that every device of a stage does whole, each line's together.

    Returns:
      (The name of the primitive, the user's line that it comes from, as "model.py:12", or "") -> its share of the
      layer's floating-point operations, forward and backward, on whole arrays.
    """
    unsplit = [*layer.forward.unsplit, *layer.unsplit]
    total = _total(traced) if unsplit else 1.0
    shares: dict[tuple[str, str], float] = {}
    for (equation, callers, *_), times, _ in unsplit:
        key = equation.primitive.name, line_of(equation, callers)
        shares[key] = shares.get(key, 0.0) + times * flops_of(equation) / total
    return shares


def _total(traced: TracedLayer) -> float:
    """A layer's floating-point operations, forward and backward, on whole arrays; at least one."""
    return max(count_flops(traced.forward) + count_flops(traced.backward), 1.0)


def warn_of_unsplit(trained: Sequence[TracedLayer], layers: Sequence[DeviceLayer]) -> None:
    """Warns once of each kind of layer much of which every device computes whole, if the model is slower by that."""
    totals = [_total(traced) * len(traced.function.group.indices) for traced in trained]
    for traced, layer, total in zip(trained, layers, totals, strict=True):
        operations = unsplit_in(traced, layer)
        share = sum(operations.values())
        if share > MUCH and _total(traced) > NEGLIGIBLE and share * total > FELT * sum(totals):
            operation, line = max(operations, key=operations.__getitem__)
            warn_once(
                f"{traced.function.group.in_words}: {operation} ({line or 'of no line'}) has to see whole "
                f"arrays on each device, {share:.0%} of its operations; pipe.communication(batch) shows what that sends"
            )
