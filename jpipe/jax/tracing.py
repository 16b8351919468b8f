"""Rewrites jaxprs, traces functions on shapes, with random keys as plain data, and runs small jaxprs on this host.

A jaxpr is a function as JAX traced it: a list of equations, each with a primitive, operands, results and parameters.
The parameters of some equations hold jaxprs themselves: calls (`jit`), loops, branches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun, jaxprs_in_params
from jax.sharding import AbstractMesh
from numpy.typing import ArrayLike

from jpipe.jax import inside, primitives
from jpipe.jax.flat_jaxpr import flatten
from jpipe.jax.inside import axes_of, called_by, carry_out, needed_part, replaced, scan_counts, with_named_axes
from jpipe.jax.primitives import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, shapes_of
from jpipe.types import PyTree, Shapes

Change = Callable[[JaxprEqn], Sequence[JaxprEqn]]
"""From an equation to those in its place; none to drop it, so that its operands stand for its results, if any."""
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
    flat = flatten(closed, calls=primitives.CALLS | {"shard_map"}, selects=True)
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


def without(closed: ClosedJaxpr, unwanted: Callable[[JaxprEqn], bool]) -> ClosedJaxpr:
    """Takes out equations that give their operands back, in the jaxprs inside too."""
    change = lambda equation: () if unwanted(equation) else (equation,)
    return ClosedJaxpr(changed(closed.jaxpr, change), closed.consts)


def without_prints(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Takes out equations that give nothing (`jax.debug.print`, `jax.debug.callback`), in the jaxprs inside too.

    Dead code elimination keeps those, and with them whatever they show.
    """

    change = lambda equation: (replaced(equation, effects=frozenset()),) if equation.outvars else ()
    return ClosedJaxpr(replaced(changed(closed.jaxpr, change), effects=frozenset()), closed.consts)


def unrounded(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Takes out each `reduce_precision` to full precision, which `jax.checkpoint` puts on values that it saves.

    Those of narrow numbers stay: a compiler may compute with wider ones in between, and forward and backward are to see
    the same. Those of others are copies that nobody needs.
    """

    def is_copy(equation: JaxprEqn) -> bool:
        if equation.primitive.name != "reduce_precision":
            return False
        dtype = shapes_of(equation.outvars)[0].dtype
        full = {"exponent_bits": jnp.finfo(dtype).nexp, "mantissa_bits": jnp.finfo(dtype).nmant}
        return dtype.itemsize >= 4 and equation.params == full

    return without(closed, is_copy)


def with_keys_by_index(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Has slices of random keys, typed or raw, begin at scalars: `jax.random.split(key, n)[i]` is alike for all `i`."""

    def change(equation: JaxprEqn) -> Sequence[JaxprEqn]:
        if equation.primitive.name != "slice" or set(equation.params["strides"] or ()) - {1}:
            return (equation,)
        (keys,), (result,) = shapes_of(equation.invars), shapes_of(equation.outvars)
        if keys.dtype != np.uint32 and not jnp.issubdtype(keys.dtype, jax.dtypes.prng_key):
            return (equation,)
        starts = list(map(np.int32, equation.params["start_indices"]))
        return inside.in_place_of(equation, lambda x: lax.dynamic_slice(x, starts, result.shape))

    return ClosedJaxpr(changed(closed.jaxpr, change), closed.consts)


def changed(jaxpr: Jaxpr, change: Change) -> Jaxpr:
    """Makes `change` to the equations of a jaxpr, and to those of the jaxprs inside of it.

    What is in a `shard_map` stays: there an array is one device's part.
    """
    standing_for: dict[Var, Var | Literal] = {}  # by a dropped result, the operand in its place

    def resolve(v: Var | Literal) -> Var | Literal:
        return v if isinstance(v, Literal) else standing_for.get(v, v)

    equations: list[JaxprEqn] = []
    for equation in jaxpr.eqns:
        new = change(equation)
        if not new and equation.outvars:
            standing_for.update(zip(equation.outvars, map(resolve, equation.invars), strict=True))
        for one in new:
            params = one.params
            if one.primitive.name != "shard_map":
                params = {name: _changed_inside(value, change) for name, value in params.items()}
            equations.append(replaced(one, invars=list(map(resolve, one.invars)), params=params))
    return replaced(jaxpr, eqns=equations, outvars=list(map(resolve, jaxpr.outvars)))


def _changed_inside(value: PyTree, change: Change) -> PyTree:
    """Changes an equation's parameter if it is a jaxpr (of `jit`, a loop) or holds several (branches)."""

    def changed_one(part: object) -> object:
        if isinstance(part, ClosedJaxpr):
            return ClosedJaxpr(changed(part.jaxpr, change), part.consts)
        return changed(part, change) if isinstance(part, Jaxpr) else part

    if not isinstance(value, ClosedJaxpr | Jaxpr | tuple | list):
        return value
    return jax.tree.map(changed_one, value, is_leaf=lambda part: isinstance(part, ClosedJaxpr | Jaxpr))


# --- functions as traced ----------------------------------------------------------------------------------------------


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
    calls = primitives.CALLS | primitives.LOOPS_AND_BRANCHES | {"shard_map"}

    def holds_one(equation: JaxprEqn) -> bool:
        params = {name: value for name, value in equation.params.items() if name != "update_jaxpr"}  # a scatter's sum
        inside = jaxprs_in_params(params)
        return any(map(_is_opaque, inside) if equation.primitive.name in calls else inside)

    return any(map(holds_one, jaxpr.eqns))


def _without_axes(jaxpr: Jaxpr, names: Sequence[str]) -> Jaxpr:
    """Takes out reductions over the mesh axes called `names`."""

    def change(equation: JaxprEqn) -> Sequence[JaxprEqn]:
        if equation.primitive.name not in primitives.SUMS_OVER_DEVICES | primitives.OVER_DEVICES:
            return (equation,)
        axes = axes_of(equation)
        named = [a for a in axes if a in names]
        if not named:
            return (equation,)
        if equation.primitive.name in primitives.OVER_DEVICES or equation.params.get("axis_index_groups"):
            raise ValueError(
                f"{equation.primitive.name} over the mesh axis {named[0]!r}: a layer sees whole arrays, so that only "
                "sums, means and the like over a whole axis have a meaning there; use jax.shard_map in the layer"
            )
        rest = tuple(a for a in axes if a not in names)  # of `jax.vmap`
        return (replaced(equation, params=equation.params | {"axes": rest}),) if rest else ()

    return changed(jaxpr, change)


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


def replayed(closed: ClosedJaxpr, *arguments: PyTree) -> list[jax.Array]:
    """Runs a jaxpr, and returns its results in a flat list."""
    return replay(closed, [0] * len(closed.out_avals))(*arguments)


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


# --- small jaxprs, run on this host -----------------------------------------------------------------------------------


@contextmanager
def on_this_host() -> Iterator[None]:
    """Has operations run at once on one device of this process, of the CPU if there is one."""
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # there are accelerators only
        device = jax.local_devices()[0]
    with no_mesh(), jax.ensure_compile_time_eval(), jax.transfer_guard("allow"), jax.default_device(device):
        yield


def interpret(closed: ClosedJaxpr, *arguments: ArrayLike) -> list[np.ndarray]:
    """Computes the outputs of a jaxpr on this host, operation by operation, also where the caller is being traced.

    Args:
      closed: the jaxpr.
      arguments: its inputs, arrays or numbers.
    """
    flat = flatten(closed)
    values = flat.constants | dict(zip(flat.arguments, arguments, strict=True))
    read = lambda numbers: [np.asarray(values[i], flat.avals[i].dtype) for i in numbers]
    with on_this_host():
        for equation, _, reads, makes in flat.equations:
            values.update(zip(makes, carry_out(equation, read(reads)), strict=True))
        return read(flat.results)
