"""`per_device`, the entry: makes the function that one device runs from a function of whole arrays.

A function is traced once, on whole arrays. Its equations are then carried out one by one on the parts of arrays that a
device has: each has a rule for how its operands have to lie (`jpipe.partitioner.rules`), and values are converted to
that. This decides only where arrays lie, never what is computed: a sum over examples stays exact. The compiler adds no
collectives. All collectives join devices along the given axes alone, so that they may stand in a loop or a branch that
devices along other axes don't run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from jpipe.jax.flat_jaxpr import flatten
from jpipe.jax.inside import with_axis_types, with_named_axes
from jpipe.jax.primitives import ClosedJaxpr, Jaxpr, shapes_of
from jpipe.jax.tracing import equations_in, replay
from jpipe.partitioner.choice import Chooser, Wanted, along_whole_axes, always, cheapest_plan
from jpipe.partitioner.handlers import HANDLERS
from jpipe.partitioner.shardings import Axis, Sharding, is_possible, named, of_spec, part_structs, to_spec, whole_shape
from jpipe.partitioner.way import Axes, Unsplit
from jpipe.types import PyTree

Specs = PyTree
"""PartitionSpecs, as `jax.shard_map` takes them: a pytree of them, or one for a whole subtree."""


def per_device(
    function: Callable[..., PyTree],
    mesh: Mesh | AbstractMesh,
    in_specs: Specs,
    out_specs: Specs,
    *,
    data_axes: Sequence[str] = (),
) -> Callable[..., PyTree]:
    """Makes the function of one device's parts that does as `function` does on whole arrays, for `jax.shard_map`.

        specs = {"in_specs": (P("data"), P(None, "model")), "out_specs": P("data")}
        on_parts = per_device(lambda x, w: jax.nn.softmax(x @ w), mesh, **specs)
        y = jax.jit(jax.shard_map(on_parts, mesh=mesh, check_vma=False, **specs))(x, w)  # as softmax(x @ w)

    Gradients are taken inside of `function`. Arrays that it closes over are taken as whole.

    Args:
      function: from pytrees of whole arrays to a pytree of whole arrays.
      mesh: the mesh of the `jax.shard_map`, which has to be manual over all of its axes of several devices.
      in_specs: how the arguments are split.
      out_specs: how the results are to be split.
      data_axes: the axes that examples are split over. Along them sums may be rounded to a narrower type before they
        are added up, random bits are split at once, and sharding constraints inside of `function` change nothing.

    Raises:
      ValueError: a spec names an axis that the mesh lacks. When called, a spec of a result that doesn't divide it, or
        a call outside of such a `jax.shard_map`.
    """
    for name in sorted({*named(jax.tree.leaves((in_specs, out_specs))), *data_axes} - {*mesh.axis_names}):
        raise ValueError(f"the mesh axis {name!r} is named, but the mesh has {dict(mesh.shape)}; name one of these")
    axes = tuple(Axis((name,), (size,), name in data_axes) for name, size in mesh.shape.items() if size > 1)

    def on_parts(*parts: PyTree) -> PyTree:
        """Takes a device's parts of the arguments, and gives its parts of the results."""
        missing = {axis.names[0] for axis in axes} - {*jax.sharding.get_abstract_mesh().manual_axes}
        if missing:
            fault = f"a function of per_device is called where the mesh axes {sorted(missing)} aren't manual"
            raise ValueError(f"{fault}; call it inside of jax.shard_map over the mesh {dict(mesh.shape)}")
        leaves, shardings = jax.tree.leaves(parts), _of_each(in_specs, parts, axes)
        shapes = [whole_shape(x.shape, s, axes) for x, s in zip(leaves, shardings, strict=True)]
        whole = [jax.ShapeDtypeStruct(shape, x.dtype) for shape, x in zip(shapes, leaves, strict=True)]
        with _all_of_type(mesh.abstract_mesh, AxisType.Auto):
            arguments = jax.tree.unflatten(jax.tree.structure(parts), whole)
            jaxpr, results = jax.make_jaxpr(function, return_shape=True)(*arguments)
        wanted = _of_each(out_specs, results, axes)
        for (path, leaf), sharding in zip(jax.tree_util.tree_leaves_with_path(results), wanted, strict=True):
            if not is_possible(leaf.shape, sharding, axes):
                spec, result = to_spec(sharding, axes, leaf.ndim), f"result{jax.tree_util.keystr(path)}"
                raise ValueError(f"out_specs split {result} of shape {leaf.shape} by {spec}, which has to divide it")
        program = jaxpr_per_device(jaxpr, axes, shardings, list(map(always, wanted)))
        return replay(program.jaxpr, results)(*parts)

    return on_parts


def _of_each(specs: Specs, tree: PyTree, axes: Axes) -> list[Sharding]:
    """Lists the shardings of a pytree's leaves."""
    return [of_spec(spec, axes) for spec in jax.tree.leaves(jax.tree.broadcast(specs, tree))]


class PerDeviceJaxpr(NamedTuple):
    """The jaxpr that one device runs.

    Attributes:
      jaxpr: from the device's parts of the arguments to its parts of the results.
      shardings: for each result how it lies.
      unsplit: the equations that every device carries out whole though an operand was split.
    """

    jaxpr: ClosedJaxpr
    shardings: list[Sharding]
    unsplit: list[Unsplit]


def jaxpr_per_device(
    jaxpr: ClosedJaxpr, axes: Axes, shardings: Sequence[Sharding], wanted: Sequence[Wanted]
) -> PerDeviceJaxpr:
    """Makes the jaxpr that one device runs from a jaxpr of whole arrays.

    Args:
      jaxpr: of whole arrays.
      axes: the mesh axes that arrays may be split over.
      shardings: for each argument how it lies.
      wanted: for each result a function: how it lies by itself -> how it has to lie.
    """
    here = jax.sharding.get_abstract_mesh()
    # Where mesh axes could be named in tracing, a jaxpr may say so though arrays are split over none.
    if not axes and all(axis_type == AxisType.Manual for axis_type in here.axis_types):
        return PerDeviceJaxpr(jaxpr, [()] * len(jaxpr.jaxpr.outvars), [])
    plan = cheapest_plan(axes, HANDLERS, flatten(jaxpr), shardings, wanted)
    sizes = dict(here.shape) or {n: size for axis in axes for n, size in zip(axis.names, axis.sizes, strict=True)}
    parts = part_structs(shapes_of(jaxpr.jaxpr.invars), shardings, axes)
    with _all_of_type(here, AxisType.Manual):
        results = [along_whole_axes(sharding, axes, plan.axes) for sharding in plan.results]
        return PerDeviceJaxpr(with_named_axes(plan.run, sizes)(*parts)[0], results, plan.unsplit)


def results_by_rules(jaxpr: ClosedJaxpr, axes: Axes, shardings: Sequence[Sharding]) -> list[Sharding]:
    """Says how the results of a jaxpr of whole arrays lie by themselves, where its arguments lie so; traces nothing."""
    return Chooser(axes, HANDLERS).results_at(flatten(jaxpr), tuple(shardings))


def _all_of_type(mesh: AbstractMesh, axis_type: AxisType) -> AbstractContextManager:
    """Sets a mesh whose axes are all Manual, as in a program of one device, or all of another type."""
    return jax.sharding.use_abstract_mesh(with_axis_types(mesh, dict.fromkeys(mesh.axis_names, axis_type)))


def named_axes(jaxpr: ClosedJaxpr | Jaxpr) -> frozenset[str]:
    """Collects the mesh axes that constraints and the specs of `shard_map`s name, in the jaxprs inside of it too."""
    names: set[str] = set()
    for equation in equations_in(jaxpr.eqns):
        params, name = equation.params, equation.primitive.name
        specs = (*params["in_specs"], *params["out_specs"]) if name == "shard_map" else ()
        if name == "sharding_constraint":
            specs = (getattr(params["sharding"], "spec", None) or PartitionSpec(),)
        names.update(named(specs))
    return frozenset(names)
