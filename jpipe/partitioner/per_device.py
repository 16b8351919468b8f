"""`jaxpr_per_device`, the entry: makes the jaxpr that one device runs from a jaxpr of whole arrays.

A function is traced once, on whole arrays. Its equations are then carried out one by one on the parts of arrays that a
device has: each has a rule for how its operands have to lie (`jpipe.partitioner.rules`), and values are converted to
that. This decides only where arrays lie, never what is computed: a sum over examples stays exact. The compiler adds no
collectives. All collectives join devices along the given axes alone, so that they may stand in a loop or a branch that
devices along other axes don't run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax.sharding import AxisType, PartitionSpec

from jpipe.jax.flat_jaxpr import flatten
from jpipe.jax.inside import with_axis_types, with_named_axes
from jpipe.jax.primitives import ClosedJaxpr, Jaxpr, shapes_of
from jpipe.jax.tracing import equations_in
from jpipe.partitioner.choice import Chooser, Wanted, along_whole_axes, cheapest_plan
from jpipe.partitioner.handlers import HANDLERS
from jpipe.partitioner.shardings import Sharding, named, part_structs
from jpipe.partitioner.way import Axes, Unsplit


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
    with jax.sharding.use_abstract_mesh(with_axis_types(here, dict.fromkeys(here.axis_names, AxisType.Manual))):
        results = [along_whole_axes(sharding, axes, plan.axes) for sharding in plan.results]
        return PerDeviceJaxpr(with_named_axes(plan.run, sizes)(*parts)[0], results, plan.unsplit)


def results_by_rules(jaxpr: ClosedJaxpr, axes: Axes, shardings: Sequence[Sharding]) -> list[Sharding]:
    """Says how the results of a jaxpr of whole arrays lie by themselves, where its arguments lie so; traces nothing."""
    return Chooser(axes, HANDLERS).results_at(flatten(jaxpr), tuple(shardings))


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
