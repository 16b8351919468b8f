"""Lines: values that each piece of a model hands on to the next one, in one shape from the first piece to the last.

What a block gives to the model's outputs, such as the load balance that a router sows, would cross all boundaries
behind that block and none before: blocks would be unlike, and each compiled. So such values of one shape share a line:
a queue with a row for each of them. A block drops the first row and appends its own:

    embed ─► [0 0 0] ─► block ─► [0 0 a] ─► block ─► [0 a b] ─► block ─► [a b c] ─► head, the outputs a, b, c

A sum of scalars of several blocks, such as a regulariser of their parameters, is a line of one number, to which each
block adds its own.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import zip_longest
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jpipe.cutting.places import Traced
from jpipe.cutting.straight import Follows, Part, Straight
from jpipe.jax.flat_jaxpr import FlatEquation, FlatJaxpr, Flattening

Element = tuple[int, tuple[int, ...]]
"""A leaf of a model's outputs, and indices within it, where unrolled scans stack it."""


@dataclass(frozen=True)
class Lines:
    """The lines of a model.

    Attributes:
      queues: for each queue the elements of the outputs that it bears, and the shape and dtype of one.
      sums: for each sum its dtype.
    """

    queues: tuple[tuple[tuple[Element, ...], jax.ShapeDtypeStruct], ...] = ()
    sums: tuple[np.dtype, ...] = ()


NO_LINES = Lines()


def find_lines(training: Straight, evaluation: Straight, num_examples: int) -> Lines:
    """The lines of a model, from its traces at some shapes.

    Args:
      training, evaluation: the traces.
      num_examples: b of the micro-batch. A queue bears scalars and vectors, but none with a number for each example.
    """
    values, queues = _Values(training), defaultdict[tuple[tuple[int, ...], np.dtype], dict[Element, int]](dict)
    for leaf in np.flatnonzero(training.read).tolist():
        own = {element: values.number(element)[0] for element in _elements(training.flat, leaf)}
        aval = training.flat.avals[next(iter(own.values()))]
        if aval.ndim <= 1 and aval.shape != (num_examples,) and all(values.at(n) >= 0 for n in own.values()):
            queues[aval.shape, aval.dtype] |= own
    sums = max((_Values(mode).sums for mode in (training, evaluation)), key=len)
    return Lines(
        tuple(
            (tuple(own), jax.ShapeDtypeStruct(*kind)) for kind, own in queues.items() if values.are_apart(own.values())
        ),
        tuple(one.dtype for one in sums),
    )


def _elements(flat: FlatJaxpr, leaf: int) -> Iterator[Element]:
    """The elements of a leaf of the outputs."""

    def within(number: int, indices: tuple[int, ...]) -> Iterator[Element]:
        if number not in flat.trips:
            yield leaf, indices
        for i, trip in enumerate(flat.trips.get(number, ())):
            yield from within(trip, (*indices, i))

    return within(flat.results[leaf], ())


class _Sum(NamedTuple):
    """A sum of scalars.

    Attributes:
      total: its number.
      terms: the numbers of its terms.
      dtype: of all.
      end: the index of the equation behind which the last term is made.
      late: the indices of the equations of parameters alone that follow from it.
    """

    total: int
    terms: list[int]
    dtype: np.dtype
    end: int
    late: frozenset[int]


@dataclass(frozen=True, eq=False)
class _Values:
    """Says where the values of a trace are made: behind which equation of the list."""

    straight: Straight

    @property
    def flat(self) -> FlatJaxpr:
        """The list."""
        return self.straight.flat

    def number(self, element: Element) -> tuple[int, tuple[int, ...]]:
        """(the number of an element of the outputs, the indices that are left within it)."""
        return self.flat.element(self.flat.results[element[0]], element[1])

    def at(self, number: int) -> int:
        """The index of the equation behind which a value is there, in the piece that makes it; -1 if all can make it.

        What follows from parameters alone is made where these are used.
        """
        source = self.straight.sources[number]
        if source is Follows.VARIABLES:
            return max((self._first_used.get(part, -1) for part in self.straight.support([number])[1]), default=-1)
        return self.flat.made_by.get(number, -1) if source is Follows.BOTH else -1

    @cached_property
    def _first_used(self) -> dict[Part, int]:
        pairs = list(zip(self.straight.main, Traced(self.straight).parts_used, strict=True))
        return {part: i for i, parts in reversed(pairs) for part in parts}

    def are_apart(self, numbers: Iterable[int]) -> bool:
        """Whether some of these values are made in other blocks than others: parameters are used in between."""
        at = sorted(filter(lambda i: i >= 0, map(self.at, numbers)))
        uses = zip(self.straight.main, Traced(self.straight).uses_variables, strict=True)
        return bool(at) and any(used and at[0] < i <= at[-1] for i, used in uses)

    @cached_property
    def sums(self) -> list[_Sum]:
        """The sums of scalars that are made in several blocks."""
        readers = defaultdict[int, list[int]](list)
        for i in self.straight.needed:
            for number in self.flat.equations[i].reads:
                readers[number].append(i)
        made = (number for i in self.straight.needed for number in self.flat.equations[i].makes)
        found = []
        for total in [n for n in made if self._terms(n)]:
            if any(self._terms(n) for i in readers[total] for n in self.flat.equations[i].makes):
                continue  # a part of a larger one
            todo, terms, late = [total], list[int](), set[int]()
            while todo:
                inner = self._terms(number := todo.pop())
                todo += inner
                terms += [] if inner else [number]
            todo, end = [total], max(map(self.at, terms))
            while todo:
                of_parameters = [i for i in readers[todo.pop()] if self._is_of(i, Follows.VARIABLES)]
                todo += [n for i in {*of_parameters} - late for n in self.flat.equations[i].makes]
                late.update(of_parameters)
            made_late = {total, *(n for i in late for n in self.flat.equations[i].makes)}
            first = min((i for n in made_late for i in readers[n] if i not in late), default=end + 1)
            if end < first and self.are_apart(terms):
                found.append(
                    _Sum(total, sorted(terms, key=self.at), self.flat.avals[total].dtype, end, frozenset(late))
                )
        return found

    def _is_of(self, equation: int, source: Follows) -> bool:
        return self.straight.sources[self.flat.equations[equation].makes[0]] is source

    def _terms(self, number: int) -> list[int]:
        """What a value is the sum of; nothing if it is no sum of scalars that follow from parameters."""
        i, aval = self.flat.made_by.get(number), self.flat.avals[number]
        if i is None or aval.shape or not jnp.issubdtype(aval.dtype, jnp.floating):
            return []
        one = self.flat.equations[i]
        if not self.straight.sources[number] & Follows.VARIABLES:
            return []
        if one.equation.primitive.name in ("add", "add_any"):
            return [*one.reads]
        is_stack = one.equation.primitive.name == "reduce_sum" and self.flat.avals[one.reads[0]].ndim == 1
        return self.flat.trips.get(one.reads[0], []) if is_stack else []


def with_lines(straight: Straight, lines: Lines) -> Straight:
    """A trace of a model, in any mode, in which each value of its lines joins its line where it is made."""
    if lines == NO_LINES or not straight.main:
        return straight
    rewriting = _Rewriting(straight)
    for dtype, one in zip_longest(lines.sums, rewriting.values.sums):
        if dtype is not None:
            rewriting.add_up(dtype, one if one is not None and one.dtype == dtype else None)
    for elements, kind in lines.queues:  # behind the sums, which some of the elements may follow from
        rewriting.queue_up(elements, kind)
    return rewriting.done()


class _Rewriting:
    """Puts lines into a trace: new equations behind some of its own."""

    def __init__(self, straight: Straight):
        flat = straight.flat
        self.values, self._straight = _Values(straight), straight
        self._flattening = Flattening(replace(flat, avals=[*flat.avals], constants={**flat.constants}, equations=[]))
        self._added: list[tuple[float, int, FlatEquation]] = []  # behind which equation, of several there in what order
        self._late: dict[int, tuple[int, int]] = {}  # by index of an equation, behind which one, and in what order
        self._totals: dict[int, int] = {}
        self._results = list(straight.flat.results)
        self._lines: list[list[int]] = []

    def _add(self, behind: float, order: int, function: Callable[..., jax.Array], *numbers: int) -> int:
        start = len(self._flattening.flat.equations)
        number = self._flattening.applied(function, numbers)
        self._added += [(behind, order, one) for one in self._flattening.flat.equations[start:]]
        return number

    def _line(self, shape: tuple[int, ...], dtype: np.dtype) -> list[int]:
        """Begins a line, before all other activations: its values so far."""
        self._lines.append([self._add(self._straight.main[0] - 1, 0, partial(jnp.zeros, shape, dtype))])
        return self._lines[-1]

    def add_up(self, dtype: np.dtype, one: _Sum | None) -> None:
        """Makes the line of a sum, which is zero in a mode that lacks it."""
        line = self._line((), dtype)
        if one is not None:
            for term in one.terms:
                behind = max(self.values.at(term), self._straight.main[0] - 1)
                line.append(self._add(behind, 2 * len(self._lines), operator.add, line[-1], term))
            self._totals[one.total] = line[-1]
            self._late |= dict.fromkeys(one.late, (one.end, 2 * len(self._lines) + 1))  # terms of the next sums

    def queue_up(self, elements: Sequence[Element], kind: jax.ShapeDtypeStruct) -> None:
        """Makes the line of a queue; an element that all pieces can make in this mode joins at the end."""
        line = self._line((len(elements), *kind.shape), kind.dtype)
        at, last = [self.values.at(self.values.number(e)[0]) for e in elements], len(self._straight.flat.equations)
        joins = sorted((i if i >= 0 else last, element) for i, element in zip(at, elements, strict=True))
        for i, element in joins:
            number, rest = self.values.number(element)
            line.append(self._add(i, 2 * len(self._lines), partial(_appended, rest), line[-1], number))
        rows = defaultdict[int, dict[tuple[int, ...], int]](dict)
        for row, (_, (leaf, indices)) in enumerate(joins):
            rows[leaf][indices] = row
        for leaf, own in rows.items():
            shape, places = self._straight.flat.avals[self._results[leaf]].shape, [own[i] for i in sorted(own)]
            self._results[leaf] = self._add(last + 1, 0, partial(_taken, places, shape), line[-1])

    def done(self) -> Straight:
        """The trace with its lines. What follows from parameters alone comes first, so that each piece can make it."""
        straight, flat = self._straight, self._flattening.flat
        start = len(straight.flat.equations)
        order = [(behind, order, start + i, one) for i, (behind, order, one) in enumerate(self._added)]
        for i, one in enumerate(straight.flat.equations):
            early = Follows.BOTH not in {straight.sources[n] for n in one.makes} and not one.equation.effects
            order.append((*self._late.get(i, (-2 if early else i, 0)), i, one))
        now = lambda numbers: tuple(self._totals.get(n, n) for n in numbers)
        equations = [one._replace(reads=now(one.reads)) for *_, one in sorted(order, key=lambda item: item[:3])]
        trips = {number: list(now(own)) for number, own in flat.trips.items()}
        flat = replace(flat, equations=equations, results=now(self._results), trips=trips)
        return replace(straight, flat=flat, lines={n: i for i, line in enumerate(self._lines) for n in line})


def _appended(indices: tuple[int, ...], rows: jax.Array, values: jax.Array) -> jax.Array:
    """A queue without its first row, and with one of some values, or an element of them."""
    return lax.concatenate([rows[1:], values[indices][None]], 0)


def _taken(places: Sequence[int], shape: tuple[int, ...], rows: jax.Array) -> jax.Array:
    """Some rows of a queue, as an output of this shape."""
    return jnp.stack([lax.index_in_dim(rows, i, keepdims=False) for i in places]).reshape(shape)
