"""Finds the places at which a model is cut into pieces: where little crosses, and where a person would cut.

Between two equations of the straight list some activations are still needed: they would cross a boundary there. In a
transformer, one value is, behind each attention and each feed-forward; inside of them several are. So the places are
those where the fewest values cross. A model whose inside is all wider (a U-Net, whose skips cross; a net whose cells
take two earlier outputs) is cut there, and the pieces that are too large are cut again, at their own narrowest places.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise

import numpy as np

from jpipe.cutting.marks import CUT
from jpipe.cutting.straight import Follows, Straight, does_work
from jpipe.jaxprs.flops import flops_of

LARGEST = 8
"""A piece with more than this part of the model's FLOPs is cut again."""
MOST_WIDER = 2
"""A piece is cut at an inner place that bears at most so many times the bytes of its wider end."""


@dataclass(frozen=True, eq=False)
class Places:
    """The places between the main equations of a model: place p is behind p of them.

    Attributes:
      straight: the model.
    """

    straight: Straight

    @cached_property
    def crossing(self) -> list[tuple[int, ...]]:
        """For each place the activations that are needed behind it and made before it, in the order of their making."""
        straight, main = self.straight, self.straight.main
        last: dict[int, int] = {}
        for p, i in enumerate(main):
            last.update(dict.fromkeys(straight.flat.equations[i].reads, p))
        last.update(dict.fromkeys(straight.outputs, len(main)))
        live: dict[int, None] = {}
        crossing: list[tuple[int, ...]] = [()]
        for p, i in enumerate(main):
            made = straight.flat.equations[i].makes
            live.update(dict.fromkeys(n for n in made if straight.sources[n] is Follows.BOTH))
            live = {n: None for n in live if last.get(n, -1) > p}
            crossing.append(tuple(live))
        return crossing

    @cached_property
    def bytes(self) -> list[int]:
        """For each place, the bytes that cross it."""
        avals = self.straight.flat.avals
        return [sum(avals[n].size * avals[n].dtype.itemsize for n in values) for values in self.crossing]

    def shapes(self, place: int) -> list[tuple[tuple[int, ...], object]]:
        """The shapes and dtypes of what crosses a place."""
        avals = self.straight.flat.avals
        return [(avals[n].shape, avals[n].dtype) for n in self.crossing[place]]

    def kinds(self, place: int) -> tuple[tuple[int, object], ...]:
        """The numbers of dimensions and the dtypes of what crosses a place: what doesn't depend on the batch's size."""
        return tuple((len(shape), dtype) for shape, dtype in self.shapes(place))

    @cached_property
    def flops(self) -> np.ndarray:
        """For each place, the FLOPs of all main equations before it."""
        equations = self.straight.flat.equations
        return np.cumsum([0.0, *(flops_of(equations[i].equation).flops for i in self.straight.main)])

    @cached_property
    def uses_variables(self) -> list[bool]:
        """For each main equation, whether it reads what follows from variables alone."""
        sources, equations = self.straight.sources, self.straight.flat.equations
        return [any(sources[n] is Follows.VARIABLES for n in equations[i].reads) for i in self.straight.main]

    @cached_property
    def works(self) -> list[bool]:
        """For each main equation, whether it is a product or a convolution."""
        return [does_work(self.straight.flat.equations[i].equation) for i in self.straight.main]

    def runs(self, chosen: Sequence[int]) -> list[list[int]]:
        """Places in order, in runs of such as are next to each other, with nothing but elementwise work between."""
        runs: list[list[int]] = []
        for p in chosen:
            if not runs or p > runs[-1][-1] + 1 or self.works[p - 1]:
                runs.append([])
            runs[-1].append(p)
        return runs

    @cached_property
    def marked(self) -> list[int]:
        """The places that the user marked by `jpipe.cut`."""
        equations = self.straight.flat.equations
        names = [equations[i].equation for i in self.straight.main]
        return [p + 1 for p, e in enumerate(names) if e.primitive.name == "name" and e.params["name"] == CUT]


def find_places(places: Places, wanted: int, forbidden: Callable[[int], bool]) -> list[int]:
    """The places to cut at, in order.

    They follow from the model alone, so that pipelines of other numbers of stages have the same layers; but where
    these are fewer than wanted, more places are taken.

    Args:
      places: of the model.
      wanted: how many pieces there have to be at least, if the model has so many.
      forbidden: whether a place must not be used.
    """
    end = len(places.straight.main)
    if places.marked:
        return [p for p in places.marked if 0 < p < end and not forbidden(p)]
    chosen = _cut(places, 0, end, forbidden)
    for pieces, most_wider in ((LARGEST, MOST_WIDER), (wanted, MOST_WIDER), (wanted, np.inf)):
        chosen = _cut_again(places, chosen, forbidden, places.flops[-1] / pieces, most_wider)
        if len(chosen) + 1 >= wanted:
            break
    return chosen


def _cut_again(
    places: Places, chosen: Sequence[int], forbidden: Callable[[int], bool], most_flops: float, most_wider: float
) -> list[int]:
    """The places chosen so far, and those inside of pieces that have more than so many FLOPs."""
    found, todo, end = set(chosen), list(pairwise([0, *chosen, len(places.straight.main)])), len(places.straight.main)
    while todo:
        start, stop = todo.pop()
        if places.flops[stop] - places.flops[start] <= most_flops:
            continue
        ends = max(places.bytes[start], places.bytes[stop] if stop < end else 0)
        inner = _cut(
            places, start, stop, lambda p, ends=ends: forbidden(p) or places.bytes[p] > most_wider * max(ends, 1)
        )
        found.update(inner)
        todo += pairwise([start, *inner, stop]) if inner else []
    return sorted(found)


def _cut(places: Places, start: int, stop: int, forbidden: Callable[[int], bool]) -> list[int]:
    """The narrowest places inside of a piece: those that the fewest values cross, one for each run of such places."""
    # Where no work lies between a place and an end, the two are one. A model begins with a look-up, which is none.
    begins = places.works if start else [a or b for a, b in zip(places.works, places.uses_variables, strict=True)]
    first = next((p + 1 for p in range(start, stop) if begins[p]), stop)
    last = next((p for p in reversed(range(start, stop)) if places.works[p]), start)
    inside = [p for p in range(first, last + 1) if not forbidden(p)]
    if not inside:
        return []
    fewest = min(len(places.crossing[p]) for p in inside)
    narrow = [p for p in inside if len(places.crossing[p]) == fewest]
    # Places next to each other, or with nothing but elementwise work between, are one place: the one at which crosses
    # what crosses elsewhere, so that a cast behind the table or before the head leaves the blocks equal; of such the
    # one with the fewest bytes, and then the last. So a bias, a scale or an activation belongs to what is before it.
    choices = places.runs(narrow)
    common = Counter(kind for choice in choices for kind in {places.kinds(p) for p in choice})
    rank = lambda p: (-common[places.kinds(p)], places.bytes[p])
    candidates = [min(reversed(choice), key=rank) for choice in choices]
    return _without_idle(places, start, stop, _without_peaks(places, candidates))


def _without_peaks(places: Places, candidates: list[int]) -> list[int]:
    """Without places that bear more bytes than those before and behind them: such as a wide hidden layer."""
    runs = [list(run) for _, run in groupby(candidates, lambda p: places.bytes[p])]
    size = lambda run: places.bytes[run[0]]

    def is_peak(i: int) -> bool:
        neighbours = [size(runs[j]) for j in (i - 1, i + 1) if 0 <= j < len(runs)]
        return bool(neighbours) and size(runs[i]) > max(neighbours)

    return [p for i, run in enumerate(runs) if not is_peak(i) for p in run]


def _without_idle(places: Places, start: int, stop: int, candidates: list[int]) -> list[int]:
    """Without the places behind which nothing but elementwise work without weights is done before the next one."""
    kept: list[int] = []
    before = start
    for p in candidates:
        if any(places.works[before:p]) or any(places.uses_variables[before:p]):
            kept.append(p)
            before = p
        elif kept and places.bytes[p] < places.bytes[kept[-1]]:
            kept[-1] = before = p
    while kept and not (any(places.works[kept[-1] : stop]) or any(places.uses_variables[kept[-1] : stop])):
        kept.pop()
    return kept
