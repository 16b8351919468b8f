"""How an array lies on the devices of one stage (its sharding), and how it gets from one sharding to another.

The *whole* array is what a layer is traced on; a device has a *part* of it. Along each axis of the mesh besides `stage`
an array is a *shard* of one dimension, *replicated*, or *partial*: the whole array is the sum of the parts. (PyTorch's
DTensor has the same three.) Conversions use collectives among the devices of one stage alone, so that they may stand in
a loop that other stages don't run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Axis:
    """One or several mesh axes that arrays are split over jointly.

    Attributes:
      names: the names of the mesh axes, the major first.
      sizes: their sizes, in the same order.
      of_examples: whether they are the data axes: micro-batches are split over them, and weights aren't.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    of_examples: bool = False

    @property
    def size(self) -> int:
        """The number of devices along all of the mesh axes together."""
        return math.prod(self.sizes)


@dataclass(frozen=True)
class Shard:
    """Each device along an axis has equal blocks of the dimension `dim`.

    The dimension's n elements are seen as `[outer, axis.size, n / (outer * axis.size)]`; device i has `[:, i, :]`. So
    with `outer` = 1 it has one run of elements. With `outer` = 2 the first of two devices has elements 0, 1, 4, 5 of 8.
    Several runs arise where a reshape merges a dimension in front into a split one, and where several axes split one
    dimension: the axis that cuts last has the larger `outer`.
    """

    dim: int
    outer: int = 1


@dataclass(frozen=True)
class Replicated:
    """Each device along an axis has the whole array."""


@dataclass(frozen=True)
class Partial:
    """The whole array is the sum of what the devices along an axis have, each of the whole shape."""


REPLICATED, PARTIAL = Replicated(), Partial()
AxisSharding = Shard | Replicated | Partial
"""How an array lies along one axis."""
Sharding = tuple[AxisSharding, ...]
"""How an array lies on the devices of a stage: one `AxisSharding` for each axis."""


def replicated(axes: Sequence[Axis]) -> Sharding:
    """The sharding of an array that every device has as a whole."""
    return (REPLICATED,) * len(axes)


def settled(sharding: Sharding) -> Sharding:
    """The sharding once partial sums are added up: replicated where it was partial."""
    return tuple(REPLICATED if s == PARTIAL else s for s in sharding)


def in_runs(sharding: Sharding) -> Sharding:
    """The sharding, replicated where a device has several runs of elements, which no PartitionSpec may describe."""
    return tuple(REPLICATED if isinstance(s, Shard) and s.outer > 1 else s for s in sharding)


def local_shape(shape: Shape, sharding: Sharding, axes: Sequence[Axis]) -> Shape:
    """The shape of a device's part of an array of a whole shape.

    >>> local_shape((4, 6), (Shard(0), PARTIAL), (Axis(("data",), (2,)), Axis(("model",), (2,))))
    (2, 6)
    """
    result = list(shape)
    for along, axis in zip(sharding, axes, strict=True):
        if isinstance(along, Shard):
            result[along.dim] //= axis.size
    return tuple(result)


def local_struct(leaf: Any, sharding: Sharding, axes: Sequence[Axis]) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a device's part of an array; `leaf` is anything with those of the whole array."""
    return jax.ShapeDtypeStruct(local_shape(leaf.shape, sharding, axes), leaf.dtype)


def local_structs(tree: Any, shardings: Sequence[Sharding], axes: Sequence[Axis]) -> list[jax.ShapeDtypeStruct]:
    """The shapes and dtypes of a device's parts of a pytree's leaves, each with its own sharding."""
    return [local_struct(leaf, s, axes) for leaf, s in zip(jax.tree.leaves(tree), shardings, strict=True)]


def is_possible(shape: Shape, sharding: Sharding, axes: Sequence[Axis]) -> bool:
    """Whether an array of a whole shape can be sharded so: blocks divide dimensions, and lie within one another."""
    pairs = [(s, axis.size) for s, axis in zip(sharding, axes, strict=True) if isinstance(s, Shard)]
    return is_nested(sharding, axes) and not any(shape[s.dim] % (s.outer * size) for s, size in pairs)


def is_nested(sharding: Sharding, axes: Sequence[Axis]) -> bool:
    """Whether the blocks of axes that split the same dimension lie within one another."""
    blocks: dict[int, int] = {}  # dimension -> the number of blocks that the axes so far cut it into
    pairs = [(s, axis.size) for s, axis in zip(sharding, axes, strict=True) if isinstance(s, Shard)]
    for shard, size in sorted(pairs, key=lambda pair: pair[0].outer):
        if shard.outer % blocks.get(shard.dim, 1):
            return False
        blocks[shard.dim] = shard.outer * size
    return True


def of_spec(spec: PartitionSpec, axes: Sequence[Axis], sizes: Mapping[str, int]) -> Sharding:
    """The sharding that a weight's PartitionSpec means; data axes are taken for gathered: replicated.

    Args:
      spec: how the weight is split; mesh axes that aren't among `axes` are left out.
      axes: what arrays are split over; those that aren't data axes have one mesh axis each.
      sizes: mesh axis -> size, of all mesh axes that the spec names.
    """
    found: dict[str, Shard] = {}
    for dim, entry in enumerate(spec):
        outer = 1
        for name in names_in(entry):
            found[name] = Shard(dim, outer)
            outer *= sizes[name]
    return tuple(REPLICATED if axis.of_examples else found.get(axis.names[0], REPLICATED) for axis in axes)


def names_in(entry: Any) -> tuple[str, ...]:
    """The mesh axes that an entry of a PartitionSpec (None, a name or a tuple of names) names."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def to_spec(sharding: Sharding, axes: Sequence[Axis], ndim: int) -> PartitionSpec:
    """The PartitionSpec of an array of `ndim` dimensions with this sharding.

    Axes along which it isn't a shard are named nowhere. Of each dimension a device has to have one run of elements; if
    several axes split it, the one with the smaller `outer` is named first.
    """
    entries: list[list[tuple[int, tuple[str, ...]]]] = [[] for _ in range(ndim)]
    for along, axis in zip(sharding, axes, strict=True):
        if isinstance(along, Shard):
            entries[along.dim].append((along.outer, axis.names))
    joined = [tuple(name for _, names in sorted(entry) for name in names) for entry in entries]
    return PartitionSpec(*(names[0] if len(names) == 1 else names or None for names in joined))


# --- converting a device's part; in a program that all devices run ---


def convert(part: jax.Array, axes: Sequence[Axis], now: Sharding, wanted: Sharding) -> jax.Array:
    """A device's part of an array under another sharding.

    Args:
      part: this device's part, of the shape `local_shape(whole shape, now, axes)`.
      axes: what arrays are split over.
      now: how the array lies.
      wanted: how it shall lie; the result has the shape `local_shape(whole shape, wanted, axes)`.
    """
    # One axis after the other; what makes parts smaller comes first.
    order = sorted(range(len(axes)), key=lambda i: not isinstance(wanted[i], Shard))
    path = _path(now, wanted, order)
    if not all(is_nested(sharding, axes) for sharding in path):  # then by way of whole arrays
        between = tuple(REPLICATED if a != b else a for a, b in zip(now, wanted, strict=True))
        path = [*_path(now, between, order), *_path(between, wanted, order)]
    for following in path:
        for i in range(len(axes)):
            if following[i] != now[i]:
                part = _convert_along(part, axes, now, i, following[i])
        now = following
    return part


def _path(now: Sharding, wanted: Sharding, order: Sequence[int]) -> list[Sharding]:
    """The shardings on the way from `now` to `wanted`, if axes are changed one by one in this order."""
    path, current = [], list(now)
    for i in order:
        current[i] = wanted[i]
        path.append(tuple(current))
    return path


def _convert_along(part: jax.Array, axes: Sequence[Axis], now: Sharding, i: int, wanted: AxisSharding) -> jax.Array:
    """A device's part once it lies as `wanted` along axis i; along the other axes it stays as in `now`."""
    old, axis = now[i], axes[i]
    outer = lambda shard: _outer_in_part(shard, axes, now, i)
    if isinstance(old, Shard):
        if isinstance(wanted, Shard) and outer(old) == outer(wanted) == 1 and old.dim != wanted.dim:
            return lax.all_to_all(part, axis.names, wanted.dim, old.dim, tiled=True)
        if wanted == PARTIAL:
            return _pad(part, axis, old.dim, outer(old))
        part = _gather(part, axis, old.dim, outer(old))
        return _slice(part, axis, wanted.dim, outer(wanted)) if isinstance(wanted, Shard) else part
    if old == PARTIAL:
        if isinstance(wanted, Shard) and outer(wanted) == 1:
            return lax.psum_scatter(part, axis.names, scatter_dimension=wanted.dim, tiled=True)
        part = lax.psum(part, axis.names)
        return _slice(part, axis, wanted.dim, outer(wanted)) if isinstance(wanted, Shard) else part
    if isinstance(wanted, Shard):
        return _slice(part, axis, wanted.dim, outer(wanted))
    # From replicated to partial: the first device has the array, the others zeros.
    return jnp.where(lax.axis_index(axis.names) == 0, part, jnp.zeros_like(part))


def _outer_in_part(shard: Shard, axes: Sequence[Axis], now: Sharding, i: int) -> int:
    """`shard.outer` as it counts in a device's part, in which other axes than i have cut the dimension already."""
    outer = shard.outer
    for j, other in enumerate(now):
        if j != i and isinstance(other, Shard) and other.dim == shard.dim and other.outer < shard.outer:
            outer //= axes[j].size
    return outer


def _split_dim(x: jax.Array, dim: int, *sizes: int) -> jax.Array:
    """`x` `[..., n, ...]` as `[..., *sizes, n / product of sizes, ...]`."""
    rest = x.shape[dim] // math.prod(sizes)
    return x.reshape(*x.shape[:dim], *sizes, rest, *x.shape[dim + 1 :])


def _merge_dims(x: jax.Array, dim: int, count: int) -> jax.Array:
    """The inverse of `_split_dim`: `count` dimensions from `dim` on as one."""
    size = math.prod(x.shape[dim : dim + count])
    return x.reshape(*x.shape[:dim], size, *x.shape[dim + count :])


def _gather(part: jax.Array, axis: Axis, dim: int, outer: int) -> jax.Array:
    """From a shard of `dim` to the whole dimension."""
    if outer == 1:
        return lax.all_gather(part, axis.names, axis=dim, tiled=True)
    return _merge_dims(lax.all_gather(_split_dim(part, dim, outer), axis.names, axis=dim + 1, tiled=True), dim, 2)


def _slice(x: jax.Array, axis: Axis, dim: int, outer: int) -> jax.Array:
    """From the whole dimension to this device's shard of it."""
    own = lax.dynamic_index_in_dim(
        _split_dim(x, dim, outer, axis.size),
        lax.axis_index(axis.names),
        dim + 1,
        keepdims=False,
        allow_negative_indices=False,
    )
    return _merge_dims(own, dim, 2)


def _pad(part: jax.Array, axis: Axis, dim: int, outer: int) -> jax.Array:
    """From a shard of `dim` to a partial sum: this device's blocks in their place, zeros elsewhere."""
    blocks = jnp.expand_dims(_split_dim(part, dim, outer), dim + 1)  # [..., outer, 1, block, ...]
    device = lax.broadcasted_iota(jnp.int32, (axis.size,) + (1,) * (blocks.ndim - dim - 2), 0)
    own = device == lax.axis_index(axis.names)
    return _merge_dims(jnp.where(own, blocks, jnp.zeros_like(blocks)), dim, 3)


# --- gathering weights that are split at rest ---


def gather_axes(part: jax.Array, spec: PartitionSpec, names: Callable[[str], bool]) -> jax.Array:
    """A device's part of an array, gathered along some of the mesh axes that split it.

    The other axes still split it, so that `of_spec` of the whole spec describes the result.

    Args:
      part: this device's part of an array that is split by `spec`.
      spec: for each dimension, the mesh axes that split it.
      names: mesh axis -> whether to gather along it.
    """
    for dim, entry in enumerate(spec):
        chosen = tuple(filter(names, names_in(entry)))
        if chosen:
            part = lax.all_gather(part, chosen, axis=dim, tiled=True)
    return part


def scatter_axes(part: jax.Array, spec: PartitionSpec, names: Callable[[str], bool]) -> jax.Array:
    """The inverse of `gather_axes` for partial sums: adds them up, and each device keeps its own part of the sum."""
    for dim, entry in enumerate(spec):
        chosen = tuple(filter(names, names_in(entry)))
        if chosen:
            part = lax.psum_scatter(part, chosen, scatter_dimension=dim, tiled=True)
    return part
