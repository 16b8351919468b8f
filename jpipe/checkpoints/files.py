"""Reads and writes checkpoints as files: one directory for each step, by orbax.

A step's directory has an item `layers`, or `model` if that is one module, and an item `optimizer`, trees of arrays in
orbax's own format, and `about`, JSON: the format's version, the step, the random key, the position in the data, and the
names and shapes of all arrays.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from jpipe.checkpoints.containers import Json
from jpipe.checkpoints.contents import LAYERS, MODEL, OPTIMIZER, Named
from jpipe.seam.runtime import may_pass

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
    try:
        _check_shared(directory)
        return ocp.CheckpointManager(
            directory,
            options=ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True),
            item_names=(LAYERS, MODEL, OPTIMIZER, ABOUT),
        )
    except (OSError, RuntimeError) as error:
        raise OSError(
            f"checkpoints can't be written to {directory}: {error}; choose another directory (jpipe.load_layers reads "
            "one that can't be written)"
        ) from error


def _check_shared(directory: epath.Path) -> None:
    """Makes the directory, and checks by a file in it that all processes see the same one."""
    probe = directory / ".jpipe_probe"

    def make() -> None:
        directory.mkdir(parents=True, exist_ok=True)
        probe.write_text("")

    first_does(make)
    seen = all(_of_all(int(probe.exists())))
    first_does(lambda: probe.unlink(missing_ok=True))
    if not seen:
        raise FileNotFoundError("not all processes see it; it has to be on a file system that they share")


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
    results, raised = [], None
    try:
        results.append(work())
    except Exception as error:
        raised = error
    severity = 0 if raised is None else 1 if isinstance(raised, DamagedError) else 2
    worst = max(_of_all(severity))
    if raised is not None and severity == worst:
        raise raised
    if worst:
        raise (DamagedError if worst == 1 else RuntimeError)("another process raised an error here; see what it says")
    return results[0]


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
        words = "".join(traceback.format_exception(error))
        of_file = isinstance(error, OSError) and not isinstance(error, FileNotFoundError)
        if of_file or may_pass(words):
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
        raise ValueError(
            f"the checkpoint {directory} has the format {version}, and this jpipe reads none newer than {newest}; "
            "use a newer jpipe"
        )
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
    count = int(multihost_utils.broadcast_one_to_all(np.int32(len(steps))))
    as_many = np.array([*steps, *[0] * count][:count], np.int32)  # process 0's, or of the same shape
    return multihost_utils.broadcast_one_to_all(as_many).tolist()


def listed(directory: epath.Path) -> list[int]:
    """Lists the same steps as `steps_in`, as this process sees them."""
    steps = ocp.utils.checkpoint_steps(directory) if directory.is_dir() else []
    return sorted((step for step in steps if (directory / str(step)).is_dir()), reverse=True)


def set_aside(directory: epath.Path, steps: Sequence[int]) -> None:
    """Renames steps' directories, so that nothing takes them for checkpoints any more: `damaged-300`."""

    def rename() -> None:
        for step in steps:
            number, target = 0, directory / f"damaged-{step}"
            while target.exists():
                number += 1
                target = directory / f"damaged-{step}-{number}"
            (directory / str(step)).rename(target)

    first_does(rename)
