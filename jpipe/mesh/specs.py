"""PartitionSpecs of arrays at rest: parts of them, the shapes they give, and gathering along some of their axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpipe.partitioner.shardings import Shape, names_in

Over = Callable[[str], bool]
"""Mesh axis -> whether it is meant."""


def spec_of(entries: Sequence[Sequence[str]]) -> PartitionSpec:
    """The PartitionSpec that names these mesh axes for each dimension, without empty entries at the end."""
    joined = [tuple(names) if len(names) > 1 else names[0] if names else None for names in entries]
    while joined and joined[-1] is None:
        joined.pop()
    return PartitionSpec(*joined)


def split_by(spec: PartitionSpec, over: Over) -> PartitionSpec:
    """A spec without the mesh axes that aren't meant."""
    return spec_of([list(filter(over, names_in(entry))) for entry in spec])


def shard_shape(shape: Sequence[int], spec: PartitionSpec, mesh: Mesh, over: Over) -> Shape:
    """The shape of a device's part of an array, if only the meant axes split it.

    Args:
      shape: of the whole array.
      spec: the mesh axes that split each dimension.
      mesh: says how many devices they have.
      over: which of them are meant.
    """
    return NamedSharding(mesh, split_by(spec, over)).shard_shape(tuple(shape))


def gather_axes(part: jax.Array, spec: PartitionSpec, over: Over) -> jax.Array:
    """A device's part of an array that is split by `spec`, gathered along the meant axes; the others still split it."""
    for dim, entry in enumerate(split_by(spec, over)):
        if entry is not None:
            part = lax.all_gather(part, entry, axis=dim, tiled=True)
    return part


def scatter_axes(part: jax.Array, spec: PartitionSpec, over: Over) -> jax.Array:
    """The inverse of `gather_axes` for partial sums: adds them up, and each device keeps its own part of the sum."""
    for dim, entry in enumerate(split_by(spec, over)):
        if entry is not None:
            part = lax.psum_scatter(part, entry, scatter_dimension=dim, tiled=True)
    return part
