"""Decides which layers idle stages compute too, so that every loop has the same number of trips on all stages.

Stages run in lockstep: one that idles in a slot waits for those that don't. It may as well compute the same layers of
whatever values it has, and drop what they give: what it keeps goes into rows that nothing else is in (`lower`), and it
adds nothing to sums. Then all loops turn equally often on all stages, and a compiler knows how often. A GPU's host
stops before each trip of a loop whose number of trips follows from data, until all kernels are done; for a TPU it makes
no difference, and there idle stages idle.

Layers that all virtual stages have equally many of are computed along. So is the first or the last layer, which one of
them has, if it takes next to no time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np
from jax.extend.core import jaxprs_in_params

from jpipe.arrays.trees import bytes_of, is_float
from jpipe.jaxprs.flops import count_flops
from jpipe.model.groups import LayerGroup, Model
from jpipe.model.traced_layer import DeviceForward, DeviceLayer
from jpipe.planning.layer_ranges import LayerRanges
from jpipe.seam.primitives import ClosedJaxpr, JaxprEqn

FLOPS_A_BYTE = 300
"""The FLOPs that a GPU does while it moves a byte: 989e12 / 3.35e12 on an H100, 312e12 / 2.04e12 on an A100."""
KERNELS = ("ffi_call", "pallas_call")
MORE = 1.05
"""The first or the last layer is computed by all stages only if slots take at most so many times as long."""


@dataclass(frozen=True)
class IdleWork:
    """The layers that idle stages compute along.

    Attributes:
      trips: by group, how many of its layers each virtual stage computes in each pass.
      single: the groups among them with a layer on one virtual stage alone: others compute it, and drop its results.
      safe: all groups that may be computed of any values.
    """

    trips: dict[int, int] = field(default_factory=dict)
    single: frozenset[int] = frozenset()
    safe: frozenset[int] = frozenset()


def plan_idle_work(
    model: Model,
    forwards: Sequence[DeviceForward],
    layers: Sequence[DeviceLayer],
    ranges: LayerRanges,
    num_chunks: int,
) -> IdleWork:
    """Decides what idle stages compute along.

    Args:
      model, forwards, layers: of the step (`Step`).
      ranges: the layers of each virtual stage.
      num_chunks: the virtual stages of each stage.
    """
    programs = [{forward.jaxpr} for forward in forwards]  # a set: a forward that keeps residuals is that of its layer
    for of_group, layer in zip(programs, layers, strict=False):
        of_group |= {layer.forward.jaxpr, layer.backward_jaxpr}
    by_pass = ranges.stop - ranges.start  # [S, passes, G]
    safe = [g for g, group in enumerate(model.groups) if _is_safe(group, programs[g])]
    trips = {g: int(by_pass[0, 0, g]) for g in safe if by_pass[0, 0, g] and len({*by_pass[..., g].flat}) == 1}
    if not trips:
        return IdleWork()
    costs, number = np.array([sum(map(_cost, jaxprs)) for jaxprs in programs]), by_pass.sum(axis=1)
    # Slots in which stages run a chunk last as long as the slowest of them.
    lasting = lambda takes: takes.reshape(num_chunks, -1).max(axis=1).sum()
    limit, takes, single = MORE * lasting(number @ costs), number @ costs, list[int]()
    candidates = {0, model.last} & {*safe} - {*trips} if by_pass.shape[1] == 1 else set()  # else once in each pass
    for g in sorted(candidates, key=lambda g: costs[g]):
        by_all = takes + (1 - number[:, g]) * costs[g]
        if number[:, g].sum() == 1 and lasting(by_all) <= limit:
            takes = by_all
            single.append(g)
    return IdleWork(trips | dict.fromkeys(single, 1), frozenset(single), frozenset(safe))


def _is_safe(group: LayerGroup, programs: Collection[ClosedJaxpr]) -> bool:
    """Whether a layer may be computed of any values.

    It may not if it calls back, or has a loop that ends on a condition, which with such values may never hold; nor if a
    kernel may take integers of its activation for places.
    """
    names = {equation.primitive.name for one in programs for equation in _outside_of_kernels(one.jaxpr.eqns)}
    takes_integers = not all(map(is_float, jax.tree.leaves(group.takes)))
    return not any(
        name in ("while", "debug_print") or name.endswith("callback") or (name in KERNELS and takes_integers)
        for name in names
    )


def _outside_of_kernels(equations: Sequence[JaxprEqn]) -> Iterator[JaxprEqn]:
    """Yields equations, and those of the jaxprs that they hold, but for the programs of kernels."""
    for equation in equations:
        yield equation
        for inner in jaxprs_in_params(equation.params) if equation.primitive.name != "pallas_call" else ():
            yield from _outside_of_kernels(inner.eqns)


def _cost(closed: ClosedJaxpr) -> float:
    """A function's FLOPs, plus those that a device could do while it reads its arguments and writes its results."""
    return count_flops(closed).flops + FLOPS_A_BYTE * bytes_of([*closed.in_avals, *closed.out_avals])
