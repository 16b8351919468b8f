"""Meshes: programs are manual over every axis, so that no compiler adds a collective to them.

`stage` is where layers lie; the others split what a stage has: `replica`, `data` and `fsdp` the examples of a
micro-batch, any of them the weights, as layers ask by their metadata. What a device does with its parts is decided by
`jpipe.sharding.spmd`. A mesh may have Auto or Explicit axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from jpipe.sharding.shardings import Axis, names_in

AXIS = "stage"
BATCH_AXES = ("replica", "data", "fsdp")
"""Mesh axes over which a micro-batch is split, those of them that the mesh has."""


def as_mesh(mesh: Any, num_stages: int) -> Mesh:
    """Checks the user's mesh; makes one of the first K devices if there is none.

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
    """Checks that the mesh in context, if there is one, is the pipeline's.

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
    """The mesh axes over which a micro-batch is split."""
    return tuple(name for name in BATCH_AXES if name in mesh.axis_names)


def num_shards(mesh: Mesh) -> int:
    """The number of parts that a micro-batch is split into."""
    return int(np.prod([mesh.shape[name] for name in batch_axes(mesh)]))


def stage_axes(mesh: Mesh) -> tuple[Axis, ...]:
    """What a stage's arrays are split over while it computes: the data axes jointly, and each other axis."""
    sized = lambda names: tuple(name for name in names if mesh.shape[name] > 1)
    examples, others = sized(batch_axes(mesh)), sized(n for n in mesh.axis_names if n not in (AXIS, *BATCH_AXES))
    first = [Axis(examples, tuple(mesh.shape[n] for n in examples), of_examples=True)] if examples else []
    return (*first, *[Axis((name,), (mesh.shape[name],)) for name in others])


def rest_axes(mesh: Mesh) -> tuple[Axis, ...]:
    """What a stage's arrays are split over at rest: each axis for itself."""
    return tuple(Axis((n,), (mesh.shape[n],)) for n in mesh.axis_names if n != AXIS and mesh.shape[n] > 1)


def is_batch_axis(name: str) -> bool:
    """Whether micro-batches are split over a mesh axis of this name."""
    return name in BATCH_AXES


def part_shape(shape: Sequence[int], spec: PartitionSpec, mesh: Mesh, over: Callable[[str], bool]) -> tuple[int, ...]:
    """The shape of a device's part of an array that is split over those axes of its spec that `over` picks."""
    sizes = [math.prod(mesh.shape[name] for name in names_in(entry) if over(name)) for entry in spec]
    return tuple(n // s for n, s in zip(shape, [*sizes, *[1] * (len(shape) - len(sizes))], strict=True))


def shapes_only(mesh: Mesh) -> AbstractContextManager:
    """The context in which layers are traced: the mesh as a program on the stages sees it (`on_stages`).

    A layer that constrains how its activations are split then finds the axes that it names.
    """
    types = dict.fromkeys(mesh.axis_names, AxisType.Auto) | {AXIS: AxisType.Manual}
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh.update_axis_types(types))


def on_stages(
    function: Callable,
    mesh: Mesh,
    in_specs: Any,
    out_specs: Any,
    before: Callable = lambda *arguments: arguments,
    after: Callable = lambda results: results,
    result_specs: Any = None,
) -> Callable:
    """`function` as one program on all devices, to be called under `jax.jit`.

    Args:
      function: takes and returns pytrees of arrays as one device has them.
      mesh: the user's mesh.
      in_specs: PartitionSpecs of the arguments.
      out_specs: PartitionSpecs of the results.
      before: the caller's arguments -> those of `function`, as whole arrays.
      after: the results of `function` -> those for the caller, as whole arrays.
      result_specs: PartitionSpecs of the latter (default: `out_specs`).
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
