"""Types for how an array lies on several devices (its sharding), and how PartitionSpecs say that.

The *whole* array is what a function is traced on; a device has a *part* of it. Along each axis of the mesh an array is
a *shard* of one dimension, *replicated*, or *partial*: the whole array is the sum of the parts. (PyTorch's DTensor has
the same three.) Of x = [[1, 2], [3, 4]] two devices have

                device 0            device 1
    Shard(0)    [[1, 2]]            [[3, 4]]
    Shard(1)    [[1], [3]]          [[2], [4]]
    replicated  [[1, 2], [3, 4]]    [[1, 2], [3, 4]]
    partial     [[1, 0], [5, 4]]    [[0, 2], [-2, 0]]     or any others whose sum is x
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jpipe.types import PyTree

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Axis:
    """A mesh axis that arrays are split over, or several jointly, or a part of one (`jpipe.partitioner.choice`).

    Attributes:
      names: the names of the mesh axes, the major first.
      sizes: their sizes, in the same order; of a part its own.
      is_data: whether examples are split over them. Along data axes random bits are split at once, and sharding
        constraints change nothing.
      sums_late: whether sums are added up after casts to wider types; along data axes they are, after any casts.
      outer, inner: of a part of a mesh axis, whose devices are seen as `[outer, size, inner]`.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    is_data: bool = False
    sums_late: bool = False
    outer: int = 1
    inner: int = 1

    @property
    def size(self) -> int:
        """The number of devices along all of the mesh axes together."""
        return math.prod(self.sizes)

    @property
    def groups(self) -> list[list[int]] | None:
        """The groups of devices that collectives along a part of a mesh axis join; None for a whole axis."""
        devices = np.arange(self.outer * self.size * self.inner).reshape(self.outer, self.size, self.inner)
        return np.swapaxes(devices, 1, 2).reshape(-1, self.size).tolist() if self.outer * self.inner > 1 else None

    def index(self) -> jax.Array:
        """Returns the index of a device along the axis, in a program that all devices run."""
        along = lax.axis_index(self.names)
        return along // self.inner % self.size if self.groups else along


@dataclass(frozen=True)
class Shard:
    """Each device along an axis has equal blocks of the dimension `dim`.

    The dimension's n elements are seen as `[outer, axis.size, n / (outer * axis.size)]`; device i has `[:, i, :]`. Of
    eight elements over two devices:

        element    0 1 2 3 4 5 6 7
        outer = 1  a a a a b b b b      a: the first device's, b: the second's; one run of elements each
        outer = 2  a a b b a a b b      two runs each
        outer = 4  a b a b a b a b

    Several runs arise where a reshape merges a dimension in front into a split one, and where several axes split one
    dimension: the axis that cuts last has the larger `outer`. With `Shard(0, 1)` along one axis and `Shard(0, 2)` along
    another, of two devices each, device (i, j) has the elements 4 i + 2 j and 4 i + 2 j + 1.
    """

    dim: int
    outer: int = 1

    def outer_in_part(self, axes: Sequence[Axis], now: Sharding, i: int) -> int:
        """Counts `outer` in a device's part, in which other axes than i have cut the dimension already."""
        outer = self.outer
        for j, other in enumerate(now):
            if j != i and isinstance(other, Shard) and other.dim == self.dim and other.outer < self.outer:
                outer //= axes[j].size
        return outer


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
"""How an array lies on devices: one `AxisSharding` for each axis."""


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


def replicated(axes: Sequence[Axis]) -> Sharding:
    """Makes the sharding of an array that every device has as a whole."""
    return (REPLICATED,) * len(axes)


def summed(sharding: Sharding) -> Sharding:
    """Adds up partial sums: the sharding is replicated where it was partial."""
    return tuple(REPLICATED if s == PARTIAL else s for s in sharding)


def in_runs(sharding: Sharding, axes: Sequence[Axis]) -> Sharding:
    """Makes a sharding replicated where a device has several runs of elements, which no PartitionSpec may describe.

    >>> axes = Axis(("data",), (2,)), Axis(("model",), (4,))
    >>> in_runs((Shard(0), Shard(0, 2)), axes), in_runs((REPLICATED, Shard(0, 2)), axes)
    ((Shard(dim=0, outer=1), Shard(dim=0, outer=2)), (Replicated(), Replicated()))
    """
    has_several = lambda i, s: isinstance(s, Shard) and s.outer_in_part(axes, sharding, i) > 1
    return tuple(REPLICATED if has_several(i, s) else s for i, s in enumerate(sharding))


def part_shape(shape: Shape, sharding: Sharding, axes: Sequence[Axis]) -> Shape:
    """Returns the shape of a device's part of an array of a whole shape.

    >>> part_shape((4, 6), (Shard(0), PARTIAL), (Axis(("data",), (2,)), Axis(("model",), (2,))))
    (2, 6)
    """
    shards = [(s.dim, axis.size) for s, axis in zip(sharding, axes, strict=True) if isinstance(s, Shard)]
    return tuple(n // math.prod(size for of_dim, size in shards if of_dim == dim) for dim, n in enumerate(shape))


def part_structs(tree: PyTree, shardings: Sequence[Sharding], axes: Sequence[Axis]) -> list[jax.ShapeDtypeStruct]:
    """Lists the shapes and dtypes of a device's parts of a pytree's leaves, each with its own sharding."""
    pairs = zip(jax.tree.leaves(tree), shardings, strict=True)
    return [jax.ShapeDtypeStruct(part_shape(leaf.shape, s, axes), leaf.dtype) for leaf, s in pairs]


def is_possible(shape: Shape, sharding: Sharding, axes: Sequence[Axis]) -> bool:
    """Whether an array of a whole shape can be sharded so: blocks divide dimensions, and lie within one another."""
    blocks = blocks_of(sharding, axes)
    return blocks is not None and not any(shape[dim] % count for dim, count in blocks.items())


def blocks_of(sharding: Sharding, axes: Sequence[Axis]) -> dict[int, int] | None:
    """Counts the blocks of each dimension; None where those of several axes don't lie within one another."""
    blocks: dict[int, int] = {}
    pairs = [(s, axis.size) for s, axis in zip(sharding, axes, strict=True) if isinstance(s, Shard)]
    for shard, size in sorted(pairs, key=lambda pair: pair[0].outer):
        if shard.outer % blocks.get(shard.dim, 1):
            return None
        blocks[shard.dim] = shard.outer * size
    return blocks


def of_spec(spec: PartitionSpec, axes: Sequence[Axis]) -> Sharding:
    """Reads the sharding that a PartitionSpec means; the mesh axes that it names besides `axes` have one device each.

    Raises:
      ValueError: it names a part of mesh axes that arrays are split over jointly, or in another order.
    """
    sharding: list[AxisSharding] = [REPLICATED] * len(axes)
    joint = {name: axis.names for axis in axes for name in axis.names}
    for dim, entry in enumerate(spec):
        names, outer = tuple(name for name in names_in(entry) if name in joint), 1
        while names:
            first = joint[names[0]]
            if names[: len(first)] != first:
                fault = f"{spec} names {names[0]!r}, but arrays are split over the mesh axes {first} jointly"
                raise ValueError(f"{fault}; name all of them, in this order")
            for i in (i for i, axis in enumerate(axes) if axis.names == first):  # all of its parts
                sharding[i] = Shard(dim, outer)
                outer *= axes[i].size
            names = names[len(first) :]
    return tuple(sharding)


def names_in(entry: object) -> tuple[str, ...]:
    """Lists the mesh axes that an entry of a PartitionSpec (None, a name or a tuple of names) names."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return entry if isinstance(entry, tuple) else (str(entry),)


def named(specs: Iterable[PartitionSpec]) -> set[str]:
    """Collects the mesh axes that PartitionSpecs name."""
    return {name for spec in specs for entry in spec for name in names_in(entry) if name is not None}


def to_spec(sharding: Sharding, axes: Sequence[Axis], ndim: int) -> PartitionSpec:
    """Writes the PartitionSpec of an array of `ndim` dimensions with this sharding.

    Axes along which it isn't a shard are named nowhere. A device has to have one run of elements of each dimension; if
    several axes split it, the one with the smaller `outer` is named first.
    """
    entries: list[list[tuple[int, tuple[str, ...]]]] = [[] for _ in range(ndim)]
    for along, axis in zip(sharding, axes, strict=True):
        if isinstance(along, Shard):
            entries[along.dim].append((along.outer, axis.names))
    joined = [tuple(name for _, names in sorted(entry) for name in names) for entry in entries]
    return PartitionSpec(*(names[0] if len(names) == 1 else names or None for names in joined))
