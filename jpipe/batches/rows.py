"""Computes which rows of a batch this process feeds, and makes them part of global arrays (`Pipeline.place`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpipe.batches.microbatches import batch_size
from jpipe.mesh.axes import AXIS
from jpipe.types import Batch, Leaf


def data_shard(mesh: Mesh, batch_axes: Sequence[str]) -> tuple[int, int]:
    """`(index, count)`: this process feeds the part `index` of `count` equal parts of each batch, counted from 0.

    Processes that have the same part of the data axes, such as those that differ in their stages, feed the same rows.

    Args:
      mesh: the devices.
      batch_axes: the mesh's data axes.

    Raises:
      ValueError: this process has no device in the mesh, or parts of processes overlap or have gaps.
    """
    owners = np.vectorize(lambda device: device.process_index, otypes=[int])(mesh.devices)
    owners = np.moveaxis(owners, [mesh.axis_names.index(name) for name in batch_axes], range(len(batch_axes)))
    parts = [set(row) for row in owners.reshape(math.prod(owners.shape[: len(batch_axes)]), -1)]
    own = jax.process_index()
    of = {p: [d for d, there in enumerate(parts) if p in there] for p in set().union(*parts)}
    if own not in of:
        raise ValueError(
            f"process {own} has none of the {mesh.size} devices of the mesh, which are those of the processes "
            f"{sorted(of)}; use all devices: jpipe.make_mesh(...)"
        )
    size = len(of[own])
    for p, there in sorted(of.items()):
        if len(there) != size or there[0] % size or there[-1] - there[0] != size - 1:
            raise ValueError(
                f"process {p} has the parts {there} of the {len(parts)} along the mesh's data axes, process {own} has "
                f"{of[own]}: not equal runs of them; order devices as jpipe.make_mesh({AXIS}=..., data=...) does"
            )
    return of[own][0] // size, len(parts) // size


def place_rows(batch: Batch, mesh: Mesh, batch_axes: Sequence[str]) -> Batch:
    """Global arrays `[B, ...]`, split over the data axes, from this process's rows; see `Pipeline.place`."""
    count = data_shard(mesh, batch_axes)[1]
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if isinstance(leaf, Tracer) or (isinstance(leaf, jax.Array) and not leaf.is_fully_addressable):
            what = "being traced" if isinstance(leaf, Tracer) else "spread over processes already"
            raise ValueError(
                f"batch{jax.tree_util.keystr(path)} is {what}; place takes the rows of this process, outside of "
                "jax.jit: pass a placed batch on as it is"
            )
    rows, shards = batch_size(batch), math.prod(mesh.shape[name] for name in batch_axes)
    if rows * count % shards:
        raise ValueError(
            f"{rows} rows of each of {count} parts make a batch of {rows * count}, which can't be split over the "
            f"{shards} devices of the mesh's data axes; place a multiple of {shards // count} rows"
        )
    sharding = NamedSharding(mesh, PartitionSpec(tuple(batch_axes)))

    def move(leaf: Leaf) -> jax.Array:
        shape = (rows * count, *leaf.shape[1:])
        return jax.make_array_from_process_local_data(sharding, np.asarray(leaf), shape)

    return jax.tree.map(move, batch)


def check_placed(batch: Batch) -> None:
    """Checks, where the mesh has devices of several processes, that no array of a batch is on some of one of them.

    Raises:
      ValueError: naming the first that is.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        own = isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_fully_addressable
        if own and leaf.committed:
            raise ValueError(
                f"batch{jax.tree_util.keystr(path)} is on devices of process {jax.process_index()} alone, but the mesh "
                "has those of several processes; give pipe.place(batch), with the rows that this process feeds "
                "(pipe.data_shard)"
            )
