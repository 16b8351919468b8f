"""Compares what is carried out on parts of arrays with what is computed on whole ones, in float64.

One program carries out a function and its gradients under several shardings of its arguments.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType, Mesh, PartitionSpec

from jpipe.jax.inside import with_axis_types
from jpipe.jax.tracing import replay
from jpipe.partitioner.choice import always
from jpipe.partitioner.conversions import convert
from jpipe.partitioner.per_device import jaxpr_per_device
from jpipe.partitioner.shardings import (
    PARTIAL,
    REPLICATED,
    Axis,
    Shard,
    Sharding,
    is_possible,
    of_spec,
    replicated,
    summed,
)

AXES = (Axis(("data", "fsdp"), (1, 2), is_data=True), Axis(("model",), (2,)))
NAMES = ("stage", "data", "fsdp", "model")

Case = tuple[Callable, Sequence[np.ndarray], bool]
"""A function, its arguments, and whether it can be differentiated."""


def case(function: Callable, *arguments: np.ndarray, gradients: bool = True) -> Case:
    """A case for `compare`."""
    return function, arguments, gradients


def array(*shape: int, seed: int = 0) -> np.ndarray:
    """Normally distributed numbers."""
    return np.random.default_rng((seed, *shape)).standard_normal(shape)


def integers(limit: int, *shape: int) -> np.ndarray:
    """Integers below a limit."""
    return np.random.default_rng((limit, *shape)).integers(0, limit, shape).astype(np.int32)


def possible(shape: tuple[int, ...]) -> list[Sharding]:
    """The shardings of an array: every one with a run of elements a device, some with several, and partial ones."""
    shards = [REPLICATED, *[Shard(d) for d in range(len(shape))]]
    found = [(a, b) for a, b in itertools.product(shards, shards)]
    found += [(Shard(0, 1), Shard(0, 2)), (Shard(0, 2), Shard(0, 1)), (Shard(1, 2), REPLICATED)][
        : 3 if len(shape) > 1 else 0
    ]
    found += [(PARTIAL, REPLICATED), (REPLICATED, PARTIAL), *[(PARTIAL, Shard(d)) for d in range(len(shape))]]
    return [s for s in found if is_possible(shape, s, AXES)]


def chosen(arguments: Sequence[Any], count: int) -> list[tuple[Sharding, ...]]:
    """A few of the ways in which all arguments may lie."""
    ways = list(itertools.product(*[possible(np.shape(a)) for a in arguments]))
    rng = np.random.default_rng(len(ways))
    return [ways[i] for i in rng.permutation(len(ways))[:count]]


def with_gradients(function: Callable, arguments: Sequence[Any], gradients: bool) -> Callable:
    """(results, gradients of their sum, weighted unequally, by the floating-point arguments) of a function."""
    floats = [i for i, a in enumerate(arguments) if a.dtype == np.float64]

    def total(*arguments: Any) -> Any:
        leaves = [y for y in jax.tree.leaves(function(*arguments)) if y.dtype == jnp.float64]
        return sum(jnp.sum(y * jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)) for y in leaves)

    by_arguments = jax.grad(total, floats) if gradients else lambda *arguments: ()
    return lambda *arguments: (function(*arguments), by_arguments(*arguments))


def traced(known: Case) -> Any:
    """The jaxpr of a case's function and gradients."""
    function, arguments, gradients = known
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        return jax.make_jaxpr(with_gradients(function, arguments, gradients))(*arguments)


def run_on_parts(make_mesh: Callable, cases: Sequence[tuple[Any, Sequence[Sharding]]], arguments: Sequence[Any]) -> Any:
    """The whole results of jaxprs that are carried out on parts, each with one way in which its arguments lie."""
    whole = replicated(AXES)
    programs = [jaxpr_per_device(jaxpr, AXES, way, [summed] * len(jaxpr.jaxpr.outvars)) for jaxpr, way in cases]

    def run(*arguments: Any) -> Any:
        found = []
        for program, (_, way) in zip(programs, cases, strict=True):
            parts = [convert(jnp.asarray(a), AXES, whole, s) for a, s in zip(arguments, way, strict=True)]
            results = jaxpr_as_fun(program.jaxpr)(*parts)
            found.append([convert(x, AXES, s, whole) for x, s in zip(results, program.shardings, strict=True)])
        return found

    everywhere, mesh = PartitionSpec(), make_mesh((1, 1, 2, 2), NAMES)
    on_all = jax.shard_map(run, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False)
    return jax.jit(on_all)(*arguments)


def compare(make_mesh: Callable, known: Case, count: int = 3, with_gradients_too: int = 2) -> None:
    """Compares a function under several shardings of its arguments, and its gradients under the first of them."""
    function, arguments, gradients = known
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        ways, both, alone = chosen(arguments, count), traced(known), traced((function, arguments, False))
        expected = jax.tree.leaves(jax.jit(with_gradients(function, arguments, gradients))(*arguments))
        cases = [(both if i < with_gradients_too else alone, way) for i, way in enumerate(ways)]
        for (jaxpr, way), found in zip(cases, run_on_parts(make_mesh, cases, arguments), strict=True):
            for i, (a, b) in enumerate(zip(found, expected[: len(jaxpr.jaxpr.outvars)], strict=True)):
                np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12, err_msg=f"result {i} under {way}")


def whole_shape(part: Sequence[int], sharding: Sharding, axes: Sequence[Axis]) -> tuple[int, ...]:
    """The whole shape of an array from that of a device's part: the inverse of `part_shape`."""
    whole = list(part)
    for along, axis in zip(sharding, axes, strict=True):
        if isinstance(along, Shard):
            whole[along.dim] *= axis.size
    return tuple(whole)


def on_mesh(function: Callable, mesh: Mesh, in_specs: Any, out_specs: Any, data_axes: Sequence[str] = ()) -> Callable:
    """A function of whole arrays, carried out on parts by the devices of a mesh; specs as of `jax.shard_map`."""
    axes = tuple(Axis((name,), (size,), name in data_axes) for name, size in mesh.shape.items() if size > 1)
    auto = with_axis_types(mesh.abstract_mesh, dict.fromkeys(mesh.axis_names, AxisType.Auto))

    def of_each(specs: Any, tree: Any) -> list[Sharding]:
        return [of_spec(spec, axes) for spec in jax.tree.leaves(jax.tree.broadcast(specs, tree))]

    def on_parts(*parts: Any) -> Any:
        (leaves, structure), shardings = jax.tree.flatten(parts), of_each(in_specs, parts)
        pairs = zip(leaves, shardings, strict=True)
        whole = [jax.ShapeDtypeStruct(whole_shape(x.shape, s, axes), x.dtype) for x, s in pairs]
        with jax.sharding.use_abstract_mesh(auto):
            jaxpr, results = jax.make_jaxpr(function, return_shape=True)(*jax.tree.unflatten(structure, whole))
        wanted = list(map(always, of_each(out_specs, results)))
        return replay(jaxpr_per_device(jaxpr, axes, shardings, wanted).jaxpr, results)(*parts)

    return jax.jit(jax.shard_map(on_parts, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))
