"""Makes jaxprs of parts of a trace: those that are the same but for scalars are one, and known as such at once.

To compare the traces of all pieces would take most of the time in which a model of a hundred blocks is planned.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import suppress
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from jpipe.jax.flat_jaxpr import FlatEquation, FlatJaxpr, jaxpr_of
from jpipe.jax.primitives import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jpipe.jax.tracing import trace
from jpipe.jax.trees import is_float
from jpipe.layers.fingerprint import same_value
from jpipe.model.alike import has_custom_derivatives, whole
from jpipe.model.groups import bits, is_scalar, scalar_places


class PartJaxpr(NamedTuple):
    """A part of a trace as a jaxpr of its own.

    Attributes:
      closed: the jaxpr, with its constants.
      kind: a number, the same for all parts that are the same but for scalars.
    """

    closed: ClosedJaxpr
    kind: int

    @property
    def scalars(self) -> list[np.ndarray]:
        """Its scalars in the order in which they are read: those of a trace of it (`constants.scalars_of`)."""
        jaxpr = self.closed.jaxpr
        scalars = {jaxpr.constvars[i]: np.asarray(self.closed.consts[i]) for i in scalar_places(self.closed)}
        read = [*(v for equation in jaxpr.eqns for v in equation.invars), *jaxpr.outvars]
        return [scalars[v] for v in read if not isinstance(v, Literal) and v in scalars]


class Kinds:
    """The kinds of jaxprs that were made of traces so far."""

    def __init__(self):
        self._operations: dict[Hashable, list[object]] = {}  # by name and shapes
        self._known: dict[int, tuple[JaxprEqn, Hashable]] = {}  # by identity, of an equation that is kept here
        self._jaxprs: dict[Hashable, tuple[int, Jaxpr]] = {}

    def part(
        self, flat: FlatJaxpr, equations: Sequence[FlatEquation], takes: Sequence[int], gives: Sequence[int]
    ) -> PartJaxpr:
        """Some equations as a jaxpr; arguments as of `jaxpr_of`."""
        read = dict.fromkeys([*(n for equation in equations for n in equation.reads), *gives])
        constants = [number for number in read if number in flat.constants]
        made = (n for equation in equations for n in equation.makes)
        local = {n: i for i, n in enumerate(dict.fromkeys([*takes, *constants, *made]))}
        within = lambda numbers: tuple(local[n] for n in numbers)
        key = (
            tuple((flat.avals[n].shape, flat.avals[n].dtype) for n in (*takes, *constants)),
            tuple(None if is_scalar(flat.constants[n]) else bits(flat.constants[n]) for n in constants),
            tuple((self._operation(flat, e), within(e.reads), within(e.makes)) for e in equations),
            within(takes),
            within(gives),
        )
        if key not in self._jaxprs:
            self._jaxprs[key] = len(self._jaxprs), jaxpr_of(flat, equations, takes, gives, constants).jaxpr
        kind, jaxpr = self._jaxprs[key]
        return PartJaxpr(ClosedJaxpr(jaxpr, [flat.constants[n] for n in constants]), kind)

    def _operation(self, flat: FlatJaxpr, one: FlatEquation) -> Hashable:
        """Names what an equation does with its operands: equal for two that do the same, and have one derivative."""
        if id(one.equation) not in self._known:
            shapes = tuple((flat.avals[n].shape, flat.avals[n].dtype) for n in (*one.reads, *one.makes))
            name = one.equation.primitive.name, shapes
            alike, described = self._operations.setdefault(name, []), _described(flat, one)
            index = next((i for i, other in enumerate(alike) if same_value(other, described)), len(alike))
            if index == len(alike):
                alike.append(described)
            self._known[id(one.equation)] = one.equation, (name, index)
        return self._known[id(one.equation)][1]


def _described(flat: FlatJaxpr, one: FlatEquation) -> object:
    """Describes what an equation does, for `same_value`: its parameters, or what it calls, and its derivative.

    Functions among the parameters, such as rules of derivatives, are made anew in each trace. So it is differentiated.
    """
    if not has_custom_derivatives([one.equation]):
        return whole(sorted(one.equation.params.items()))
    reads, makes = dict.fromkeys(n for n in one.reads), dict.fromkeys(one.makes)
    run = jaxpr_as_fun(jaxpr_of(flat, [one], list(reads), list(makes), []))
    shapes = [jax.ShapeDtypeStruct(flat.avals[n].shape, flat.avals[n].dtype) for n in reads]
    floats = [i for i, shape in enumerate(shapes) if is_float(shape)]

    def differentiated(*arguments: jax.Array) -> object:
        def of_floats(*leaves: jax.Array) -> list[jax.Array]:
            filled = dict(enumerate(arguments)) | dict(zip(floats, leaves, strict=True))
            return [leaf for leaf in run(*filled.values()) if is_float(leaf)]

        results, back = jax.vjp(of_floats, *(arguments[i] for i in floats))
        return results, back(jax.tree.map(jnp.ones_like, results))

    with suppress(Exception):  # a loop without a known number of turns has no derivative: it is like no other
        return whole(trace(run, *shapes)[0]), whole(trace(differentiated, *shapes)[0])
    return one.equation
