"""Checks the mesh that a user passes, or sets by `jax.set_mesh`; its axes may be Auto or Explicit."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jpipe.mesh.axes import AXIS


def as_mesh(mesh: object, num_stages: int) -> Mesh:
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
