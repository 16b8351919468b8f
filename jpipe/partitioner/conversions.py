"""Converts a device's part of an array to its part under another sharding, by collectives.

Collectives join devices along the axes of the sharding alone: others may be elsewhere in their program meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jpipe.partitioner.shardings import (
    PARTIAL,
    REPLICATED,
    Axis,
    AxisSharding,
    Shape,
    Shard,
    Sharding,
    blocks_of,
    by_mesh_axis,
    names_of,
    part_shape,
)


class Hop(NamedTuple):
    """One step of a conversion: a sharding changes along one axis, or a sum is taken over several.

    Attributes:
      now: how the array lies before it.
      over: the axes, along which it lies alike.
      wanted: how it lies along these axes after it.
    """

    now: Sharding
    over: tuple[int, ...]
    wanted: AxisSharding

    @property
    def then(self) -> Sharding:
        """The sharding after this step."""
        return tuple(self.wanted if i in self.over else s for i, s in enumerate(self.now))


def convert(part: jax.Array, axes: Sequence[Axis], now: Sharding, wanted: Sharding) -> jax.Array:
    """Converts a device's part of an array to another sharding.

    Args:
      part: this device's part, of the shape `part_shape(whole shape, now, axes)`.
      axes: what arrays are split over.
      now: how the array lies.
      wanted: how it shall lie; the result has the shape `part_shape(whole shape, wanted, axes)`.
    """
    for hop in hops(axes, now, wanted):
        part = _moved(part, axes, hop)
    return part


def hops(axes: Sequence[Axis], now: Sharding, wanted: Sharding) -> list[Hop]:
    """Lists the steps from one sharding to another."""
    # On the way the blocks of axes that split the same dimension may cease to lie within one another, so that no device
    # has its part in one slice of another's. From (Shard(0, 2), Shard(0)) to (Shard(0), Shard(0, 2)), elements 0 to 3
    # on the devices (0, 0), (0, 1), (1, 0), (1, 1):
    #
    #   now          0  2  1  3
    #   between      (Shard(0), Shard(0)): both axes cut at the middle, and of (0, 1) nothing would be left
    #   wanted       0  1  2  3
    #
    # Then it goes by way of whole arrays, along the axes that change.
    path = _path(axes, now, wanted)
    if any(blocks_of(hop.then, axes) is None for hop in path):
        between = tuple(REPLICATED if a != b else a for a, b in zip(now, wanted, strict=True))
        path = [*_path(axes, now, between), *_path(axes, between, wanted)]
    return path


def _path(axes: Sequence[Axis], now: Sharding, wanted: Sharding) -> list[Hop]:
    """Lists the steps from `now` to `wanted`, axis by axis, but with one sum over all mesh axes that are summed.

    Steps that make parts smaller come first and gathers last, so that each step sends as little as it can.
    """
    order = sorted(range(len(axes)), key=lambda i: (not isinstance(wanted[i], Shard), isinstance(now[i], Shard)))
    is_summed = lambda i: (now[i], wanted[i]) == (PARTIAL, REPLICATED)
    at_once = tuple(i for parts in by_mesh_axis(axes) if all(map(is_summed, parts)) for i in parts)
    path: list[Hop] = []
    for i in order:
        before = path[-1].then if path else now
        if before[i] != wanted[i]:
            path.append(Hop(before, at_once if i in at_once else (i,), wanted[i]))
    return path


Collective = Literal["all_to_all", "all_gather", "reduce_scatter", "all_reduce"]


def collective_of(axes: Sequence[Axis], hop: Hop) -> Collective | None:
    """Names the collective of a step; None if each device makes its part from the part that it has."""
    i, wanted = hop.over[0], hop.wanted
    old = hop.now[i]
    one_run = lambda shard: isinstance(shard, Shard) and _outer_in_part(shard, axes, hop.now, i) == 1
    if isinstance(old, Shard) and wanted != PARTIAL:
        exchanges = one_run(old) and one_run(wanted) and isinstance(wanted, Shard) and old.dim != wanted.dim
        return "all_to_all" if exchanges else "all_gather"
    if old == PARTIAL:
        return "reduce_scatter" if one_run(wanted) else "all_reduce"
    return None


def bytes_sent(axes: Sequence[Axis], shape: Shape, itemsize: int, hop: Hop) -> float:
    """Counts the bytes that a device sends in a step of a conversion of a whole array (`ring_bytes`)."""
    kind, size = collective_of(axes, hop), math.prod(axes[i].size for i in hop.over)
    return ring_bytes(kind, math.prod(part_shape(shape, hop.now, axes)) * itemsize, size) if kind else 0.0


def ring_bytes(kind: str, part: float, size: int) -> float:
    """Counts the bytes that a device sends in a collective, on a ring.

    Args:
      kind: the collective.
      part: the bytes of the part that a device puts in: n.
      size: the number of devices: p. To exchange, or to scatter a sum, (p - 1) / p n are sent, twice that for a sum
        that all have, (p - 1) n for all parts, n in a permutation.
    """
    each = {"all_reduce": 2 / size, "reduce_scatter": 1 / size, "all_to_all": 1 / size, "all_gather": 1.0}
    return part if kind == "permute" else each[kind] * (size - 1) * part


def _moved(part: jax.Array, axes: Sequence[Axis], hop: Hop) -> jax.Array:
    """Takes a step with a device's part."""
    now, (i, *others), wanted = hop
    old, axis, kind = now[i], axes[i], collective_of(axes, hop)
    joined = {"axis_name": axis.names, "axis_index_groups": axis.groups}
    if others:
        joined = {"axis_name": names_of([axes[j] for j in hop.over])}
    outer = lambda shard: _outer_in_part(shard, axes, now, i)
    if isinstance(old, Shard):
        if kind == "all_to_all" and isinstance(wanted, Shard):
            return lax.all_to_all(part, split_axis=wanted.dim, concat_axis=old.dim, tiled=True, **joined)
        if wanted == PARTIAL:
            return _among_zeros(part, axis, old.dim, outer(old))
        part = _joined(part, axis, old.dim, outer(old))
    elif old == PARTIAL:
        if kind == "reduce_scatter" and isinstance(wanted, Shard):
            return lax.psum_scatter(part, scatter_dimension=wanted.dim, tiled=True, **joined)
        part = lax.psum(part, **joined)
    elif wanted == PARTIAL:  # the first device has the array, the others zeros
        return jnp.where(axis.index() == 0, part, jnp.zeros_like(part))
    return _cut(part, axis, wanted.dim, outer(wanted)) if isinstance(wanted, Shard) else part


def _outer_in_part(shard: Shard, axes: Sequence[Axis], now: Sharding, i: int) -> int:
    """Counts `shard.outer` in a device's part, in which other axes than i have cut the dimension already."""
    outer = shard.outer
    for j, other in enumerate(now):
        if j != i and isinstance(other, Shard) and other.dim == shard.dim and other.outer < shard.outer:
            outer //= axes[j].size
    return outer


def _split_dim(x: jax.Array, dim: int, *sizes: int) -> jax.Array:
    """Reshapes `x` `[..., n, ...]` to `[..., *sizes, n / product of sizes, ...]`."""
    rest = x.shape[dim] // math.prod(sizes)
    return x.reshape(*x.shape[:dim], *sizes, rest, *x.shape[dim + 1 :])


def _joined(part: jax.Array, axis: Axis, dim: int, outer: int) -> jax.Array:
    """Joins the shards of `dim` to the whole dimension."""
    if outer == 1:
        return lax.all_gather(part, axis.names, axis_index_groups=axis.groups, axis=dim, tiled=True)
    split = _split_dim(part, dim, outer)
    blocks = lax.all_gather(split, axis.names, axis_index_groups=axis.groups, axis=dim + 1, tiled=True)
    return lax.collapse(blocks, dim, dim + 2)


def _cut(x: jax.Array, axis: Axis, dim: int, outer: int) -> jax.Array:
    """Cuts this device's shard out of the whole dimension."""
    blocks, device = _split_dim(x, dim, outer, axis.size), axis.index()
    shard = lax.dynamic_index_in_dim(blocks, device, dim + 1, keepdims=False, allow_negative_indices=False)
    return lax.collapse(shard, dim, dim + 2)


def _among_zeros(part: jax.Array, axis: Axis, dim: int, outer: int) -> jax.Array:
    """Makes a partial sum of a shard of `dim`: this device's blocks in their place, zeros elsewhere."""
    blocks = jnp.expand_dims(_split_dim(part, dim, outer), dim + 1)  # [..., outer, 1, block, ...]
    device = lax.broadcasted_iota(jnp.int32, (axis.size,) + (1,) * (blocks.ndim - dim - 2), 0)
    is_here = device == axis.index()
    return lax.collapse(jnp.where(is_here, blocks, jnp.zeros_like(blocks)), dim, dim + 3)
