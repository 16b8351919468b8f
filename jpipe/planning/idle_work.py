"""Decides which layers the stages that idle compute along with those at work, so that no loop's trips vary by stage.

Stages run in lockstep: one that idles in a slot waits for those that don't. It may as well compute the same layers of
whatever values it has, and drop what they give: what it keeps goes into rows that nothing else is in (`lower`), and it
adds nothing to sums. Then all loops turn equally often on all stages, and a compiler knows how often. A GPU's host
stops before each trip of a loop whose number of trips follows from data, until all kernels are done; for a TPU it makes
no difference, and there idle stages idle.

Layers that all virtual stages have equally many of are computed along. So is the first or the last layer, which one of
them has, if it takes next to no time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from jax.extend.core import jaxprs_in_params

from jpipe.arrays.trees import bytes_of
from jpipe.jaxprs.flops import count_flops
from jpipe.model.groups import Model
from jpipe.planning.layer_ranges import LayerRanges
from jpipe.seam.jaxpr_types import ClosedJaxpr, JaxprEqn

FLOPS_A_BYTE = 300
"""The FLOPs that a GPU does while it moves a byte: 989e12 / 3.35e12 on an H100, 312e12 / 2.04e12 on an A100."""
MORE = 1.05
"""How many times as long the slots of a tick may take for that."""


@dataclass(frozen=True)
class IdleWork:
    """The layers that idle stages compute along.

    Attributes:
      trips: by group, how many of its layers each virtual stage computes in each pass.
      ends: the groups among them with a layer on one virtual stage alone: others compute it, and drop its results.
    """

    trips: dict[int, int] = field(default_factory=dict)
    ends: frozenset[int] = frozenset()


def plan_idle_work(
    model: Model, programs: Sequence[Sequence[ClosedJaxpr]], ranges: LayerRanges, num_chunks: int
) -> IdleWork:
    """Decides what idle stages compute along.

    Args:
      model: the layers.
      programs: for each group the jaxprs that a device runs, forward and backward.
      ranges: the layers of each virtual stage.
      num_chunks: the virtual stages of each stage.
    """
    counts = ranges.stop - ranges.start  # [S, passes, G]
    safe = [g for g, jaxprs in enumerate(programs) if not any(map(_is_open_ended, jaxprs))]
    trips = {g: int(counts[0, 0, g]) for g in safe if (counts[..., g] == counts[0, 0, g]).all() and counts[0, 0, g]}
    if not trips:
        return IdleWork()
    costs = np.array([sum(map(_cost, jaxprs)) for jaxprs in programs])
    number = counts.sum(axis=1)  # [S, G]
    # Slots in which stages run a chunk last as long as the slowest of them.
    lasting = lambda takes: takes.reshape(num_chunks, -1).max(axis=1).sum()
    limit, takes, ends = MORE * lasting(number @ costs), number @ costs, list[int]()
    for g in sorted({0, model.last} & {*safe} - {*trips}, key=lambda g: costs[g]):
        along = takes + (1 - number[:, g]) * costs[g]
        if number[:, g].sum() == 1 and lasting(along) <= limit:
            takes = along
            ends.append(g)
    return IdleWork(trips | dict.fromkeys(ends, 1), frozenset(ends))


def _is_open_ended(closed: ClosedJaxpr) -> bool:
    """Whether a function calls back, or has loops that turn until a condition holds: of any values it may never end."""
    names = {equation.primitive.name for equation in _outside_of_kernels(closed.jaxpr.eqns)}
    return any(name in ("while", "debug_print") or name.endswith("callback") for name in names)


def _outside_of_kernels(equations: Sequence[JaxprEqn]) -> Iterator[JaxprEqn]:
    """Yields equations, and those of the jaxprs that they hold, but for the programs of kernels."""
    for equation in equations:
        yield equation
        for inner in jaxprs_in_params(equation.params) if equation.primitive.name != "pallas_call" else ():
            yield from _outside_of_kernels(inner.eqns)


def _cost(closed: ClosedJaxpr) -> float:
    """What a function takes, in FLOPs, those that the device could do while it reads and writes its values included."""
    return count_flops(closed).flops + FLOPS_A_BYTE * bytes_of([*closed.in_avals, *closed.out_avals])
