"""Copies a state's arrays from the devices to their hosts, and from files to the devices, part by part."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from etils import epath

from jpipe.arrays.host import HOST
from jpipe.checkpoints import files
from jpipe.checkpoints.contents import LAYERS, OPTIMIZER, Contents, Named, NamedRecord, trees_of
from jpipe.checkpoints.refreezing import Origin
from jpipe.memory.layout import StageTree, zeros_like
from jpipe.memory.records import Arrays
from jpipe.memory.storage import Buffers
from jpipe.terminal.progress import task
from jpipe.training.train_state import make_opt_state

AT_ONCE = 1 / 8
"""How much of the state is copied at a time, as a share, when it is saved or restored."""


def take_all(contents: Contents, advance: Callable[[int], None]) -> Named:
    """Copies all arrays, by path, to the memory of the hosts, split as on the devices.

    The devices hold a second copy of only `AT_ONCE` of the state at a time.

    Args:
      contents: the names and places of the state's arrays.
      advance: is told how many bytes were copied.
    """
    named = {path: _to_host(jnp.copy(leaf)) for path, leaf in contents.without_layer.items()}
    arrays = contents.arrays
    for portion in _portions(contents.each_record):
        for record in portion:
            leaves = contents.records.take(arrays, record.record_type, record.record)
            for name, shapes in record.shapes.items():
                stored = zip(shapes, leaves[name], strict=True)
                named |= {path: _to_host(leaf) for path, leaf in stored if path in record.named}
        jax.block_until_ready([named[path] for record in portion for path in record.named])
        advance(sum(record.num_bytes for record in portion))
    return named


def _to_host(leaf: jax.Array) -> jax.Array:
    """Puts an array into the memory of its devices' hosts: while it is written it takes no room on the devices."""
    has_room = any(memory.kind == HOST for memory in jax.local_devices()[0].addressable_memories())
    return jax.device_put(leaf, leaf.sharding.with_memory_kind(HOST)) if has_room else leaf


def read_all(directory: epath.Path, contents: Contents, origin: Origin) -> tuple[Arrays, Named]:
    """Returns (new buffers with each layer's arrays, the arrays that belong to no layer, by path).

    Args:
      directory: the directory of a step.
      contents: the names and places of a state's arrays, as shapes.
      origin: which arrays of the checkpoint they are. Fresh arrays are made from the parameters, once these are read.
    """
    with task(f"restoring step {directory.name}", total=contents.num_bytes, unit="bytes") as advance:

        def read(shapes: Named) -> Named:
            """Reads those of the state's arrays that aren't fresh; each process reads its own parts."""
            saved_names = {path: origin.names.get(path, path) for path in shapes if path not in origin.fresh}
            wanted = {name: shapes[path] for path, name in saved_names.items()}
            arrays = files.if_all_can(lambda: files.read_arrays(directory, wanted))
            return {path: arrays[name] for path, name in saved_names.items()}

        def fill(arrays: Arrays, records: list[NamedRecord]) -> Arrays:
            """Reads the arrays of some records into buffers, a portion at a time; fresh arrays stay as they are.

            The buffers are donated. If there are none yet, they are made once the first portion could be read.
            """
            for portion in _portions(records):
                named = read({path: shape for record in portion for path, shape in record.named.items()})
                arrays = arrays or jax.tree.map(zeros_like, contents.arrays)
                for record in portion:
                    place = record.record_type, record.record
                    if not all(path in named for shapes in record.shapes.values() for path in shapes):
                        old = contents.records.take(arrays, *place)
                        for name, shapes in record.shapes.items():
                            named = dict(zip(shapes, old[name], strict=True)) | named
                    new = {name: [named[path] for path in shapes] for name, shapes in record.shapes.items()}
                    arrays = contents.records.put(arrays, *place, new)
                advance(sum(record.num_bytes for record in portion))
            return arrays

        named = read(contents.without_layer)
        if not origin.fresh:
            return fill({}, contents.each_record), named
        arrays = fill({}, [record.part(LAYERS) for record in contents.each_record])
        layers = trees_of(LAYERS, arrays)
        del arrays  # the room of the optimiser's arrays is given back before new ones are made
        arrays = layers | _new_state(contents, layers[f"{LAYERS}/params"])
        return fill(arrays, [record.part(OPTIMIZER) for record in contents.each_record]), named


def _new_state(contents: Contents, params: Buffers) -> Arrays:
    """Makes the buffers of a new optimiser's state for these parameters."""
    state = contents.state
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state.opt_state)
    tree = StageTree(params, state.variables["params"].layout)
    opt_state = make_opt_state(state.tx, tree, shardings)
    new = Contents(contents.model, state.replace(opt_state=opt_state))
    return trees_of(OPTIMIZER, new.arrays)


def _portions(records: list[NamedRecord]) -> list[list[NamedRecord]]:
    """Cuts records into runs of about `AT_ONCE` of their bytes each."""
    total = sum(record.num_bytes for record in records)
    portions, room = [], 0.0
    for record in records:
        if not portions or record.num_bytes > room:
            portions.append([])
            room = AT_ONCE * total
        portions[-1].append(record)
        room -= record.num_bytes
    return portions
