"""Lines: values that each piece of a model hands on to the next one, in one shape from the first piece to the last.

What a block gives to the model's outputs, such as the load balance that a router sows, would cross all boundaries
behind that block and none before: blocks would be unlike, and each would be compiled alone. So such values of one shape
share a line: a queue with a row for each of them. A block drops the first row and appends its own:

    embed ─► [0 0 0] ─► block ─► [0 0 a] ─► block ─► [0 a b] ─► block ─► [a b c] ─► head, the outputs a, b, c

A sum of scalars of several blocks, such as a regulariser of their parameters, is a line of one number, to which each
block adds its own.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jpipe.cutting.places import Traced
from jpipe.cutting.straight import Follows, Part, Straight
from jpipe.jax.flat_jaxpr import FlatEquation, FlatJaxpr, Flattening
from jpipe.jax.primitives import CALLS
from jpipe.jax.trees import is_float

Element = tuple[int, tuple[int, ...]]
"""A leaf of a model's outputs, and indices within it, where it is a stack of others."""


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


def find_lines(training: Straight, evaluation: Straight, num_examples: int, names: Sequence[str]) -> Lines:
    """Finds the lines of a model in its traces at some shapes.

    Args:
      training, evaluation: the traces.
      num_examples: b of the micro-batch. A queue bears scalars and vectors, but none with a number for each example.
      names: of each leaf of the outputs; those of blocks that are alike have the same. A queue bears values of one
        name, made by the same operations: sums over examples are other values than means.
    """
    values, queues = _Values(training), defaultdict[tuple[object, ...], dict[Element, int]](dict)
    for leaf in np.flatnonzero(training.read).tolist():
        own = {(leaf, at): n for at, n in _elements(training.flat, training.flat.results[leaf])}
        aval = training.flat.avals[first := next(iter(own.values()))]
        if aval.ndim <= 1 and aval.shape != (num_examples,) and all(values.at(n) >= 0 for n in own.values()):
            queues[aval.shape, aval.dtype, names[leaf], values.made_by(first)] |= own
    chosen = {kind: own for kind, own in queues.items() if values.are_apart(own.values())}
    longest = max(values, _Values(evaluation), key=lambda values: len(values.sums))
    dtypes = tuple(longest.flat.avals[total].dtype for total, _ in longest.sums)
    return Lines(tuple((tuple(own), jax.ShapeDtypeStruct(*kind[:2])) for kind, own in chosen.items()), dtypes)


def _elements(flat: FlatJaxpr, number: int, at: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yields the indices and the numbers of what a value stacks, or of itself."""
    for i, row in enumerate(flat.rows.get(number, ())):
        yield from _elements(flat, row, (*at, i))
    if number not in flat.rows:
        yield at, number


class _Values:
    """Says where the values of a trace are made: behind which equation of the list."""

    def __init__(self, straight: Straight):
        self.straight, self.flat, self.traced = straight, straight.flat, Traced(straight)

    def number(self, element: Element) -> tuple[int, tuple[int, ...]]:
        """Finds an element of the outputs: (its number, the indices that are left within it)."""
        return self.flat.element(self.flat.results[element[0]], element[1])

    def at(self, number: int) -> int:
        """Finds the equation behind which a value is there, in the piece that makes it; -1 if all can make it.

        What follows from parameters alone is made where these are used.
        """
        source = self.straight.sources[number]
        if source is Follows.VARIABLES:
            return max((self._first_used.get(part, -1) for part in self.straight.support([number])[1]), default=-1)
        return self.flat.made_by.get(number, -1) if source is Follows.BOTH else -1

    def made_by(self, number: int) -> tuple[object, ...]:
        """The operation that makes a value, those that make its operands, and what it follows from."""
        makers, equations = self.flat.made_by, self.flat.equations
        reads = equations[makers[number]].reads if number in makers else ()
        names = (equations[makers[n]].equation.primitive.name for n in (number, *reads) if n in makers)
        return self.straight.sources[number], *names

    @cached_property
    def _first_used(self) -> dict[Part, int]:
        pairs = list(zip(self.straight.main, self.traced.parts_used, strict=True))
        return {part: i for i, parts in reversed(pairs) for part in parts}

    def are_apart(self, numbers: Iterable[int]) -> bool:
        """Whether some of these values are made in other blocks than others: parameters are used in between."""
        at = sorted(filter(lambda i: i >= 0, map(self.at, numbers)))
        uses = zip(self.straight.main, self.traced.uses_variables, strict=True)
        return bool(at) and any(used and at[0] < i <= at[-1] for i, used in uses)

    @cached_property
    def sums(self) -> list[tuple[int, list[int]]]:
        """The sums of scalars that are made in several blocks, each with its terms, none a part of another."""
        needed = [self.flat.equations[i] for i in self.straight.needed]
        terms = {n: own for one in needed for n in one.makes if (own := self._terms(n))}
        inner, found = {n for own in terms.values() for n in own}, []
        for total in terms.keys() - inner:
            todo, leaves = [total], list[int]()
            while todo:
                own = terms.get(number := todo.pop(), [])
                todo += own
                leaves += [] if own else [number]
            if self.are_apart(leaves):
                found.append((total, sorted(leaves, key=self.at)))
        return sorted(found)

    def _terms(self, number: int) -> list[int]:
        """Tells what a value is the sum of; nothing if it is no sum of scalars that follow from parameters."""
        aval, one = self.flat.avals[number], self.flat.equations[self.flat.made_by[number]]
        if aval.shape or not is_float(aval) or not self.straight.sources[number] & Follows.VARIABLES:
            return []
        if one.equation.primitive.name in ("add", "add_any"):
            return [*one.reads]
        is_stack = one.equation.primitive.name == "reduce_sum" and self.flat.avals[one.reads[0]].ndim == 1
        return self.flat.rows.get(one.reads[0], []) if is_stack else []


def with_lines(straight: Straight, lines: Lines) -> Straight:
    """Has each value of some lines join its line where it is made, in a trace of the model in any mode."""
    if lines == NO_LINES or not straight.main:
        return straight
    rewriting = _Rewriting(straight)
    sums = rewriting.values.sums
    for i, dtype in enumerate(lines.sums):
        rewriting.add_up(dtype, *(sums[i] if i < len(sums) else (None, [])))
    for elements, kind in lines.queues:
        rewriting.queue_up(elements, kind)
    return rewriting.done()


class _Rewriting:
    """Puts lines into a trace: new equations behind some of its own."""

    def __init__(self, straight: Straight):
        flat = straight.flat
        self.values, self._straight = _Values(straight), straight
        never = lambda equation: False
        new = replace(flat, avals=[*flat.avals], constants={**flat.constants}, equations=[], rows={**flat.rows})
        self._flattening = Flattening(new, CALLS, never, never, selects=False)
        self._added: list[tuple[int, FlatEquation]] = []  # behind which equation, what
        self._totals: dict[int, int] = {}
        self._results = list(flat.results)
        self._lines: list[list[int]] = []

    def _add(self, behind: int, function: Callable[..., jax.Array], *numbers: int) -> int:
        start = len(self._flattening.flat.equations)
        number = self._flattening.applied(function, numbers)
        self._added += [(behind, one) for one in self._flattening.flat.equations[start:]]
        return number

    def _line(self, shape: tuple[int, ...], dtype: np.dtype) -> list[int]:
        """Begins a line, before all other activations: its values so far."""
        zeros = lambda: lax.squeeze(jnp.zeros((1, *shape), dtype), [0])  # an equation; `zeros(())` is a constant
        self._lines.append([self._add(self._straight.main[0] - 1, zeros)])
        return self._lines[-1]

    def add_up(self, dtype: np.dtype, total: int | None, terms: Sequence[int]) -> None:
        """Makes the line of a sum, which is zero in a mode that lacks it."""
        line = self._line((), dtype)
        for term in terms:
            behind = max(self.values.at(term), self._straight.main[0] - 1)
            line.append(self._add(behind, operator.add, line[-1], term))
        self._totals |= {} if total is None else {total: line[-1]}

    def queue_up(self, elements: Sequence[Element], kind: jax.ShapeDtypeStruct) -> None:
        """Makes the line of a queue; an element that all pieces can make in this mode joins at the end."""
        (number, rest), avals = self.values.number(elements[0]), self._straight.flat.avals
        line = self._line((len(elements), *avals[number].shape[len(rest) :]), kind.dtype)  # of these shapes
        at, last = [self.values.at(self.values.number(e)[0]) for e in elements], len(self._straight.flat.equations)
        places_of = defaultdict[int, dict[tuple[int, ...], int]](dict)
        joins = sorted((i if i >= 0 else last, element) for i, element in zip(at, elements, strict=True))
        for row, (i, (leaf, indices)) in enumerate(joins):
            number, rest = self.values.number((leaf, indices))
            append = lambda rows, values, rest=rest: lax.concatenate([rows[1:], values[rest][None]], 0)
            line.append(self._add(i, append, line[-1], number))
            places_of[leaf][indices] = row
        for leaf, own in places_of.items():
            shape, places = avals[self._results[leaf]].shape, [own[i] for i in sorted(own)]
            take = lambda rows, at=places, shape=shape: jnp.stack([rows[i] for i in at]).reshape(shape)
            self._results[leaf] = self._add(last, take, line[-1])

    def done(self) -> Straight:
        """Gives the trace with its lines: what follows from parameters alone is computed before it is first read."""
        straight, flat = self._straight, self._flattening.flat
        now = lambda numbers: tuple(self._totals.get(n, n) for n in numbers)
        ordered = sorted([*enumerate(straight.flat.equations), *self._added], key=lambda pair: pair[0])
        waiting = [one._replace(reads=now(one.reads)) for _, one in ordered]
        makers = {number: one for one in waiting for number in one.makes}
        # The others follow from less than activations, and come where somebody reads them.
        late = {n for n, source in enumerate(straight.sources) if source is not Follows.BOTH}
        first = [one for one in waiting if one.equation.effects or late.isdisjoint(one.makes)]
        equations = dict[int, FlatEquation]()
        for one in [*first, *waiting]:
            todo = [one]
            while todo:
                before = [makers[n] for n in todo[-1].reads if n in makers and id(makers[n]) not in equations]
                if not before:
                    equations.setdefault(id(todo[-1]), todo.pop())
                todo += before
        rows = {number: list(now(stacked)) for number, stacked in flat.rows.items()}
        flat = replace(flat, equations=[*equations.values()], results=now(self._results), rows=rows)
        return replace(straight, flat=flat, lines={n: i for i, line in enumerate(self._lines) for n in line})
