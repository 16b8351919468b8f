"""Names the mesh axes: `stage`, those that split a batch (`batch_axes=`, checked here), and all others.

At each index along the axis `stage` are the layers of one stage. The other axes split the arrays of a stage: the data
axes (`replica`, `data` and `fsdp`, unless the user names others) split the examples of a micro-batch, and any of them
split weights as the layers' metadata asks. What a device does with its parts of arrays is decided by
`jpipe.partitioner`. A mesh and its data axes together are `jpipe.mesh.splits.Splits`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jax.sharding import AbstractMesh, Mesh

from jpipe.partitioner.shardings import Axis

AXIS = "stage"
"""The mesh axis of pipeline stages."""
BATCH_AXES = ("replica", "data", "fsdp")
"""The data axes of users who name none: a micro-batch is split over those of them that the mesh has, in this order."""


def check_batch_axes(mesh: Mesh, names: object) -> tuple[str, ...]:
    """The user's `batch_axes` (a name or several names), as the mesh's data axes in the order in which they are given.

    Raises:
      TypeError: they are no names in an order.
      ValueError: they name `stage`, an axis twice, or an axis that the mesh lacks (the default's may be lacking).
    """
    axes = (names,) if isinstance(names, str) else names
    if not isinstance(axes, Sequence) or not all(isinstance(name, str) for name in axes):
        raise TypeError(f"batch_axes={names!r} aren't names of mesh axes; pass a tuple, such as ('data', 'fsdp')")
    axes, others = tuple(axes), [name for name in mesh.axis_names if name != AXIS]
    if AXIS in axes:
        raise ValueError(
            f"batch_axes={names!r} names {AXIS!r}, along which devices have other layers, not other examples; name "
            f"other axes of the mesh, which has {others}"
        )
    for name in axes:
        if axes.count(name) > 1:
            raise ValueError(f"batch_axes={names!r} names {name!r} {axes.count(name)} times; name it once")
        if name not in mesh.axis_names and axes != BATCH_AXES:
            raise ValueError(
                f"batch_axes={names!r} names {name!r}, which the mesh {dict(mesh.shape)} lacks; name some of its axes "
                f"{others}, or leave batch_axes out"
            )
    return tuple(name for name in axes if name in mesh.axis_names)


def stage_axes(
    mesh: Mesh | AbstractMesh,
    batch_axes: Sequence[str],
    *,
    jointly: bool = True,
    over_stages: bool = False,
    rings: Sequence[tuple[str, tuple[int, ...]]] = (),
) -> tuple[Axis, ...]:
    """The axes that a stage's arrays are split over: the data axes, and each of the others.

    Mesh axes of one device are left out. At rest, where no axis is told from another, there are no data axes.

    Args:
      mesh: all devices.
      batch_axes: its data axes.
      jointly: whether the data axes are one.
      over_stages: `stage` is one of the others, the last.
      rings: the `Axis.ring` of some axes, by name.
    """
    of_several_devices = lambda names: tuple(name for name in names if mesh.shape[name] > 1)
    data = of_several_devices(batch_axes)
    others = [name for name in mesh.axis_names if name not in (AXIS, *batch_axes)] + [AXIS] * over_stages
    together = [data] * bool(data) if jointly else [(name,) for name in data]
    data_axes = [Axis(names, tuple(mesh.shape[n] for n in names), is_data=True) for names in together]
    along = [Axis((name,), (mesh.shape[name],)) for name in of_several_devices(others)]
    on_rings = [*([] if jointly else data_axes), *along]  # along data axes that are one, all goes once a step
    on_rings = [replace(axis, ring=dict(rings).get(axis.names[0], ())) for axis in on_rings]
    return (*(data_axes if jointly else ()), *on_rings)
