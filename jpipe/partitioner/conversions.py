"""Converts a device's part of an array to its part under another sharding, by collectives; counts what is sent.

Collectives join devices along the axes of the sharding alone: others may be elsewhere in their program meanwhile.

A cost is a number of bytes: those that a device sends, and those that it could send while it computes and writes. What
devices send each other in a program, its collectives, is read from its jaxpr (`sent_in`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxprs_in_params

from jpipe.jax.flat_jaxpr import aval_of
from jpipe.jax.inside import axes_of, line_of, scopes_of
from jpipe.jax.primitives import COLLECTIVES, Jaxpr, JaxprEqn, shapes_of
from jpipe.partitioner.shardings import PARTIAL, REPLICATED, Axis, Hop, Shard, Sharding, blocks_of, part_shape


def names_of(axes: Sequence[Axis]) -> tuple[str, ...]:
    """Lists the names of all mesh axes, each once."""
    return tuple(dict.fromkeys(name for axis in axes for name in axis.names))


def by_mesh_axis(axes: Sequence[Axis]) -> list[list[int]]:
    """Groups the indices of axes that are parts of one mesh axis."""
    return [[i for i, axis in enumerate(axes) if axis.names == names] for names in dict.fromkeys(a.names for a in axes)]


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


def collective_of(axes: Sequence[Axis], hop: Hop) -> str | None:
    """Names the collective of a step (as in `Sent`); None if each device makes its part from the part that it has."""
    i, wanted = hop.over[0], hop.wanted
    old = hop.now[i]
    one_run = lambda shard: isinstance(shard, Shard) and shard.outer_in_part(axes, hop.now, i) == 1
    if isinstance(old, Shard) and wanted != PARTIAL:
        exchanges = one_run(old) and one_run(wanted) and isinstance(wanted, Shard) and old.dim != wanted.dim
        return "all_to_all" if exchanges else "all_gather"
    return ("reduce_scatter" if one_run(wanted) else "all_reduce") if old == PARTIAL else None


def bytes_sent(axes: Sequence[Axis], shape: tuple[int, ...], itemsize: int, hop: Hop) -> float:
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
    names = names_of([axes[j] for j in hop.over])
    joined = {"axis_name": names, "axis_index_groups": None if others else axis.groups}
    if isinstance(old, Shard):
        if kind == "all_to_all" and isinstance(wanted, Shard):
            return lax.all_to_all(part, split_axis=wanted.dim, concat_axis=old.dim, tiled=True, **joined)
        if wanted == PARTIAL:
            return _among_zeros(part, axis, old.dim, old.outer_in_part(axes, now, i))
        part = _joined(part, axis, old.dim, old.outer_in_part(axes, now, i))
    elif old == PARTIAL:
        if kind == "reduce_scatter" and isinstance(wanted, Shard):
            return lax.psum_scatter(part, scatter_dimension=wanted.dim, tiled=True, **joined)
        part = lax.psum(part, **joined)
    elif wanted == PARTIAL:  # the first device has the array, the others zeros
        return jnp.where(axis.index() == 0, part, jnp.zeros_like(part))
    return _cut(part, axis, wanted.dim, wanted.outer_in_part(axes, now, i)) if isinstance(wanted, Shard) else part


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


SCATTERED, FLOPS, WRITTEN = 1 + 1 / 4, 1 / 1024, 1 / 128
"""The worth of a byte of a reduce-scatter, an operation of a product and a byte written, in bytes sent; in powers of
two, so that costs are added up without rounding, and equal ones stay equal on all hosts.

In the time of a byte 765 operations are done on a TPU v5p (459 TFLOP/s, 600 GB/s), 985 on a v5e, 1,100 on an H100
(NVLink, 900 GB/s), and 4.6 bytes written on a v5p (2,765 GB/s), but few of them: operations are joined. A compiler of
TPUs scatters 2,048 rows as 2,240, and 144 more."""
AMONG_ZEROS = 16 * WRITTEN
"""The cost of a byte of a shard that is written among zeros, to be added to a partial sum: no other operation does that
on its way. 16 MiB take 105,000 cycles on a v5p."""


def cost_of_work(equation: JaxprEqn, operands: Sequence[tuple[int, ...]], results: Sequence[tuple[int, ...]]) -> float:
    """Counts the cost of an equation on a device, of computing and of writing, by the shapes of its parts."""
    pairs = zip(equation.outvars, results, strict=True)
    written = sum(math.prod(shape) * aval_of(v).dtype.itemsize for v, shape in pairs)
    flops = 0.0
    if equation.primitive.name == "dot_general":
        (contracting, _), _ = equation.params["dimension_numbers"]
        flops = 2.0 * math.prod(results[0]) * math.prod(operands[0][dim] for dim in contracting)
    elif equation.primitive.name == "conv_general_dilated":
        output_features = equation.params["dimension_numbers"].rhs_spec[0]
        flops = 2.0 * math.prod(results[0]) * math.prod(operands[1]) / max(operands[1][output_features], 1)
    return flops * FLOPS + written * WRITTEN


def cost_of_conversion(
    axes: Sequence[Axis], shape: tuple[int, ...], size: int, now: Sharding, wanted: Sharding
) -> float:
    """Counts the cost of sending, for a whole array of elements of `size` bytes that comes to lie otherwise."""
    cost = 0.0
    for hop in hops(axes, now, wanted):
        if hop.wanted == PARTIAL and isinstance(hop.now[hop.over[0]], Shard):
            cost += AMONG_ZEROS * math.prod(part_shape(shape, hop.then, axes)) * size
        worth = SCATTERED if collective_of(axes, hop) == "reduce_scatter" else 1.0
        cost += worth * bytes_sent(axes, shape, size, hop)
    return cost


class Sent(NamedTuple):
    """A collective of a program.

    Attributes:
      collective: "all_reduce", "all_gather", "reduce_scatter", "all_to_all" or "permute".
      axes: the mesh axes along which it joins devices.
      devices: how many it joins: all along these axes, or a part of them.
      shape: the shape of the part that a device puts in.
      dtype: the dtype of that part.
      bytes: the bytes that a device sends, each time.
      loops: the lengths of the loops around it, outermost first, as far as they are known.
      scope: the names of the scopes and loops around it, outermost first.
      line: the user's line that made it, as "model.py:12"; empty if none did.
    """

    collective: str
    axes: tuple[str, ...]
    devices: int
    shape: tuple[int, ...]
    dtype: str
    bytes: float
    loops: tuple[int, ...]
    scope: tuple[str, ...]
    line: str


def sent_in(
    jaxpr: Jaxpr, sizes: Mapping[str, int], scope: tuple[str, ...] = (), loops: tuple[int, ...] = ()
) -> list[Sent]:
    """Lists the collectives of a jaxpr, and of those within it, in order.

    Args:
      jaxpr: a program that all devices run.
      sizes: mesh axis -> how many devices it has.
      scope, loops: what is around it, as in `Sent`.
    """
    sent: list[Sent] = []
    for equation in jaxpr.eqns:
        name, here = equation.primitive.name, (*scope, *scopes_of(equation))
        inner = (*loops, equation.params["length"]) if name == "scan" else loops
        for within in jaxprs_in_params(equation.params):
            sent += sent_in(within, sizes, here, inner)
        named = axes_of(equation) if name in COLLECTIVES else ()
        axes = tuple(axis for axis in named if sizes.get(axis, 1) > 1)
        for leaf in shapes_of(equation.invars) if axes else ():
            groups = equation.params.get("axis_index_groups")
            count = len(groups[0]) if groups else math.prod(sizes[axis] for axis in axes)
            kind = COLLECTIVES[name]
            size = ring_bytes(kind, leaf.size * leaf.dtype.itemsize, count)
            sent.append(Sent(kind, axes, count, leaf.shape, leaf.dtype.name, size, loops, here, line_of(equation)))
    return sent
