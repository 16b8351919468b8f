"""A state's arrays from the devices to their hosts, and from files to the devices, a part of them at a time."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from etils import epath

from jpipe.checkpoints import files
from jpipe.checkpoints.contents import Contents, Named, NamedRecord
from jpipe.memory.records import Arrays
from jpipe.terminal.progress import task

AT_ONCE = 1 / 8
"""How much of the state is copied at a time, as a share, when it is saved or restored."""


HOST_MEMORY = "pinned_host"
"""JAX's name for a host's memory that its devices reach."""


def take_all(contents: Contents, advance: Callable[[int], None]) -> Named:
    """Copies of all arrays by path, split over all devices, in their hosts' memory.

    Only `AT_ONCE` of the state is on the devices a second time, before it is there.

    Args:
      contents: of the state.
      advance: is told how many bytes were copied.
    """
    named = {path: _to_host(jnp.copy(leaf)) for path, leaf in contents.without_layer.items()}
    arrays = contents.arrays
    for portion in _portions(contents):
        for record in portion:
            taken = contents.records.take(arrays, record.record_type, record.record)
            for name, shapes in record.shapes.items():
                named |= dict(zip(shapes, map(_to_host, taken[name]), strict=True))
        jax.block_until_ready([named[path] for record in portion for path in record.named])
        advance(sum(record.num_bytes for record in portion))
    return named


def _to_host(leaf: jax.Array) -> jax.Array:
    """An array in its devices' hosts' memory, so that what is being written takes no room on the devices."""
    memories = jax.local_devices()[0].addressable_memories()
    if not any(memory.kind == HOST_MEMORY for memory in memories):
        return leaf
    return jax.device_put(leaf, leaf.sharding.with_memory_kind(HOST_MEMORY))


def read_all(directory: epath.Path, contents: Contents) -> tuple[Arrays, Named]:
    """(new buffers with each layer's arrays, what belongs to no layer); `contents` of a state's shapes."""
    read = lambda shapes: files.if_all_can(lambda: files.read_arrays(directory, shapes))
    with task(f"restoring step {directory.name}", total=contents.num_bytes, unit="bytes") as advance:
        named, arrays = read(contents.without_layer), None
        for portion in _portions(contents):
            found = read({path: shape for record in portion for path, shape in record.named.items()})
            if arrays is None:  # once something could be read
                arrays = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype, device=a.sharding), contents.arrays)
            for record in portion:
                leaves = {name: [found[path] for path in shapes] for name, shapes in record.shapes.items()}
                arrays = contents.records.put(arrays, record.record_type, record.record, leaves)
            advance(sum(record.num_bytes for record in portion))
    return arrays or {}, named


def _portions(contents: Contents) -> list[list[NamedRecord]]:
    """Runs of records, each about `AT_ONCE` of the state's bytes."""
    total = contents.num_bytes
    portions, room = [], 0.0
    for record in contents.each_record:
        if not portions or record.num_bytes > room:
            portions.append([])
            room = AT_ONCE * total
        portions[-1].append(record)
        room -= record.num_bytes
    return portions
