"""Reads and writes checkpoints as files, part by part: one directory for each step, by orbax.

A step's directory has an item `layers`, or `model` if that is one module, and an item `optimizer`, trees of arrays in
orbax's own format, and `about`, JSON: the format's version, the step, the random key, the position in the data, and the
names and shapes of all arrays.

A pipeline may freeze other parameters than the checkpoint's (`jpipe.freeze`: gradual unfreezing). A layer's own tree,
or the model's if it is one module, is the same, frozen or not, so its two descriptions pair the parameters. The
optimiser's arrays for a parameter have the parameter's name, so that names pair them too. Three parameters, where
frozen ones have no moments:

    checkpoint                    pipeline
    params/a   mu/a      ->       params/a   mu/a      as saved
    frozen/b             ->       params/b   mu/b      the value as saved, mu/b of a new state (`Origin.fresh`)
    params/c   mu/c      ->       frozen/c             the value as saved
"""

from __future__ import annotations

import math
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import count
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from jpipe.checkpoints.contents import LAYERS, MODEL, OPTIMIZER, Contents, Json, Named, Path, of_item, own_trees
from jpipe.jax.in_place import HOST
from jpipe.memory.layout import StageTree, zeros_like
from jpipe.memory.records import Arrays
from jpipe.memory.storage import Buffers
from jpipe.processes.progress import task
from jpipe.processes.runtime import may_pass
from jpipe.training.train_state import make_opt_state

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


# --- frozen parameters ------------------------------------------------------------------------------------------------


PARAMS = "params"


class Origin(NamedTuple):
    """Says which array of a checkpoint each array of a state is.

    Attributes:
      names: path in the state -> path in the checkpoint, of each parameter that is frozen in one of the two alone.
      fresh: arrays of the optimiser for parameters that were frozen: they are those of a new state.
      saved: the checkpoint's description as if it had frozen the same parameters as the pipeline.
    """

    names: dict[Path, Path]
    fresh: set[Path]
    saved: Json


def origin_of(saved: Json, wanted: Json) -> Origin:
    """Finds where a state's arrays come from.

    Args:
      saved: the checkpoint's description.
      wanted: the pipeline's description.

    Raises:
      ValueError: an array of the optimiser can't be told apart by parameters; it is named.
    """
    names = _renamed_parameters(saved, wanted)
    changed = {parameter_of(path)[0] for path in names}
    collections = {parameter_of(path)[1] for pair in names.items() for path in pair}
    there, here = ({tuple(path): shape for path, _, shape in description["arrays"]} for description in (saved, wanted))
    parameters: dict[str, dict[Path, Path]] = {}
    for path in (path for path in here if path[0] in (LAYERS, MODEL)):
        layer, collection, keys = parameter_of(path)
        if collection in collections:
            parameters.setdefault(layer, {})[keys] = path
    fresh, dropped = set(), set()
    for path, shape in (there | here).items():
        layer = next((name for name in ("", *path) if name in changed), None)
        if path[0] != OPTIMIZER or layer is None:
            continue
        # An array of the optimiser for a parameter has its name at the end of its path; the longest such name counts. A
        # parameter that is all of its layer has an empty name: arrays of its shape belong to it.
        # Of a list of layers it may end with the metadata box around the parameter, too.
        unboxed = path[:-1] if path[-1] == "value" else path
        named = {keys: p for keys, p in parameters[layer].items() if keys or here[p] == shape}
        ends = [keys for keys in named if keys in (path[len(path) - len(keys) :], unboxed[len(unboxed) - len(keys) :])]
        owner = named[max(ends, key=len)] if ends else None
        if owner is None:
            trained = sum(math.prod(here[p]) for p in parameters[layer].values() if parameter_of(p)[1] == PARAMS)
            # An array with a name of its own, such as a count, belongs to no parameter, unless it is as long as all of
            # the layer's parameters together. A whole model's optimiser names all that belongs to parameters.
            is_told = not layer or (not path[-1].isdigit() and (not shape or math.prod(shape) != trained))
        else:
            trains = [parameter_of(p)[1] == PARAMS for p in (owner, names.get(owner, owner))]
            is_told = all(it_trains or path not in has for it_trains, has in zip(trains, (here, there), strict=True))
        if not is_told:
            one = next(p for p in names if parameter_of(p)[0] == layer)
            raise ValueError(
                f"{'/'.join(path)} belongs to no single parameter by its name; freeze {'/'.join(one)} as it was saved"
            )
        if owner in names:
            (fresh if path in here else dropped).add(path)
    state_names = {name: path for path, name in names.items()}
    arrays = [(tuple(path), *rest) for path, *rest in saved["arrays"]]
    kept = [[state_names.get(path, path), *rest] for path, *rest in arrays if path not in dropped]
    new = [array for array in wanted["arrays"] if tuple(array[0]) in fresh]
    return Origin(names, fresh, saved | {"arrays": kept + new})


def _renamed_parameters(saved: Json, wanted: Json) -> dict[Path, Path]:
    """The parameters that one of the two alone froze: path in the pipeline -> path in the checkpoint."""
    names = {}
    for trees in zip(own_trees(wanted), own_trees(saved), strict=False):  # `first_difference` compares the counts
        if jax.tree.structure(trees[0]) == jax.tree.structure(trees[1]):
            for pair in zip(*map(jax.tree.leaves, trees), strict=True):
                (layer, collection, _), (other, another, _) = (parameter_of(leaf.path) for leaf in pair)
                if layer == other and collection != another:
                    names |= zip(pair[0].paths, pair[1].paths, strict=False)
    return names


def parameter_of(path: Path) -> tuple[str, str, Path]:
    """(Its layer, empty in a model that is one module; its collection; its path there) of an array of the model."""
    return ("", path[1], path[2:]) if path[0] == MODEL else (path[1], path[2], path[3:])


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
            arrays = if_all_can(lambda: read_arrays(directory, wanted))
            return {path: arrays[name] for path, name in saved_names.items()}

        def fill(arrays: Arrays, item: str = "") -> Arrays:
            """Reads the arrays of an item, or of both, into buffers, a portion at a time; fresh arrays stay.

            The buffers are donated. If there are none yet, they are made once the first portion could be read.
            """
            for portion in contents.portions(item):
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
            return fill({}), named
        layers = of_item(LAYERS, fill({}, LAYERS))  # the optimiser's arrays go before new ones are made
        arrays = layers | _new_state(contents, layers[f"{LAYERS}/params"])
        return fill(arrays, OPTIMIZER), named


def _new_state(contents: Contents, params: Buffers) -> Arrays:
    """Makes the buffers of a new optimiser's state for these parameters."""
    state = contents.state
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state.opt_state)
    opt_state = make_opt_state(state.tx, StageTree(params, state.variables["params"].layout), shardings)
    return of_item(OPTIMIZER, Contents(contents.model, state.replace(opt_state=opt_state)).arrays)
