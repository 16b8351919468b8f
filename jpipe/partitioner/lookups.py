"""The rules of look-ups (`gather`) and of writes and additions (`scatter`) at indices.

A rule takes an equation, how each operand lies along one axis, and the axis; it says how the operands have to lie and
how the result lies then, or None if they have to be whole (`jpipe.sharding.rule.Rule`).

A look-up takes a slice of a *table* for each vector of indices `[*index dimensions, columns]`: column k says where the
slice starts along the table's dimension `start_index_map[k]`. The result has the index dimensions, and among them, at
`offset_dims`, those dimensions of the table that slices keep: its *window* dimensions. A write is the reverse: for each
vector of indices a window of the *updates* is written into the *target*.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jpipe.partitioner.rule_result import Operation, Rule, RuleResult, aval_of, operand_shape, result_shape
from jpipe.partitioner.shardings import PARTIAL, REPLICATED, Axis, AxisSharding, Shard
from jpipe.seam.jaxpr_types import JaxprEqn


def gather(equation: JaxprEqn, shardings: Sequence[AxisSharding], axis: Axis) -> RuleResult | None:
    """The rule of a look-up; operands: table, indices.

    Split indices give split results. In a split table each device looks up what it has, and zeros elsewhere: the result
    is partial.
    """
    d, (table, indices) = equation.params["dimension_numbers"], shardings
    index_dims = [dim for dim in range(len(result_shape(equation))) if dim not in d.offset_dims]
    if isinstance(indices, Shard) and indices.dim < len(index_dims):
        result = Shard(index_dims[indices.dim], indices.outer)
        if indices.dim not in d.start_indices_batching_dims:
            return RuleResult([REPLICATED, indices], [result])
        k = d.start_indices_batching_dims.index(indices.dim)
        return RuleResult([Shard(d.operand_batching_dims[k], indices.outer), indices], [result])
    if table == PARTIAL and equation.params["mode"] != lax.GatherScatterMode.FILL_OR_DROP:
        return RuleResult([PARTIAL, REPLICATED], [PARTIAL])
    return _split_table(equation, table, axis, index_dims) if isinstance(table, Shard) else None


def _split_table(equation: JaxprEqn, table: Shard, axis: Axis, index_dims: Sequence[int]) -> RuleResult | None:
    """How things are looked up in a split table.

    Args:
      equation: the look-up.
      table: how the table lies.
      axis: the axis.
      index_dims: dimension of the indices -> the result's dimension.
    """
    d, shape, sizes = equation.params["dimension_numbers"], operand_shape(equation), equation.params["slice_sizes"]
    windows = [dim for dim in range(len(shape)) if dim not in (*d.collapsed_slice_dims, *d.operand_batching_dims)]
    if table.dim in d.operand_batching_dims:
        k = d.start_indices_batching_dims[d.operand_batching_dims.index(table.dim)]
        return RuleResult([table, Shard(k, table.outer)], [Shard(index_dims[k], table.outer)])
    if table.dim in windows and sizes[table.dim] == shape[table.dim] and table.dim not in d.start_index_map:
        return RuleResult([table, REPLICATED], [Shard(d.offset_dims[windows.index(table.dim)], table.outer)])
    can_be_added = jnp.issubdtype(aval_of(equation.outvars[0]).dtype, jnp.number)
    by_index = table.dim in d.collapsed_slice_dims and table.dim in d.start_index_map
    if by_index and table.outer == 1 and can_be_added:
        wrap = lambda operation: _own_entries(equation, operation, axis, table.dim, index_dims)
        return RuleResult([table, REPLICATED], [PARTIAL], wrap)
    return None


def _own_entries(
    equation: JaxprEqn, operation: Operation, axis: Axis, dim: int, index_dims: Sequence[int]
) -> Operation:
    """A look-up in a device's own part of a table that is split along `dim`: zeros for the entries of others.

    Args:
      equation: the look-up in the whole table.
      operation: the look-up in a part of it.
      axis: the axis that splits the table.
      dim: the table's split dimension, which indices choose from.
      index_dims: dimension of the indices -> the result's dimension.
    """
    column = equation.params["dimension_numbers"].start_index_map.index(dim)
    size, ndim = operand_shape(equation)[dim], len(result_shape(equation))

    def look_up(table: jax.Array, indices: jax.Array) -> list[jax.Array]:
        device, length = lax.axis_index(axis.names), size // axis.size
        indices = indices.astype(jnp.promote_types(indices.dtype, jnp.int32))  # bytes can't count a larger table
        wanted = indices[..., column]
        # What is outside of the whole table is looked up by the first device, outside of its part too.
        outside = (wanted < 0) | (wanted >= size)
        if equation.params["mode"] == lax.GatherScatterMode.CLIP:
            wanted, outside = jnp.clip(wanted, 0, size - 1), jnp.zeros_like(outside)
        own = wanted - (device * length).astype(wanted.dtype)
        valid = jnp.where(outside, device == 0, (own >= 0) & (own < length))
        own = jnp.where(outside, jnp.full_like(own, length), jnp.clip(own, 0, length - 1))
        in_column = lax.broadcasted_iota(jnp.int32, indices.shape, indices.ndim - 1) == column
        (found,) = operation(table, jnp.where(in_column, own[..., None], indices))
        valid = lax.broadcast_in_dim(valid, found.shape, [i for i in range(ndim) if i in index_dims])
        return [jnp.where(valid, found, jnp.zeros_like(found))]

    return look_up


def scatter(adds: bool) -> Rule:
    """The rule of writes at indices, or of additions; operands: target, indices, updates."""

    def rule(equation: JaxprEqn, shardings: Sequence[AxisSharding], axis: Axis) -> RuleResult | None:
        """By split updates if there are some, else by windows that are as large as the target."""
        window_dims = equation.params["dimension_numbers"].update_window_dims
        index_dims = [dim for dim in range(len(operand_shape(equation, 2))) if dim not in window_dims]
        _, indices, updates = shardings
        if isinstance(updates, Shard) and updates.dim in index_dims:
            return _split_updates(equation, index_dims, index_dims.index(updates.dim), updates.outer, adds)
        if isinstance(indices, Shard) and indices.dim < len(index_dims):
            return _split_updates(equation, index_dims, indices.dim, indices.outer, adds)
        return _split_windows(equation, shardings, adds)

    return rule


def _split_updates(
    equation: JaxprEqn, index_dims: Sequence[int], dim: int, outer: int, adds: bool
) -> RuleResult | None:
    """Each device writes its own updates: into its part of a batched target, or sums are left partial.

    Args:
      equation: the write.
      index_dims: dimension of the indices -> the updates' dimension.
      dim: the dimension of the indices that is split.
      outer: as in `Shard`.
      adds: whether updates are added.
    """
    d = equation.params["dimension_numbers"]
    own = [Shard(dim, outer), Shard(index_dims[dim], outer)]
    if dim in d.scatter_indices_batching_dims:
        target = Shard(d.operand_batching_dims[d.scatter_indices_batching_dims.index(dim)], outer)
        return RuleResult([target, *own], [target])
    return RuleResult([PARTIAL, *own], [PARTIAL]) if adds else None


def _split_windows(equation: JaxprEqn, shardings: Sequence[AxisSharding], adds: bool) -> RuleResult | None:
    """Each device writes its part of every window, where windows are as large as the target."""
    d, (target, _, updates) = equation.params["dimension_numbers"], shardings
    shape, update_shape = operand_shape(equation, 0), operand_shape(equation, 2)
    windows = [dim for dim in range(len(shape)) if dim not in (*d.inserted_window_dims, *d.operand_batching_dims)]
    whole = {  # the target's dimension -> the updates' dimension
        dim: update_dim
        for dim, update_dim in zip(windows, d.update_window_dims, strict=True)
        if update_shape[update_dim] == shape[dim] and dim not in d.scatter_dims_to_operand_dims
    }
    chosen = target
    if isinstance(updates, Shard) and not (isinstance(target, Shard) and target.dim in whole):
        chosen = next((Shard(dim, updates.outer) for dim, u in whole.items() if u == updates.dim), REPLICATED)
    if isinstance(chosen, Shard) and chosen.dim in whole:
        return RuleResult([chosen, REPLICATED, Shard(whole[chosen.dim], chosen.outer)], [chosen])
    if adds and PARTIAL in (target, updates):
        return RuleResult([PARTIAL, REPLICATED, PARTIAL], [PARTIAL])
    return None
