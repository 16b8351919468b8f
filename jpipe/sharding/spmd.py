"""Partitions traced layers over the devices of a stage: the program that one device runs, collectives in plain sight.

A layer is traced once, on whole micro-batches and whole weights. Here its equations are carried out one by one on the
parts that a device has: each has a rule for how its operands have to lie (`jpipe.sharding.rules`), and values are
converted to that. So every collective within a stage is one of jpipe's own, among the devices of that stage alone, and
no compiler adds others: in a loop that other stages don't run, those would wait for ever. And whatever a layer does
across examples stays exact, since only where arrays lie is decided here, never what is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr
from jax.sharding import AxisType

from jpipe.sharding.control_flow import LOOPS
from jpipe.sharding.partitioner import Axes, Partitioner, Value
from jpipe.sharding.shardings import Sharding, local_struct
from jpipe.sharding.users import SAID


class LocalProgram(NamedTuple):
    """What one device runs.

    Attributes:
      program: from and to the device's parts of arrays.
      shardings: how the results lie.
    """

    program: ClosedJaxpr
    shardings: list[Sharding]


def partition_program(
    program: ClosedJaxpr,
    axes: Axes,
    shardings: Sequence[Sharding],
    wanted: Sequence[Callable[[Sharding], Sharding]],
) -> LocalProgram:
    """The program of one device.

    Args:
      program: of whole arrays.
      axes: the mesh axes besides `stage`, as arrays are split over them.
      shardings: how the arguments lie.
      wanted: for each result, how it lies by itself -> how it has to lie.
    """
    if not axes and not _mentions_axes():
        return LocalProgram(program, [()] * len(program.jaxpr.outvars))
    found: list[Sharding] = []

    def run(*arguments: Any) -> list[Any]:
        values = [Value(x, sharding) for x, sharding in zip(arguments, shardings, strict=True)]
        results = Partitioner(axes, LOOPS | SAID).run_closed(program, values)
        found[:] = [choose(value.sharding) for choose, value in zip(wanted, results, strict=True)]
        return [value.lying(sharding, axes) for value, sharding in zip(results, found, strict=True)]

    mesh = dict(jax.sharding.get_abstract_mesh().shape)
    sizes = mesh or {name: size for axis in axes for name, size in zip(axis.names, axis.sizes, strict=True)}
    pairs = zip(program.jaxpr.invars, shardings, strict=True)
    local = [local_struct(v.aval, sharding, axes) for v, sharding in pairs]
    with _on_one_device():
        return LocalProgram(jax.make_jaxpr(run, axis_env=list(sizes.items()))(*local), found)


def _mentions_axes() -> bool:
    """Whether programs were traced where mesh axes could be named, though arrays are split over none of them."""
    return any(kind != AxisType.Manual for kind in jax.sharding.get_abstract_mesh().axis_types)


def _on_one_device() -> AbstractContextManager:
    """The context of a program that is manual over all axes of the mesh at hand."""
    mesh = jax.sharding.get_abstract_mesh()
    return jax.sharding.use_abstract_mesh(mesh.update_axis_types(dict.fromkeys(mesh.axis_names, AxisType.Manual)))
