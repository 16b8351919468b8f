"""Where to cut the sequence of layers into stages: the exact best contiguous partition for given layer costs.

A pipeline advances at the pace of its slowest stage, so the default objective is the largest stage cost; the GPipe
paper (section 2.2) minimises the variance of the stage costs instead. The two can differ, and both are exact here.

Both are the least sum of squared deviations from the mean, the first under a cap on the cost of a stage: the cap is
found by bisection, the sum by dynamic programming. N is the number of layers, K the number of stages and V the number
of chunks a stage; layers are cut into K*V virtual stages, which are the stages if V is 1.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, SupportsFloat, SupportsIndex

import numpy as np

if TYPE_CHECKING:
    from jpipe.pictures.tables import Table

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
    def costs(self) -> tuple[float, ...]:
        """`[K*V]`, the cost by virtual stage."""
        return tuple(math.fsum(self.layer_costs[start:stop]) for start, stop in self.bounds)

    @property
    def imbalance(self) -> float:
        """The cost of the slowest virtual stage over the mean; 1.0 is perfect balance."""
        costs = self.costs
        total = math.fsum(costs)
        return max(costs) * len(costs) / total if total else 1.0

    @property
    def variance(self) -> float:
        """The variance of `costs`, which the paper minimises."""
        costs = self.costs
        mean = math.fsum(costs) / len(costs)
        return math.fsum((cost - mean) ** 2 for cost in costs) / len(costs)

    def __str__(self) -> str:
        return self._table().text()

    def _repr_html_(self) -> str:
        return self._table().html()

    def _table(self) -> Table:
        """A row for each virtual stage, the slowest one marked."""
        from jpipe.pictures.tables import Table

        costs = self.costs
        total, slowest = math.fsum(costs), costs.index(max(costs))
        rows = []
        for virtual_stage, ((start, stop), cost) in enumerate(zip(self.bounds, costs, strict=True)):
            layers = str(start) if stop - start == 1 else f"{start}-{stop - 1}"
            share = cost / total if total else 1 / len(costs)
            chunk, stage = divmod(virtual_stage, self.num_stages)
            names = (str(stage), str(chunk)) if self.num_chunks > 1 else (str(stage),)
            rows.append((*names, layers, str(stop - start), f"{cost:.4g}", f"{share:.1%}"))
        even = partition_from_counts(_even_counts(len(self.layer_costs), len(costs)), self.layer_costs)
        note = (
            f"slowest/mean {self.imbalance:.3f}; cut into even counts the slowest stage would cost "
            f"{max(even.costs):.4g} ({even.imbalance:.3f})"
        )
        header = ("stage", *(("chunk",) if self.num_chunks > 1 else ()), "layers", "count", "cost", "share")
        return Table(f"Partition of {len(self.layer_costs)} layers", header, rows, {slowest: "slowest"}, [note])


def partition(
    costs: Sequence[SupportsFloat],
    num_stages: int,
    objective: str = "max",
    *,
    num_chunks: int = 1,
    sizes: Sequence[SupportsFloat] | None = None,
    limit: float | None = None,
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
      sizes: `[N]`, the bytes of each layer, for `limit`.
      limit: the most bytes of a virtual stage.

    Raises:
      ValueError: if `costs` is empty or holds something that is no cost, if `num_stages` is out of range, if
          `objective` is unknown, or if there is no partition within the limit (the least that it would have to be is
          named).
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
        known = ", ".join(map(repr, OBJECTIVES))
        raise ValueError(f"objective={objective!r} is unknown; use one of {known}")
    layer_costs = _checked_costs(costs)
    num_parts = _checked_num_parts(num_stages, num_chunks, len(layer_costs))
    limits = _limits(sizes, limit, len(layer_costs), num_parts)
    if not any(layer_costs) and not limits:
        return Partition(_cuts(_even_counts(len(layer_costs), num_parts)), layer_costs, objective, num_chunks)
    # Scaled by a power of two, which is exact, so that no square overflows.
    exponent = math.frexp(max(layer_costs))[1]
    sums = list(accumulate((math.ldexp(cost, -exponent) for cost in layer_costs), initial=0.0))
    if objective == "max":
        limits = [*limits, (sums, _smallest_cap(sums, num_parts, limits))]
    return Partition(_least_squares_cuts(sums, num_parts, limits), layer_costs, objective, num_chunks)


Limits = list[tuple[list[float], float]]
"""What no virtual stage may exceed: pairs of `[N + 1]`, a size summed over the first layers, and the most of it."""


def _limits(sizes: Sequence[SupportsFloat] | None, limit: float | None, num_layers: int, num_parts: int) -> Limits:
    """The user's limit of bytes, checked; none if there is none."""
    if sizes is None and limit is None:
        return []
    if sizes is None or limit is None:
        raise ValueError("sizes and limit go together: give the bytes of each layer and the most bytes of a stage")
    layer_sizes = _checked_costs(sizes, "sizes")
    if len(layer_sizes) != num_layers:
        raise ValueError(f"sizes has {len(layer_sizes)} entries but there are {num_layers} layers; give one a layer")
    sums = list(accumulate(layer_sizes, initial=0.0))
    if isinstance(limit, bool) or not isinstance(limit, int | float | np.number):
        raise TypeError(f"limit={limit!r} is no number; give the most bytes of a virtual stage, such as 16e9")
    least = _smallest_cap(sums, num_parts, [])
    if not limit >= least * (1 - 1e-12):
        raise ValueError(
            f"no partition keeps to limit={limit:g} bytes a virtual stage; with these sizes it takes {least:g}"
        )
    return [(sums, max(limit, least))]


def partition_from_counts(
    counts: Sequence[SupportsIndex], layer_costs: Sequence[SupportsFloat], num_chunks: int = 1
) -> Partition:
    """The partition that has the given numbers of layers.

    Args:
      counts: `[K*V]`, the number of layers by virtual stage, each at least 1; they sum to N.
      layer_costs: `[N]`, as in `partition`.
      num_chunks: V.

    Raises:
      ValueError: if a count is less than 1 or the counts don't sum to N, or for bad costs.
      TypeError: if a count is no integer.

    >>> partition_from_counts([1, 2], [5, 2, 2]).cuts
    (1,)
    """
    checked_costs = _checked_costs(layer_costs, "layer_costs")
    whole = [_checked_int(count, f"counts[{stage}]") for stage, count in enumerate(counts)]
    if not whole:
        raise ValueError("counts is empty; give the number of layers of each stage")
    for stage, count in enumerate(whole):
        if count < 1:
            raise ValueError(f"counts[{stage}]={count}; every stage needs at least one layer")
    if sum(whole) != len(checked_costs):
        raise ValueError(f"counts={whole} sum to {sum(whole)}; they must sum to the {len(checked_costs)} layers")
    return Partition(_cuts(whole), checked_costs, "counts", num_chunks)


def _even_counts(num_layers: int, num_stages: int) -> list[int]:
    """Numbers of layers as even as can be, the larger ones last, as `partition` has them for equal costs."""
    count, rest = divmod(num_layers, num_stages)
    return [count] * (num_stages - rest) + [count + 1] * rest


def _cuts(counts: Sequence[int]) -> tuple[int, ...]:
    return tuple(accumulate(counts))[:-1]


def _checked_costs(costs: Sequence[SupportsFloat], name: str = "costs") -> tuple[float, ...]:
    if not isinstance(costs, Iterable) or isinstance(costs, str):
        raise TypeError(f"{name}={costs!r} is no sequence; give one number for each layer")
    checked = []
    for layer, cost in enumerate(costs):
        try:
            value = float(cost)
        except (TypeError, ValueError):
            raise TypeError(f"{name}[{layer}]={cost!r} is no number; every layer needs a cost of at least 0") from None
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"{name}[{layer}]={value}; a cost must be finite and at least 0")
        checked.append(value)
    if not checked:
        raise ValueError(f"{name} is empty; give one cost for each layer")
    return tuple(checked)


def _checked_num_parts(num_stages: int, num_chunks: int, num_layers: int) -> int:
    num_stages, num_chunks = _checked_int(num_stages, "num_stages"), _checked_int(num_chunks, "num_chunks")
    if num_stages < 1:
        raise ValueError(f"num_stages={num_stages} is less than 1; use 1 to {num_layers}")
    if num_stages > num_layers:
        raise ValueError(f"num_stages={num_stages} is more than the {num_layers} layers; use 1 to {num_layers}")
    if not 1 <= num_chunks <= num_layers // num_stages:
        raise ValueError(
            f"num_chunks={num_chunks} with num_stages={num_stages} and {num_layers} layers; use 1 to "
            f"{num_layers // num_stages}, so that every chunk has a layer"
        )
    return num_stages * num_chunks


def _checked_int(value: SupportsIndex, name: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r} is no integer") from None


# --- the search: here a stage is any virtual stage, and K the number of all of them -----------------------------------


def _furthest(sums: list[float], start: int, cap: float) -> int:
    """The largest `stop` for which the layers from `start` up to `stop`, excluded, cost at most `cap` together."""
    return bisect_right(range(len(sums)), cap, lo=start, key=lambda stop: sums[stop] - sums[start]) - 1


def _reaches(num_stages: int, num_layers: int, limits: Limits) -> list[int]:
    """`[num_stages + 1]`, for each k the most layers that k stages within the limits can take."""
    reaches = [0]
    for _ in range(num_stages):
        reaches.append(min((_furthest(sums, reaches[-1], cap) for sums, cap in limits), default=num_layers))
    return reaches


def _smallest_cap(sums: list[float], num_stages: int, limits: Limits) -> float:
    """The smallest possible cost of the costliest stage, by bisection between a cap that is too low and one that isn't.

    A cap that leaves stages empty is none too low: a stage of several layers can be cut again.
    """
    low, high = sums[-1] / num_stages * (1 - 1e-9), sums[-1]
    while low < (middle := (low + high) / 2) < high:
        reaches = _reaches(num_stages, len(sums) - 1, [*limits, (sums, middle)])
        if reaches[-1] == len(sums) - 1:
            high = max(sums[stop] - sums[start] for start, stop in pairwise(reaches))
        else:
            low = middle
    return high


def _least_squares_cuts(sums: list[float], num_stages: int, limits: Limits) -> tuple[int, ...]:
    """The cuts with the least sum of squared deviations from the mean, no stage exceeding the limits.

    `best[j]` is that sum for the first j layers in k stages. It comes from the same for k-1 stages: it is the least
    over i of `best[i] + deviation(i, j)^2`, where the last stage has the layers i to j. The i within the limits are an
    interval, both of whose ends grow with j. So does the smallest of the best i, as squares are convex.
    """
    prefix = np.asarray(sums)
    num_layers = len(sums) - 1
    reaches = _reaches(num_stages, num_layers, limits)
    first = np.zeros(num_layers + 1, np.int64)  # by j, the smallest i for which the layers i to j are within the limits
    for s, cap in limits:
        starts = [bisect_left(range(j + 1), -cap, key=lambda i, s=s, j=j: s[i] - s[j]) for j in range(num_layers + 1)]
        first = np.maximum(first, starts)
    best = np.where(np.arange(num_layers + 1) == 0, 0.0, np.inf)
    choices = []
    for stages in range(1, num_stages + 1):
        ends = np.arange(stages, min(reaches[stages], num_layers - (num_stages - stages)) + 1)
        low = np.maximum(first[ends], stages - 1)
        high = np.minimum(ends - 1, reaches[stages - 1])
        choice, value = _row_minima(prefix, best, ends, low, high, num_stages)
        best = np.full(num_layers + 1, np.inf)
        best[ends] = value
        choices.append(dict(zip(ends.tolist(), choice.tolist(), strict=True)))
    cuts = [num_layers]
    for choice in reversed(choices):
        cuts.append(choice[cuts[-1]])
    return tuple(reversed(cuts[1:-1]))


def _row_minima(
    prefix: np.ndarray, best: np.ndarray, ends: np.ndarray, low: np.ndarray, high: np.ndarray, num_stages: int
) -> tuple[np.ndarray, np.ndarray]:
    """For each end j, the first i from low to high at which `best[i] + (K (prefix[j] - prefix[i]) - total)^2` is least.

    The i sought grow with j, so that those of solved ends bound those of the ends between them. Ends are solved at ever
    smaller strides, all ends of a stride at once, which is O(N) work a stride.

    Args:
      prefix: `[N + 1]`, the cost of the first layers.
      best: `[N + 1]`, the least sums with one stage less.
      ends: `[R]`, the j, each one more than the one before.
      low: `[R]`, for each j the smallest i allowed.
      high: `[R]`, and the largest.
      num_stages: K, the number of all stages.

    Returns:
      `[R]`, the i, and `[R]`, the least sums there.
    """
    num_rows = len(ends)
    choice, value = np.empty(num_rows, np.int64), np.empty(num_rows)
    stride = 1 << (num_rows - 1).bit_length()
    rows = np.array([0])
    while stride:
        below, above = rows - stride, rows + stride
        start = np.where(below >= 0, np.maximum(low[rows], choice[np.maximum(below, 0)]), low[rows])
        inside = np.minimum(above, num_rows - 1)
        stop = np.where(above < num_rows, np.minimum(high[rows], choice[inside]), high[rows]) + 1
        lengths = stop - start
        offsets = np.cumsum(lengths) - lengths
        splits = np.arange(lengths.sum()) + np.repeat(start - offsets, lengths)
        stage_costs = np.repeat(prefix[ends[rows]], lengths) - prefix[splits]
        sums = best[splits] + (num_stages * stage_costs - prefix[-1]) ** 2
        value[rows] = np.minimum.reduceat(sums, offsets)
        hits = np.flatnonzero(sums == np.repeat(value[rows], lengths))
        choice[rows] = splits[hits[np.searchsorted(hits, offsets)]]
        rows = np.arange(stride // 2, num_rows, stride)
        stride //= 2
    return choice, value
