"""Tracing: what can be learnt from a function's jaxpr, and how to replay one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import AbstractMesh, AxisType


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
    stops = lambda equation: None if equation.primitive.name == "stop_gradient" else equation
    return ClosedJaxpr(_changed(program.jaxpr, stops), program.consts)


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

    return ClosedJaxpr(_changed(program.jaxpr, change), program.consts)


def _changed(jaxpr: Jaxpr, change: Callable[[Any], Any]) -> Jaxpr:
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
    """`_changed` of an equation's parameter: a program (of `jit`, a loop), several (branches), or neither."""
    if isinstance(value, Jaxpr):
        return _changed(value, change)
    if isinstance(value, ClosedJaxpr):
        return ClosedJaxpr(_changed(value.jaxpr, change), value.consts)
    if isinstance(value, tuple | list) and any(isinstance(v, ClosedJaxpr | Jaxpr) for v in value):
        found = [_changed_inside(v, change) for v in value]
        return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)
    return value


def trace(function: Callable, *shapes: Any) -> tuple[ClosedJaxpr, Any]:
    """(the program of a user's function, the shapes of its results).

    What the function reduces over a mesh axis (`nn.BatchNorm(axis_name="data")`) is whole already where it is traced: a
    layer sees all of a micro-batch, whatever devices have it. So such reductions are left out.

    What can't be traced where there is a mesh, or holds programs that would remember it, is traced as if there were
    none: Flax constrains parameters to axes in their metadata that the mesh may lack, and some modules reshaped ones.

    Raises:
      ValueError: it asks for its index along a mesh axis, which isn't known there.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return _trace_on_mesh(function, *shapes)
    try:
        found = _trace_on_mesh(function, *shapes)
        if not _is_opaque(found[0].jaxpr):
            return found
    except Exception:
        try:
            with no_mesh():
                return _trace_on_mesh(function, *shapes)
        except Exception:  # not the mesh's fault: the first error says what is
            pass
        raise
    with no_mesh():
        return _trace_on_mesh(function, *shapes)


_CALLS_AND_LOOPS = (*_CALLS, "pjit", "core_call", "scan", "while", "cond", "shard_map")


def _is_opaque(jaxpr: Jaxpr) -> bool:
    """Whether an equation holds programs that run as they are, of which each knows the mesh that it was traced on.

    Kernels are among them.
    """
    is_program = lambda x: isinstance(x, ClosedJaxpr | Jaxpr)
    for equation in jaxpr.eqns:
        params = [value for name, value in equation.params.items() if name != "update_jaxpr"]  # of a scatter: a sum
        values = jax.tree.leaves(params, is_leaf=is_program)
        programs = [p.jaxpr if isinstance(p, ClosedJaxpr) else p for p in values if is_program(p)]
        if equation.primitive.name in _CALLS_AND_LOOPS:
            if any(map(_is_opaque, programs)):
                return True
        elif equation.primitive.name == "pallas_call" or any(isinstance(p, ClosedJaxpr) for p in values):
            return True
    return False


def _trace_on_mesh(function: Callable, *shapes: Any) -> tuple[ClosedJaxpr, Any]:
    """`trace` under the mesh at hand."""
    mesh = jax.sharding.get_abstract_mesh()
    names = [n for n, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind != AxisType.Manual]
    program, result = jax.make_jaxpr(function, axis_env=[(name, 1) for name in names], return_shape=True)(*shapes)
    if not names:
        return program, result

    return ClosedJaxpr(_over_all(program.jaxpr, names), program.consts), result


def _over_all(jaxpr: Jaxpr, names: Sequence[str]) -> Jaxpr:
    """A program without the mesh axes that it reduces over."""

    def without(equation: Any) -> Any:
        axes = equation.params.get("axes", equation.params.get("axis_name", ()))
        axes = axes if isinstance(axes, tuple) else (axes,)
        named = [a for a in axes if a in names]
        if not named or equation.primitive.name not in (*_REDUCTIONS, *_OVER_AXES):
            return equation
        if equation.primitive.name in _OVER_AXES or equation.params.get("axis_index_groups"):
            raise ValueError(
                f"{equation.primitive.name} over the mesh axis {named[0]!r}: a layer sees the whole micro-batch and "
                "all of its weights, so that only sums, means and the like over a whole axis have a meaning there; for "
                "a program of single devices, use jax.shard_map in the layer"
            )
        rest = tuple(a for a in axes if a not in names)  # of `jax.vmap`
        return equation.replace(params=equation.params | {"axes": rest}) if rest else None

    return _changed(jaxpr, without)


_REDUCTIONS = ("psum", "pmax", "pmin", "psum_invariant", "pvary", "pbroadcast")  # the last two change nothing
_OVER_AXES = ("axis_index", "all_gather", "all_to_all", "ppermute", "reduce_scatter")


def scan_counts(equation: Any) -> tuple[int, int]:
    """(how many operands of a `scan` are constants, how many it carries), as different versions of JAX say it."""
    params = equation.params
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    constants, carried, _ = params["ft_in"]  # pytrees with None for an operand
    count = lambda tree: len(jax.tree.leaves(tree, is_leaf=lambda x: x is None))
    return count(constants), count(carried)


def uses(program: ClosedJaxpr, wanted: Sequence[bool] | None = None) -> list[bool]:
    """For each input of a program, whether one of the wanted outputs (all by default) needs it.

    Unlike `depends_on` it looks into loops.
    """
    return dce_jaxpr(program.jaxpr, wanted or [True] * len(program.jaxpr.outvars))[1]


def replay(program: ClosedJaxpr, result: Any) -> Callable[..., Any]:
    """A program as a function of pytrees.

    Args:
      program: what `jax.make_jaxpr` made.
      result: what the function returns, or its shapes.

    Returns:
      The function, which returns arrays alone: a program hands its literals back as Python scalars.
    """
    structure, run = jax.tree.structure(result), jaxpr_as_fun(program)

    def call(*arguments: Any) -> Any:
        found = zip(run(*jax.tree.leaves(arguments)), program.out_avals, strict=True)
        return jax.tree.unflatten(structure, [_as_array(value, aval) for value, aval in found])

    return call


def _as_array(value: Any, aval: Any) -> jax.Array:
    return value if isinstance(value, jax.Array) else jnp.asarray(value, aval.dtype)


def key_shape(key: Any = None) -> jax.ShapeDtypeStruct:
    """The type of a random key, or of JAX's default implementation's."""
    return jax.eval_shape(lambda: jax.random.key(0)) if key is None else jax.ShapeDtypeStruct(key.shape, key.dtype)


def example_key(kind: jax.ShapeDtypeStruct) -> jax.Array:
    """A key of a type, always the same."""
    found: list[Any] = []  # JAX tells the implementation of keys alone, not of their types
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), kind)
    return jax.random.key(0, impl=found[0])


def no_mesh() -> Any:
    """A context in which there is no mesh."""
    return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))
