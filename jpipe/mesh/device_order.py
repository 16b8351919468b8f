"""`jpipe.make_mesh`: places devices in a mesh so that the axes that send most have the fastest links.

Stages hand on one activation a micro-batch, so their neighbours may be far apart; data axes reduce gradients once a
step; the other axes communicate in every layer.
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
    """A mesh of all devices: `make_mesh(stage=4, data=2, model=2)`.

    Devices are grouped by what joins them: TPU slices (or what else JAX calls so, such as hosts of GPUs), else
    processes. The axis `stage` goes across groups as far as its size allows, then the data axes ("replica", "data" and
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
    sizes = {AXIS: stage, **axes}
    sizes = {name: as_integer(name, size, "pass the number of devices along the axis") for name, size in sizes.items()}
    found = list(jax.devices() if devices is None else devices)
    if math.prod(sizes.values()) != len(found):
        product = " * ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(
            f"{product} takes {math.prod(sizes.values())} devices, but there are {len(found)}; change the sizes, or "
            "pass devices=, such as jax.devices()[:n]"
        )
    if axis_types is None or isinstance(axis_types, AxisType):
        axis_types = (axis_types or AxisType.Auto,) * len(sizes)
    return Mesh(_ordered(found, sizes), tuple(sizes), axis_types=tuple(axis_types))


def _ordered(devices: list[Device], sizes: dict[str, int]) -> np.ndarray:
    """The devices in the shape of the mesh."""
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
    found = dict.fromkeys(sizes, 1)
    for name in (AXIS, *BATCH_AXES):
        if name in sizes:
            found[name] = math.gcd(groups, sizes[name])
            groups //= found[name]
    return tuple(found.values()) if groups == 1 else None
