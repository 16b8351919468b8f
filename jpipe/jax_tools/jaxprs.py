"""What can be learnt from a function's jaxpr, and how to change one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.interpreters.partial_eval import dce_jaxpr


def depends_on(program: ClosedJaxpr, inputs: Collection[Any]) -> list[bool]:
    """For each output of a program, whether it depends on any of the given input variables."""
    return _depends_on(program.jaxpr, inputs)


def _depends_on(jaxpr: Jaxpr, inputs: Collection[Any]) -> list[bool]:
    moving = set(inputs)
    moves = lambda v: not isinstance(v, Literal) and v in moving
    for equation in jaxpr.eqns:
        taken = list(map(moves, equation.invars))
        if not any(taken):
            continue
        given, called = [True] * len(equation.outvars), _called(equation)
        if called:  # some of what a function is called with may not matter
            given = _depends_on(called, [v for v, moving in zip(called.invars, taken, strict=True) if moving])
        moving.update(v for v, depends in zip(equation.outvars, given, strict=True) if depends)
    return list(map(moves, jaxpr.outvars))


CALLS = ("jit", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call", "closed_call")


def _called(equation: Any) -> Jaxpr | None:
    """The program that an equation only calls, with its own inputs."""
    if equation.primitive.name not in CALLS:
        return None
    called = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    called = called.jaxpr if isinstance(called, ClosedJaxpr) else called
    return called if len(called.invars) == len(equation.invars) else None


def uses(program: ClosedJaxpr, wanted: Sequence[bool] | None = None) -> list[bool]:
    """For each input of a program, whether one of the wanted outputs (all by default) needs it.

    Unlike `depends_on` it looks into loops.
    """
    return dce_jaxpr(program.jaxpr, wanted or [True] * len(program.jaxpr.outvars))[1]


def only_needed(program: ClosedJaxpr) -> ClosedJaxpr:
    """A program without the equations that its outputs don't need; those with side effects go too."""
    needed = {v for v in program.jaxpr.outvars if not isinstance(v, Literal)}
    equations = []
    for equation in reversed(program.jaxpr.eqns):
        if needed.intersection(equation.outvars):
            equations.append(equation)
            needed.update(v for v in equation.invars if not isinstance(v, Literal))
    effects = frozenset().union(*(equation.effects for equation in equations))
    return ClosedJaxpr(program.jaxpr.replace(eqns=equations[::-1], effects=effects), program.consts)


def without_stops(program: ClosedJaxpr) -> ClosedJaxpr:
    """A program with every `jax.lax.stop_gradient` in it taken away, in the programs inside of it too."""
    stops = lambda equation: None if equation.primitive.name == "stop_gradient" else equation
    return ClosedJaxpr(changed(program.jaxpr, stops), program.consts)


def without_roundings(program: ClosedJaxpr) -> ClosedJaxpr:
    """A program without the `reduce_precision` to full precision that `jax.checkpoint` puts on what it saves.

    Those of narrow numbers stay: a compiler may compute with wider ones in between, and forward and backward are to see
    the same. Those of others are copies that nobody needs.
    """

    def change(equation: Any) -> Any:
        if equation.primitive.name != "reduce_precision":
            return equation
        dtype = equation.outvars[0].aval.dtype
        whole = {"exponent_bits": jnp.finfo(dtype).nexp, "mantissa_bits": jnp.finfo(dtype).nmant}
        return None if dtype.itemsize >= 4 and equation.params == whole else equation

    return ClosedJaxpr(changed(program.jaxpr, change), program.consts)


def changed(jaxpr: Jaxpr, change: Callable[[Any], Any]) -> Jaxpr:
    """A program with its equations changed, in the programs inside of it too; None hands the operands through."""
    names: dict[Any, Any] = {}
    named = lambda v: v if isinstance(v, Literal) else names.get(v, v)
    equations = []
    for equation in jaxpr.eqns:
        inputs, new = list(map(named, equation.invars)), change(equation)
        if new is None:
            names.update(zip(equation.outvars, inputs, strict=True))
            continue
        params = new.params
        if new.primitive.name != "shard_map":  # there devices are seen one by one
            params = {name: _changed_inside(value, change) for name, value in params.items()}
        equations.append(new.replace(invars=inputs, params=params))
    return jaxpr.replace(eqns=equations, outvars=list(map(named, jaxpr.outvars)))


def _changed_inside(value: Any, change: Callable[[Any], Any]) -> Any:
    """`changed` of an equation's parameter: a program (of `jit`, a loop), several (branches), or neither."""
    if isinstance(value, Jaxpr):
        return changed(value, change)
    if isinstance(value, ClosedJaxpr):
        return ClosedJaxpr(changed(value.jaxpr, change), value.consts)
    if isinstance(value, tuple | list) and any(isinstance(v, ClosedJaxpr | Jaxpr) for v in value):
        found = [_changed_inside(v, change) for v in value]
        return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)
    return value


def scan_counts(equation: Any) -> tuple[int, int]:
    """(how many operands of a `scan` are constants, how many it carries), as different versions of JAX say it."""
    params = equation.params
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    constants, carried, _ = params["ft_in"]  # pytrees with None for an operand
    count = lambda tree: len(jax.tree.leaves(tree, is_leaf=lambda x: x is None))
    return count(constants), count(carried)
