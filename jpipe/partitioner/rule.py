"""The interface of a rule, what it is told of one operation along one mesh axis and what it answers; rules of look-ups.

A rule is asked before anything is carried out, while a plan is made (`jpipe.partitioner.choice`): for each axis, and
for each sharding of the operands that is tried. It answers how operands have to lie, and how results lie then. It moves
nothing: the plan converts operands that lie otherwise.

Most rules follow from labels, as those of an einsum: dimensions that are split together have the same label. For the
product "bd,df->bf" there are three ways to split it along an axis:

           x [b, d]     w [d, f]        x @ w [b, f]
    b      Shard(0)     replicated      Shard(0)
    d      Shard(1)     Shard(0)        partial
    f      replicated   Shard(1)        Shard(1)

`by_labels` takes the first of these that keeps an operand as it lies.

A look-up (`gather`) takes a slice of a *table* for each vector of indices `[*index dimensions, columns]`: column k says
where the slice starts along the table's dimension `start_index_map[k]`. The result has the index dimensions, and among
them, at `offset_dims`, those dimensions of the table that slices keep: its *window* dimensions. A write or an addition
(`scatter`) is the reverse: for each vector of indices a window of the *updates* is written into the *target*.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jpipe.jax.flat_jaxpr import aval_of, operand_shape, result_shape
from jpipe.jax.primitives import JaxprEqn
from jpipe.partitioner.shardings import PARTIAL, REPLICATED, Axis, AxisSharding, Shape, Shard

Operation = Callable[..., list[jax.Array]]
"""A device's parts of an equation's operands -> its parts of the results."""


class RuleResult(NamedTuple):
    """How an equation is carried out along one axis.

    Attributes:
      operands: how each operand has to lie along the axis.
      results: how each result then lies along the axis.
      instead: what a device does instead of the equation: a function of that and its parts of the operands, which
        gives its parts of the results; None if it does just the equation.
    """

    operands: Sequence[AxisSharding]
    results: Sequence[AxisSharding]
    instead: Operation | None = None


Rule = Callable[[JaxprEqn, Sequence[AxisSharding], Axis], RuleResult | None]
"""(equation on whole arrays, how each operand lies along one axis, that axis) -> how it is carried out along the axis.

The answer may want operands to lie otherwise than they do; they are converted. None means that the operation has to see
whole arrays: all operands replicated.
"""

Labels = Sequence[Hashable]
"""A label for each dimension of an array; a dimension labelled None is never split."""


def by_labels(
    operands: Sequence[Labels], results: Sequence[Labels], lying: Sequence[AxisSharding], order: Sequence[int] = ()
) -> RuleResult | None:
    """Keeps an operand as it lies: the first that is a shard of a dimension with a label.

    Where others have that label, they are split too. Operands without it are replicated; results without it, in which
    it was summed over, are partial.

    Args:
      operands: the labels of the first operands; those behind them have none.
      results: the labels of the results.
      lying: how each operand lies.
      order: in which operands are looked at (default: from the first on).
    """
    order = order or range(len(operands))
    shards = [(s, operands[i][s.dim]) for i in order if isinstance(s := lying[i], Shard)]
    if not (labelled := [pair for pair in shards if pair[1] is not None]):
        return None
    shard, label = labelled[0]

    def split_or(labels: Labels, otherwise: AxisSharding) -> AxisSharding:
        return Shard(labels.index(label), shard.outer) if label in labels else otherwise

    first = [split_or(labels, REPLICATED) for labels in operands]
    others = [REPLICATED] * (len(lying) - len(operands))
    return RuleResult([*first, *others], [split_or(labels, PARTIAL) for labels in results])


def on_partial(shardings: Sequence[AxisSharding], num_results: int, count: int | None = None) -> RuleResult | None:
    """Answers for a linear operation, which may be done before its operands are summed; None if none is partial.

    The first `count` operands (default: all) are summed over devices later: if one is partial, all have to be.
    """
    alike = len(shardings[:count])
    if PARTIAL not in shardings[:alike]:
        return None
    return RuleResult([PARTIAL] * alike + [REPLICATED] * (len(shardings) - alike), [PARTIAL] * num_results)


def look_up_entries(equation: JaxprEqn, shardings: Sequence[AxisSharding], axis: Axis) -> RuleResult | None:
    """The rule of a look-up; operands: table, indices.

    Split indices give split results. Where the split dimension of a table is the one that is looked up in, each device
    looks up what it has, and zeros elsewhere: the result is partial.
    """
    dims, (table, _), entries = equation.params["dimension_numbers"], shardings, result_shape(equation)
    of_table, index_dims = _labels(equation, entries)
    split = by_labels([of_table, [*index_dims, None]], [range(len(entries))], shardings, order=(1, 0))
    if split is None and isinstance(table, Shard):
        can_be_added = jnp.issubdtype(aval_of(equation.outvars[0]).dtype, jnp.number)
        by_index = table.dim in dims.collapsed_slice_dims and table.dim in dims.start_index_map
        if by_index and table.outer == 1 and can_be_added:
            return RuleResult([table, REPLICATED], [PARTIAL], partial(_own_entries, equation, axis, table.dim))
    fills = equation.params["mode"] == lax.GatherScatterMode.FILL_OR_DROP
    return on_partial(shardings, 1, 1) if split is None and not fills else split


def _labels(equation: JaxprEqn, entries: Shape) -> tuple[list[int | None], list[int]]:
    """Labels the dimensions of a look-up's table, or of a write's target, by those of its entries.

    Entries are what is looked up, or the updates that are written.

    Returns:
      (the labels: of dimensions that are batched, and of windows as large as the table; the entries' index dimensions).
    """
    # A scatter calls its dimensions otherwise than a gather, but has them in the same order.
    kept, removed, chosen, batched, batched_indices, *_ = equation.params["dimension_numbers"]
    shape, index_dims = operand_shape(equation), [dim for dim in range(len(entries)) if dim not in kept]
    labels: list[int | None] = [None] * len(shape)
    for dim, k in zip(batched, batched_indices, strict=True):
        labels[dim] = index_dims[k]
    windows = [dim for dim in range(len(shape)) if dim not in (*removed, *batched)]
    for dim, at in zip(windows, kept, strict=True):
        if entries[at] == shape[dim] and dim not in chosen:
            labels[dim] = at
    return labels, index_dims


def _own_entries(
    equation: JaxprEqn, axis: Axis, dim: int, operation: Operation, table: jax.Array, indices: jax.Array
) -> list[jax.Array]:
    """Looks up in a device's own part of a table that is split along `dim`: zeros for the entries of others.

    With a table of 8 entries on two devices, 4 each:

        wanted             2    5    9 (outside of the table)
        device 0 looks up  2    0*   4 (outside of its part)       * some entry of its own, which is not used
        device 1 looks up  0*   1    0*
        device 0 has       t[2] 0    what the mode gives outside
        device 1 has       0    t[5] 0

    Args:
      equation: the look-up in the whole table.
      axis: the axis that splits the table.
      dim: the table's split dimension, which indices choose from.
      operation: the look-up in a part of it.
      table: the device's part.
      indices: all of them.
    """
    dims, ndim = equation.params["dimension_numbers"], len(result_shape(equation))
    column, size = dims.start_index_map.index(dim), operand_shape(equation)[dim]
    device, length = axis.index(), size // axis.size
    # Narrow indices, such as bytes, might not hold the table's size.
    indices = indices.astype(jnp.int64 if indices.dtype.itemsize > 4 else jnp.int32)
    wanted = indices[..., column]
    # What is outside of the whole table is looked up by the first device, outside of its part too.
    outside = (wanted < 0) | (wanted >= size)
    if equation.params["mode"] == lax.GatherScatterMode.CLIP:
        wanted, outside = jnp.clip(wanted, 0, size - 1), jnp.zeros_like(outside)
    place = wanted - (device * length).astype(wanted.dtype)  # in the device's part
    valid = jnp.where(outside, device == 0, (place >= 0) & (place < length))
    place = jnp.where(outside, jnp.full_like(place, length), jnp.clip(place, 0, length - 1))
    in_column = lax.broadcasted_iota(jnp.int32, indices.shape, indices.ndim - 1) == column
    (entries,) = operation(table, jnp.where(in_column, place[..., None], indices))
    valid = lax.broadcast_in_dim(valid, entries.shape, [i for i in range(ndim) if i not in dims.offset_dims])
    return [jnp.where(valid, entries, jnp.zeros_like(entries))]


def write_entries(equation: JaxprEqn, shardings: Sequence[AxisSharding], axis: Axis, adds: bool) -> RuleResult | None:
    """The rule of writes at indices, or of additions; operands: target, indices, updates.

    It goes by split updates if there are any, else by windows that are as large as the target. Where the split
    dimension of a target is one that indices choose from, each device adds what belongs to its own part.

    Labels are the updates' dimensions. Additions have labels for unbatched indices too: split, they leave sums partial.
    """
    (old, _, updates), update_shape = shardings, operand_shape(equation, 2)
    target, index_dims = _labels(equation, update_shape)
    of_updates = [dim if dim in target or (adds and dim in index_dims) else None for dim in range(len(update_shape))]
    of_indices = [*(of_updates[dim] for dim in index_dims), None]
    order = (2, 1, 0) if isinstance(updates, Shard) and updates.dim in index_dims else (1, 0, 2)
    split = by_labels([target, of_indices, of_updates], [target], shardings, order)
    if split is None:
        if adds and isinstance(old, Shard) and old.outer == 1 and old.dim in dims_of_entries(equation):
            return RuleResult([old, REPLICATED, REPLICATED], [old], partial(_to_own_entries, equation, axis, old.dim))
        return RuleResult([PARTIAL, REPLICATED, PARTIAL], [PARTIAL]) if adds and PARTIAL in (old, updates) else None
    # The target is added to once in all: it is one device's, and zeros on the others.
    return RuleResult([PARTIAL, *split.operands[1:]], [PARTIAL]) if PARTIAL in split.results else split


def dims_of_entries(equation: JaxprEqn) -> list[int]:
    """Lists the dimensions of a target of additions along which each index chooses one entry, and may choose none."""
    dims = equation.params["dimension_numbers"]
    if equation.params["mode"] == lax.GatherScatterMode.CLIP:
        return []
    return [dim for dim in dims.scatter_dims_to_operand_dims if dim in dims.inserted_window_dims]


def _to_own_entries(
    equation: JaxprEqn, axis: Axis, dim: int, add: Operation, target: jax.Array, indices: jax.Array, updates: jax.Array
) -> list[jax.Array]:
    """Adds to a device's own part of a target that is split along `dim`, which indices choose from.

    Seen from its part, the entries of others lie outside, before it or behind it, where nothing is added. The axis
    splits the whole target into runs of one length.
    """
    column = equation.params["dimension_numbers"].scatter_dims_to_operand_dims.index(dim)
    length = operand_shape(equation)[dim] // axis.size
    indices = indices.astype(jnp.int64 if indices.dtype.itemsize > 4 else jnp.int32)
    in_column = lax.broadcasted_iota(jnp.int32, indices.shape, indices.ndim - 1) == column
    start = (axis.index() * length).astype(indices.dtype)
    return add(target, jnp.where(in_column, indices - start, indices), updates)


LOOK_UPS: dict[str, Rule] = {
    "gather": look_up_entries,
    "scatter": partial(write_entries, adds=False),
    "scatter-add": partial(write_entries, adds=True),
}
"""The name of a primitive -> its rule, of look-ups and writes."""
