"""Follows the examples of a batch through a function: where it treats them by themselves, and where it couples them.

A function of a whole mini-batch is to be carried out micro-batch by micro-batch. The micro-batches are one more axis
that arrays are split over, so the same rules (`jpipe.partitioner.rules`) say how each operation treats them. Of

    loss = sum(error(outputs, labels) * mask) / sum(mask)         outputs, labels, mask [B, T]

`outputs` is a shard, and so are the error and its product with the mask. Their sum is partial: each micro-batch has a
part of it. `sum(mask)` is partial too, but follows from the batch alone: it is computed *ahead*, once for the whole
mini-batch, and each micro-batch divides its part by that number. The parts add up to the loss.

An equation *couples* examples if it needs more of the outputs than a micro-batch has of them: two micro-batches side by
side (pairs), a sum over all (the square of a mean), or all in order (a sort). Then no parts add up to the function.

Nothing is converted here but what is the same for all micro-batches: it is cut, or each takes an M-th part of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from itertools import chain, product
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import jaxprs_in_params

from jpipe.jax.flat_jaxpr import FlatEquation, aval_of, flatten
from jpipe.jax.inside import carry_out, line_of, needed_part, standing_alone
from jpipe.jax.primitives import ClosedJaxpr, JaxprEqn, Literal
from jpipe.jax.tracing import equations_in, interpret, trace, uses
from jpipe.jax.trees import is_float
from jpipe.partitioner.choice import Chooser
from jpipe.partitioner.per_device import HANDLERS
from jpipe.partitioner.rules import RULES, part_params
from jpipe.partitioner.shardings import PARTIAL, REPLICATED, Axis, AxisSharding, Shard, is_possible, part_shape
from jpipe.partitioner.way import Axes, Way, way_by_rule
from jpipe.types import Leaf, PyTree

Form = tuple[int, AxisSharding]
"""A value by its number, and how a micro-batch has it: a shard of it, the whole, or a part of a sum."""


class Why(StrEnum):
    """The ways in which equations couple examples, in words."""

    UNKNOWN = "isn't known to treat examples by themselves"
    SUM = "takes a sum over examples, and is no linear function of it, as the square of a mean isn't"
    PAIRS = "makes pairs of examples"
    IN_ORDER = "looks at all examples together, or takes them in order or by their place in the batch"
    DRAWS = "draws for all examples together"
    TOGETHER = "is of all examples together"


class Coupling(NamedTuple):
    """An equation that needs more of a value than a micro-batch has.

    Attributes:
      flat: the equation.
      why: what it does.
      is_statistic: whether it needs sums that results called statistics are made of, or these alone need it.
    """

    flat: FlatEquation
    why: Why
    is_statistic: bool = False

    @property
    def is_sure(self) -> bool:
        """Whether it sums, orders or pairs examples. Others, as a loop, may well treat examples by themselves."""
        name = self.flat.equation.primitive.name
        return self.why == Why.SUM or name.startswith(("arg", "cum", "dot_general", "reduce_", "sort", "top_k"))

    def __str__(self) -> str:
        return f"{self.flat.equation.primitive.name} at {line_of(self.flat.equation) or 'an unknown line'} {self.why}"


class CouplesError(ValueError):
    """A function couples examples. Its argument is the `Coupling`."""


class Known(NamedTuple):
    """A value that micro-batches need and that follows from the batch alone, of the whole mini-batch.

    Attributes:
      value: its number; -1 for the micro-batch's index.
      shard: the part that each micro-batch has of it; None if each has the whole.
    """

    value: int
    shard: Shard | None


INDEX = Known(-1, Shard(0))

ADDING = {"add", "add_any", "concatenate", "pad", "select_n", "stack", "sub"}
ADDING |= {"broadcast_in_dim", "convert_element_type", "reshape", "slice", "squeeze"}
"""Operations that add up their operands, put them side by side, or move them: of zeros they make zeros."""
SMALL = 2**16
"""Constants of more elements aren't looked at: masks of many places, say."""
FACTORS = {"mul": 1, "dot_general": 1, "div": -1}
"""Operations that multiply by constants, or by their inverses."""


@dataclass(frozen=True)
class _Microbatches(Axis):
    """The axis of micro-batches. `here` holds the index of the one that is being computed."""

    here: list[Leaf] = field(default_factory=list, compare=False)

    def index(self) -> jax.Array:
        """The micro-batch's index, where a device has its own."""
        return jnp.asarray(self.here[0], jnp.int32)


_Given = dict[object, PyTree]
"""What a micro-batch is given: its arguments by number, `Known` values, and the results of equations so far."""


class _Recipe(NamedTuple):
    """How a micro-batch computes a value: `run` takes what it is given and the forms that are read; gives this one."""

    reads: Sequence[Form]
    run: Callable[..., Leaf]


class Examples:
    """Says how a function treats the examples of a mini-batch.

    Args:
      closed: the function, of whole arrays of all micro-batches together.
      count: M, the number of micro-batches.
      arguments: how a micro-batch has each argument.
      late: for each argument, whether it is known only when a micro-batch is computed; those of the batch aren't.
      strict: whether an equation that couples late values is an error.
      statistics: the indices of results that are statistics of examples, such as a running mean.

    Attributes:
      at: by number, how a micro-batch has each value, if it can compute it; else whole.
      couplings: the equations that couple late values; if `strict`, those that only prints need.
      known: what micro-batches need of the whole mini-batch, as far as `function` was called.
      takes: the numbers of the arguments that an earlier layer gives, for `scales`.

    Raises:
      CouplesError: `strict`, and an equation couples late values.
    """

    def __init__(
        self,
        closed: ClosedJaxpr,
        count: int,
        arguments: Sequence[AxisSharding],
        late: Sequence[bool],
        *,
        strict: bool,
        statistics: Sequence[int] = (),
    ):
        used = needed_part(closed, [True] * len(closed.out_avals), keep=True)[0]  # and what has effects, as prints
        flat, self.axis, self._strict = flatten(used), _Microbatches(("microbatches",), (count,), True), strict
        alone = [one._replace(equation=standing_alone(one.equation, one.callers)) for one in flat.equations]
        self.flat = replace(flat, equations=alone)
        # A `shard_map` has devices of its own.
        handlers = {name: handler for name, handler in HANDLERS.items() if name != "shard_map"}
        self._chooser = Chooser((self.axis,), handlers, _by_rule)
        self.at: dict[int, AxisSharding] = dict.fromkeys(self.flat.constants, REPLICATED)
        self.at |= dict(zip(self.flat.arguments, arguments, strict=True))
        self._late = {number for number, is_late in zip(self.flat.arguments, late, strict=True) if is_late}
        self._early = {*self.flat.arguments} - self._late  # and what follows from these alone
        # For each part of a sum, the equations that summed over examples.
        self._sums = {number: frozenset({-1}) for number, at in self.at.items() if at == PARTIAL}
        self._needed = {*self.flat.needed_for(self.flat.results)}  # others are for prints alone
        of = lambda chosen: {*self.flat.needed_for(n for i, n in enumerate(self.flat.results) if chosen(i))}
        self._of_statistics, self._of_others = of(statistics.__contains__), of(lambda i: i not in statistics)
        self._own_rows = set[int]()  # what counts examples to look each up in its own row
        self.takes: Sequence[int] = ()
        self.couplings, self.known = list[Coupling](), list[Known]()
        self._ways = [self._follow(i, flat) for i, flat in enumerate(self.flat.equations)]

    @property
    def results(self) -> list[AxisSharding]:
        """How a micro-batch has each result."""
        return [self.at[number] for number in self.flat.results]

    @property
    def late(self) -> list[bool]:
        """For each result, whether it follows from late arguments."""
        return [number in self._late for number in self.flat.results]

    @property
    def numbers(self) -> list[float]:
        """The constants that late equations read, but for those that make parts of sums, and all in bodies of loops."""
        late, avals = [one for one in self.flat.equations if not self._late.isdisjoint(one.reads)], self.flat.avals
        reads = chain(*(one.reads for one in late if PARTIAL not in [self.at[n] for n in one.makes]))
        floats = [n for n in reads if is_float(avals[n]) and avals[n].size <= SMALL]
        inner = equations_in(e for one in late for jaxpr in jaxprs_in_params(one.equation.params) for e in jaxpr.eqns)
        constants = [x for n in floats if (x := self._constant(n)) is not None]
        constants += [v.val for e in inner for v in e.invars if isinstance(v, Literal) and is_float(aval_of(v))]
        return [float(x) for array in constants for x in np.unique(array)]

    def scales(self, given: Sequence[frozenset[float]]) -> list[frozenset[float]]:
        """For each result, the numbers that parts of sums are multiplied by on the ways to it.

        Of what has no examples it is 1 / b, as of a mean, if it may be other than zero: added to a sum over examples it
        makes something else.

        Args:
          given: the same for the values that `takes` numbers.
        """
        at = dict(zip(self.takes, given, strict=False))

        def of(number: int) -> frozenset[float]:
            if number in at or self.at[number] != REPLICATED or self.flat.avals[number].dtype == bool:  # a predicate
                return at.get(number, frozenset())
            constant = self._constant(number)
            return frozenset({1 / self.axis.size} if constant is None or np.any(constant) else ())

        for flat in self.flat.equations:
            name = flat.equation.primitive.name
            is_part = name in FACTORS and PARTIAL in [self.at[n] for n in flat.makes]
            constants = [np.unique(x) for n in flat.reads if is_part and (x := self._constant(n)) is not None]
            factors = [math.prod(float(x) or 1.0 for x in each) ** FACTORS.get(name, 1) for each in product(*constants)]
            chosen = [n for n in flat.reads if name in ADDING or self.at[n] == PARTIAL]
            told = any(self.at[n] == PARTIAL or n not in self._late for n in flat.makes)
            parts = frozenset[float]().union(*map(of, chosen if told else ()))
            for n in flat.makes:
                if self.at[n] == PARTIAL:
                    at[n] = frozenset(float(x * factor) for x in parts or {1.0} for factor in factors)
                elif chosen and not parts and n not in self._late:
                    at[n] = parts
        return list(map(of, self.flat.results))

    def _constant(self, number: int) -> Leaf | None:
        """A value that no argument has to do with, and that isn't drawn by a key; else None."""
        if number in self.flat.constants or number in self._late | self._early:
            return self.flat.constants.get(number)
        return None if self._is_drawn(number) else interpret(self.flat.part((), (number,)))[0]

    def _is_drawn(self, number: int) -> bool:
        """Whether a value follows from random bits, or is a key."""
        needed = (self.flat.equations[i].equation for i in self.flat.needed_for([number]))
        return any(equation.primitive.name.startswith("random_") for equation in needed)

    # --- from the first equation to the last: how a micro-batch has each value ---

    def _follow(self, i: int, flat: FlatEquation) -> Way:
        """Finds how an equation is carried out for a micro-batch, and notes how it has the results."""
        now = [self.at[number] for number in flat.reads]
        way = self._own_places(i, now) or self._way(i, now)
        operands = [*zip(flat.reads, now, way.operands, strict=True)]
        is_late = not self._late.isdisjoint(flat.reads)
        moved = [n for n, old, new in operands if old not in (*new, REPLICATED)]
        if flat.makes and is_late and (way.sends or not self._late.isdisjoint(moved)):
            sums = [self._sums.get(n) for n in moved]  # by equations that made them; None for what isn't a sum
            is_sum = not way.sends and all(s is not None and s <= self._of_statistics for s in sums)
            is_statistic = is_sum or (bool(self._of_statistics) and i not in self._of_others)
            coupling = Coupling(flat, _why(flat.equation, now), is_statistic)
            if self._strict and i in self._needed:
                raise CouplesError(coupling)
            self.couplings += [coupling] * (self._strict or i in self._needed)
        if not is_late and (way.sends or moved or not all(isinstance(at, Shard) for (at,) in way.results)):
            way = self._way(i, [REPLICATED] * len(now))  # of the whole mini-batch
        if is_late:
            self._late.update(flat.makes)
        elif not self._early.isdisjoint(flat.reads):
            self._early.update(flat.makes)
        for number, (at,) in zip(flat.makes, way.results, strict=True):
            self.at[number] = at
            if at == PARTIAL:
                summed = [self._sums[n] for n, old in zip(flat.reads, now, strict=True) if old == PARTIAL]
                self._sums[number] = frozenset[int]().union(*summed) or frozenset({i})
        return way

    def _way(self, i: int, lying: Sequence[AxisSharding]) -> Way:
        return self._chooser.way(self.flat, i, tuple((at,) for at in lying))

    def _own_places(self, i: int, now: Sequence[AxisSharding]) -> Way | None:
        """The way of a look-up in each example's own row, `logits[jnp.arange(B), labels]`, or of its transpose.

        Rules don't know that indices are the examples' own places. A micro-batch counts them from its first row.
        """
        equation, name = self.flat.equations[i].equation, self.flat.equations[i].equation.primitive.name
        if name not in ("gather", "scatter-add") or not isinstance(indices := now[1], Shard) or indices.outer > 1:
            return None
        # The dimensions of entries that come from the table, the table's that entries lack, and those that indices
        # choose from: both kinds of numbers begin with them.
        kept, removed, chosen, *_ = equation.params["dimension_numbers"]
        entries = aval_of(equation.outvars[0] if name == "gather" else equation.invars[2])
        at = Shard([d for d in range(len(entries.shape)) if d not in kept][indices.dim])
        for column, dim in enumerate(chosen):
            table = Shard(dim)
            if dim in removed and now[0] in (table, REPLICATED) and self._counts(i, column, dim, indices.dim):
                result = at if name == "gather" else table
                run = partial(_at_own_places, equation, column, indices.dim, result, self.axis)
                return Way(((table,), (indices,), (at,))[: len(now)], ((result,),), run)
        return None

    def _counts(self, i: int, column: int, dim: int, along: int) -> bool:
        """Whether a column of the indices of a look-up counts all rows of its table, `dim`, along their dimension."""
        (table, number), flat = self.flat.equations[i].reads[:2], self.flat
        made = flat.equations[flat.made_by[number]] if number in flat.made_by else None
        if made is not None and made.equation.primitive.name == "concatenate":
            ends = np.cumsum([flat.avals[n].shape[-1] for n in made.reads])
            part = int(np.searchsorted(ends, column, side="right"))
            number, column = made.reads[part], column - int(ends[part])
        if (found := self._constant(number)) is None:
            return False
        rows = np.moveaxis(found[..., column], along, -1)
        is_own = rows.shape[-1] == flat.avals[table].shape[dim] and bool(np.all(rows == np.arange(rows.shape[-1])))
        makes = [one for i in flat.needed_for([number]) for one in flat.equations[i].makes]
        self._own_rows.update(makes if is_own else ())
        return is_own

    # --- from what is wanted to what it needs: what a micro-batch computes ---

    def function(self, wanted: Sequence[Form], *, shows: bool = False) -> Callable[..., list[Leaf]]:
        """Makes the function of one micro-batch that computes some values.

        Args:
          wanted: the values, and how a micro-batch is to have them.
          shows: whether it prints, too, what the function prints of values that a micro-batch has.

        Returns:
          (the micro-batch's arguments, its values of `known`) -> what is wanted. Call it once `known` is complete.

        Raises:
          CouplesError: a micro-batch can't have a value so.
        """
        prints = [flat for flat in self.flat.equations if shows and flat.equation.effects and not flat.makes]
        coupled = {self.flat.made_by[one.flat.makes[0]] for one in self.couplings}
        prints = [flat for flat in prints if coupled.isdisjoint(self.flat.needed_for(flat.reads))]
        recipes, todo = dict[Form, _Recipe](), [*wanted, *((n, self.at[n]) for flat in prints for n in flat.reads)]
        while todo:
            if (form := todo.pop()) not in recipes:
                recipes[form] = self._recipe(*form)
                todo += recipes[form].reads
        for number, form in recipes:
            made = self.flat.made_by.get(number)
            split = (number, REPLICATED) in recipes and isinstance(form, Shard) and number in self._late
            if split and made is not None and self.flat.equations[made].equation.primitive.name == "random_bits":
                raise CouplesError(Coupling(self.flat.equations[made], Why.DRAWS))
        # A value follows the equation that makes it; an M-th part follows the whole.
        order = sorted(recipes, key=lambda form: (self.flat.made_by.get(form[0], -1), form[1] == PARTIAL))

        def run(arguments: Sequence[Leaf], known: Sequence[Leaf]) -> list[Leaf]:
            given: _Given = dict(zip((*self.flat.arguments, *self.known), (*arguments, *known), strict=False))
            self.axis.here[:] = [given.get(INDEX, 0)]
            values = dict[Form, Leaf]()
            for form in order:
                values[form] = recipes[form].run(given, *(values[read] for read in recipes[form].reads))
            for flat in prints:
                carry_out(flat.equation, [values[n, self.at[n]] for n in flat.reads])
            return [jnp.asarray(values[form]) for form in wanted]

        return run

    def ahead(self) -> ClosedJaxpr:
        """Computes the values of `known` but for the index, whole, from the leaves of the mini-batch."""
        values = [number for number, _ in self.known if number >= 0]
        return self.flat.part([number for number in self.flat.arguments if number in self._early], values)

    def reads_places(self, wanted: Sequence[Form]) -> bool:
        """Whether a micro-batch that computes some values reads its examples' places, as for a mask by places.

        Raises:
          CouplesError: as of `function`.
        """
        run, avals = self.function(wanted), self.flat.avals
        part = lambda n, at: jax.ShapeDtypeStruct(part_shape(avals[n].shape, (at,), (self.axis,)), avals[n].dtype)
        arguments = [part(n, self.at[n]) for n in self.flat.arguments]
        known = [jnp.int32(0) if n < 0 else part(n, shard or REPLICATED) for n, shard in self.known]
        is_read = uses(trace(run, arguments, known)[0])[len(arguments) :]
        read = [one for one, reads in zip(self.known, is_read, strict=True) if reads and not self._is_drawn(one.value)]
        read = [(n, at) for n, at in read if at is not None and n not in self._own_rows]
        arrays = [(None if n < 0 else self._constant(n), at) for n, at in read]
        differs = (x is None or np.any(x != np.take(x, [0], at.dim)) for x, at in arrays)  # else it is the same for all
        return self.axis.size > 1 and any(differs)

    def _recipe(self, number: int, form: AxisSharding) -> _Recipe:
        """How a micro-batch computes a value in some form."""
        i, now, is_late = self.flat.made_by.get(number), self.at[number], number in self._late
        if number in self.flat.constants and form == REPLICATED:
            return _Recipe((), lambda _: self.flat.constants[number])
        if form == PARTIAL and now == REPLICATED and jnp.issubdtype(self.flat.avals[number].dtype, jnp.inexact):
            return _Recipe([(number, REPLICATED)], lambda _, x: x / self.axis.size)
        if now == form and i is None:
            return _Recipe((), lambda given: given[number])
        if now == form and i is not None and (is_late or form != REPLICATED or number not in self._early):
            return self._by_way(i, self._ways[i], number)
        if i is not None and now == REPLICATED and isinstance(form, Shard) and (split := self._split(i, number, form)):
            return split
        if is_late or form == PARTIAL:
            raise CouplesError(Coupling(self.flat.equations[-1 if i is None else i], Why.TOGETHER))
        return self._known(Known(number, form if isinstance(form, Shard) else None))

    def _known(self, known: Known) -> _Recipe:
        self.known += [known] * (known not in self.known)
        return _Recipe((), lambda given: given[known])

    def _by_way(self, i: int, way: Way, number: int) -> _Recipe:
        flat, key = self.flat.equations[i], (i, way.operands)
        if way.plans:
            self._known(INDEX)  # in a loop something may be cut

        def run(given: _Given, *parts: Leaf) -> Leaf:
            if key not in given:  # once for all results
                given[key] = way.run(*parts)
            return given[key][flat.makes.index(number)]

        return _Recipe([(n, at) for n, (at,) in zip(flat.reads, way.operands, strict=True)], run)

    def _split(self, i: int, number: int, form: Shard) -> _Recipe | None:
        """Computes a micro-batch's part of what all have alike: where it is spread over examples, or from parts."""
        flat, shape = self.flat.equations[i], self.flat.avals[number].shape
        equation, sizes = flat.equation, [self.flat.avals[n].shape for n in flat.reads]
        name, params, part = equation.primitive.name, equation.params, part_shape(shape, (form,), (self.axis,))
        kept = zip(params.get("broadcast_dimensions", ()), sizes[0] if sizes else (), strict=False)
        spread = name == "broadcast_in_dim" and not any(d == form.dim and n > 1 for d, n in kept)
        # By a key of the micro-batch's own it draws its own bits; by any other its part of those of all.
        if spread or (name == "random_bits" and number in self._late and params["shape"] == shape):
            params = {**part_params(equation, sizes, [part]), "shape": part}
            return _Recipe([(n, REPLICATED) for n in flat.reads], lambda _, *x: carry_out(equation, x, params)[0])
        now = [self.at[n] for n in flat.reads]
        for k, size in enumerate(sizes):
            for at in (Shard(d, outer) for d in range(len(size)) for outer in {1, form.outer}):
                if now[k] in (at, REPLICATED) and is_possible(size, (at,), (self.axis,)):
                    way = self._way(i, [*now[:k], at, *now[k + 1 :]])
                    moves = any(old not in (new, REPLICATED) for old, (new,) in zip(now, way.operands, strict=True))
                    if way.results[flat.makes.index(number)] == (form,) and not moves and not way.sends:
                        return self._by_way(i, way, number)
        return None


BATCHED = frozenset({"cholesky", "eigh", "fft", "householder_product", "lu", "qr", "svd", "triangular_solve"})
"""Operations on the last dimensions of arrays, each matrix by itself, which the partitioner has no rules for."""
KNOWN = RULES.keys() | {"scan", "cond"} | BATCHED
"""Operations of which it is known how they treat examples. A `while` may go on for each by itself (`jax.vmap`)."""


def _by_rule(equation: JaxprEqn, lying: Sequence[tuple[AxisSharding]], *, axes: Axes, is_last: bool = False) -> Way:
    """As `way_by_rule`, but sums stay partial wherever that is right: here sums aren't waited for to send less."""
    name, now = equation.primitive.name, [at for (at,) in lying]
    if not equation.outvars:  # a print
        return Way(tuple(lying), (), lambda *x: [])
    core = len(equation.params["fft_lengths"]) if name == "fft" else 2
    first = now[0] if now else REPLICATED
    if name in BATCHED and isinstance(first, Shard) and first.dim < len(aval_of(equation.invars[0]).shape) - core:
        return Way((lying[0],) * len(now), (lying[0],) * len(equation.outvars), lambda *x: carry_out(equation, x))
    is_float = jnp.issubdtype(aval_of(equation.outvars[0]).dtype, jnp.inexact)
    linear = {"convert_element_type": is_float, "reduce_precision": True, "broadcast_in_dim": True}
    linear |= {"div": is_float and now[1:] == [REPLICATED], "dot_general": REPLICATED in now}
    if name == "random_bits":
        return Way(((REPLICATED,),) * len(now), ((REPLICATED,),), lambda *x: carry_out(equation, x))
    if PARTIAL in now and linear.get(name, False):
        whole = way_by_rule(equation, [(REPLICATED,)] * len(now), axes)
        return replace(whole, operands=tuple(lying), results=((PARTIAL,),))
    return way_by_rule(equation, lying, axes, is_last=is_last)


def _at_own_places(
    equation: JaxprEqn, column: int, dim: int, result: Shard, axis: Axis, *operands: jax.Array
) -> list[jax.Array]:
    """Carries out a look-up or an addition for a micro-batch, in whose table its own rows count from 0."""
    table, indices, *updates = operands
    is_column = lax.broadcasted_iota(jnp.int32, indices.shape, indices.ndim - 1) == column
    indices = jnp.where(is_column, lax.broadcasted_iota(indices.dtype, indices.shape, dim), indices)
    shape = part_shape(aval_of(equation.outvars[0]).shape, (result,), (axis,))
    return carry_out(equation, (table, indices, *updates), part_params(equation, [table.shape], [shape]))


def _why(equation: JaxprEqn, now: Sequence[AxisSharding]) -> Why:
    """Says what an equation does to examples."""
    name, shards = equation.primitive.name, [at for at in now if isinstance(at, Shard)]
    if name not in KNOWN:
        return Why.UNKNOWN
    if PARTIAL in now:
        return Why.SUM
    return Why.PAIRS if len(shards) > 1 and name not in ("concatenate", "sort") else Why.IN_ORDER
