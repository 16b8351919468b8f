"""Cuts the sequence of layers into stages: the exact best contiguous partition for given layer costs.

A pipeline advances at the pace of its slowest stage, so the default objective is the largest stage cost; the GPipe
paper (section 2.2) minimises the variance of the stage costs instead. The two can differ, and both are exact here.

Both are the least sum of squared deviations from the mean, the first under the smallest cap on the cost of a stage that
there is. Cap and sum are found by the same dynamic programming. N is the number of layers, K the number of stages and V
the number of chunks a stage; layers are cut into K*V virtual stages, which are the stages if V is 1.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import SupportsFloat

import numpy as np

from jpipe.processes.tables import Table
from jpipe.schedules.actions import Orders
from jpipe.users_numbers import as_integer, as_number, integer_or_none

OBJECTIVES = ("max", "variance")


@dataclass(frozen=True)
class Partition:
    """A sequence of layers cut into virtual stages: `bounds[s]` are the first layer of the s-th and its end, excluded.

    Attributes:
      cuts: `[K*V - 1]`, the layers that virtual stages 1, 2, ... begin with.
      layer_costs: `[N]`, the costs that it was made for, in whatever unit they came.
      objective: "max", "variance", or "counts" if it was made from numbers of layers.
      num_chunks: V; virtual stage s is chunk s // K of stage s % K.
    """

    cuts: tuple[int, ...]
    layer_costs: tuple[float, ...]
    objective: str
    num_chunks: int = 1

    @property
    def num_stages(self) -> int:
        """K, the number of stages."""
        return (len(self.cuts) + 1) // self.num_chunks

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """`[K*V]`, `(start, stop)` by virtual stage."""
        return list(pairwise((0, *self.cuts, len(self.layer_costs))))

    @property
    def counts(self) -> tuple[int, ...]:
        """`[K*V]`, the number of layers by virtual stage."""
        return tuple(stop - start for start, stop in self.bounds)

    @property
    def ranges(self) -> list[str]:
        """`[K*V]`, the layers by virtual stage in words: "0-6", or "7" of one alone."""
        return [f"{start}-{stop - 1}" if stop - start > 1 else str(start) for start, stop in self.bounds]

    @property
    def costs(self) -> tuple[float, ...]:
        """`[K*V]`, the cost by virtual stage."""
        return tuple(math.fsum(self.layer_costs[start:stop]) for start, stop in self.bounds)

    @property
    def imbalance(self) -> float:
        """The cost of the slowest virtual stage over the mean; 1.0 is perfect balance."""
        costs = self.costs
        total = math.fsum(costs)
        return max(costs) * len(costs) / total if total else 1.0

    def __repr__(self) -> str:
        return f"<Partition of {len(self.layer_costs)} layers into {reprlib.repr(self.counts)}; {self._slowest}>"

    def __str__(self) -> str:
        return self._table().text()

    def _repr_html_(self) -> str:
        return self._table().html()

    @property
    def _slowest(self) -> str:
        return f"slowest/mean {self.imbalance:.3f}"

    def _table(self) -> Table:
        """A row for each virtual stage, the slowest one marked."""
        costs = self.costs
        total, slowest = math.fsum(costs), costs.index(max(costs))
        rows = []
        for virtual_stage, (layers, count, cost) in enumerate(zip(self.ranges, self.counts, costs, strict=True)):
            share = cost / total if total else 1 / len(costs)
            chunk, stage = divmod(virtual_stage, self.num_stages)
            names = (str(stage), str(chunk)) if self.num_chunks > 1 else (str(stage),)
            mark = "<- slowest" if virtual_stage == slowest else ""
            rows.append((*names, layers, str(count), f"{cost:.4g}", f"{share:.1%}", mark))
        even = replace(self, cuts=partition([1.0] * len(self.layer_costs), len(costs)).cuts)
        note = (
            f"{self._slowest}; cut into even counts the slowest stage would cost "
            f"{max(even.costs):.4g} ({even.imbalance:.3f})"
        )
        header = ("stage", *(("chunk",) if self.num_chunks > 1 else ()), "layers", "count", "cost", "share", "")
        return Table(f"Partition of {len(self.layer_costs)} layers", header, rows, [note])


def partition(
    costs: Sequence[SupportsFloat], num_stages: int, objective: str = "max", *, num_chunks: int = 1
) -> Partition:
    """Cuts layers with the given costs into contiguous stages, the best way there is.

    Every stage has at least one layer. Among equally good partitions the last stage takes as many layers as it can,
    then the one before it, and so on: under 1F1B the later stages hold fewer micro-batches.

    Args:
      costs: `[N]`, a finite cost of at least 0 for each layer, in any unit.
      num_stages: K, from 1 to N.
      objective: "max" for the smallest largest stage cost and, among those, the smallest variance; "variance" for
          the smallest variance of the stage costs (GPipe, section 2.2).
      num_chunks: V; the layers are cut into K*V virtual stages.

    Raises:
      ValueError: if `costs` is empty or holds something that is no cost, if `num_stages` is out of range, or if
          `objective` is unknown.
      TypeError: if `num_stages` or `num_chunks` is no integer.

    >>> partition([3, 4, 8, 6, 5, 6, 3], 3).costs
    (7.0, 14.0, 14.0)
    >>> partition([3, 4, 8, 6, 5, 6, 3], 3, "variance").costs
    (15.0, 11.0, 9.0)
    >>> print(partition([3, 4, 8, 6, 5, 6, 3], 3))
    stage  layers  count  cost  share
        0     0-1      2     7  20.0%
        1     2-3      2    14  40.0%  <- slowest
        2     4-6      3    14  40.0%
    slowest/mean 1.200; cut into even counts the slowest stage would cost 14 (1.200)
    """
    if objective not in OBJECTIVES:
        raise ValueError(f"objective={objective!r} is unknown; use one of {', '.join(map(repr, OBJECTIVES))}")
    layer_costs = checked_costs(costs, "costs")
    num_stages, num_chunks = check_sizes(num_stages, num_chunks, len(layer_costs))
    num_parts = num_stages * num_chunks
    weights = layer_costs if any(layer_costs) else (1.0,) * len(layer_costs)  # all of them nothing: all alike
    # Scaled by a power of two, which is exact, so that no square overflows.
    sums = np.cumsum(np.ldexp([0.0, *weights], -math.frexp(max(weights))[1]))
    cap = np.inf
    if objective == "max":
        cap = np.diff(sums[_best_bounds(sums, num_parts, np.maximum)]).max()
    squares = lambda before, cost: before + (num_parts * cost - sums[-1]) ** 2
    return Partition(tuple(_best_bounds(sums, num_parts, squares, cap)[1:-1]), layer_costs, objective, num_chunks)


def partition_from_counts(counts: Sequence[int], layer_costs: Sequence[float], num_chunks: int = 1) -> Partition:
    """The partition that has the given numbers of layers.

    Args:
      counts: `[K*V]`, the number of layers by virtual stage, each at least 1; they sum to N.
      layer_costs: `[N]`, as in `partition`.
      num_chunks: V.

    >>> partition_from_counts([1, 2], [5, 2, 2]).cuts
    (1,)
    """
    return Partition(tuple(accumulate(counts))[:-1], tuple(map(float, layer_costs)), "counts", num_chunks)


def checked_costs(costs: Sequence[SupportsFloat], name: str) -> tuple[float, ...]:
    """The user's costs, called by this name in errors, as floats.

    Raises:
      ValueError: if there are none, or one isn't finite and at least 0.
      TypeError: if they are no sequence of numbers.
    """
    if not isinstance(costs, Iterable) or isinstance(costs, str):
        raise TypeError(f"{name}={costs!r} is no sequence; give one number for each layer")
    needs = "give one number for each layer"
    checked = tuple(as_number(f"{name}[{layer}]", cost, needs) for layer, cost in enumerate(costs))
    if not checked:
        raise ValueError(f"{name} is empty; {needs}")
    return checked


def check_sizes(num_stages: int, num_chunks: int, num_layers: int) -> tuple[int, int]:
    """K and V as ints, checked to give every virtual stage a layer.

    Raises:
      TypeError: one is no integer.
      ValueError: one is less than 1, or there are too few layers.
    """
    num_stages = as_integer("num_stages", num_stages, f"use 1 to {num_layers}")
    num_chunks = as_integer("num_chunks", num_chunks, "use 1 or more")
    if num_stages > num_layers:
        raise ValueError(f"num_stages={num_stages} is more than the {num_layers} layers; use 1 to {num_layers}")
    if num_chunks > (most := num_layers // num_stages):
        raise ValueError(f"num_chunks={num_chunks} with {num_stages=} and {num_layers} layers; use 1 to {most}")
    return num_stages, num_chunks


# --- the search: here a stage is any virtual stage, and K the number of all of them -----------------------------------

Combine = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""(result of the stages before the last one, cost of the last one) -> result of all; for many choices at once."""


def _best_bounds(sums: np.ndarray, num_stages: int, combine: Combine, cap: float = np.inf) -> list[int]:
    """`[K + 1]`, where the stages begin and end that come to the least together, none of them above the cap.

    `best[j]` is the least for the first j layers in k stages. It comes from the same for k-1 stages: it is the least
    over i of `combine(best[i], cost(i, j))`, where the last stage has the layers i to j.

    Args:
      sums: `[N + 1]`, the cost of the first layers.
      num_stages: K.
      combine: the largest of stages' costs, or a sum of convex functions of them.
      cap: the most that a stage may cost.
    """
    first, start = [], 0  # by j, the smallest i for which the layers i to j cost no more than the cap
    for stop in range(len(sums)):
        while sums[stop] - sums[start] > cap:
            start += 1
        first.append(start)
    best = np.where(np.arange(len(sums)) == 0, 0.0, np.inf)
    choices = []
    for _ in range(num_stages):
        choice, least = [0], [np.inf]
        for j in range(1, len(sums)):
            values = combine(best[first[j] : j], sums[j] - sums[first[j] : j])
            at = int(np.argmin(values))  # of equals the first, so that the last stage is as long as it can be
            choice.append(first[j] + at)
            least.append(values[at])
        choices.append(choice)
        best = np.asarray(least)
    bounds = [len(sums) - 1]
    for choice in reversed(choices):
        bounds.append(choice[bounds[-1]])
    return bounds[::-1]


Balance = str | tuple[int, ...] | tuple[float, ...]
"""A name, the number of layers of each virtual stage, or the cost of each layer."""


UNITS = {"flops": "flops", "time": "time", "size": "flops"}
"""The balances for which layers are measured -> the unit of their forward and backward (`layer_costs`)."""
BALANCES = (*UNITS, "even")


def as_balance(balance: object, num_layers: int | None, num_parts: int) -> Balance:
    """Checks the user's balance as far as it can be without shapes, and without the number of layers, if that is None.

    Raises:
      ValueError: an unknown name, counts that don't fit (length, sum, zeros), or costs that don't.
      TypeError: neither a name nor a sequence of numbers.
    """
    if isinstance(balance, str):
        if balance not in BALANCES:
            raise ValueError(
                f"balance={balance!r} is unknown; use one of {list(BALANCES)}, counts, or one cost a layer as floats"
            )
        return balance
    if isinstance(balance, Partition):
        raise TypeError("balance is a Partition; pass its layer counts: balance=partition.counts")
    values: tuple = (None,)
    if isinstance(balance, Iterable) and np.ndim(np.asarray(balance, object)) == 1:
        values = tuple(value.item() if hasattr(value, "item") else value for value in balance)
    if any(not isinstance(value, float) and integer_or_none(value) is None for value in values):
        raise TypeError(f"balance={balance!r} is neither one of {list(BALANCES)} nor a list of layer counts or costs")
    if any(isinstance(value, float) for value in values):
        if num_layers not in (None, len(values)):
            raise ValueError(f"balance has {len(values)} costs but there are {num_layers} layers; give one a layer")
        return checked_costs(values, "balance")
    if num_layers is not None:
        _check_counts(values, num_layers, num_parts)
    return values


def _check_counts(values: tuple[int, ...], num_layers: int, num_parts: int) -> None:
    such_as = f"such as {list(partition([1.0] * num_layers, num_parts).counts)}"
    if len(values) != num_parts:
        raise ValueError(f"balance={list(values)} has {len(values)} layer counts; give {num_parts} of them, {such_as}")
    if any(value < 1 for value in values):
        raise ValueError(f"balance={list(values)} has a stage without layers; give each at least one, {such_as}")
    if sum(values) != num_layers:
        raise ValueError(f"balance={list(values)} sums to {sum(values)}, not {num_layers} layers; use counts {such_as}")


def _counts(balance: Balance) -> tuple[int, ...] | None:
    """The layers of each virtual stage, if the user counted them out."""
    counts = () if isinstance(balance, str) else tuple(value for value in balance if isinstance(value, int))
    return counts or None


def unit_of(balance: Balance) -> str | None:
    """The unit in which layers are measured; None if they aren't. If the user counted layers out, FLOPs are shown."""
    return UNITS.get(balance) if isinstance(balance, str) else "flops" if _counts(balance) else None


def unmeasured_costs(balance: Balance, num_layers: int) -> tuple[float, ...]:
    """`[N]`, the layers' costs where none are measured: the user's own, else 1.0 each.

    >>> unmeasured_costs("even", 2), unmeasured_costs((1, 1), 2), unmeasured_costs((3.0, 4.0), 2)
    ((1.0, 1.0), (1.0, 1.0), (3.0, 4.0))
    """
    return (1.0,) * num_layers if isinstance(balance, str) or _counts(balance) else tuple(map(float, balance))


def cut_layers(balance: Balance, costs: Sequence[float], schedule: Orders) -> Partition:
    """The cuts for a balance: the best for these costs, or where the user wants them.

    Args:
      balance: as checked by `as_balance`.
      costs: `[N]`, what is to be shared out evenly.
      schedule: for how many virtual stages.
    """
    if counts := _counts(balance):
        return partition_from_counts(counts, costs, schedule.num_chunks)
    return partition(costs, schedule.num_stages, num_chunks=schedule.num_chunks)
