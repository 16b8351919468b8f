"""Tracing: what can be learnt from a function's jaxpr, and how to replay one."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun
from jax.sharding import AbstractMesh


def depends_on(program: ClosedJaxpr, inputs: Collection[Any]) -> list[bool]:
    """For each output of a program, whether it depends on any of the given input variables."""
    moving = set(inputs)
    for equation in program.jaxpr.eqns:
        if any(not isinstance(v, Literal) and v in moving for v in equation.invars):
            moving.update(equation.outvars)
    return [not isinstance(v, Literal) and v in moving for v in program.jaxpr.outvars]


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
    """A program with every `jax.lax.stop_gradient` in it taken away (but for those in loops and branches)."""
    names: dict[Any, Any] = {}
    named = lambda v: v if isinstance(v, Literal) else names.get(v, v)
    equations = []
    for equation in program.jaxpr.eqns:
        inputs = list(map(named, equation.invars))
        if equation.primitive.name == "stop_gradient":
            names.update(zip(equation.outvars, inputs, strict=True))
            continue
        params = equation.params
        if equation.primitive.name == "jit":
            params = params | {"jaxpr": without_stops(params["jaxpr"])}
        equations.append(equation.replace(invars=inputs, params=params))
    outputs = list(map(named, program.jaxpr.outvars))
    return ClosedJaxpr(program.jaxpr.replace(eqns=equations, outvars=outputs), program.consts)


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
