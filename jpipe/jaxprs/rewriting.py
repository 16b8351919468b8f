"""Rewrites jaxprs (without prints, or the roundings of `jax.checkpoint`); finds which outputs depend on which inputs.

A jaxpr is a function as JAX traced it: a list of equations, each with a primitive, operands, results and parameters.
The parameters of some equations hold jaxprs themselves: calls (`jit`), loops, branches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params

from jpipe.jaxprs.flat_jaxpr import flatten
from jpipe.seam.inside import called_by, needed_part, replaced, scan_counts
from jpipe.seam.primitives import CALLS, LOOPS_AND_BRANCHES, ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, shapes_of
from jpipe.types import PyTree

Change = Callable[[JaxprEqn], JaxprEqn | None]
"""From an equation to the one in its place; None to drop it, so that its operands stand for its results, if any."""
Origins = Mapping[int, frozenset[object]]
"""The inputs of a trace that a value follows from, by numbers of the caller's, -1 for those that aren't told apart.
With each the values that don't follow from it, but from others, and were mixed in on the way."""


def equations_in(equations: Iterable[JaxprEqn]) -> Iterator[JaxprEqn]:
    """Yields equations, and those of the jaxprs that they hold."""
    for equation in equations:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations_in(inner.eqns)


def depends_on(closed: ClosedJaxpr, inputs: Collection[Var]) -> list[bool]:
    """Finds which outputs of a jaxpr depend on any of `inputs`, which the jaxpr takes or has as constants.

    It looks into calls. All results of a loop are taken to depend on all of its operands; `uses` looks into loops.
    """
    flat, variables = flatten(closed), [*closed.jaxpr.invars, *closed.jaxpr.constvars]
    # The constants of the jaxpr itself come first in `flat.constants`, before literals and those of jaxprs in it.
    numbers = zip(variables, (*flat.arguments, *flat.constants), strict=False)
    dependent = {number for variable, number in numbers if variable in inputs}
    for _, _, reads, makes in flat.equations:
        if not dependent.isdisjoint(reads):
            dependent.update(makes)
    return [number in dependent for number in flat.results]


def uses(closed: ClosedJaxpr, wanted: Sequence[bool] | None = None) -> list[bool]:
    """Finds which inputs of a jaxpr any of the wanted outputs needs; it looks into loops.

    Args:
      closed: the jaxpr.
      wanted: for each output, whether it is wanted; all are by default.
    """
    return needed_part(closed, wanted or [True] * len(closed.jaxpr.outvars))[1]


def origins(closed: ClosedJaxpr, inputs: Mapping[int, Origins], place: tuple[int, ...] = ()) -> list[Origins]:
    """Finds the origins of the outputs of a trace; it looks into loops: two turns show what each of them mixes in.

    Args:
      closed: the trace.
      inputs: the origins of what it takes, by index; those that are missing aren't told apart.
      place: where it stands: the loops that it is the body of, and the turn.
    """
    flat = flatten(closed, calls=CALLS | {"shard_map"}, selects=True)
    values = defaultdict(dict, {number: inputs.get(i, {-1: frozenset()}) for i, number in enumerate(flat.arguments)})
    for equation, _, reads, makes in flat.equations:
        operands, mixed = [values[number] for number in reads], dict[int, frozenset[object]]()
        for i in set().union(*operands):
            others = {(*place, n) for n in reads if -1 in values[n] and i not in values[n]}
            mixed[i] = frozenset(others).union(*(operand.get(i, ()) for operand in operands))
        results = [mixed] * len(makes)
        if equation.primitive.name == "scan":
            first, size = scan_counts(equation)
            for turn in range(min(2, equation.params["length"])):
                results = origins(called_by(equation), dict(enumerate(operands)), (*place, makes[0], turn))
                operands[first : first + size] = results[:size]
        values.update(zip(makes, results, strict=True))
    return [values[number] for number in flat.results]


def without_stops(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Takes out any `jax.lax.stop_gradient`, in the jaxprs inside too."""
    return without_equations(closed, lambda equation: equation.primitive.name == "stop_gradient")


def without_equations(closed: ClosedJaxpr, unwanted: Callable[[JaxprEqn], bool]) -> ClosedJaxpr:
    """Takes out equations that give their operands back, in the jaxprs inside too."""
    change = lambda equation: None if unwanted(equation) else equation
    return ClosedJaxpr(changed(closed.jaxpr, change), closed.consts)


def without_prints(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Takes out equations that give nothing (`jax.debug.print`, `jax.debug.callback`), in the jaxprs inside too.

    Dead code elimination keeps those, and with them whatever they show.
    """

    def change(equation: JaxprEqn) -> JaxprEqn | None:
        return replaced(equation, effects=frozenset()) if equation.outvars else None

    return ClosedJaxpr(replaced(changed(closed.jaxpr, change), effects=frozenset()), closed.consts)


def without_roundings(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Takes out each `reduce_precision` to full precision, which `jax.checkpoint` puts on values that it saves.

    Those of narrow numbers stay: a compiler may compute with wider ones in between, and forward and backward are to see
    the same. Those of others are copies that nobody needs.
    """

    def change(equation: JaxprEqn) -> JaxprEqn | None:
        if equation.primitive.name != "reduce_precision":
            return equation
        dtype = shapes_of(equation.outvars)[0].dtype
        full = {"exponent_bits": jnp.finfo(dtype).nexp, "mantissa_bits": jnp.finfo(dtype).nmant}
        return None if dtype.itemsize >= 4 and equation.params == full else equation

    return ClosedJaxpr(changed(closed.jaxpr, change), closed.consts)


def changed(jaxpr: Jaxpr, change: Change) -> Jaxpr:
    """Makes `change` to the equations of a jaxpr, and to those of the jaxprs inside of it.

    What is in a `shard_map` stays: there an array is one device's part.
    """
    standing_for: dict[Var, Var | Literal] = {}  # by a dropped result, the operand in its place

    def resolve(v: Var | Literal) -> Var | Literal:
        return v if isinstance(v, Literal) else standing_for.get(v, v)

    equations = []
    for equation in jaxpr.eqns:
        operands, new = list(map(resolve, equation.invars)), change(equation)
        if new is None:
            if equation.outvars:
                standing_for.update(zip(equation.outvars, operands, strict=True))
            continue
        params = new.params
        if new.primitive.name != "shard_map":
            inside = lambda jaxpr: changed(jaxpr, change)
            params = {name: changed_inside(value, inside) for name, value in params.items()}
        equations.append(replaced(new, invars=operands, params=params))
    return replaced(jaxpr, eqns=equations, outvars=list(map(resolve, jaxpr.outvars)))


def changed_inside(value: PyTree, change: Callable[[Jaxpr], Jaxpr]) -> PyTree:
    """Changes an equation's parameter if it is a jaxpr (of `jit`, a loop) or several (branches)."""
    if isinstance(value, Jaxpr):
        return change(value)
    if isinstance(value, ClosedJaxpr):
        return ClosedJaxpr(change(value.jaxpr), value.consts)
    if isinstance(value, tuple | list) and any(isinstance(v, ClosedJaxpr | Jaxpr) for v in value):
        inside = [changed_inside(v, change) for v in value]
        return type(value)(*inside) if hasattr(value, "_fields") else type(value)(inside)
    return value


def inside_of_calls(equation: JaxprEqn, change: Callable[[Jaxpr], Jaxpr]) -> JaxprEqn:
    """Changes the jaxprs in an equation that calls, loops or branches; any other stays."""
    if equation.primitive.name not in CALLS | LOOPS_AND_BRANCHES:
        return equation
    return replaced(equation, params={name: changed_inside(value, change) for name, value in equation.params.items()})
