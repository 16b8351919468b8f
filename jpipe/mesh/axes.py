"""What the axes of a mesh are for.

At each index along the axis `stage` are the layers of one stage. The other axes split the arrays of a stage: `replica`,
`data` and `fsdp` (the data axes) split the examples of a micro-batch, and any of them split weights as the layers'
metadata asks. What a device does with its parts of arrays is decided by `jpipe.partitioner`.
"""

from __future__ import annotations

import math

from jax.sharding import AbstractMesh, Mesh

from jpipe.partitioner.shardings import Axis

AXIS = "stage"
"""The mesh axis of pipeline stages."""
BATCH_AXES = ("replica", "data", "fsdp")
"""The data axes: a micro-batch is split over those of them that the mesh has, in this order."""


def batch_axes(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """The mesh's data axes: a micro-batch `[b, ...]` is split over all of them jointly."""
    return tuple(name for name in BATCH_AXES if name in mesh.axis_names)


def num_shards(mesh: Mesh) -> int:
    """The number of parts that a micro-batch is split into."""
    return math.prod(mesh.shape[name] for name in batch_axes(mesh))


def stage_axes(mesh: Mesh | AbstractMesh) -> tuple[Axis, ...]:
    """The axes that a stage's arrays are split over while it computes: the data axes as one, and each of the others.

    Mesh axes of one device are left out.
    """
    longer = lambda names: tuple(name for name in names if mesh.shape[name] > 1)
    data, others = longer(batch_axes(mesh)), longer(n for n in mesh.axis_names if n not in (AXIS, *BATCH_AXES))
    first = [Axis(data, tuple(mesh.shape[n] for n in data), is_data=True)] if data else []
    return (*first, *[Axis((name,), (mesh.shape[name],)) for name in others])


def rest_axes(mesh: Mesh | AbstractMesh) -> tuple[Axis, ...]:
    """The axes that a stage's arrays are split over at rest: each mesh axis but `stage` and those of one device."""
    return tuple(Axis((n,), (mesh.shape[n],)) for n in mesh.axis_names if n != AXIS and mesh.shape[n] > 1)


def is_batch_axis(name: str) -> bool:
    """Whether a mesh axis of this name is a data axis."""
    return name in BATCH_AXES
