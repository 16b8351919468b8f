"""Takes PartitionSpecs apart into `stage` and other axes, and gathers and scatters arrays along axes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import jax
from jax import lax
from jax.sharding import PartitionSpec

from jpipe.mesh.axes import AXIS
from jpipe.partitioner.shardings import names_in


def spec_of(entries: Sequence[Sequence[str]]) -> PartitionSpec:
    """The PartitionSpec that names these mesh axes for each dimension, without empty entries at the end."""
    joined = list(map(tuple, entries))
    while joined and not joined[-1]:
        joined.pop()
    return PartitionSpec(*joined)


def split_by(spec: PartitionSpec, over: Callable[[str], bool]) -> PartitionSpec:
    """A spec with only those mesh axes for which `over` is true."""
    return spec_of([list(filter(over, names_in(entry))) for entry in spec])


def on_all_stages(spec: PartitionSpec) -> bool:
    """Whether an array is split over `stage`, so that each stage has a part of it."""
    return any(AXIS in names_in(entry) for entry in spec)


def within_stage(spec: PartitionSpec) -> PartitionSpec:
    """How an array is split over other mesh axes than `stage`."""
    return split_by(spec, lambda name: name != AXIS)


def gather_axes(part: jax.Array, spec: PartitionSpec, over: Collection[str]) -> jax.Array:
    """A device's part of an array that is split by `spec`, gathered along the axes `over`; others still split it."""
    for dim, entry in enumerate(split_by(spec, lambda name: name in over)):
        if entry is not None:
            part = lax.all_gather(part, entry, axis=dim, tiled=True)
    return part


def scatter_axes(part: jax.Array, spec: PartitionSpec, over: Collection[str]) -> jax.Array:
    """The inverse of `gather_axes` for partial sums: adds them up, and each device keeps its own part of the sum."""
    for dim, entry in enumerate(split_by(spec, lambda name: name in over)):
        if entry is not None:
            part = lax.psum_scatter(part, entry, scatter_dimension=dim, tiled=True)
    return part
