"""Flattens a jaxpr to one list of equations: calls are replaced by what they call, and values have numbers.

So a fact about a value, such as how it lies on devices, holds wherever the value is read.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, Tracer

from jpipe.seam.inside import called_by, replaced, within
from jpipe.seam.jaxpr_types import ClosedJaxpr, JaxprEqn, Literal, Var
from jpipe.seam.primitives import CALLS
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
    """

    avals: list[ShapedArray]
    constants: dict[int, Leaf]
    arguments: tuple[int, ...]
    equations: list[FlatEquation]
    results: tuple[int, ...]
    is_body: bool = False

    @cached_property
    def read(self) -> frozenset[int]:
        """The values that equations read, or may read."""
        by_equations = (value for equation in self.equations for value in equation.reads)
        return frozenset([*by_equations, *(self.results if self.is_body else ())])


def flatten(closed: ClosedJaxpr, *, calls: Collection[str] = CALLS, is_body: bool = False) -> FlatJaxpr:
    """Puts the equations of the jaxprs that a jaxpr calls in their callers' places.

    Args:
      closed: the jaxpr.
      calls: the names of the primitives that call them.
      is_body: as of `FlatJaxpr`.
    """
    avals: list[ShapedArray] = []
    constants: dict[int, Leaf] = {}
    equations: list[FlatEquation] = []

    def new(variable: Var | Literal) -> int:
        avals.append(aval_of(variable))
        return len(avals) - 1

    def visit(closed: ClosedJaxpr, inputs: tuple[int, ...], callers: tuple[JaxprEqn, ...]) -> tuple[int, ...]:
        """Appends the equations of a jaxpr, given the numbers of its inputs; returns the numbers of its results."""
        jaxpr = closed.jaxpr
        numbers = dict(zip(jaxpr.invars, inputs, strict=True))
        for variable, constant in zip(jaxpr.constvars, closed.consts, strict=True):
            numbers[variable] = new(variable)
            constants[numbers[variable]] = _without_mesh(constant)

        def read(variable: Var | Literal) -> int:
            if not isinstance(variable, Literal):
                return numbers[variable]
            number = new(variable)
            constants[number] = np.asarray(variable.val, avals[number].dtype)
            return number

        for equation in jaxpr.eqns:
            reads = tuple(map(read, equation.invars))
            if equation.primitive.name in calls:
                makes = visit(called_by(equation), reads, (*callers, equation))
            else:
                makes = tuple(map(new, equation.outvars))
                equations.append(FlatEquation(equation, callers, reads, makes))
            numbers.update(zip(equation.outvars, makes, strict=True))
        return tuple(map(read, jaxpr.outvars))

    arguments = tuple(map(new, closed.jaxpr.invars))
    results = visit(closed, arguments, ())
    return FlatJaxpr(avals, constants, arguments, equations, results, is_body)


def without_calls(closed: ClosedJaxpr, calls: Collection[str] = CALLS) -> ClosedJaxpr:
    """Puts the equations of the jaxprs that a jaxpr calls in their callers' places, and takes out literals.

    Each literal is a constant of its own. The arguments are those of `flatten`.
    """
    flat = flatten(closed, calls=calls)
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in flat.avals]
    values = jax.make_jaxpr(lambda *x: x)(*shapes).jaxpr.invars
    chosen = lambda numbers: [values[i] for i in numbers]
    equations = [
        replaced(within(equation, callers), invars=chosen(reads), outvars=chosen(makes))
        for equation, callers, reads, makes in flat.equations
    ]
    ends = {"invars": chosen(flat.arguments), "constvars": chosen(flat.constants), "outvars": chosen(flat.results)}
    return ClosedJaxpr(replaced(closed.jaxpr, eqns=equations, **ends), list(flat.constants.values()))


def aval_of(variable: Var | Literal) -> ShapedArray:
    """Returns the whole shape and the dtype of an operand or a result."""
    return cast(ShapedArray, variable.aval)


def _without_mesh(constant: Leaf) -> Leaf:
    """Takes a constant off the mesh that it was made under, whose axes were of other types."""
    plain = isinstance(constant, jax.Array) and not isinstance(constant, Tracer)
    return np.asarray(constant) if plain and not jnp.issubdtype(constant.dtype, jax.dtypes.extended) else constant
