"""Checkpoints as files: one directory a step, written and read by orbax.

A step's directory has an item `layers` and an item `optimizer`, trees of arrays in orbax's own format, and `about`,
JSON: the format's version, the step, the random key, the position in the data, and the names and shapes of all arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from jpipe.checkpoints.containers import Json
from jpipe.checkpoints.contents import LAYERS, OPTIMIZER, Named, Path, nested

FORMAT = 1
ABOUT = "about"


class DamagedError(Exception):
    """A checkpoint can't be read, and another one may do in its place."""


def make_manager(directory: epath.Path, keep: int | None) -> ocp.CheckpointManager:
    """Orbax's manager of a directory, which is made if it isn't there; what an interrupted save left is removed.

    Raises:
      OSError: the directory can't be written, or not all processes see it.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _check_shared(directory)
        return ocp.CheckpointManager(
            directory,
            options=ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True),
            item_names=(LAYERS, OPTIMIZER, ABOUT),
            item_handlers={
                LAYERS: ocp.PyTreeCheckpointHandler(),
                OPTIMIZER: ocp.PyTreeCheckpointHandler(),
                ABOUT: ocp.JsonCheckpointHandler(),
            },
        )
    except OSError as error:
        raise OSError(f"checkpoints can't be written to {directory}: {error}; choose another directory") from error


def _check_shared(directory: epath.Path) -> None:
    """Writes a file and removes it; all processes have to see it in between."""
    probe = directory / ".jpipe_probe"
    if jax.process_index() == 0:
        probe.write_text("")
    wait_for_all("probe")
    seen = all_agree(probe.exists())
    if jax.process_index() == 0:
        probe.unlink(missing_ok=True)
    if not seen:
        raise FileNotFoundError("not all processes see it; it has to be on a file system that they share")


def all_agree(mine: bool) -> bool:
    """Whether `mine` is true in all processes."""
    if jax.process_count() == 1:
        return mine
    return bool(np.all(multihost_utils.process_allgather(np.array(mine))))


def wait_for_all(what: str) -> None:
    """Waits for the other processes."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"jpipe checkpoint: {what}")


def write(manager: ocp.CheckpointManager, step: int, named: Named, about: Json) -> None:
    """Starts to write a checkpoint; the arrays may be changed once this returns."""
    trees = {name: tree for name, tree in nested(named).items() if tree}
    items = {name: ocp.args.PyTreeSave(tree) for name, tree in trees.items()}
    manager.save(step, args=ocp.args.Composite(**items, **{ABOUT: ocp.args.JsonSave({"format": FORMAT, **about})}))


@contextmanager
def _reading(what: epath.Path) -> Iterator[None]:
    """Errors of files and of orbax as `DamagedError`."""
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:  # orbax and tensorstore raise all kinds, ValueError and Exception too
        first = str(error).partition("\n")[0]
        raise DamagedError(f"{what.name}: {type(error).__name__}: {first:.200}") from error


def read_about(directory: epath.Path) -> Json:
    """What a step's directory says about itself.

    Raises:
      DamagedError: it can't be read, or is no checkpoint of jpipe.
      ValueError: it is of a newer format.
    """
    if not (directory / ABOUT).exists():
        raise DamagedError(f"it has no item {ABOUT!r}: half deleted, or not written by jpipe.Checkpointer")
    with _reading(directory / ABOUT):
        about = ocp.JsonCheckpointHandler().restore(directory / ABOUT)
        version = int(about["format"])
    if version > FORMAT:
        raise ValueError(
            f"the checkpoint {directory} has the format {version}, and this jpipe reads none newer than {FORMAT}; "
            "use a newer jpipe"
        )
    return about


def read_arrays(directory: epath.Path, shapes: Named) -> Named:
    """Some of a checkpoint's arrays.

    Args:
      directory: a step's.
      shapes: for each, by path, shape and dtype, and a sharding; without one it is read to the host.

    Raises:
      DamagedError: they can't be read.
    """
    found: Named = {}
    for item in (LAYERS, OPTIMIZER):
        wanted = {path[1:]: shape for path, shape in shapes.items() if path[0] == item}
        if wanted:
            with _reading(directory / item):
                tree = nested(wanted)
                arguments = ocp.args.PyTreeRestore(
                    item=tree, restore_args=jax.tree.map(_restore_args, tree), partial_restore=True
                )
                restored = ocp.PyTreeCheckpointHandler().restore(directory / item, args=arguments)
            found |= {(item, *path): _at(restored, path) for path in wanted}
    return found


def _restore_args(shape: Any) -> ocp.RestoreArgs:
    if getattr(shape, "sharding", None) is None:
        return ocp.RestoreArgs(restore_type=np.ndarray, dtype=shape.dtype)
    return ocp.ArrayRestoreArgs(sharding=shape.sharding, global_shape=shape.shape, dtype=shape.dtype)


def _at(tree: Mapping[str, Any], path: Path) -> Any:
    for name in path:
        tree = tree[name]
    return tree


def steps_in(directory: epath.Path) -> list[int]:
    """The steps of which a directory has a finished checkpoint, damaged ones included, the newest first."""
    return sorted(ocp.utils.checkpoint_steps(directory), reverse=True) if directory.exists() else []


def set_aside(directory: epath.Path, steps: Sequence[int]) -> None:
    """Renames steps' directories, so that nothing takes them for checkpoints any more: `damaged-300`."""
    if jax.process_index() == 0:
        for step in steps:
            number, target = 0, directory / f"damaged-{step}"
            while target.exists():
                number += 1
                target = directory / f"damaged-{step}-{number}"
            (directory / str(step)).rename(target)
    wait_for_all("set aside")
