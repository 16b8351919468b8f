"""Partitions a traced layer over the devices of a stage: what one device runs, collectives in plain sight.

A layer is traced once, on whole micro-batches and whole weights. Here its equations are carried out one by one on the
parts of arrays that a device has: each has a rule for how its operands have to lie (`jpipe.partitioner.rules`), and
values are converted to that. So every collective within a stage is one of jpipe's own, among the devices of that stage
alone, and no compiler adds others: in a loop that other stages don't run, those would wait for ever. And whatever a
layer does across examples stays exact, since only where arrays lie is decided here, never what is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import jax
from jax.sharding import AxisType

from jpipe.partitioner.control_flow import CONTROL_FLOW
from jpipe.partitioner.equations import Axes, Partitioner, Value
from jpipe.partitioner.shardings import Sharding, local_struct
from jpipe.partitioner.user_shardings import USER_SHARDINGS
from jpipe.seam.inside import with_axis_types, with_named_axes
from jpipe.seam.jaxpr_types import ClosedJaxpr


class LocalJaxpr(NamedTuple):
    """What one device runs.

    Attributes:
      jaxpr: from the device's parts of the arguments to its parts of the results.
      shardings: for each result how it lies.
    """

    jaxpr: ClosedJaxpr
    shardings: list[Sharding]


def partition_jaxpr(
    jaxpr: ClosedJaxpr,
    axes: Axes,
    shardings: Sequence[Sharding],
    wanted: Sequence[Callable[[Sharding], Sharding]],
) -> LocalJaxpr:
    """What one device runs of a jaxpr of whole arrays.

    Args:
      jaxpr: of whole arrays.
      axes: the mesh axes besides `stage`, as arrays are split over them.
      shardings: for each argument how it lies.
      wanted: for each result a function: how it lies by itself -> how it has to lie.
    """
    if not axes and not _mentions_axes():
        return LocalJaxpr(jaxpr, [()] * len(jaxpr.jaxpr.outvars))
    found: list[Sharding] = []

    def run(*parts: jax.Array) -> list[jax.Array]:
        values = [Value(part, sharding) for part, sharding in zip(parts, shardings, strict=True)]
        results = Partitioner(axes, CONTROL_FLOW | USER_SHARDINGS).run(jaxpr, values)
        found[:] = [choose(value.sharding) for choose, value in zip(wanted, results, strict=True)]
        return [value.part(sharding, axes) for value, sharding in zip(results, found, strict=True)]

    mesh = dict(jax.sharding.get_abstract_mesh().shape)
    sizes = mesh or {name: size for axis in axes for name, size in zip(axis.names, axis.sizes, strict=True)}
    pairs = zip(jaxpr.jaxpr.invars, shardings, strict=True)
    local = [local_struct(v.aval, sharding, axes) for v, sharding in pairs]
    with _all_manual():
        return LocalJaxpr(with_named_axes(run, sizes)(*local)[0], found)


def _mentions_axes() -> bool:
    """Whether jaxprs were traced where mesh axes could be named, though arrays are split over none of them."""
    return any(axis_type != AxisType.Manual for axis_type in jax.sharding.get_abstract_mesh().axis_types)


def _all_manual() -> AbstractContextManager:
    """The context of a program of one device: the mesh at hand, manual over all axes."""
    mesh = jax.sharding.get_abstract_mesh()
    return jax.sharding.use_abstract_mesh(with_axis_types(mesh, dict.fromkeys(mesh.axis_names, AxisType.Manual)))
