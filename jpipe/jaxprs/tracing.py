"""Traces a function to its jaxpr, and runs a jaxpr as a function again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun, jaxprs_in_params
from jax.sharding import AbstractMesh

from jpipe.jaxprs.rewriting import changed
from jpipe.seam.inside import axes_of, replaced, with_named_axes
from jpipe.seam.primitives import (
    CALLS,
    LOOPS_AND_BRANCHES,
    OVER_DEVICES,
    SUMS_OVER_DEVICES,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    shapes_of,
)
from jpipe.types import PyTree, Shapes


def trace(function: Callable[..., PyTree], *arguments: PyTree) -> tuple[ClosedJaxpr, Shapes]:
    """Traces a user's function.

    A layer sees all of a micro-batch, whatever devices have it. Its reductions over a mesh axis
    (`nn.BatchNorm(axis_name="data")`) are left out, since the array is whole already.

    Where there is a mesh, there are two ways to trace, and neither serves all functions:

        function                                              in the mesh                 as if there were none
        names an axis (a constraint, a sum, `shard_map`)      its axes are found          fails: no such axis
        constrains what it reshaped, or over an axis that     fails                       nothing is constrained
          the mesh lacks (Flax, by a parameter's metadata)
        holds a program that runs as it is (a kernel)         it would keep this mesh,    it fits everywhere
                                                                and run in another
        anything else                                         same                        same

    So the first way is tried first, and the second where that fails or finds such a program; if both fail, it isn't
    the mesh's fault, and the first error tells more.

    Args:
      function: from pytrees of arrays to a pytree of arrays.
      arguments: pytrees of arrays, or of their shapes.

    Returns:
      `(jaxpr, shapes of the function's result)`; the jaxpr takes and gives the leaves.

    Raises:
      ValueError: it asks for its index along a mesh axis, which isn't known there.
    """
    ways = [nullcontext()] if jax.sharding.get_abstract_mesh().empty else [nullcontext(), no_mesh()]
    failures: list[Exception] = []
    for way in ways:
        with way:
            mesh = jax.sharding.get_abstract_mesh()
            names = [name for name in mesh.axis_names if name not in mesh.manual_axes]
            try:
                closed, shapes = with_named_axes(function, dict.fromkeys(names, 1))(*arguments)
                jaxpr = _without_axes(closed.jaxpr, names) if names else closed.jaxpr
            except Exception as error:
                failures.append(error)
                continue
        if way is ways[-1] or not _is_opaque(jaxpr):
            return ClosedJaxpr(jaxpr, closed.consts), shapes
    raise failures[0]


def _is_opaque(jaxpr: Jaxpr) -> bool:
    """Whether an equation holds jaxprs that run as they are, kernels for instance: each knows the mesh of its trace."""
    for equation in jaxpr.eqns:
        params = {name: value for name, value in equation.params.items() if name != "update_jaxpr"}  # a scatter's sum
        inside = jaxprs_in_params(params)
        if equation.primitive.name in CALLS | LOOPS_AND_BRANCHES | {"shard_map"}:
            inside = filter(_is_opaque, inside)
        if any(inside):
            return True
    return False


def _without_axes(jaxpr: Jaxpr, names: Sequence[str]) -> Jaxpr:
    """Takes out reductions over the mesh axes called `names`."""

    def without(equation: JaxprEqn) -> JaxprEqn | None:
        if equation.primitive.name not in SUMS_OVER_DEVICES | OVER_DEVICES:
            return equation
        axes = axes_of(equation)
        named = [a for a in axes if a in names]
        if not named:
            return equation
        if equation.primitive.name in OVER_DEVICES or equation.params.get("axis_index_groups"):
            raise ValueError(
                f"{equation.primitive.name} over the mesh axis {named[0]!r}: a layer sees whole arrays, so that only "
                "sums, means and the like over a whole axis have a meaning there; use jax.shard_map in the layer"
            )
        rest = tuple(a for a in axes if a not in names)  # of `jax.vmap`
        return replaced(equation, params=equation.params | {"axes": rest}) if rest else None

    return changed(jaxpr, without)


def replay(closed: ClosedJaxpr, result: PyTree) -> Callable[..., PyTree]:
    """Makes the function again that a jaxpr was traced from.

    Args:
      closed: the jaxpr, which takes and gives leaves.
      result: a pytree of the structure that the function returns.

    Returns:
      A function of pytrees. It returns arrays alone: a jaxpr itself hands its literals back as Python scalars.
    """
    structure, run = jax.tree.structure(result), jaxpr_as_fun(closed)

    def call(*arguments: PyTree) -> PyTree:
        pairs = zip(run(*jax.tree.leaves(arguments)), shapes_of(closed.jaxpr.outvars), strict=True)
        leaves = [leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf, aval.dtype) for leaf, aval in pairs]
        return jax.tree.unflatten(structure, leaves)

    return call


def compiled(function: Callable[..., PyTree], *arguments: PyTree) -> Callable[..., PyTree]:
    """Compiles a function for arguments; what it gives runs for real, also where its caller is being traced.

    `jax.ensure_compile_time_eval` is around calls alone. Around a trace it would have JAX compute what follows from no
    argument at once, operation by operation.
    """
    with jax.disable_jit(False):
        program = jax.jit(function).lower(*arguments).compile()

    def call(*arguments: PyTree) -> PyTree:
        with jax.disable_jit(False), jax.ensure_compile_time_eval():
            return program(*arguments)

    return call


def no_mesh() -> AbstractContextManager[object]:
    """Sets a context without a mesh."""
    return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))
