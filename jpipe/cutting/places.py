"""Finds the places at which a model is cut into pieces: where `jpipe.cut` marks it, or where little crosses.

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

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jpipe.cutting.straight import Follows, Part, Straight, does_work
from jpipe.jax.flops import flops_of
from jpipe.types import PyTree

LARGEST = 1 / 8
"""A piece with more than this part of the model's FLOPs is cut again, if a good place is inside."""
SHARES, FEWEST = 2, 4
"""A piece that takes more than so many shares of a virtual stage, of at least so many, is cut again by all means."""
NEARLY = 3 / 4
"""A new piece with more than this part of the FLOPs of the old one is nearly the same."""
MOST_WIDER = 2
"""A piece is cut at an inner place that bears at most so many times the bytes of its wider end."""


@dataclass(frozen=True, eq=False)
class Traced:
    """A model's trace in one mode, at some shapes, with the places between its main equations: place p is behind p.

    Attributes:
      straight: its equations.
      each_use: each use of variables is work, whether it is a product or not.
    """

    straight: Straight
    each_use: bool = False

    # --- what crosses a place ---

    @cached_property
    def crossing(self) -> list[tuple[int, ...]]:
        """For each place the activations that are needed behind it and made before it, in the order of their making.

        Behind them the values of lines, in order.
        """
        straight, main = self.straight, self.straight.main
        last: dict[int, int] = {}
        for p, i in enumerate(main):
            last.update(dict.fromkeys(straight.flat.equations[i].reads, p))
        last.update(dict.fromkeys(straight.ends, len(main)))
        live: dict[int, None] = {}
        crossing: list[tuple[int, ...]] = [()]
        for p, i in enumerate(main):
            made = straight.flat.equations[i].makes
            live.update(dict.fromkeys(n for n in made if straight.sources[n] is Follows.BOTH))
            live = {n: None for n in live if last.get(n, -1) > p}
            crossing.append(tuple(sorted(live, key=lambda n: straight.lines.get(n, -1))))
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
        return np.cumsum([0.0, *(flops_of(equations[i].equation) for i in self.straight.main)])

    @cached_property
    def uses_variables(self) -> list[bool]:
        """For each main equation, whether it reads what follows from variables alone."""
        sources, equations = self.straight.sources, self.straight.flat.equations
        return [any(sources[n] is Follows.VARIABLES for n in equations[i].reads) for i in self.straight.main]

    @cached_property
    def works(self) -> list[bool]:
        """For each main equation, whether it is a product or a convolution, or with `each_use` uses variables."""
        pairs = zip(self.straight.main, self.uses_variables, strict=True)
        return [does_work(self.straight.flat.equations[i].equation) or (self.each_use and used) for i, used in pairs]

    @cached_property
    def tails(self) -> list[int]:
        """For each place, a number that stands for the operations between the last product before it and itself."""
        equations, tails = self.straight.flat.equations, [0]
        for i, works in zip(self.straight.main, self.works, strict=True):
            tails.append(0 if works else hash((tails[-1], equations[i].equation.primitive.name)))
        return tails

    @cached_property
    def marked(self) -> list[int]:
        """The places that the user marked by `jpipe.cut`; of values that are marked together, behind the last."""
        marks, made = list[int](), set[int]()
        for p, i in enumerate(self.straight.main):
            one = self.straight.flat.equations[i]
            if one.equation.primitive.name == "name" and one.equation.params["name"] == CUT:
                together = marks[-1:] == [p] and made.isdisjoint(one.reads)
                marks, made = [*marks[: len(marks) - together], p + 1], {*one.makes, *(made if together else ())}
        return marks

    # --- variables ---

    @cached_property
    def written(self) -> dict[Part, int]:
        """The new values of the state: by part that changes, the number of its new value."""
        new = self.straight.new_state.items()
        return {part: n for leaf, number in new for part, n in self.straight.slices_made(Part(leaf), number).items()}

    @cached_property
    def parts_used(self) -> list[set[Part]]:
        """For each main equation, the parts of the variables that it needs besides activations.

        The last one also has those that outputs follow from alone; one that makes a part of the state has that part.
        """
        straight = self.straight
        used = [{*straight.support(straight.flat.equations[i].reads)[1]} for i in straight.main]
        if used:
            used[-1] |= {*straight.support(straight.outputs)[1]}
        for part, number in self.written.items():
            p = self._position.get(straight.flat.made_by.get(number, -1))
            if p is None and not any(part in parts for parts in used):
                read = straight.support([number])[1]
                p = next((p for p, parts in enumerate(used) if not parts.isdisjoint(read)), None)
            if p is not None:
                used[p].add(part)
        return used

    def used(self, start: int = 0, stop: int | None = None) -> set[Part]:
        """The parts that the main equations between two places use."""
        return set().union(*self.parts_used[start:stop])

    @cached_property
    def _position(self) -> dict[int, int]:
        return {i: p for p, i in enumerate(self.straight.main)}

    @cached_property
    def split(self) -> list[frozenset[Part]]:
        """For each place the parts that are used both before and behind it."""
        last = {part: p for p, parts in enumerate(self.parts_used) for part in parts}
        split = [frozenset[Part]()]
        for p, parts in enumerate(self.parts_used):
            split.append(frozenset(part for part in split[-1] | parts if last[part] > p) if parts else split[-1])
        return split

    def is_inside_of_state(self, place: int) -> bool:
        """Whether a part of the state is read before a place and written behind it."""
        return any(start < place < stop for start, stop in self.spans.values())

    @cached_property
    def spans(self) -> dict[Part, tuple[int, int]]:
        """For each part of the state, the places before its first use and behind the equation that writes it."""
        first: dict[Part, int] = {}
        for p in reversed(range(len(self.parts_used))):
            first.update(dict.fromkeys(self.parts_used[p], p))
        spans = {}
        for part, number in self.written.items():
            made = self._position.get(self.straight.flat.made_by.get(number, -1))
            if made is not None and part in first:
                spans[part] = min(first[part], made), max(made + 1, first[part] + 1)
        return spans


def find_places(traced: Traced, wanted: int, forbidden: Callable[[int], bool]) -> list[int]:
    """The places to cut at, in order.

    They follow from the model alone, so that pipelines of other numbers of stages have the same layers; but where
    these are fewer than wanted, or some far larger than the others can be, more places are taken.

    Args:
      traced: the model.
      wanted: how many pieces there have to be at least, if the model has so many.
      forbidden: whether a place must not be used.
    """
    end = len(traced.straight.main)
    if traced.marked:
        return [p for p in traced.marked if 0 < p < end and not forbidden(p)]
    chosen = _cut(traced, 0, end, forbidden)
    # A place beside the model's path, as behind the embedding of a time, is narrow and leaves nearly all in one piece;
    # and what all blocks read may be large. Such pieces are cut by all means, and then at good places.
    for most, by_all_means in ((LARGEST, False), (SHARES / max(wanted, FEWEST), True), (LARGEST, False)):
        chosen = _cut_again(traced, chosen, forbidden, most, by_all_means=by_all_means)
    for by_all_means in (False, True):
        if len(chosen) + 1 < wanted:
            chosen = _cut_again(traced, chosen, forbidden, 1 / wanted, by_all_means=by_all_means)
    return chosen


def _cut_again(
    traced: Traced, chosen: Sequence[int], forbidden: Callable[[int], bool], most: float, *, by_all_means: bool
) -> list[int]:
    """The places chosen so far, and those inside of pieces that have more than such a part of the model's FLOPs.

    Unless it is to be by all means, not where much more crosses, or where what comes of a piece is nearly itself.
    """
    flops, end = traced.flops, len(traced.straight.main)
    size = lambda pair: flops[pair[1]] - flops[pair[0]]

    def inside(start: int, stop: int) -> list[int]:
        if size((start, stop)) <= most * flops[-1]:
            return []
        ends = max(traced.bytes[start], traced.bytes[stop] if stop < end else 0)
        limit = np.inf if by_all_means else MOST_WIDER * max(ends, 1)
        inner = _cut(traced, start, stop, lambda p: forbidden(p) or traced.bytes[p] > limit)
        pieces = pairwise([start, *inner, stop]) if inner else ()
        inner = sorted([*inner, *(p for piece in pieces for p in inside(*piece))])
        is_nearly = max(map(size, pairwise([start, *inner, stop]))) > NEARLY * size((start, stop))
        return [] if is_nearly and not by_all_means else inner

    return sorted([*chosen, *(p for piece in pairwise([0, *chosen, end]) for p in inside(*piece))])


def _cut(traced: Traced, start: int, stop: int, forbidden: Callable[[int], bool]) -> list[int]:
    """The narrowest places inside of a piece: those that the fewest values cross, one between two products."""
    # Where no work lies between a place and an end, the two are one. A model begins with a look-up, which is none.
    begins = traced.works if start else [a or b for a, b in zip(traced.works, traced.uses_variables, strict=True)]
    first = next((p + 1 for p in range(start, stop) if begins[p]), stop)
    last = next((p for p in reversed(range(start, stop)) if traced.works[p]), start)
    inside = [p for p in range(first, last + 1) if not forbidden(p)]
    if not inside:
        return []
    fewest = min(len(traced.crossing[p]) for p in inside)
    narrow = [p for p in inside if len(traced.crossing[p]) == fewest]
    # Places with no product between them are one place: the one at which crosses what crosses elsewhere, so that a cast
    # behind the table or before the head leaves the blocks equal; of such the one with the fewest bytes; of such the
    # one behind what is behind other products, so that a norm before the head is no part of the last block; and then
    # the last. So a bias, an activation or a norm behind each block belongs to the product before it.
    products = np.cumsum([0, *traced.works])
    choices = [list(group) for _, group in groupby(narrow, lambda p: products[p])]
    common = Counter(kind for choice in choices for kind in {traced.kinds(p) for p in choice})
    tails = Counter(traced.tails[p] for p in narrow)
    rank = lambda p: (-common[traced.kinds(p)], traced.bytes[p], -tails[traced.tails[p]])
    return _without_peaks(traced, [min(reversed(choice), key=rank) for choice in choices])


def _without_peaks(traced: Traced, candidates: list[int]) -> list[int]:
    """Without places that bear more bytes than those before and behind them: such as a wide hidden layer."""
    runs = [list(run) for _, run in groupby(candidates, lambda p: traced.bytes[p])]
    size = lambda run: traced.bytes[run[0]]

    def is_peak(i: int) -> bool:
        neighbours = [size(runs[j]) for j in (i - 1, i + 1) if 0 <= j < len(runs)]
        return bool(neighbours) and size(runs[i]) > max(neighbours)

    return [p for i, run in enumerate(runs) if not is_peak(i) for p in run]


# --- marks ------------------------------------------------------------------------------------------------------------


CUT = "jpipe.cut"
"""The name under which marked values are found in a trace."""


def cut(x: PyTree) -> PyTree:
    """Marks a value of a model: a stage may begin behind it. Where a model has such marks, only these places are used.

    It does nothing outside of a pipeline. A mark isn't seen in a loop that doesn't go over blocks, in a function with
    derivatives of its own (`jax.custom_vjp`), or on a value that follows from the batch alone.

    Args:
      x: an activation, any pytree of arrays.

    Returns:
      The same.
    """
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, CUT), x)
