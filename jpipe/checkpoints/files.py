"""Reads and writes checkpoints as files, part by part: one directory for each step, by orbax.

A step's directory has an item `layers`, or `model` if that is one module, and an item `optimizer`, trees of arrays in
orbax's own format, and `about`, JSON: the format's version, the step, the random key, the position in the data, and the
names and shapes of all arrays.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import count
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from jpipe.checkpoints.contents import LAYERS, MODEL, OPTIMIZER, Contents, Json, Named
from jpipe.jax.in_place import HOST
from jpipe.memory.layout import zeros_like
from jpipe.memory.records import Arrays
from jpipe.processes.progress import task
from jpipe.processes.runtime import may_pass

FORMATS = {"layers": 1, "model": 2}
"""The versions of the format: a jpipe that reads only the first reads lists of layers alone."""
ABOUT = "about"
Result = TypeVar("Result")


class DamagedError(Exception):
    """A checkpoint can't be read, and another one may do in its place."""


def as_path(directory: str | os.PathLike[str]) -> epath.Path:
    """Makes a user's directory absolute, as orbax wants it; one of a cloud store stays as it is.

    Raises:
      ValueError: the name is empty.
    """
    if not os.fspath(directory):
        raise ValueError("the directory's name is empty; give one, '.' for the current directory")
    path = epath.Path(directory).expanduser()
    return path if "://" in os.fspath(path) else path.absolute()


def make_manager(directory: epath.Path, keep: int | None) -> ocp.CheckpointManager:
    """Makes orbax's manager of a directory, and the directory too; removes the leftovers of interrupted saves.

    Raises:
      OSError: the directory can't be written, or not all processes see it.
    """
    probe = directory / ".jpipe_probe"

    def make() -> None:
        directory.mkdir(parents=True, exist_ok=True)
        probe.write_text("")

    try:
        first_does(make)
        seen = all(_of_all(probe.exists()))
        first_does(lambda: probe.unlink(missing_ok=True))
        if not seen:
            raise FileNotFoundError("not all processes see it; it has to be on a file system that they share")
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
        return ocp.CheckpointManager(directory, options=options, item_names=(LAYERS, MODEL, OPTIMIZER, ABOUT))
    except (OSError, RuntimeError) as error:
        raise OSError(f"checkpoints can't be written to {directory}: {error}; choose another directory") from error


# --- several processes ------------------------------------------------------------------------------------------------


def _of_all(number: int) -> list[int]:
    """Returns the number of each process; they wait for each other here."""
    return [number] if jax.process_count() == 1 else multihost_utils.process_allgather(np.int32(number)).tolist()


def if_all_can(work: Callable[[], Result]) -> Result:
    """Returns the result of `work` if it succeeds in all processes; where it fails in one, all raise an error.

    Raises:
      Exception: the error that it raised here.
      RuntimeError: it raised something in another process.
      DamagedError: it raised this in another process.
    """
    own = Future[Result]()
    try:
        own.set_result(work())
    except Exception as error:
        own.set_exception(error)
    raised = own.exception()
    severity = 0 if raised is None else 1 if isinstance(raised, DamagedError) else 2
    if severity < (worst := max(_of_all(severity))):
        raise (DamagedError if worst == 1 else RuntimeError)("another process raised an error here; see what it says")
    return own.result()


def first_does(work: Callable[[], None]) -> None:
    """Does work in the first process, while the others wait for it."""
    if_all_can(work if jax.process_index() == 0 else lambda: None)


# --- writing and reading ----------------------------------------------------------------------------------------------


def write(manager: ocp.CheckpointManager, step: int, named: Named, about: Json) -> None:
    """Starts to write a checkpoint; the arrays may be changed once this returns."""
    not_empty = {path: leaf for path, leaf in named.items() if leaf.size}  # orbax holds no arrays without elements
    items = {name: ocp.args.PyTreeSave(tree) for name, tree in ocp.tree.from_flat_dict(not_empty).items()}
    version = FORMATS["model" if "model" in about else "layers"]
    arguments = ocp.args.Composite(**items, **{ABOUT: ocp.args.JsonSave({"format": version, **about})})
    manager.save(step, args=arguments, force=True)


@contextmanager
def _reading(what: epath.Path) -> Iterator[None]:
    """Turns errors of orbax and of missing files into `DamagedError`; others stay, since they may pass."""
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:  # orbax and tensorstore raise all kinds, ValueError and Exception too
        of_file = isinstance(error, OSError) and not isinstance(error, FileNotFoundError)
        if of_file or may_pass("".join(traceback.format_exception(error))):
            raise
        first = str(error).partition("\n")[0]
        raise DamagedError(f"{what.name}: {type(error).__name__}: {first:.200}") from error


def read_about(directory: epath.Path) -> Json:
    """Reads what a step's directory says about itself.

    Raises:
      DamagedError: it can't be read, or is no checkpoint of jpipe.
      ValueError: it is of a newer format.
    """
    if not (directory / ABOUT).exists():
        raise DamagedError(f"it has no item {ABOUT!r}: half deleted, or not written by jpipe.Checkpointer")
    with _reading(directory / ABOUT):
        about = ocp.JsonCheckpointHandler().restore(directory / ABOUT)
        version = int(about["format"])
    if version > (newest := max(FORMATS.values())):
        raise ValueError(f"{directory} has the format {version}, this jpipe reads up to {newest}; use a newer jpipe")
    return about


def shapes_in(about: Json) -> Named:
    """The arrays in a checkpoint as shapes by path, without random keys, which its description holds itself."""
    arrays = [(tuple(path), dtype, shape) for path, dtype, shape in about["arrays"] if not dtype.startswith("key")]
    return {path: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for path, dtype, shape in arrays}


def read_arrays(directory: epath.Path, shapes: Named) -> Named:
    """Reads some of a checkpoint's arrays.

    Args:
      directory: the directory of a step.
      shapes: shape, dtype and sharding of each, by path; an array without a sharding is read to the host.

    Raises:
      DamagedError: they can't be read.
    """
    arrays: Named = {path: np.zeros(shape.shape, shape.dtype) for path, shape in shapes.items() if not shape.size}
    for item in (LAYERS, MODEL, OPTIMIZER):
        wanted = {path[1:]: shape for path, shape in shapes.items() if path[0] == item and shape.size}
        if wanted:
            tree = ocp.tree.from_flat_dict(wanted)
            how = ocp.checkpoint_utils.construct_restore_args(tree)
            arguments = ocp.args.PyTreeRestore(item=tree, restore_args=how, partial_restore=True)
            with _reading(directory / item):
                restored = ocp.PyTreeCheckpointHandler().restore(directory / item, args=arguments)
                for path, array in ocp.tree.to_flat_dict(restored).items():
                    if isinstance(array, jax.ShapeDtypeStruct):  # orbax leaves it where there is no array
                        raise KeyError("/".join(path))
                    arrays[item, *path] = array
    return arrays


def steps_in(directory: epath.Path) -> list[int]:
    """Lists the steps with a finished checkpoint in a directory, the newest first, damaged ones included.

    In a cluster these are the steps that process 0 sees.
    """
    steps = listed(directory)
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(steps))))
    as_many = np.array([*steps, *[0] * length][:length], np.int32)  # process 0's, or of the same shape
    return multihost_utils.broadcast_one_to_all(as_many).tolist()


def listed(directory: epath.Path) -> list[int]:
    """Lists the same steps as `steps_in`, as this process sees them."""
    steps = ocp.utils.checkpoint_steps(directory) if directory.is_dir() else []
    return sorted((step for step in steps if (directory / str(step)).is_dir()), reverse=True)


def set_aside(directory: epath.Path, steps: Sequence[int]) -> None:
    """Renames steps' directories, so that nothing takes them for checkpoints any more: `damaged-300`."""

    def rename() -> None:
        for step in steps:
            targets = (directory / (f"damaged-{step}" + f"-{number}" * (number > 0)) for number in count())
            (directory / str(step)).rename(next(target for target in targets if not target.exists()))

    first_does(rename)


# --- devices, hosts and files -----------------------------------------------------------------------------------------


def take_all(contents: Contents, advance: Callable[[int], None]) -> Named:
    """Copies all arrays, by path, to the memory of the hosts, split as on the devices.

    The devices hold a second copy of only `AT_ONCE` of the state at a time.

    Args:
      contents: the names and places of the state's arrays.
      advance: is told how many bytes were copied.
    """
    named = {path: _to_host(jnp.copy(leaf)) for path, leaf in contents.without_layer.items()}
    arrays = contents.arrays
    for portion in contents.portions():
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


def read_all(directory: epath.Path, contents: Contents) -> tuple[Arrays, Named]:
    """Returns (new buffers with each layer's arrays, the arrays that belong to no layer, by path).

    Each process reads its own parts, a portion at a time. The buffers are made once the first portion could be read.

    Args:
      directory: the directory of a step.
      contents: the names and places of a state's arrays, as shapes.
    """
    read = lambda shapes: if_all_can(lambda: read_arrays(directory, shapes))
    with task(f"restoring step {directory.name}", total=contents.num_bytes, unit="bytes") as advance:
        without_layer, arrays = read(contents.without_layer), Arrays()
        for portion in contents.portions():
            named = read({path: shape for record in portion for path, shape in record.named.items()})
            arrays = arrays or jax.tree.map(zeros_like, contents.arrays)
            for record in portion:
                new = {
                    name: [named.get(path, np.zeros(shape.shape, shape.dtype)) for path, shape in shapes.items()]
                    for name, shapes in record.shapes.items()
                }
                arrays = contents.records.put(arrays, record.record_type, record.record, new)
            advance(sum(record.num_bytes for record in portion))
    return arrays, without_layer
