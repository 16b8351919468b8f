"""Flattens a jaxpr to one list of equations: calls are replaced by what they call, and values have numbers.

So a fact about a value, such as how it lies on devices, holds wherever the value is read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray, Tracer
from jax.sharding import AbstractMesh

from jpipe.jax.inside import called_by, new_variables, replaced, scan_counts, within
from jpipe.jax.primitives import CALLS, NUMPY, ClosedJaxpr, JaxprEqn, Literal, Var
from jpipe.types import Leaf


class FlatEquation(NamedTuple):
    """An equation, and which values it is about.

    Attributes:
      equation: of whole arrays.
      callers: the equations that call it, the outermost first.
      reads: the numbers of its operands.
      makes: the numbers of its results.
    """

    equation: JaxprEqn
    callers: tuple[JaxprEqn, ...]
    reads: tuple[int, ...]
    makes: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class FlatJaxpr:
    """A jaxpr of whole arrays without calls.

    Attributes:
      avals: by number of a value its whole shape and its dtype.
      constants: the values that are the same in every call, by number.
      arguments: the numbers of its arguments.
      equations: what it computes, in order.
      results: the numbers of its results.
      is_body: whether it is a loop's or a branch, whose results are read by what is around it.
      slices: by number of a value that an unrolled scan takes in one trip, (the number of the array that it is a slice
        of, the index of the trip).
      rows: by number of an array that stacks others along its first dimension, as an unrolled scan does and
        `jnp.stack`, the numbers of these.
    """

    avals: list[ShapedArray]
    constants: dict[int, Leaf]
    arguments: tuple[int, ...]
    equations: list[FlatEquation]
    results: tuple[int, ...]
    is_body: bool = False
    slices: dict[int, tuple[int, int]] = field(default_factory=dict)
    rows: dict[int, list[int]] = field(default_factory=dict)

    @cached_property
    def read(self) -> frozenset[int]:
        """The values that equations read, or may read."""
        by_equations = (value for equation in self.equations for value in equation.reads)
        return frozenset([*by_equations, *(self.results if self.is_body else ())])

    @cached_property
    def folded(self) -> FlatJaxpr:
        """The same with scalars that follow from constants alone as constants: such as counts of random numbers drawn.

        So that functions that differ in such numbers have the same equations.
        """
        constants, equations = dict(self.constants), []
        for flat in self.equations:
            name, operands = flat.equation.primitive.name, [constants.get(number) for number in flat.reads]
            is_plain = name in NUMPY or name == "convert_element_type"
            if is_plain and all(isinstance(value, np.ndarray | np.generic) and value.ndim == 0 for value in operands):
                result = getattr(np, NUMPY[name])(*operands) if name in NUMPY else operands[0]
                constants[flat.makes[0]] = np.asarray(result).astype(self.avals[flat.makes[0]].dtype)
            else:
                equations.append(flat)
        return replace(self, constants=constants, equations=equations)

    def element(self, number: int, indices: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        """(the number of an element of an array that stacks others, the indices that are left within it)."""
        while indices and number in self.rows:
            number, indices = self.rows[number][indices[0]], indices[1:]
        return number, indices

    def constants_of(self, equations: Sequence[FlatEquation], takes: Sequence[int], gives: Sequence[int]) -> list[int]:
        """The numbers of the constants that some equations read or give, but for those that they take."""
        read = dict.fromkeys([*(number for one in equations for number in one.reads), *gives])
        return [number for number in read if number in self.constants and number not in takes]

    @cached_property
    def made_by(self) -> dict[int, int]:
        """The index of the equation that makes a value, by the value's number."""
        return {number: i for i, equation in enumerate(self.equations) for number in equation.makes}

    def part(self, takes: Sequence[int], gives: Sequence[int]) -> ClosedJaxpr:
        """A jaxpr of the equations that some values need."""
        return jaxpr_of(self, [self.equations[i] for i in self.needed_for(gives)], takes, gives)

    def needed_for(self, values: Iterable[int], *, effects: bool = False) -> list[int]:
        """The indices of the equations that some values need, in order; with `effects` also of those that have some."""
        needed = {i for i, one in enumerate(self.equations) if effects and one.equation.effects}
        todo = [*values, *(number for i in needed for number in self.equations[i].reads)]
        while todo:
            i = self.made_by.get(todo.pop())
            if i is not None and i not in needed:
                needed.add(i)
                todo += self.equations[i].reads
        return sorted(needed)


def flatten(
    closed: ClosedJaxpr,
    *,
    calls: Collection[str] = CALLS,
    is_body: bool = False,
    unrolls: Whether = lambda equation: False,
    keeps: Whether = lambda equation: False,
    selects: bool = False,
) -> FlatJaxpr:
    """Puts the equations of the jaxprs that a jaxpr calls in their callers' places.

    Args:
      closed: the jaxpr.
      calls: the names of the primitives that call them.
      is_body: as of `FlatJaxpr`.
      unrolls: whether the equations of all trips of a `scan` stand in its place, one trip after the other.
      keeps: whether a call stays one equation.
      selects: whether the equations of all branches of a `cond` stand in its place, and its results are selected.
    """
    flattening = Flattening(FlatJaxpr([], {}, (), [], ()), calls, unrolls, keeps, selects)
    arguments = tuple(flattening.new(aval_of(v)) for v in closed.jaxpr.invars)
    results = flattening.visit(closed, arguments, ())
    return replace(flattening.flat, arguments=arguments, results=results, is_body=is_body)


Whether: TypeAlias = Callable[[JaxprEqn], bool]
Callers: TypeAlias = tuple[JaxprEqn, ...]
"""The equations that call one, the outermost first."""


class Flattening:
    """Puts equations into `flat`, one jaxpr after the other; the arguments are those of `flatten`."""

    def __init__(self, flat: FlatJaxpr, calls: Collection[str], unrolls: Whether, keeps: Whether, selects: bool):
        self._calls, self._unrolls, self._keeps, self._selects = calls, unrolls, keeps, selects
        self.flat = flat

    def new(self, aval: ShapedArray, constant: Leaf | None = None) -> int:
        """Numbers a value."""
        number = len(self.flat.avals)
        self.flat.avals.append(aval)
        if constant is not None:
            self.flat.constants[number] = constant
        return number

    def visit(self, closed: ClosedJaxpr, inputs: tuple[int, ...], callers: Callers) -> tuple[int, ...]:
        """Appends the equations of a jaxpr, given the numbers of its inputs; the numbers of its results."""
        jaxpr = closed.jaxpr
        numbers = dict(zip(jaxpr.invars, inputs, strict=True))
        for variable, constant in zip(jaxpr.constvars, closed.consts, strict=True):
            numbers[variable] = self.new(aval_of(variable), _without_mesh(constant))

        def read(variable: Var | Literal) -> int:
            if not isinstance(variable, Literal):
                return numbers[variable]
            aval = aval_of(variable)
            return self.new(aval, np.asarray(variable.val, aval.dtype))

        for equation in jaxpr.eqns:
            reads = tuple(map(read, equation.invars))
            if equation.primitive.name in self._calls and not self._keeps(equation):
                makes = self.visit(called_by(equation), reads, (*callers, equation))
            elif equation.primitive.name == "scan" and self._unrolls(equation):
                makes = self._visit_trips(equation, reads, (*callers, equation))
            elif equation.primitive.name == "cond" and self._selects:
                makes = self._visit_branches(equation, reads, (*callers, equation))
            else:
                makes = tuple(self.new(aval_of(v)) for v in equation.outvars)
                self.flat.equations.append(FlatEquation(equation, callers, reads, makes))
                if rows := self._stacked(equation, reads):
                    self.flat.rows[makes[0]] = rows
            numbers.update(zip(equation.outvars, makes, strict=True))
        return tuple(map(read, jaxpr.outvars))

    def _visit_trips(self, scan: JaxprEqn, reads: tuple[int, ...], callers: Callers) -> tuple[int, ...]:
        """Appends the equations of all trips of a scan; the numbers of its results."""
        num_constants, num_carry = scan_counts(scan)
        kept, rest = reads[:num_constants], reads[num_constants:]
        carry, arrays = rest[:num_carry], rest[num_carry:]
        trips = range(scan.params["length"])
        stacked: dict[int, tuple[int, ...]] = {}
        for i in reversed(trips) if scan.params["reverse"] else trips:
            slices = [self._slice(array, i, callers) for array in arrays]
            results = self.visit(called_by(scan), (*kept, *carry, *slices), callers)
            carry, stacked[i] = results[:num_carry], results[num_carry:]
        columns = zip(*(stacked[i] for i in trips), strict=True)
        return *carry, *(self.applied(lambda *x: jnp.stack(x), column, callers) for column in columns)

    def _visit_branches(self, cond: JaxprEqn, reads: tuple[int, ...], callers: Callers) -> tuple[int, ...]:
        """Appends the equations of all branches of a cond; the numbers of what is selected of their results."""
        which, *operands = reads
        branches = [self.visit(branch, tuple(operands), callers) for branch in cond.params["branches"]]
        select = lambda choices: self.applied(lambda which, *x: lax.select_n(which, *x), (which, *choices), callers)
        pick = lambda choices: choices[0] if len({*choices}) == 1 else select(choices)
        return tuple(map(pick, zip(*branches, strict=True)))

    def applied(self, function: Callable[..., jax.Array], numbers: tuple[int, ...], callers: Callers = ()) -> int:
        """Appends the equations of a function of some values; the number of its result."""
        shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in (self.flat.avals[i] for i in numbers)]
        return self.visit(jax.make_jaxpr(function)(*shapes), numbers, callers)[0]

    def _slice(self, array: int, i: int, callers: Callers) -> int:
        if array in self.flat.rows:
            return self.flat.rows[array][i]
        aval, mesh = self.flat.avals[array], jax.sharding.get_abstract_mesh()
        # The index is a number among the constants, so that slices that differ in it are one function.
        index = self.new(ShapedArray((), np.dtype(np.int32)), np.int32(i))
        (number,) = self.visit(_slice_of(aval.shape, aval.dtype, mesh), (array, index), callers)
        self.flat.slices[number] = array, i
        return number

    def _stacked(self, equation: JaxprEqn, reads: tuple[int, ...]) -> list[int]:
        """The numbers of what an equation stacks along a first dimension of its own; none if it does anything else."""
        name, rows = equation.primitive.name, [self.flat.rows.get(number, []) for number in reads]
        if name == "concatenate" and equation.params["dimension"] == 0 and all(rows):
            return [row for own in rows for row in own]
        made, takes = (aval_of(ends[0]).shape if ends else () for ends in (equation.outvars, equation.invars))
        is_one = name in ("broadcast_in_dim", "expand_dims", "reshape") and made == (1, *takes)
        return [*reads] if is_one or (name == "stack" and equation.params["axis"] == 0) else []


@cache
def _slice_of(shape: tuple[int, ...], dtype: np.dtype, mesh: AbstractMesh) -> ClosedJaxpr:
    """The jaxpr of `x[i]`, as traced in the context of this mesh: equations remember it."""

    def take(x: jax.Array, i: jax.Array) -> jax.Array:
        return lax.squeeze(lax.dynamic_slice(x, [i, *[np.int32(0)] * (x.ndim - 1)], (1, *x.shape[1:])), [0])

    return jax.make_jaxpr(take)(jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct((), np.int32))


def without_calls(closed: ClosedJaxpr, calls: Collection[str] = CALLS) -> ClosedJaxpr:
    """Puts the equations of the jaxprs that a jaxpr calls in their callers' places, and takes out literals.

    Each literal is a constant of its own. The arguments are those of `flatten`.
    """
    flat = flatten(closed, calls=calls)
    return jaxpr_of(flat, flat.equations, flat.arguments, flat.results)


def jaxpr_of(
    flat: FlatJaxpr, equations: Sequence[FlatEquation], takes: Sequence[int], gives: Sequence[int]
) -> ClosedJaxpr:
    """Some equations of a flat jaxpr as a jaxpr of their own; its constants are those that it reads or gives.

    Args:
      flat: the jaxpr.
      equations: those of its equations that are wanted, in order.
      takes: the numbers of the values that it takes, which may be constants of the whole.
      gives: the numbers of the values that it gives.
    """
    constants = flat.constants_of(equations, takes, gives)
    numbers = list(dict.fromkeys([*takes, *constants, *(n for equation in equations for n in equation.makes)]))
    variables = dict(zip(numbers, new_variables([flat.avals[n] for n in numbers]), strict=True))
    chosen = lambda numbers: [variables[i] for i in numbers]
    of_own = lambda e: replaced(within(e.equation, e.callers), invars=chosen(e.reads), outvars=chosen(e.makes))
    places = {"invars": chosen(takes), "constvars": chosen(constants), "outvars": chosen(gives)}
    effects = frozenset().union(*(equation.equation.effects for equation in equations))
    jaxpr = replaced(jax.make_jaxpr(lambda: 0)().jaxpr, **places, eqns=list(map(of_own, equations)), effects=effects)
    return ClosedJaxpr(jaxpr, [flat.constants[number] for number in constants])


def aval_of(variable: Var | Literal) -> ShapedArray:
    """Returns the whole shape and the dtype of an operand or a result."""
    return cast(ShapedArray, variable.aval)


def operand_shape(equation: JaxprEqn, operand: int = 0) -> tuple[int, ...]:
    """Returns the whole shape of an operand."""
    return aval_of(equation.invars[operand]).shape


def result_shape(equation: JaxprEqn) -> tuple[int, ...]:
    """Returns the whole shape of the first result."""
    return aval_of(equation.outvars[0]).shape


def _without_mesh(constant: Leaf) -> Leaf:
    """Takes a constant off the mesh that it was made under, whose axes were of other types."""
    plain = isinstance(constant, jax.Array) and not isinstance(constant, Tracer)
    return np.asarray(constant) if plain and not jnp.issubdtype(constant.dtype, jax.dtypes.extended) else constant
