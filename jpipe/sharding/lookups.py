"""What look-ups and writes at indices do to shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jpipe.sharding.rule import Rule, Run, Step, result_of, shape_of
from jpipe.sharding.shardings import PARTIAL, REPLICATED, Axis, Placement, Shard


def gather(equation: Any, placements: Sequence[Placement], axis: Axis) -> Step | None:
    """Split indices give split results; in a split table each device looks up what it has, and zeros elsewhere."""
    d, (table, indices) = equation.params["dimension_numbers"], placements
    shape, sizes = shape_of(equation), equation.params["slice_sizes"]
    loops = [i for i in range(len(result_of(equation))) if i not in d.offset_dims]  # by dimension of the indices
    windows = [i for i in range(len(shape)) if i not in (*d.collapsed_slice_dims, *d.operand_batching_dims)]
    if isinstance(indices, Shard) and indices.dim < len(loops):
        result = Shard(loops[indices.dim], indices.outer)
        if indices.dim not in d.start_indices_batching_dims:
            return Step([REPLICATED, indices], [result])
        k = d.start_indices_batching_dims.index(indices.dim)
        return Step([Shard(d.operand_batching_dims[k], indices.outer), indices], [result])
    if table == PARTIAL and equation.params["mode"] != lax.GatherScatterMode.FILL_OR_DROP:
        return Step([PARTIAL, REPLICATED], [PARTIAL])
    if not isinstance(table, Shard):
        return None
    if table.dim in d.operand_batching_dims:
        k = d.start_indices_batching_dims[d.operand_batching_dims.index(table.dim)]
        return Step([table, Shard(k, table.outer)], [Shard(loops[k], table.outer)])
    if table.dim in windows and sizes[table.dim] == shape[table.dim] and table.dim not in d.start_index_map:
        return Step([table, REPLICATED], [Shard(d.offset_dims[windows.index(table.dim)], table.outer)])
    number = jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.number)
    if table.dim in d.collapsed_slice_dims and table.dim in d.start_index_map and table.outer == 1 and number:
        return Step(
            [table, REPLICATED], [PARTIAL], lambda run, axis: _own_entries(equation, run, axis, table.dim, loops)
        )
    return None


def _own_entries(equation: Any, run: Run, axis: Axis, dim: int, loops: Sequence[int]) -> Run:
    """A look-up in a device's own part of a table: zeros for the entries of others."""
    column = equation.params["dimension_numbers"].start_index_map.index(dim)
    size, ndim = shape_of(equation)[dim], len(result_of(equation))

    def look_up(table: Any, indices: Any) -> list[Any]:
        here, length = lax.axis_index(axis.names), size // axis.size
        indices = indices.astype(jnp.promote_types(indices.dtype, jnp.int32))  # bytes can't count a larger table
        wanted = indices[..., column]
        # What is outside of the whole table is looked up by the first device, outside of its part too.
        outside = (wanted < 0) | (wanted >= size)
        if equation.params["mode"] == lax.GatherScatterMode.CLIP:
            wanted, outside = jnp.clip(wanted, 0, size - 1), jnp.zeros_like(outside)
        own = wanted - (here * length).astype(wanted.dtype)
        valid = jnp.where(outside, here == 0, (own >= 0) & (own < length))
        own = jnp.where(outside, jnp.full_like(own, length), jnp.clip(own, 0, length - 1))
        here_in = lax.broadcasted_iota(jnp.int32, indices.shape, indices.ndim - 1) == column
        (found,) = run(table, jnp.where(here_in, own[..., None], indices))
        valid = lax.broadcast_in_dim(valid, found.shape, [i for i in range(ndim) if i in loops])
        return [jnp.where(valid, found, jnp.zeros_like(found))]

    return look_up


def scatter(adds: bool) -> Rule:
    """The rule of writes (or additions) at indices."""

    def rule(equation: Any, placements: Sequence[Placement], axis: Axis) -> Step | None:
        """By split updates if there are some, else by windows that are as large as the target."""
        del axis
        updates_dims = equation.params["dimension_numbers"].update_window_dims
        loops = [i for i in range(len(shape_of(equation, 2))) if i not in updates_dims]  # by dimension of the indices
        _, indices, updates = placements
        if isinstance(updates, Shard) and updates.dim in loops:
            return _split_updates(equation, loops, loops.index(updates.dim), updates.outer, adds)
        if isinstance(indices, Shard) and indices.dim < len(loops):
            return _split_updates(equation, loops, indices.dim, indices.outer, adds)
        return _split_windows(equation, placements, adds)

    return rule


def _split_updates(equation: Any, loops: Sequence[int], at: int, outer: int, adds: bool) -> Step | None:
    """Each device writes its own updates: into its part of a batched target, or sums are left partial."""
    d = equation.params["dimension_numbers"]
    own = [Shard(at, outer), Shard(loops[at], outer)]
    if at in d.scatter_indices_batching_dims:
        k = d.operand_batching_dims[d.scatter_indices_batching_dims.index(at)]
        return Step([Shard(k, outer), *own], [Shard(k, outer)])
    return Step([PARTIAL, *own], [PARTIAL]) if adds else None


def _split_windows(equation: Any, placements: Sequence[Placement], adds: bool) -> Step | None:
    """Each device writes its part of every window, where windows are as large as the target."""
    d, (target, _, updates) = equation.params["dimension_numbers"], placements
    shape, new = shape_of(equation, 0), shape_of(equation, 2)
    windows = [i for i in range(len(shape)) if i not in (*d.inserted_window_dims, *d.operand_batching_dims)]
    whole = {
        dim: d.update_window_dims[k]
        for k, dim in enumerate(windows)
        if new[d.update_window_dims[k]] == shape[dim] and dim not in d.scatter_dims_to_operand_dims
    }
    chosen = target
    if isinstance(updates, Shard) and not (isinstance(target, Shard) and target.dim in whole):
        chosen = next((Shard(dim, updates.outer) for dim, u in whole.items() if u == updates.dim), REPLICATED)
    if isinstance(chosen, Shard) and chosen.dim in whole:
        return Step([chosen, REPLICATED, Shard(whole[chosen.dim], chosen.outer)], [chosen])
    if adds and PARTIAL in (target, updates):
        return Step([PARTIAL, REPLICATED, PARTIAL], [PARTIAL])
    return None
