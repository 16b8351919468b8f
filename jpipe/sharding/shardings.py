"""How an array lies on the devices of one stage, and how it gets from one such sharding to another.

Of every mesh axis besides `stage` an array is either a *shard* along one dimension, *replicated*, or *partial*: the
array is the sum of what the devices hold. (PyTorch's DTensor has the same three placements.) Every conversion is a
collective within the devices of one stage or none at all, so that it may stand in a loop that other stages don't run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec


@dataclass(frozen=True)
class Axis:
    """Mesh axes that arrays are split over jointly.

    Attributes:
      names: of the mesh axes, the major first.
      sizes: of the mesh axes.
      of_examples: whether micro-batches are split over it (data axes), and not weights.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    of_examples: bool = False

    @property
    def size(self) -> int:
        """The devices along all of them together."""
        return math.prod(self.sizes)


@dataclass(frozen=True)
class Shard:
    """Equal blocks of one dimension: its n elements seen as `[outer, size, n / (outer * size)]`, cut along the second.

    With `outer` = 1 a device has one run of elements; more of them arise where a reshape puts another dimension in
    front of a split one, and where several axes split one dimension.
    """

    dim: int
    outer: int = 1


@dataclass(frozen=True)
class Replicated:
    """The same on all devices."""


@dataclass(frozen=True)
class Partial:
    """The array is the sum over the devices."""


REPLICATED, PARTIAL = Replicated(), Partial()
Placement = Shard | Replicated | Partial
Sharding = tuple[Placement, ...]
"""One placement an axis."""


def replicated(axes: Sequence[Axis]) -> Sharding:
    """The same on all devices."""
    return (REPLICATED,) * len(axes)


def settled(sharding: Sharding) -> Sharding:
    """The sharding once partial sums are added up."""
    return tuple(REPLICATED if p == PARTIAL else p for p in sharding)


def in_runs(sharding: Sharding) -> Sharding:
    """The sharding without those shards that aren't one run of elements, which no PartitionSpec may describe."""
    return tuple(REPLICATED if isinstance(p, Shard) and p.outer > 1 else p for p in sharding)


def local_shape(shape: Sequence[int], sharding: Sharding, axes: Sequence[Axis]) -> tuple[int, ...]:
    """The shape of a device's part of an array."""
    result = list(shape)
    for placement, axis in zip(sharding, axes, strict=True):
        if isinstance(placement, Shard):
            result[placement.dim] //= axis.size
    return tuple(result)


def local_struct(leaf: Any, sharding: Sharding, axes: Sequence[Axis]) -> jax.ShapeDtypeStruct:
    """The type of a device's part of an array."""
    return jax.ShapeDtypeStruct(local_shape(leaf.shape, sharding, axes), leaf.dtype)


def local_structs(tree: Any, shardings: Sequence[Sharding], axes: Sequence[Axis]) -> list[jax.ShapeDtypeStruct]:
    """The types of a device's parts of the leaves of a pytree."""
    return [local_struct(leaf, s, axes) for leaf, s in zip(jax.tree.leaves(tree), shardings, strict=True)]


def is_possible(shape: Sequence[int], sharding: Sharding, axes: Sequence[Axis]) -> bool:
    """Whether an array of a shape can be sharded so: blocks divide dimensions, and lie within one another."""
    pairs = [(p, axis.size) for p, axis in zip(sharding, axes, strict=True) if isinstance(p, Shard)]
    return is_nested(sharding, axes) and not any(shape[p.dim] % (p.outer * size) for p, size in pairs)


def is_nested(sharding: Sharding, axes: Sequence[Axis]) -> bool:
    """Whether the blocks of axes that split the same dimension lie within one another."""
    inside: dict[int, int] = {}
    pairs = [(p, axis.size) for p, axis in zip(sharding, axes, strict=True) if isinstance(p, Shard)]
    for placement, size in sorted(pairs, key=lambda pair: pair[0].outer):
        if placement.outer % inside.get(placement.dim, 1):
            return False
        inside[placement.dim] = placement.outer * size
    return True


def of_spec(spec: PartitionSpec, axes: Sequence[Axis], sizes: Any) -> Sharding:
    """The sharding that a weight's PartitionSpec means; axes of examples are taken for gathered.

    Args:
      spec: may name other mesh axes too, which are left out.
      axes: what arrays are split over.
      sizes: mesh axis -> size, of all axes that the spec names.
    """
    found: dict[str, Shard] = {}
    for dim, entry in enumerate(spec):
        outer = 1
        for name in names_in(entry):
            found[name] = Shard(dim, outer)
            outer *= sizes[name]
    return tuple(REPLICATED if axis.of_examples else found.get(axis.names[0], REPLICATED) for axis in axes)


def names_in(entry: Any) -> tuple[str, ...]:
    """The mesh axes that an entry of a PartitionSpec names."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def to_spec(sharding: Sharding, axes: Sequence[Axis], ndim: int) -> PartitionSpec:
    """The PartitionSpec of a sharding in runs of elements; what isn't a shard is named nowhere."""
    entries: list[list[tuple[int, tuple[str, ...]]]] = [[] for _ in range(ndim)]
    for placement, axis in zip(sharding, axes, strict=True):
        if isinstance(placement, Shard):
            entries[placement.dim].append((placement.outer, axis.names))
    joined = [tuple(name for _, names in sorted(entry) for name in names) for entry in entries]
    return PartitionSpec(*(names[0] if len(names) == 1 else names or None for names in joined))


# --- converting, inside of a program on all devices ---


def convert(x: Any, axes: Sequence[Axis], now: Sharding, wanted: Sharding) -> Any:
    """A device's part of an array under another sharding."""
    # What makes arrays smaller comes first.
    order = sorted(range(len(axes)), key=lambda i: not isinstance(wanted[i], Shard))
    steps = _steps(now, wanted, order)
    if not all(is_nested(step, axes) for step in steps):  # not one axis after the other: by way of whole arrays
        through = tuple(REPLICATED if a != b else a for a, b in zip(now, wanted, strict=True))
        steps = [*_steps(now, through, order), *_steps(through, wanted, order)]
    for step in steps:
        for i in range(len(axes)):
            if step[i] != now[i]:
                x = _convert_along(x, axes, list(now), i, step[i])
        now = step
    return x


def _steps(now: Sharding, wanted: Sharding, order: Sequence[int]) -> list[Sharding]:
    """The shardings on the way, one axis after the other."""
    steps, current = [], list(now)
    for i in order:
        current[i] = wanted[i]
        steps.append(tuple(current))
    return steps


def _convert_along(x: Any, axes: Sequence[Axis], now: list[Placement], i: int, wanted: Placement) -> Any:
    """`x` with the placement of one axis changed; the others are as in `now`."""
    old, axis = now[i], axes[i]
    among = lambda shard: _outer_here(shard, axes, now, i)
    if isinstance(old, Shard):
        if isinstance(wanted, Shard) and among(old) == among(wanted) == 1 and old.dim != wanted.dim:
            return lax.all_to_all(x, axis.names, wanted.dim, old.dim, tiled=True)
        if wanted == PARTIAL:
            return _pad(x, axis, old.dim, among(old))
        x = _gather(x, axis, old.dim, among(old))
        return _slice(x, axis, wanted.dim, among(wanted)) if isinstance(wanted, Shard) else x
    if old == PARTIAL:
        if isinstance(wanted, Shard) and among(wanted) == 1:
            return lax.psum_scatter(x, axis.names, scatter_dimension=wanted.dim, tiled=True)
        x = lax.psum(x, axis.names)
        return _slice(x, axis, wanted.dim, among(wanted)) if isinstance(wanted, Shard) else x
    if isinstance(wanted, Shard):
        return _slice(x, axis, wanted.dim, among(wanted))
    return jnp.where(lax.axis_index(axis.names) == 0, x, jnp.zeros_like(x))


def _outer_here(shard: Shard, axes: Sequence[Axis], now: list[Placement], i: int) -> int:
    """`shard.outer` on a device, where other axes have cut the dimension already."""
    outer = shard.outer
    for j, other in enumerate(now):
        if j != i and isinstance(other, Shard) and other.dim == shard.dim and other.outer < shard.outer:
            outer //= axes[j].size
    return outer


def _view(x: Any, dim: int, *sizes: int) -> Any:
    """`x` with one dimension seen as several, the last of them as large as needed."""
    rest = x.shape[dim] // math.prod(sizes)
    return x.reshape(*x.shape[:dim], *sizes, rest, *x.shape[dim + 1 :])


def _merged(x: Any, dim: int, count: int) -> Any:
    """The inverse of `_view`: `count` dimensions as one."""
    size = math.prod(x.shape[dim : dim + count])
    return x.reshape(*x.shape[:dim], size, *x.shape[dim + count :])


def _gather(x: Any, axis: Axis, dim: int, outer: int) -> Any:
    if outer == 1:
        return lax.all_gather(x, axis.names, axis=dim, tiled=True)
    return _merged(lax.all_gather(_view(x, dim, outer), axis.names, axis=dim + 1, tiled=True), dim, 2)


def _slice(x: Any, axis: Axis, dim: int, outer: int) -> Any:
    mine = lax.dynamic_index_in_dim(
        _view(x, dim, outer, axis.size),
        lax.axis_index(axis.names),
        dim + 1,
        keepdims=False,
        allow_negative_indices=False,
    )
    return _merged(mine, dim, 2)


def _pad(x: Any, axis: Axis, dim: int, outer: int) -> Any:
    """Zeros of the whole shape with this device's part in its place."""
    apart = jnp.expand_dims(_view(x, dim, outer), dim + 1)
    place = lax.broadcasted_iota(jnp.int32, (axis.size,) + (1,) * (apart.ndim - dim - 2), 0)
    mine = place == lax.axis_index(axis.names)
    return _merged(jnp.where(mine, apart, jnp.zeros_like(apart)), dim, 3)


# --- what is split at rest ---


def gather_axes(x: Any, spec: PartitionSpec, names: Callable[[str], bool]) -> Any:
    """A device's part of an array with those mesh axes gathered that `names` picks out of its spec.

    The others' shards stay, so that `of_spec` of the whole spec still describes them.
    """
    for dim, entry in enumerate(spec):
        chosen = tuple(filter(names, names_in(entry)))
        if chosen:
            x = lax.all_gather(x, chosen, axis=dim, tiled=True)
    return x


def scatter_axes(x: Any, spec: PartitionSpec, names: Callable[[str], bool]) -> Any:
    """The inverse of `gather_axes` for partial sums: adds them up, each device its own part."""
    for dim, entry in enumerate(spec):
        chosen = tuple(filter(names, names_in(entry)))
        if chosen:
            x = lax.psum_scatter(x, chosen, scatter_dimension=dim, tiled=True)
    return x
