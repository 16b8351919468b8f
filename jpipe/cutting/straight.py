"""A whole model as one straight list of equations, and what each value in it follows from.

    constants ─┐
    variables ─┼─► values of variables alone: slices of stacked weights, casts. Computed where they are used.
    the batch ─┼─► values of the batch alone: masks, positions, rotary tables. Computed where they are used.
    both      ─┴─► activations: what a boundary between two stages would have to carry.

Calls are replaced by what they call, scans that do the work of several blocks by their trips. So a loop over blocks, an
`nn.scan` and blocks written one by one give the same list.

Of arrays that `jax.vmap` made for all blocks at once a stage with some of the blocks makes the rows of these alone
(`rows_of`). From the end of a trace backwards an index is put into the operands of each operation that treats the rows
alike; elsewhere the array is made, and sliced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntFlag
from functools import cached_property, partial
from itertools import compress
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun

from jpipe.jax.flat_jaxpr import FlatEquation, FlatJaxpr, flatten, jaxpr_of
from jpipe.jax.inside import scan_counts
from jpipe.jax.primitives import ELEMENTWISE, PLAIN_CALLS, ClosedJaxpr, JaxprEqn
from jpipe.jax.tracing import equations_in
from jpipe.types import Leaf

MOST_TRIPS = 1024
"""A scan of more trips is one over time or over an image's rows, not over blocks."""

WORK = frozenset({"dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated"})
"""The primitives that do a model's work: products of matrices and convolutions."""


class Follows(IntFlag):
    """The kinds of arguments that a value follows from."""

    NOTHING = 0
    VARIABLES = 1
    BATCH = 2
    BOTH = 3


class Part(NamedTuple):
    """A leaf of a model's variables, or a slice of one that is stacked.

    Attributes:
      leaf: the index of the leaf among all leaves of the variables.
      indices: where it is sliced, along the first dimensions; empty for the whole leaf.
    """

    leaf: int
    indices: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Straight:
    """A model's trace as one list of equations.

    Attributes:
      flat: the trace without calls.
      num_variables: how many arguments, the first ones, are leaves of the model's variables; the others are leaves of
        the batch, and the random key.
      state: the leaves of the variables of which the other results are new values.
      read: for each output, whether anybody reads it.
      depths: along how many dimensions pieces have slices of a leaf of the variables, at most; see `depths_read`.
      lines: by number of a value that each piece hands on to the next one, to the end, the index of its line
        (`jpipe.cutting.lines`). It counts as an activation.
    """

    flat: FlatJaxpr
    num_variables: int
    state: tuple[int, ...]
    read: tuple[bool, ...]
    depths: Mapping[int, int] = field(default_factory=dict)
    lines: Mapping[int, int] = field(default_factory=dict)

    @cached_property
    def outputs(self) -> tuple[int, ...]:
        """The numbers of the model's outputs that are read."""
        return tuple(compress(self.flat.results, self.read))

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """The numbers of what the last piece takes or gives: the outputs, and the last value of each line."""
        return *self.outputs, *{line: number for number, line in self.lines.items()}.values()

    @property
    def data(self) -> tuple[int, ...]:
        """The numbers of the leaves of the batch, and of the random key if there is one."""
        return self.flat.arguments[self.num_variables :]

    @property
    def draws(self) -> bool:
        """Whether a random key, the last of the data, has an influence on outputs and state."""
        return any(self.data[-1] in self.flat.equations[i].reads for i in self.needed)

    @cached_property
    def sources(self) -> list[Follows]:
        """The kinds of arguments that each value follows from, by its number."""
        sources = [Follows.NOTHING] * len(self.flat.avals)
        for place, number in enumerate(self.flat.arguments):
            sources[number] = Follows.VARIABLES if place < self.num_variables else Follows.BATCH
        for equation in self.flat.equations:
            origin = Follows.NOTHING
            for number in equation.reads:
                origin |= sources[number]
            for number in equation.makes:
                sources[number] = Follows.BOTH if number in self.lines else origin
        return sources

    @cached_property
    def needed(self) -> list[int]:
        """The indices of the equations that the outputs and new values of the state need, or that have an effect."""
        # Of new values that a scan stacks its trips' count, if pieces have slices.
        new = [n for leaf, new in self.new_state.items() for n in self.slices_made(Part(leaf), new).values()]
        return self.flat.needed_for([*self.ends, *new], effects=True)

    def slices_made(self, part: Part, number: int) -> dict[Part, int]:
        """The numbers of a value, or of the slices of it that pieces have if it is a stack of others."""
        if number not in self.flat.rows or len(part.indices) >= self.depths.get(part.leaf, MOST_TRIPS):
            return {part: number}
        rows = enumerate(self.flat.rows[number])
        each = (self.slices_made(Part(part.leaf, (*part.indices, i)), row) for i, row in rows)
        return {slice: n for made in each for slice, n in made.items()}

    @cached_property
    def main(self) -> list[int]:
        """The indices of the needed equations that are about activations, in order."""

        def is_about(one: FlatEquation) -> bool:
            return bool(one.equation.effects) or any(self.sources[n] is Follows.BOTH for n in (*one.makes, *one.reads))

        return [i for i in self.needed if is_about(self.flat.equations[i])]

    @cached_property
    def new_state(self) -> dict[int, int]:
        """The number of the new value of each leaf of the variables that changes."""
        pairs = zip(self.state, self.flat.results[len(self.read) :], strict=True)
        return {leaf: number for leaf, number in pairs if number != self.flat.arguments[leaf]}

    @cached_property
    def depths_read(self) -> dict[int, int]:
        """Along how many dimensions each leaf of the variables is sliced wherever its slices are read or made.

        Nested scans slice a leaf more than once. A slice that something other than these reads is one part.
        """
        squeezes = [self.flat.made_by[number] for number in self.flat.slices]
        slicing = {self.flat.made_by[self.flat.equations[i].reads[0]] for i in squeezes}
        read = {n for i in self.needed if i not in slicing for n in self.flat.equations[i].reads} | {*self.outputs}
        parts = [part for number in read if (part := self.part(number)) is not None]
        parts += [part for leaf, new in self.new_state.items() for part in self.slices_made(Part(leaf), new)]
        depths: dict[int, int] = {}
        for leaf, indices in parts:
            depths[leaf] = min(len(indices), depths.get(leaf, len(indices)))
        return depths

    def part(self, number: int) -> Part | None:
        """The part of the variables that a value is, if it is one."""
        indices: list[int] = []
        array = number
        while array in self.flat.slices:
            array, i = self.flat.slices[array]
            indices.append(i)
        # Arguments have the first numbers of all values, in order.
        if array >= self.num_variables or len(indices) > self.depths.get(array, len(indices)):
            return None
        return Part(array, tuple(reversed(indices)))

    def support(self, numbers: Iterable[int]) -> tuple[list[int], dict[Part, int]]:
        """Finds what values need besides activations, if they are to be computed at some place in the model.

        Args:
          numbers: the values.

        Returns:
          (the indices of the equations to compute there, in order; the parts of the variables that these or whoever
          asks read, and their numbers).
        """
        equations: set[int] = set()
        parts: dict[Part, int] = {}
        todo, seen = list(numbers), set[int]()
        while todo:
            number = todo.pop()
            if number in seen or self.sources[number] is Follows.BOTH:
                continue
            seen.add(number)
            if (part := self.part(number)) is not None:
                parts[part] = number
            elif (i := self.flat.made_by.get(number)) is not None:
                equations.add(i)
                todo += self.flat.equations[i].reads
        return sorted(equations), parts

    def is_over_blocks(self, equation: FlatEquation) -> bool:
        """Whether an equation is a scan that does in each trip the work of a block with weights of its own.

        `nn.scan` makes such scans. One that goes over what follows from the batch, such as time, isn't one.
        """
        scan = equation.equation
        if scan.primitive.name != "scan" or not 1 < scan.params["length"] <= MOST_TRIPS or not does_work(scan):
            return False
        sliced = {self.sources[number] for number in equation.reads[sum(scan_counts(scan)) :]}
        return Follows.VARIABLES in sliced or sliced <= {Follows.NOTHING}


def straighten(closed: ClosedJaxpr, num_variables: int, num_outputs: int, state: Sequence[int]) -> Straight:
    """The straight list of a model's trace; see `Straight`.

    Args:
      closed: takes the leaves of its variables, of the batch, and the random key; gives its outputs and new state.
      num_variables, num_outputs: how many leaves there are.
      state: the leaves of the variables of which there are new values.
    """
    over_blocks: set[int] = set()  # by identity
    is_over_blocks = lambda scan: id(scan) in over_blocks
    while True:
        flat = flatten(closed, calls=INLINED, unrolls=is_over_blocks)
        straight = Straight(flat, num_variables, tuple(state), (True,) * num_outputs)
        # A scan inside of another is seen once that one is unrolled.
        unrolled = {id(e.equation) for e in flat.equations if straight.is_over_blocks(e)}
        if not unrolled:
            return replace(straight, flat=flat.folded)
        over_blocks |= unrolled


INLINED = PLAIN_CALLS | {"remat2"}
"""Calls that are replaced by what they call: what a model computes again, the pipeline's `remat` says."""


def does_work(equation: JaxprEqn) -> bool:
    """Whether an equation, or one inside of it, is a product of matrices or a convolution."""
    return any(inner.primitive.name in WORK for inner in equations_in([equation]))


# --- rows of stacked arrays -------------------------------------------------------------------------------------------


ROWWISE = ELEMENTWISE | {"bitcast_convert_type"}
"""Operations that treat all elements alike; a bit cast to a type of another width makes more dimensions or fewer."""
KEYWISE = frozenset({"random_bits", "random_clone", "random_fold_in", "random_split", "random_unwrap", "random_wrap"})
"""Operations on each of some random keys: on all at once, others than threefry's may draw from the first alone."""
THREEFRY = jax.eval_shape(partial(jax.random.key, impl="threefry2x32"), 0).dtype


@dataclass
class StackRows:
    """Computes values of a trace for some arguments, and rows of them.

    Attributes:
      flat: the trace.
      values: what is computed so far, by number and indices of a row.
    """

    flat: FlatJaxpr
    values: dict[tuple[int, tuple[int, ...]], Leaf] = field(default_factory=dict)

    def value(self, number: int, indices: tuple[int, ...] = ()) -> Leaf:
        """A value, or its row at some indices along the first dimensions."""
        number, indices = self.flat.element(number, indices)
        if (number, indices) not in self.values:
            self.values[number, indices] = self._made(number, indices)
        return self.values[number, indices]

    def _made(self, number: int, indices: tuple[int, ...]) -> Leaf:
        if number in self.flat.constants and not indices:
            return self.flat.constants[number]
        i = self.flat.made_by.get(number)
        one = None if i is None else self.flat.equations[i]
        if not indices:
            assert one is not None
            reads = list(dict.fromkeys(one.reads))
            run = jaxpr_as_fun(jaxpr_of(self.flat, [one], reads, one.makes))
            made = run(*map(self.value, reads))
            self.values |= {(n, ()): leaf for n, leaf in zip(one.makes, made, strict=True)}
            return self.values[number, ()]
        *before, index = indices
        if not before and one is not None and (row := self._row(one, index)) is not None:
            return row
        return lax.squeeze(lax.dynamic_slice_in_dim(self.value(number, tuple(before)), np.int32(index), 1), [0])

    def _row(self, one: FlatEquation, index: int) -> Leaf | None:
        """The row of what an equation makes, from rows of what it reads; None if that isn't known to be the same."""
        bind, params = one.equation.primitive.bind, one.equation.params
        name, shape = one.equation.primitive.name, self.flat.avals[one.makes[0]].shape
        operands = [self.flat.avals[n].shape for n in one.reads]
        row = lambda n, at: self.value(n, () if at is None else (at,))
        dtypes = [self.flat.avals[n].dtype for n in (*one.reads, *one.makes)]
        is_threefry = all(d == THREEFRY for d in dtypes if jnp.issubdtype(d, jax.dtypes.prng_key))
        if name in KEYWISE and is_threefry and all(s and s[0] == shape[0] for s in operands):
            return bind(*(row(n, index) for n in one.reads), **params)
        if name in ROWWISE and all(not s or len(s) == len(shape) for s in operands):
            at = [None if not s else (index if s[0] == shape[0] else 0) for s in operands]
            return bind(*map(row, one.reads, at), **params)
        if operands and (moved := _row_moved(name, params, operands[0], shape)) is not None:
            from_row, changed = moved
            return bind(row(one.reads[0], index if from_row else None), **{**params, **changed})
        return None


def _row_moved(
    name: str, params: Mapping, operand: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[bool, dict[str, object]] | None:
    """How an operation that moves elements makes a row: (whether of the operand's row, its parameters that differ).

    None if it makes none of that row alone, or is another operation.
    """
    if name == "broadcast_in_dim":
        dimensions = params["broadcast_dimensions"]
        from_row = 0 in dimensions
        rest = {"shape": shape[1:], "broadcast_dimensions": tuple(d - 1 for d in dimensions[from_row:])}
        return None if from_row and operand[0] != shape[0] else (from_row, rest)
    if name == "reshape" and operand[:1] == shape[:1] and params["dimensions"] is None:
        return True, {"new_sizes": shape[1:]}
    if name == "transpose" and params["permutation"][0] == 0:
        return True, {"permutation": tuple(d - 1 for d in params["permutation"][1:])}
    return None


def rows_of(flat: FlatJaxpr, wanted: Sequence[tuple[int, tuple[int, ...]]]) -> Callable[..., list[Leaf]]:
    """A function from the arguments of a trace to rows of its values, each given by its number and indices."""

    def run(*arguments: jax.Array) -> list[Leaf]:
        rows = StackRows(flat, {(n, ()): leaf for n, leaf in zip(flat.arguments, arguments, strict=True)})
        return [rows.value(number, indices) for number, indices in wanted]

    return run
