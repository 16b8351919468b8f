"""Meshes: the `stage` axis is jpipe's, all others are left to the compiler.

Programs run in a `shard_map` that is manual over `stage` alone. Over the other axes, arrays are split as their
owners ask (layers by their metadata, batches over the data axes) and the compiler adds the collectives. A mesh may
have Auto or Explicit axes; inside, all are Auto.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

AXIS = "stage"
BATCH_AXES = ("replica", "data", "fsdp")
"""Mesh axes over which a micro-batch is split, those of them that the mesh has."""


def as_mesh(mesh: Any, num_stages: int) -> Mesh:
    """Checks the user's mesh; makes one of the first K devices if there is none.

    Raises:
      TypeError: `mesh` is no `jax.sharding.Mesh`.
      ValueError: no axis `stage`, one of another size, or fewer devices than stages.
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


def known_axes(spec: PartitionSpec, mesh: Mesh) -> PartitionSpec:
    """A layer's spec without the axis names that this mesh doesn't have."""

    def keep(entry: Any) -> Any:
        names = tuple(
            n for n in (entry if isinstance(entry, tuple) else (entry,)) if n in mesh.axis_names and n != AXIS
        )
        return names if len(names) > 1 else names[0] if names else None

    return PartitionSpec(*map(keep, spec))


def constrain(tree: Any, specs: Any, mesh: Mesh) -> Any:
    """Fixes how arrays inside of a program are split over the axes other than `stage`."""
    if mesh.axis_names == (AXIS,):
        return tree
    return jax.tree.map(jax.lax.with_sharding_constraint, tree, specs)


def pin_batch(leaves: list[Any], mesh: Mesh) -> list[Any]:
    """Splits each leaf's first dimension over the data axes, and nothing else.

    Pinned at every boundary: else the compiler may choose to move data between devices in the middle of a stage's work,
    with collectives in which stages that idle would have to take part.
    """
    axes, shards = batch_axes(mesh), num_shards(mesh)
    spec = lambda a: PartitionSpec(axes) if axes and a.ndim and a.shape[0] % shards == 0 else PartitionSpec()
    return constrain(leaves, [spec(leaf) for leaf in leaves], mesh)


def shapes_only(mesh: Mesh) -> AbstractContextManager:
    """The context in which layers are traced: the mesh as a program on the stages sees it (`on_stages`).

    A layer that constrains how its activations are split then finds the axes that it names.
    """
    types = dict.fromkeys(mesh.axis_names, AxisType.Auto) | {AXIS: AxisType.Manual}
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh.update_axis_types(types))


def on_stages(function: Callable, mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable:
    """`function` as one program on all stages, to be called under `jax.jit`.

    Args:
      function: takes and returns pytrees of arrays as one stage sees them.
      mesh: the user's mesh.
      in_specs: PartitionSpecs of the arguments; those over `stage` are split, other axes are only documented.
      out_specs: PartitionSpecs of the results, exactly as they are split over all axes.
    """
    manual = lambda specs: jax.tree.map(_stage_only, specs, is_leaf=_is_spec)
    options: dict[str, Any] = {
        "in_specs": manual(in_specs),
        "out_specs": manual(out_specs),
        "axis_names": {AXIS},
        "check_vma": False,  # loop bounds vary from stage to stage, and users' layers know nothing of varying types
    }
    if AxisType.Explicit not in mesh.axis_types:
        return jax.shard_map(function, mesh=mesh, **options)

    def call(*arguments: Any) -> Any:
        inner = jax.sharding.auto_axes(jax.shard_map(function, **options), axes=mesh.axis_names, out_sharding=out_specs)
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return inner(*arguments)

    return call


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def _stage_only(spec: PartitionSpec) -> PartitionSpec:
    return PartitionSpec(*(AXIS if entry == AXIS else None for entry in spec))
