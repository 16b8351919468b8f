"""Computes the loops over layers: which each virtual stage runs, and which idle stages compute too.

Stages run in lockstep: one that idles in a slot waits for those that don't. It may as well compute the same
layers of whatever values it has, and drop what they give: what it keeps goes into rows that nothing else is in
(`lower`), and it adds nothing to sums. Then all loops turn equally often on all stages, and a compiler knows how often.
A GPU's host stops before each trip of a loop whose number of trips follows from data, until all kernels are done. And a
collective in such a loop hangs if a device waits there for stages that skip the loop. Layers that all virtual stages
have equally many of are computed along. So are the first and the last layer, which one of them has, and layers that
send, as many as the virtual stage with the most has, if that takes next to no time.

On TPUs that is done only where layers send. Elsewhere a loop that is skipped does no harm, and a slot that is one loop
hides a transfer whole: of several loops and operations a TPU's compiler takes as many as it thinks that the transfer
takes. On CPUs idle stages idle: there what is computed along takes the cores of those that work.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np
from jax.extend.core import jaxprs_in_params

from jpipe.jax.flops import count_flops
from jpipe.jax.primitives import ClosedJaxpr, JaxprEqn
from jpipe.jax.trees import bytes_of, is_float
from jpipe.model.groups import LayerGroup, Model
from jpipe.model.traced_layer import DeviceForward, DeviceLayer
from jpipe.partitioner.conversions import sent_in
from jpipe.partitioner.splits import Splits


@dataclass(frozen=True, eq=False)
class LayerRanges:
    """The layers of S virtual stages, of G groups of equal layers (`Model.groups`).

    A stage goes through the groups in order and runs a range of positions of each. Where a group comes back after
    another (A, B, A, B), it goes through them in several passes.

    Attributes:
      start: int32 `[S, passes, G]`, the first position of a group that a virtual stage runs in a pass.
      stop: int32 `[S, passes, G]`, one past the last.
    """

    start: np.ndarray
    stop: np.ndarray

    @property
    def num_passes(self) -> int:
        """The most passes that a virtual stage goes through."""
        return self.start.shape[1]

    @property
    def passes_of(self) -> np.ndarray:
        """int32 `[S]`: the passes of each virtual stage."""
        used = np.any(self.stop > self.start, axis=-1)
        return self.num_passes - np.argmax(used[:, ::-1], axis=1).astype(np.int32)

    @property
    def most(self) -> np.ndarray:
        """int32 `[G]`: the most layers of a group that any virtual stage has."""
        return (self.stop - self.start).sum(axis=1).max(axis=0)


def make_ranges(model: Model, bounds: Sequence[tuple[int, int]]) -> LayerRanges:
    """The ranges of virtual stages; `bounds` has for each the first of its layers and one past the last."""
    groups = model.group_of
    position = [model.groups[g].indices.index(i) for i, g in enumerate(groups)]
    # By layer, the passes that have begun before it, if one stage had all layers.
    begun = np.cumsum([i > 0 and g < groups[i - 1] for i, g in enumerate(groups)])
    count = 1 + max((int(begun[last - 1] - begun[first]) for first, last in bounds if first < last), default=0)
    start, stop = np.zeros((2, len(bounds), count, len(model.groups)), np.int32)
    for s, (first, last) in enumerate(bounds):
        for i in reversed(range(first, last)):
            at = s, begun[i] - begun[first], groups[i]
            start[at], stop[at] = position[i], max(stop[at], position[i] + 1)
    return LayerRanges(start, stop)


FLOPS_A_BYTE = 300
"""The FLOPs that a device does while it moves a byte: 989e12 / 3.35e12 on an H100, 197e12 / 0.82e12 on a v5e."""
KERNELS = ("ffi_call", "pallas_call")
MORE = 1.05
"""Layers that stages have unequally many of are computed by all only if slots take at most so many times as long."""


@dataclass(frozen=True)
class IdleWork:
    """The layers that idle stages compute along.

    Attributes:
      trips: by group, how many of its layers each virtual stage computes in each pass.
      uneven: the groups among them of which some virtual stages have fewer: they compute more, and drop the results.
      safe: all groups that may be computed of any values.
    """

    trips: dict[int, int] = field(default_factory=dict)
    uneven: frozenset[int] = frozenset()
    safe: frozenset[int] = frozenset()


def plan_idle_work(
    model: Model,
    forwards: Sequence[DeviceForward],
    layers: Sequence[DeviceLayer],
    ranges: LayerRanges,
    num_chunks: int,
    splits: Splits,
) -> IdleWork:
    """Decides what idle stages compute along.

    Args:
      model, forwards, layers: of the step (`Step`).
      ranges: the layers of each virtual stage.
      num_chunks: the virtual stages of each stage.
      splits: the mesh.
    """
    programs = [{forward.jaxpr} for forward in forwards]  # a set: a forward that keeps residuals is that of its layer
    for of_group, layer in zip(programs, layers, strict=False):
        of_group |= {layer.forward.jaxpr, layer.backward_jaxpr}
    by_pass = ranges.stop - ranges.start  # [S, passes, G]
    safe = [g for g, group in enumerate(model.groups) if _is_safe(group, programs[g])]
    trips = {g: int(by_pass[0, 0, g]) for g in safe if by_pass[0, 0, g] and len({*by_pass[..., g].flat}) == 1}
    costs, number, most = np.array([sum(map(_cost, jaxprs)) for jaxprs in programs]), by_pass.sum(axis=1), ranges.most
    # Slots in which stages run a chunk last as long as the slowest of them.
    lasting = lambda takes: takes.reshape(num_chunks, -1).max(axis=1).sum()
    limit, takes, uneven = MORE * lasting(number @ costs), number @ costs, list[int]()
    sends = {g for g in safe if most[g] and any(sent_in(one.jaxpr, splits.mesh.shape) for one in programs[g])}
    if not (sends or splits.on_gpu):
        return IdleWork()
    once = ranges.num_passes == 1  # else they would be computed in each pass
    others = {g for g in sends | {0, model.last} & {*safe} if most[g] and once} - {*trips}
    for g in sorted(others, key=lambda g: (g not in sends, costs[g])):
        by_all = takes + (most[g] - number[:, g]) * costs[g]
        if (trips or g in sends) and lasting(by_all) <= limit:
            takes, trips[g] = by_all, int(most[g])
            uneven.append(g)
    return IdleWork(trips, frozenset(uneven), frozenset(safe)) if trips else IdleWork()


def _is_safe(group: LayerGroup, programs: Collection[ClosedJaxpr]) -> bool:
    """Whether a layer may be computed of any values.

    It may not if it calls back, or has a loop that ends on a condition, which with such values may never hold; nor if a
    kernel may take integers of its activation for places.
    """
    names = {equation.primitive.name for one in programs for equation in _outside_of_kernels(one.jaxpr.eqns)}
    takes_integers = not all(map(is_float, jax.tree.leaves(group.takes)))
    unsafe = {"while", "debug_print", *(KERNELS if takes_integers else ())}
    return unsafe.isdisjoint(names) and not any(name.endswith("callback") for name in names)


def _outside_of_kernels(equations: Sequence[JaxprEqn]) -> Iterator[JaxprEqn]:
    """Yields equations, and those of the jaxprs that they hold, but for the programs of kernels."""
    for equation in equations:
        yield equation
        for inner in jaxprs_in_params(equation.params) if equation.primitive.name != "pallas_call" else ():
            yield from _outside_of_kernels(inner.eqns)


def _cost(closed: ClosedJaxpr) -> float:
    """A function's FLOPs, plus those that a device could do while it reads its arguments and writes its results."""
    return count_flops(closed) + FLOPS_A_BYTE * bytes_of([*closed.in_avals, *closed.out_avals])
