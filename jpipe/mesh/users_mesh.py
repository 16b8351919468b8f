"""Makes meshes whose busiest axes have the fastest links, and checks a user's.

Stages hand on one activation a micro-batch, so their neighbours may be far apart; data axes reduce gradients once a
step; the other axes communicate in every layer. The axes of a mesh may be Auto or Explicit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from jpipe.mesh.axes import AXIS, BATCH_AXES
from jpipe.partitioner.shardings import Shape
from jpipe.types import Device
from jpipe.users_numbers import as_integer

AxisTypes = AxisType | Sequence[AxisType] | None


def make_mesh(
    *, stage: int, devices: Sequence[Device] | None = None, axis_types: AxisTypes = None, **axes: int
) -> Mesh:
    """Makes a mesh of all devices: `make_mesh(stage=4, data=2, model=2)`.

    Devices are grouped by TPU slices (or by other groups that JAX calls so, such as hosts of GPUs), else by processes.
    The axis `stage` goes across groups as far as its size allows, then the data axes ("replica", "data" and
    "fsdp") do; axes with other names never go across slices. Within a group JAX orders devices by the network between
    them (`jax.experimental.mesh_utils`), with the fastest links for the last axis.

    Args:
      stage: K; `stage` is the first axis.
      devices: which devices (default: all that there are).
      axis_types: a `jax.sharding.AxisType` for all axes, or one for each (default: Auto).
      **axes: the sizes of other axes, in their order in the mesh.

    Raises:
      TypeError: a size is no integer.
      ValueError: a size below 1, another number of devices than the product, or slices that can't be shared out.
    """
    remedy = "pass the number of devices along the axis"
    sizes = {name: as_integer(name, size, remedy) for name, size in {AXIS: stage, **axes}.items()}
    devices = list(jax.devices() if devices is None else devices)
    if math.prod(sizes.values()) != len(devices):
        product = " * ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(
            f"{product} takes {math.prod(sizes.values())} devices, but there are {len(devices)}; change the sizes, or "
            "pass devices=, such as jax.devices()[:n]"
        )
    if axis_types is None or isinstance(axis_types, AxisType):
        axis_types = (axis_types or AxisType.Auto,) * len(sizes)
    return Mesh(_ordered(devices, sizes), tuple(sizes), axis_types=tuple(axis_types))


def _ordered(devices: list[Device], sizes: dict[str, int]) -> np.ndarray:
    """The devices in the shape of the mesh, with the busiest axes along the fastest links."""
    slices = Counter(getattr(device, "slice_index", None) for device in devices)
    # Within one slice of TPUs the network doesn't end at hosts.
    by_process = len(slices) == 1 and devices[0].platform != "tpu"
    groups = Counter(device.process_index for device in devices) if by_process else slices
    across = _across(len(groups), sizes) if len(set(groups.values())) == 1 else None
    if across is None and not by_process:
        among = ", ".join(f"{name}={size}" for name, size in sizes.items() if name in (AXIS, *BATCH_AXES))
        raise ValueError(
            f"the {len(devices)} devices are in {len(slices)} slices of {sorted(slices.values())}, over which "
            f"only '{AXIS}' and data axes may go, and {among} can't be shared out equally over them; make '{AXIS}' "
            f"times the data axes a multiple of {len(slices)}, of slices of equal size"
        )
    shape = tuple(sizes.values())
    # Axes of the mesh are axes of the network if they can be, else parts of them. Where processes don't fit (say, one
    # for each GPU of a host), they aren't what joins devices.
    if across is None or len(groups) == 1:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    inner = tuple(size // number for size, number in zip(shape, across, strict=True))
    return mesh_utils.create_hybrid_device_mesh(
        inner, across, devices, process_is_granule=by_process, allow_split_physical_axes=True
    )


def _across(groups: int, sizes: dict[str, int]) -> Shape | None:
    """For each axis, how many groups it goes across: `stage` as many as it can, then data axes; None if too few."""
    across = dict.fromkeys(sizes, 1)
    for name in (AXIS, *BATCH_AXES):
        if name in sizes:
            across[name] = math.gcd(groups, sizes[name])
            groups //= across[name]
    return tuple(across.values()) if groups == 1 else None


# --- checks -----------------------------------------------------------------------------------------------------------


def as_mesh(mesh: object, num_stages: int) -> Mesh:
    """Returns the user's mesh, checked; if there is none, a mesh of the first `num_stages` devices along `stage`.

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
