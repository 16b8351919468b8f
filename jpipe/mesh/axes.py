"""The mesh of devices: what its axes are for, and how a function of one device becomes a program of all of them.

At each index along the axis `stage` are the layers of one stage. The other axes split the arrays of a stage: `replica`,
`data` and `fsdp` (the data axes) split the examples of a micro-batch, and any of them split weights as the layers'
metadata asks. Programs are manual over every axis, so that no compiler adds a collective to them; what a device does
with its parts of arrays is decided by `jpipe.partitioner.per_device`. A mesh may have Auto or Explicit axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from jpipe.partitioner.shardings import Axis, Shape, names_in
from jpipe.seam.inside import with_axis_types

AXIS = "stage"
"""The mesh axis of pipeline stages."""
BATCH_AXES = ("replica", "data", "fsdp")
"""The data axes: a micro-batch is split over those of them that the mesh has, in this order."""


def as_mesh(mesh: Any, num_stages: int) -> Mesh:
    """The user's mesh, checked; if it is None, a mesh of the axis `stage` alone with the first `num_stages` devices.

    Raises:
      TypeError: `mesh` is no `jax.sharding.Mesh`.
      ValueError: no axis `stage`, one of another size, axes of several types, or fewer devices than stages.
    """
    if mesh is None:
        devices = jax.devices()
        if num_stages > len(devices):
            raise ValueError(
                f"num_stages={num_stages} is more than the {len(devices)} {devices[0].platform} devices; use "
                f"num_stages <= {len(devices)}, pass mesh=, or simulate devices on a CPU with "
                f"XLA_FLAGS=--xla_force_host_platform_device_count={num_stages}"
            )
        return Mesh(np.asarray(devices[:num_stages]), (AXIS,))
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"mesh is a {type(mesh).__name__}; pass a jax.sharding.Mesh, as jax.make_mesh(({num_stages},), ('{AXIS}',))"
        )
    if len(set(mesh.axis_types)) > 1 or AxisType.Manual in mesh.axis_types:
        raise ValueError(
            f"mesh has axes of the types {mesh.axis_types}; make them all Auto or all Explicit, as jax.make_mesh does"
        )
    if AXIS not in mesh.axis_names:
        raise ValueError(f"mesh has the axes {mesh.axis_names} but no axis '{AXIS}'; name one of them '{AXIS}'")
    if mesh.shape[AXIS] != num_stages:
        raise ValueError(
            f"mesh has {mesh.shape[AXIS]} devices along '{AXIS}' but num_stages={num_stages}; make the two equal"
        )
    return mesh


def check_context(mesh: Mesh) -> None:
    """Checks that the mesh in context (`jax.set_mesh`), if there is one, has the axes of the pipeline's mesh.

    Raises:
      ValueError: it has other axes.
    """
    context = jax.sharding.get_abstract_mesh()
    if not context.empty and dict(context.shape) != dict(mesh.shape):
        raise ValueError(
            f"the mesh in context (jax.set_mesh) has the axes {dict(context.shape)}, the pipeline's has "
            f"{dict(mesh.shape)}; set the pipeline's mesh, pipe.mesh, or none"
        )


def batch_axes(mesh: Mesh) -> tuple[str, ...]:
    """The mesh's data axes: a micro-batch `[b, ...]` is split over all of them jointly."""
    return tuple(name for name in BATCH_AXES if name in mesh.axis_names)


def num_shards(mesh: Mesh) -> int:
    """The number of parts that a micro-batch is split into."""
    return int(np.prod([mesh.shape[name] for name in batch_axes(mesh)]))


def stage_axes(mesh: Mesh) -> tuple[Axis, ...]:
    """The axes that a stage's arrays are split over while it computes: the data axes as one, and each of the others.

    Mesh axes of one device are left out.
    """
    longer = lambda names: tuple(name for name in names if mesh.shape[name] > 1)
    data, others = longer(batch_axes(mesh)), longer(n for n in mesh.axis_names if n not in (AXIS, *BATCH_AXES))
    first = [Axis(data, tuple(mesh.shape[n] for n in data), of_examples=True)] if data else []
    return (*first, *[Axis((name,), (mesh.shape[name],)) for name in others])


def rest_axes(mesh: Mesh) -> tuple[Axis, ...]:
    """The axes that a stage's arrays are split over at rest: each mesh axis but `stage` and those of one device."""
    return tuple(Axis((n,), (mesh.shape[n],)) for n in mesh.axis_names if n != AXIS and mesh.shape[n] > 1)


def is_batch_axis(name: str) -> bool:
    """Whether a mesh axis of this name is a data axis."""
    return name in BATCH_AXES


def part_shape(shape: Sequence[int], spec: PartitionSpec, mesh: Mesh, over: Callable[[str], bool]) -> Shape:
    """The shape of a device's part of an array.

    Args:
      shape: of the whole array.
      spec: the mesh axes that split each dimension.
      mesh: says how many devices they have.
      over: mesh axis -> whether it counts; the others are taken not to split the array.
    """
    sizes = [math.prod(mesh.shape[name] for name in names_in(entry) if over(name)) for entry in spec]
    return tuple(n // s for n, s in zip(shape, [*sizes, *[1] * (len(shape) - len(sizes))], strict=True))


def shapes_only(mesh: Mesh) -> AbstractContextManager:
    """The context in which layers are traced on whole arrays: manual over `stage`, as the programs of `on_stages` are.

    The other axes are Auto, so that a layer that constrains how its activations are split finds the axes that it names.
    """
    types = dict.fromkeys(mesh.axis_names, AxisType.Auto) | {AXIS: AxisType.Manual}
    return jax.sharding.use_abstract_mesh(with_axis_types(mesh.abstract_mesh, types))


def on_stages(
    function: Callable,
    mesh: Mesh,
    in_specs: Any,
    out_specs: Any,
    before: Callable = lambda *arguments: arguments,
    after: Callable = lambda results: results,
    result_specs: Any = None,
) -> Callable:
    """A function of one device's parts as a function of whole arrays, which runs on all devices; call it in `jax.jit`.

    Args:
      function: pytrees of a device's parts of arrays -> pytrees of such parts.
      mesh: the user's mesh.
      in_specs: PartitionSpecs of the arguments of `function`.
      out_specs: PartitionSpecs of its results.
      before: the caller's arguments -> a tuple of the arguments of `function`; all of them whole arrays.
      after: the results of `function` -> those for the caller; all of them whole arrays.
      result_specs: PartitionSpecs of the results for the caller (default: `out_specs`).
    """
    # Loop bounds vary from stage to stage, and users' layers know nothing of varying types.
    options: dict[str, Any] = {"in_specs": in_specs, "out_specs": out_specs, "check_vma": False}
    if AxisType.Explicit not in mesh.axis_types:
        return lambda *arguments: after(jax.shard_map(function, mesh=mesh, **options)(*before(*arguments)))

    def call(*arguments: Any) -> Any:
        run = lambda *arguments: after(jax.shard_map(function, **options)(*before(*arguments)))
        specs = out_specs if result_specs is None else result_specs
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return jax.sharding.auto_axes(run, axes=mesh.axis_names, out_sharding=specs)(*arguments)

    return call
