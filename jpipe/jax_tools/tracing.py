"""Tracing: what can be learnt from a function's jaxpr, and how to replay one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun
from jax.sharding import AbstractMesh, AxisType

from jpipe.jax_tools.jaxprs import CALLS, changed


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


_CALLS_AND_LOOPS = (*CALLS, "pjit", "core_call", "scan", "while", "cond", "shard_map")


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

    return changed(jaxpr, without)


_REDUCTIONS = ("psum", "pmax", "pmin", "psum_invariant", "pvary", "pbroadcast")  # the last two change nothing
_OVER_AXES = ("axis_index", "all_gather", "all_to_all", "ppermute", "reduce_scatter")


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


def no_mesh() -> Any:
    """A context in which there is no mesh."""
    return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))
