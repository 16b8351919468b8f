"""Makes meshes whose busiest axes have the fastest links, and checks a user's; finds the links between TPUs of a mesh.

Stages hand on one activation a micro-batch, so their neighbours may be far apart; data axes reduce gradients once a
step; the other axes communicate in every layer. The axes of a mesh may be Auto or Explicit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from jpipe.partitioner.axes import AXIS, BATCH_AXES
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
    sizes = {name: as_integer(name, size, "use 1 or more") for name, size in {AXIS: stage, **axes}.items()}
    devices = list(jax.devices() if devices is None else devices)
    if (total := math.prod(sizes.values())) != len(devices):
        product = " * ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(f"{product} is {total} devices, not {len(devices)}; resize, or pass devices=jax.devices()[:n]")
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
            f"the {len(devices)} devices are in {len(slices)} slices of {sorted(slices.values())}, over which only "
            f"'{AXIS}' and data axes may go, and {among} can't; make their product a multiple of {len(slices)}"
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
                f"{num_stages=} is more than the {len(devices)} {devices[0].platform} devices; use num_stages <= "
                f"{len(devices)}, pass mesh=, or set XLA_FLAGS=--xla_force_host_platform_device_count={num_stages}"
            )
        return Mesh(np.asarray(devices[:num_stages]), (AXIS,))
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh is a {type(mesh).__name__}; pass a Mesh, as jax.make_mesh(({num_stages},), ('{AXIS}',))")
    if len(set(mesh.axis_types)) > 1 or AxisType.Manual in mesh.axis_types:
        raise ValueError(f"mesh has axes of the types {mesh.axis_types}; make them all Auto or all Explicit")
    if AXIS not in mesh.axis_names:
        raise ValueError(f"mesh has the axes {mesh.axis_names} but no axis '{AXIS}'; name one of them '{AXIS}'")
    if mesh.shape[AXIS] != num_stages:
        raise ValueError(f"mesh has {mesh.shape[AXIS]} devices along '{AXIS}' but {num_stages=}; make the two equal")
    return mesh


def check_context(mesh: Mesh) -> None:
    """Checks that the mesh in context (`jax.set_mesh`), if there is one, has the axes of the pipeline's mesh.

    Raises:
      ValueError: it has other axes.
    """
    context = jax.sharding.get_abstract_mesh()
    if not context.empty and dict(context.shape) != dict(mesh.shape):
        raise ValueError(f"the mesh in context has {dict(context.shape)}, not {dict(mesh.shape)}; set pipe.mesh")


# --- links ------------------------------------------------------------------------------------------------------------


CLOSED_AT = {"v2": 16, "v3": 32, "v4": 4, "v5e": 16, "v5p": 4, "v6e": 16}
"""By version of TPUs, the chips along a dimension of the torus whose ends are linked: a multiple of as many. By How to
Scale Your Model, 'TPU networking', and of v2 and v3 their pods (IEEE Micro 2021)."""
TPUS = {"v5 lite": "v5e", "v5e": "v5e", "v6 lite": "v6e", "v5": "v5p"} | {name: name for name in CLOSED_AT}
"""TPUs by a part of what JAX calls them, those first that begin like others, and JAX's own before others."""
IN_CUBES = ("v4", "v5p")
"""TPUs whose ends are linked only in slices of whole cubes of as many chips along each dimension."""


def tpu_of(device: Device) -> str:
    """The version of a TPU, such as "v5e"; empty if it isn't known."""
    return next((name for word, name in TPUS.items() if word in device.device_kind.lower()), "")


def _extents(group: np.ndarray) -> list[int]:
    """How many chips of each dimension a group takes; its coordinates are `[devices, dimensions]`."""
    return [len(np.unique(column)) for column in group.T]


@dataclass(frozen=True)
class Torus:
    """The links between the TPUs of a mesh.

    Attributes:
      version: that of the TPUs.
      sizes: (name, number of devices) of each mesh axis.
      coordinates: where each TPU is on its torus, in the order of the mesh; empty of others, and of TPUs that nobody
        has placed yet: there four and more along an axis are taken to lie on a ring.
    """

    version: str
    sizes: tuple[tuple[str, int], ...]
    coordinates: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, version: str, mesh: Mesh) -> Torus:
        """The links of a mesh of such TPUs."""
        coordinates = tuple(tuple(device.coords) for device in mesh.devices.flat if hasattr(device, "coords"))
        return cls(version, tuple(mesh.shape.items()), coordinates if len(coordinates) == mesh.size else ())

    def groups(self, axes: Collection[str]) -> np.ndarray:
        """`[groups, devices of a group]`: the numbers of the devices that mesh axes join, in the order of the mesh."""
        sizes = [n for _, n in self.sizes]
        along = [i for i, (name, _) in enumerate(self.sizes) if name in axes]
        numbers = np.moveaxis(np.arange(math.prod(sizes)).reshape(sizes), along, range(-len(along), 0))
        return numbers.reshape(-1, math.prod(sizes[i] for i in along))

    def links(self, axes: Collection[str]) -> int:
        """The links of a TPU over which a collective along mesh axes sends at once: of the group with the fewest."""
        if not self.coordinates:
            return 2 if math.prod(n for name, n in self.sizes if name in axes) >= 4 else 1
        coordinates, cube = np.asarray(self.coordinates), CLOSED_AT.get(self.version, 0)
        extents = _extents(coordinates)
        is_linked = lambda n: cube > 0 and all(m % cube == 0 for m in (extents if self.version in IN_CUBES else [n]))
        # The chips along each dimension of the torus whose first has a link to the last; 0 along the others.
        closed = [n if is_linked(n) else 0 for n in extents]

        def of_group(group: np.ndarray) -> int:
            dims = zip(_extents(group), closed, strict=True)
            return sum(2 if n == size else 1 for n, size in dims if n > 1)

        return max(1, min(map(of_group, coordinates[self.groups(axes)])))
