"""Places batches, keys and states on the mesh; computes which rows of a batch this process feeds (`Pipeline.place`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpipe.arrays.trees import named_leaves
from jpipe.batches.microbatches import batch_size
from jpipe.mesh.axes import AXIS
from jpipe.types import Batch, Leaf, PyTree


def data_shard(mesh: Mesh, batch_axes: Sequence[str]) -> tuple[int, int]:
    """`(index, count)`: this process feeds the part `index` of `count` equal parts of each batch, counted from 0.

    Processes that have the same part of the data axes, such as those that differ in their stages, feed the same rows.

    Args:
      mesh: the devices.
      batch_axes: the mesh's data axes.

    Raises:
      ValueError: this process has no device in the mesh, or parts of processes overlap or have gaps.
    """
    process_of = np.vectorize(lambda device: device.process_index, otypes=[int])(mesh.devices)
    data_axes = [mesh.axis_names.index(name) for name in batch_axes]
    process_of = np.moveaxis(process_of, data_axes, range(len(data_axes)))
    processes = [set(row) for row in process_of.reshape(math.prod(process_of.shape[: len(data_axes)]), -1)]
    parts_of = {p: [i for i, part in enumerate(processes) if p in part] for p in set().union(*processes)}
    this = jax.process_index()
    if this not in parts_of:
        raise ValueError(
            f"process {this} has none of the {mesh.size} devices of the mesh, which are those of the processes "
            f"{sorted(parts_of)}; use all devices: jpipe.make_mesh(...)"
        )
    size = len(parts_of[this])
    for p, parts in sorted(parts_of.items()):
        if len(parts) != size or parts[0] % size or parts[-1] - parts[0] != size - 1:
            raise ValueError(
                f"process {p} has the parts {parts} of the {len(processes)} along the mesh's data axes, process {this} "
                f"has {parts_of[this]}: not equal runs of them; order devices as jpipe.make_mesh({AXIS}=..., data=...) "
                "does"
            )
    return parts_of[this][0] // size, len(processes) // size


def place_rows(batch: Batch, mesh: Mesh, batch_axes: Sequence[str]) -> Batch:
    """Global arrays `[B, ...]`, split over the data axes, from this process's rows; see `Pipeline.place`."""
    count = data_shard(mesh, batch_axes)[1]
    for name, leaf in named_leaves("batch", batch):
        if isinstance(leaf, Tracer) or (isinstance(leaf, jax.Array) and not leaf.is_fully_addressable):
            what = "being traced" if isinstance(leaf, Tracer) else "spread over processes already"
            raise ValueError(
                f"{name} is {what}; place takes the rows of this process, outside of jax.jit: pass a placed batch on "
                "as it is"
            )
    rows, shards = batch_size(batch), math.prod(mesh.shape[name] for name in batch_axes)
    if rows * count % shards:
        raise ValueError(
            f"{rows} rows of each of {count} parts make a batch of {rows * count}, which can't be split over the "
            f"{shards} devices of the mesh's data axes; place a multiple of {shards // count} rows"
        )
    sharding, join = NamedSharding(mesh, PartitionSpec(tuple(batch_axes))), jax.make_array_from_process_local_data
    return jax.tree.map(lambda leaf: join(sharding, np.asarray(leaf), (rows * count, *leaf.shape[1:])), batch)


def placed(tree: PyTree, shardings: PyTree, mesh: Mesh, *, between_memories: bool = False) -> PyTree:
    """Puts arrays and numbers where `shardings` say; those that lie on all devices already, or are traced, stay.

    Args:
      tree: on the host, on one device or on the mesh. Each process passes the same.
      shardings: a tree like it, or one sharding for all.
      mesh: the devices.
      between_memories: whether those that lie on all devices move to their hosts, or back, as `shardings` say.
    """
    devices = set(mesh.devices.flat)

    def move(leaf: Leaf, sharding: NamedSharding) -> Leaf:
        if isinstance(leaf, Tracer):
            return leaf
        if isinstance(leaf, jax.Array) and leaf.sharding.device_set == devices:
            moves = between_memories and leaf.sharding.memory_kind != sharding.memory_kind
            return jax.device_put(leaf, sharding) if moves else leaf
        if isinstance(leaf, np.ndarray) or not mesh.is_multi_process:
            return jax.device_put(leaf, sharding)
        return jax.jit(lambda x: x, out_shardings=sharding)(leaf)  # an array of this process alone goes to others too

    return jax.tree.map(move, tree, jax.tree.broadcast(shardings, tree))


def on_mesh(tree: PyTree, mesh: Mesh) -> PyTree:
    """Puts a batch or a key on all devices of the mesh, unless it lies there already or is traced.

    A model may have no parameters that would say where it runs. With several processes it does nothing: a process can't
    put its own array on devices of others, and every program names the mesh anyway.
    """
    return tree if mesh.is_multi_process else placed(tree, NamedSharding(mesh, PartitionSpec()), mesh)


def on_all(tree: PyTree, mesh: Mesh) -> PyTree:
    """Puts small arrays on all devices of the mesh, also on those of other processes."""
    return jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))(on_mesh(tree, mesh))
