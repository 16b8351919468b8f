"""Makes the pieces of a model: which variables each has, what it takes and gives, and its equations.

A `Cutting` says where a model is cut, independent of shapes and mode: a place is known by the variables that are used
before it. So the traces of training and of evaluation, and those at other shapes, are cut at the same places.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise, permutations, product

import jax

from jpipe.cutting.places import Traced, find_places
from jpipe.cutting.straight import Part
from jpipe.jax.tracing import replayed
from jpipe.model.alike import Kinds, PartJaxpr
from jpipe.types import Leaf

Before = frozenset[tuple[Part, int]]
"""The variables that are used before a place; tied ones together with how often, others with a 0."""


@dataclass(frozen=True)
class Cutting:
    """Where a model is cut.

    Attributes:
      before: for each place, the variables that are used before it, of those in `told_by`.
      kinds: for each place, the dimensions and dtypes of what crosses it (`Traced.kinds`).
      following: for each place, how many of those like it follow behind the same variables.
      marks: for each place, which of the user's marks it is, if it is one that both modes have; else None.
      num_marks: how many there are.
      parts: for each piece, the variables that it has.
      tied: for each piece, the index of the first piece with the same variables, if several have them; else None.
      ties: the variables that several pieces have.
      told_by: the variables that both training and evaluation use, by which places are known.
    """

    before: tuple[Before, ...]
    kinds: tuple[object, ...]
    following: tuple[int, ...]
    marks: tuple[int | None, ...]
    num_marks: int
    parts: tuple[tuple[Part, ...], ...]
    tied: tuple[int | None, ...]
    ties: frozenset[Part]
    told_by: frozenset[Part]

    @property
    def all_parts(self) -> list[Part]:
        """The variables of all pieces."""
        return [part for own in self.parts for part in own]

    def renumbered(self, numbers: Sequence[int]) -> Cutting:
        """The same of a model that has more variables: `numbers` has the new index of each leaf."""
        moved = lambda part: part._replace(leaf=numbers[part.leaf])
        return replace(
            self,
            before=tuple(frozenset((moved(part), times) for part, times in used) for used in self.before),
            parts=tuple(tuple(map(moved, own)) for own in self.parts),
            ties=frozenset(map(moved, self.ties)),
            told_by=frozenset(map(moved, self.told_by)),
        )

    def places_in(self, traced: Traced, like: tuple[Traced, Sequence[int]] | None = None) -> list[int]:
        """The places in another trace of the same model: those at which the same variables are used before.

        Args:
          traced: the other trace.
          like: a trace at the same shapes and its places: what crosses has to be of the same shapes.

        Raises:
          NoSuchPlace: a place has no counterpart.
        """
        by_used = _places_by_used(traced, self.told_by, self.ties)
        places, has_marks = [0], len(traced.marked) == self.num_marks
        for index, used in enumerate(self.before):
            candidates, following = by_used.get((used, self.kinds[index]), []), self.following[index]
            if has_marks and (mark := self.marks[index]) is not None:
                candidates, following = [traced.marked[mark]], 0
            candidates = [p for p in candidates if p > places[-1]]
            if like is not None:
                wanted = like[0].shapes(like[1][index])
                candidates = [p for p in candidates if traced.shapes(p) == wanted]
            if not candidates:
                raise NoSuchPlace(index)
            places.append(candidates[max(-1 - following, -len(candidates))])
        return places[1:]


@dataclass(frozen=True, eq=False)
class Piece:
    """A piece of a model in one mode, at some shapes.

    Attributes:
      part: its jaxpr takes parts of its variables, what crosses into it, and leaves of the batch, behind which is the
        random key; gives what crosses out of it, then the new values of the parts of its state.
      variables: which parts of its variables it takes.
      data: which leaves of the batch it takes.
      num_given: how many of the results cross out of it.
      written: which parts of its variables the other results are new values of.
    """

    part: PartJaxpr
    variables: tuple[int, ...]
    data: tuple[int, ...]
    num_given: int
    written: tuple[int, ...]

    def __call__(self, variables: Sequence[Leaf], takes: Sequence[Leaf], data: Sequence[Leaf]) -> list[jax.Array]:
        """Computes what crosses out of it, then new values of its state."""
        chosen = (*(variables[i] for i in self.variables), *takes, *(data[i] for i in self.data))
        return replayed(self.part.closed, chosen)


class TiedTogether(ValueError):
    """Some parameters are used in several pieces, in one of which together with others, or among uses of state.

    Its arguments are those parameters, and the state whose uses are around uses of them.
    """


class ReadsOthers(ValueError):
    """A piece computes a part of the state, or an output, of variables that other pieces have.

    Its arguments are the index of the piece, and these variables.
    """


class NoSuchPlace(ValueError):
    """A trace has no place like the one behind a piece, whose index is its argument."""


def decide_cutting(training: Traced, evaluation: Traced, shapes: Sequence[tuple[int, ...]], wanted: int) -> Cutting:
    """Decides where a model is cut.

    Args:
      training, evaluation: the model in both modes.
      shapes: of each leaf of the variables.
      wanted: how many pieces there have to be at least, if the model has so many.

    Raises:
      TiedTogether: some parameters are used in several pieces, of which one can't be cut so that it has no others.
      NoSuchPlace: evaluation can't be cut as training is.
    """
    told_by = frozenset(training.used() & evaluation.used())
    sizes = {part: math.prod(shapes[part.leaf][len(part.indices) :]) for part in training.used() | evaluation.used()}
    here, there = _described_places(training, told_by), dict[object, set[frozenset[Part]]]()
    for described, split in zip(_described_places(evaluation, told_by), evaluation.split, strict=True):
        there.setdefault(described, set()).add(split)

    def is_no_place(p: int) -> bool:
        # Where nothing crosses, the model hasn't begun. Evaluation has to have the same place, and may use variables on
        # both sides of it only if training does.
        both = any(split <= training.split[p] for split in there.get(here[p], ()))
        return training.is_inside_of_state(p) or not training.crossing[p] or not both

    marks = training.marked if len(training.marked) == len(evaluation.marked) else []

    def places_at(of: Traced) -> list[int]:
        return _told_apart(
            training, marks, _with_ties_alone(training, find_places(of, wanted, is_no_place), sizes), told_by
        )

    places = places_at(training)
    if len(places) + 1 < wanted:
        with suppress(TiedTogether):  # blocks may be norms, gates and recurrences, without any product
            places = max(places, places_at(replace(training, each_use=True)), key=len)
    ends = [0, *places, len(training.straight.main)]
    used = _with_all_of_ties([frozenset(training.used(*pair)) for pair in pairwise(ends)], sizes)
    times = Counter(part for own in used for part in own)
    ties = frozenset(part for part, pieces in times.items() if pieces > 1)
    by_place = _used_before(training, told_by, ties)
    before, kinds = tuple(by_place[place] for place in places), tuple(map(training.kinds, places))
    by_used = _places_by_used(training, told_by, ties)
    alike = [by_used[key] for key in zip(before, kinds, strict=True)]
    following = [len(own) - 1 - own.index(place) for own, place in zip(alike, places, strict=True)]
    which = tuple(marks.index(place) if place in marks else None for place in places)
    cutting = Cutting(before, kinds, tuple(following), which, len(marks), (), (), ties, told_by)
    again = [0, *cutting.places_in(evaluation, (training, places)), len(evaluation.straight.main)]
    both = [own | evaluation.used(*pair) for own, pair in zip(used, pairwise(again), strict=True)]
    parts = _with_all_of_ties(both, sizes)
    if unused := unused_parts(frozenset().union(*parts), shapes):
        # The first piece whose variables are its own has them, or the first one with all that share its own: parameters
        # that nothing uses, a count of steps.
        home = next((i for i, own in enumerate(parts) if ties.isdisjoint(own)), 0)
        parts = [own | unused if i == home or ties & own & parts[home] else own for i, own in enumerate(parts)]
    firsts = [parts.index(own) if own else i for i, own in enumerate(parts)]
    counts = Counter(firsts)
    tied = tuple(first if counts[first] > 1 else None for first in firsts)
    # In the order of their use, so that equal blocks have equal orders: by name `Dense_10` comes before `Dense_9`.
    first = {part: p for p, own in reversed(list(enumerate(training.parts_used))) for part in own}
    in_order = lambda own: tuple(sorted(own, key=lambda part: (first.get(part, len(first)), part)))
    return replace(cutting, parts=tuple(map(in_order, parts)), tied=tied)


def _described_places(traced: Traced, told_by: Collection[Part]) -> list[object]:
    """For each place the variables that are used before it, and the shapes of what crosses it."""
    return [(before, tuple(traced.shapes(p))) for p, before in enumerate(_used_before(traced, told_by, ()))]


def _told_apart(traced: Traced, marks: Collection[int], places: Sequence[int], told_by: Collection[Part]) -> list[int]:
    """The places, with only some of those that no variable lies between: the marks, or the one of the fewest bytes."""
    uses = [0, *accumulate(int(not frozenset(told_by).isdisjoint(parts)) for parts in traced.parts_used)]
    groups = [list(group) for _, group in groupby(places, lambda p: uses[p])]
    chosen = ([p for p in group if p in marks] or [min(group, key=lambda p: traced.bytes[p])] for group in groups)
    return [p for group in chosen for p in group]


def unused_parts(used: Collection[Part], shapes: Sequence[tuple[int, ...]]) -> set[Part]:
    """The parts that no piece uses: whole leaves, or slices of leaves of which others are used.

    Args:
      used: the parts that some piece uses.
      shapes: of all leaves.
    """
    unused: set[Part] = set()
    for leaf, shape in enumerate(shapes):
        depth = max((len(part.indices) for part in used if part.leaf == leaf), default=0)
        unused |= {Part(leaf, indices) for indices in product(*map(range, shape[:depth]))}
    return unused.difference(used)


def _with_ties_alone(traced: Traced, places: Sequence[int], sizes: Mapping[Part, int]) -> list[int]:
    """The places, and others around each use of tied variables: pieces that share some have the same ones."""
    places, end = list(places), len(traced.straight.main)
    used = lambda pairs: [frozenset(traced.used(*pair)) for pair in pairs]
    while (mixed := _mixed_piece(used(pairs := list(pairwise([0, *places, end]))))) is not None:
        index, tied = mixed
        start, stop = pairs[index]
        at = [p for p in range(start, stop) if not tied.isdisjoint(traced.parts_used[p])]
        around = {at[0], at[-1] + 1} - {start, stop}
        state = (part for part, (first, last) in traced.spans.items() if any(first < p < last for p in around))
        if not around and _mixed_piece(_in_parts(used(pairs), sizes)) is None:
            return places
        if not around or any(map(traced.is_inside_of_state, around)):
            raise TiedTogether(tied, frozenset(state))
        places = sorted({*places, *around})
    return places


def _mixed_piece(used: Sequence[frozenset[Part]]) -> tuple[int, frozenset[Part]] | None:
    """The first piece that has some variables in common with another piece, and others not; and the common ones.

    Args:
      used: the variables of each piece.
    """
    for (index, parts), (_, others) in permutations(enumerate(used), 2):
        if parts & others and parts - others:
            return index, parts & others
    return None


def _in_parts(used: Sequence[frozenset[Part]], sizes: Mapping[Part, int]) -> list[frozenset[Part]]:
    """The variables of each piece, where one that uses half of another's or more, as of a shared layer, has all."""
    size = lambda own: sum(sizes[part] for part in own)
    fits = lambda own, other: own and own < other and size(other) <= 2 * size(own)
    return [max((other for other in used if fits(own, other)), key=size, default=own) for own in used]


def _with_all_of_ties(used: Sequence[frozenset[Part]], sizes: Mapping[Part, int]) -> list[frozenset[Part]]:
    """As `_in_parts`; pieces that still share some variables, and others not, are an error."""
    parts = _in_parts(used, sizes)
    if (mixed := _mixed_piece(parts)) is not None:
        raise TiedTogether(mixed[1], frozenset())
    return parts


def _used_before(traced: Traced, told_by: Collection[Part], ties: Collection[Part]) -> list[Before]:
    """For each place the variables that are used before it; tied ones together with how often."""
    used, times, by_place = set[tuple[Part, int]](), Counter[Part](), [frozenset[tuple[Part, int]]()]
    for parts in traced.parts_used:
        new = [part for part in parts if part in told_by]
        times.update(part for part in new if part in ties)
        used |= {(part, times[part]) for part in new}
        by_place.append(frozenset(used) if new else by_place[-1])
    return by_place


def _places_by_used(
    traced: Traced, told_by: frozenset[Part], ties: frozenset[Part]
) -> dict[tuple[Before, object], list[int]]:
    """The places where a model may be cut, by the variables used before them and the kinds of what crosses them."""
    by_used: dict[tuple[Before, object], list[int]] = {}
    for p, used in enumerate(_used_before(traced, told_by, ties)[:-1]):
        if p > 0 and not traced.is_inside_of_state(p) and traced.split[p] & told_by <= ties:
            by_used.setdefault((used, traced.kinds(p)), []).append(p)
    return by_used


def make_pieces(traced: Traced, cutting: Cutting, places: Sequence[int], kinds: Kinds) -> list[Piece]:
    """The pieces of a trace.

    Args:
      traced: the trace.
      cutting: where the model is cut.
      places: the same in this trace.
      kinds: of the model's jaxprs so far.
    """
    straight, pieces = traced.straight, []
    for index, (start, stop) in enumerate(pairwise([0, *places, len(straight.main)])):
        parts = cutting.parts[index]
        gives = straight.outputs if index == len(places) else traced.crossing[stop]
        written = [i for i, part in enumerate(parts) if part in traced.written]
        new = [traced.written[parts[i]] for i in written]
        main = straight.main[start:stop]
        wanted = [*(number for i in main for number in straight.flat.equations[i].reads), *gives, *new]
        support, numbers = straight.support(wanted)
        if strange := set(numbers).difference(parts):
            raise ReadsOthers(index, frozenset(strange))
        equations = [straight.flat.equations[i] for i in sorted({*support, *main})]
        read = {*wanted, *(number for equation in equations for number in equation.reads)}
        variables = [i for i, part in enumerate(parts) if part in numbers]
        leaves = [i for i, number in enumerate(straight.data) if number in read]
        own, data = [numbers[parts[i]] for i in variables], [straight.data[i] for i in leaves]
        part = kinds.part(straight.flat, equations, [*own, *traced.crossing[start], *data], [*gives, *new])
        pieces.append(Piece(part, tuple(variables), tuple(leaves), len(gives), tuple(written)))
    return pieces
