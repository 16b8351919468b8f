"""Takes a mesh axis apart: sixteen devices can't split eight heads evenly, eight pairs of devices can.

Sixteen devices along a mesh axis can split the columns of a projection, but not the eight heads that a reshape makes of
them. But seen as `[8, 2]` the devices are two axes, and each of them splits a dimension:

    columns [1024]      Shard(0) along 16   =   Shard(0, 1) along 8, Shard(0, 8) along 2
    heads   [8, 128]    none                    Shard(0) along 8,    Shard(1) along 2

So eight heads of keys and values lie as the groups of queries that read them (Shardy calls this a sub-axis). A plan for
axes taken apart begins and ends with arrays that lie along whole ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import accumulate, pairwise

from jpipe.jaxprs.flat_jaxpr import FlatJaxpr
from jpipe.jaxprs.tracing import equations_in
from jpipe.partitioner.rule import operand_shape, result_shape
from jpipe.partitioner.shardings import PARTIAL, REPLICATED, Axis, AxisSharding, Shape, Shard, Sharding
from jpipe.partitioner.way import Axes


def taken_apart(flat: FlatJaxpr, axes: Axes) -> Axes:
    """Takes the axes apart where reshapes would have to gather arrays that the parts can split."""
    equations = equations_in(e.equation for e in flat.equations)
    shapes = {(operand_shape(e), result_shape(e)) for e in equations if e.primitive.name == "reshape"}
    return tuple(part for axis in axes for part in _parts(axis, shapes))


def apart(sharding: Sharding, axes: Axes, parts: Axes) -> Sharding:
    """Says along parts of axes the same as a sharding says along the axes."""
    along = {axis.names: s for s, axis in zip(sharding, axes, strict=True)}
    of_part = lambda s, part: Shard(s.dim, s.outer * part.outer) if isinstance(s, Shard) else s
    return tuple(of_part(along[part.names], part) for part in parts)


def together(sharding: Sharding, axes: Axes, parts: Axes) -> Sharding:
    """Makes the sharding along axes to which one along their parts is to be converted.

    Parts that disagree can't be said along the whole axis: then partial, if it is along one of them, else replicated.
    """

    def along(axis: Axis) -> AxisSharding:
        along_parts = tuple(s for s, part in zip(sharding, parts, strict=True) if part.names == axis.names)
        agreeing = apart((along_parts[0],), (axis,), tuple(part for part in parts if part.names == axis.names))
        if along_parts == agreeing:
            return along_parts[0]
        return PARTIAL if PARTIAL in along_parts else REPLICATED

    return tuple(map(along, axes))


def _parts(axis: Axis, reshapes: Iterable[tuple[Shape, Shape]]) -> list[Axis]:
    """Takes an axis apart, if reshapes ask for it: for 4 and 8 of 16 devices into `[4, 2, 2]`."""
    counts = {count for old, new in reshapes for count in _shared(axis.size, old, new)}
    if axis.is_data or not counts:
        return [axis]
    ends = [1]  # of 4 and 6 of 12 devices, which don't divide one another, the smaller
    for count in [*sorted(counts), axis.size]:
        if count % ends[-1] == 0:
            ends.append(count)
    return [Axis(axis.names, (end // start,), outer=start, inner=axis.size // end) for start, end in pairwise(ends)]


def _shared(size: int, old: Shape, new: Shape) -> set[int]:
    """Finds into how many parts `size` devices can split the first of the dimensions that a reshape makes of one.

    Where they can split the one, but not the first of those: [32] on 16 devices, and [8, 4] on 8 pairs of them.
    """
    starts = dict(zip(accumulate(old, lambda a, b: a * b, initial=1), old, strict=False))
    counts = set()
    for start, dim in zip(accumulate(new, lambda a, b: a * b, initial=1), new, strict=False):
        whole = starts.get(start, 0)
        if whole > dim > 1 and whole % size == 0:
            counts.add(math.gcd(dim, size))
    return counts - {1, size}
