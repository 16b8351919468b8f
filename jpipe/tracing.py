"""Tracing: what can be learnt from a function's jaxpr, and how to replay one."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun
from jax.sharding import AbstractMesh


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


_CALLS = ("jit", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call", "closed_call")


def _called(equation: Any) -> Jaxpr | None:
    """The program that an equation only calls, with its own inputs."""
    if equation.primitive.name not in _CALLS:
        return None
    called = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    called = called.jaxpr if isinstance(called, ClosedJaxpr) else called
    return called if len(called.invars) == len(equation.invars) else None


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
    return ClosedJaxpr(_without_stops(program.jaxpr), program.consts)


def _without_stops(jaxpr: Jaxpr) -> Jaxpr:
    names: dict[Any, Any] = {}
    named = lambda v: v if isinstance(v, Literal) else names.get(v, v)
    equations = []
    for equation in jaxpr.eqns:
        inputs = list(map(named, equation.invars))
        if equation.primitive.name == "stop_gradient":
            names.update(zip(equation.outvars, inputs, strict=True))
            continue
        params = {name: _stops_inside(value) for name, value in equation.params.items()}
        equations.append(equation.replace(invars=inputs, params=params))
    return jaxpr.replace(eqns=equations, outvars=list(map(named, jaxpr.outvars)))


def _stops_inside(value: Any) -> Any:
    """An equation's parameter without stops: a program (of `jit`, `checkpoint`, a loop), several (branches), or not."""
    if isinstance(value, Jaxpr):
        return _without_stops(value)
    if isinstance(value, ClosedJaxpr):
        return without_stops(value)
    if isinstance(value, tuple | list):
        return (
            type(value)(map(_stops_inside, value)) if any(isinstance(v, ClosedJaxpr | Jaxpr) for v in value) else value
        )
    return value


def key_shape() -> jax.ShapeDtypeStruct:
    """The type of a random key."""
    return jax.eval_shape(lambda: jax.random.key(0))


def no_mesh() -> Any:
    """A context in which there is no mesh."""
    return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))


def without_mesh(function: Callable, *arguments: Any) -> Any:
    """`function(*arguments)`, traced as if there were no mesh.

    For initialisation: there Flax splits what it makes over the mesh axes in its metadata, whether or not they exist.
    """
    shapes = jax.eval_shape(lambda x: x, arguments)
    with no_mesh():
        program, result = jax.make_jaxpr(function, return_shape=True)(*shapes)
    return jax.tree.unflatten(jax.tree.structure(result), jaxpr_as_fun(program)(*jax.tree.leaves(arguments)))
