"""`Checkpointer`, `load_layers`, `load_model`: save states, keep the newest, restore under any pipeline."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from etils import epath
from jax.core import Tracer
from jax.experimental import multihost_utils

from jpipe import __version__
from jpipe.checkpoints import files
from jpipe.checkpoints.contents import LAYERS, MODEL, Contents, Json, first_difference, from_json, own_trees, to_json
from jpipe.checkpoints.files import read_all, take_all
from jpipe.checks import check_agree, check_state, check_variables
from jpipe.memory.batches import on_all
from jpipe.pipeline import Pipeline
from jpipe.processes.progress import task, warn_user
from jpipe.processes.runtime import before_threads_end
from jpipe.training.train_state import TrainState
from jpipe.types import Batch, PyTree
from jpipe.users_numbers import as_integer

Value = TypeVar("Value")
_WAITING = "waiting for the last checkpoint"


class Checkpointer:
    """Checkpoints of one run in a directory; orbax writes them, in the background.

    A checkpoint holds the layers' own variables and the optimiser's state for each of them, by layer index and name; of
    a model that is one module those of its parameters, by their names in the model. It can be restored under another
    number of stages, other cuts, another schedule, mesh, or number of processes. No device and no process ever holds
    the whole model.

        with jpipe.Checkpointer(directory, keep=3) as saved:
            state, position = saved.restore(pipe, batch, tx)
            if state is None:
                state = pipe.create_state(key, batch, tx)
            else:
                batches.set_state(position)
            for step in range(int(state.step) + 1, num_steps + 1):
                state, metrics = pipe.train_step(state, pipe.place(next(batches)))
                last = saved.preempted(step) or step == num_steps
                if step % 100 == 0 or last:
                    saved.save(pipe, state, position=batches.get_state())
                if last:
                    break

    In a cluster all processes make one, of a directory that they share, and call the same methods in the same order.
    Within the `with` SIGTERM doesn't end the process: ask `preempted` at every step. One job at a time may have a
    directory open; others read it by `load_layers` or `load_model`.

    Args:
      directory: made if it isn't there; may be one of a cloud store that orbax knows, such as `gs://bucket/run`.
      keep: how many of the newest checkpoints are kept; None keeps all.

    Raises:
      OSError: the directory can't be written, or not all processes see it.
      TypeError, ValueError: `keep` is no integer, or less than 1.
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int | None = 3):
        if keep is not None:
            keep = as_integer("keep", keep, "keep at least 1 checkpoint, or None for all")
        self.directory = files.as_path(directory)
        self._manager = files.make_manager(self.directory, keep)
        self._done = set[int]()  # steps restored or saved by this object
        self._is_closed, self._was_told, self._at_exit = False, False, ExitStack()
        before_threads_end(self.close)

    def __enter__(self) -> Checkpointer:
        """From now on SIGTERM is noted, and doesn't end the process; the handler that was there is called too.

        In a cluster JAX's preemption service notes it, from `jpipe.initialize` on, and tells all processes. Elsewhere a
        signal handler does, if this is the main thread.
        """
        if not jax.distributed.is_initialized() and threading.current_thread() is threading.main_thread():
            before = signal.getsignal(signal.SIGTERM)

            def note(number: int, frame: FrameType | None) -> None:
                self._was_told = True
                if callable(before):
                    before(number, frame)

            signal.signal(signal.SIGTERM, note)
            self._at_exit.callback(signal.signal, signal.SIGTERM, signal.SIG_DFL if before is None else before)
        return self

    def __exit__(self, *exception: object) -> None:
        """Waits until all is written; until then SIGTERM is held off."""
        with self._at_exit:
            self.close()

    def preempted(self, step: int) -> bool:
        """Whether this job was told to end (SIGTERM), and should save and leave.

        In a cluster it is true at one step only, the same in all processes: ask first thing after every `train_step`.

        Args:
          step: the number of steps done.
        """
        step = as_integer("step", step, "pass the number of steps done", least=0)
        if jax.distributed.is_initialized():
            return bool(multihost_utils.reached_preemption_sync_point(step))
        return self._was_told

    def close(self) -> None:
        """Waits until all is written, and ends orbax's threads; after that nothing can be saved or restored."""
        if not self._is_closed:
            self._is_closed = True
            with self._task(_WAITING):
                self._manager.close()

    @property
    def latest_step(self) -> int | None:
        """The step of the newest finished checkpoint; None if there is none."""
        return next(iter(files.steps_in(self.directory)), None)

    def wait(self) -> None:
        """Waits until all saved states are on disk.

        Raises:
          RuntimeError: it couldn't be written.
        """
        if not self._is_closed:
            with self._task(_WAITING):
                self._manager.wait_until_finished()

    # --- saving ---

    def save(self, pipe: Pipeline, state: TrainState, position: PyTree = None) -> None:
        """Saves a state, in the background: it may be donated to the next step once this returns.

        This waits until the checkpoint before is on disk. A state of a step that this object has saved or restored
        already isn't saved again.

        Args:
          pipe: the pipeline whose state it is.
          state: as `pipe.train_step` returns it.
          position: the position in the data, a pytree of numbers, strings, bytes and arrays in dicts, lists and tuples.
            In a cluster the one of process 0 is kept.

        Raises:
          RuntimeError: this or the last checkpoint couldn't be written; checkpoints before it are whole.
          TypeError: `position` or the optimiser's state can't be saved.
          ValueError: the directory holds checkpoints of this step or later ones, from another run.
        """
        self._check(pipe)
        check_state(state)
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(state)):
            raise TypeError("the state is being traced; call save outside of jax.jit and its like")
        check_variables(pipe.plan, state.variables)
        contents, step = Contents(pipe.plan.model, state, pipe.plan.cut), int(state.step)
        encoded = to_json(position)
        if step in self._done:
            return
        if (newest := max(files.steps_in(self.directory), default=-1)) >= step:
            raise ValueError(
                f"{self.directory} holds step {newest}, and the state is of step {step}; restore it, or save elsewhere"
            )
        keys = {"/".join(path): _key_to_json(key) for path, key in contents.random_keys.items()}
        about = {"jpipe": __version__, "step": step, "random_keys": keys, "position": encoded, **contents.description()}
        with self._task(f"saving step {step}", contents.num_bytes) as advance:
            named = take_all(contents, advance)
            with task(_WAITING):
                files.write(self._manager, step, named, about)
        self._done.add(step)

    def _check(self, pipe: Pipeline) -> None:
        """Checks that this can still be used, and with a pipeline.

        Raises:
          RuntimeError: it is closed.
          TypeError: `pipe` is no pipeline.
        """
        if self._is_closed:
            raise RuntimeError(f"this Checkpointer of {self.directory} is closed; use it within its `with`")
        if not isinstance(pipe, Pipeline):
            raise TypeError(f"pipe is a {type(pipe).__name__}; pass a jpipe.Pipeline")

    @contextmanager
    def _task(self, what: str, num_bytes: int | None = None) -> Iterator[Callable[..., None]]:
        """Shows a task, and adds to errors which checkpoints are lost, and which aren't."""
        try:
            with task(what, num_bytes, "bytes") as advance:
                yield advance
        except Exception as error:
            listed = files.listed(self.directory)
            self._done.intersection_update(listed)  # a step that wasn't written may be saved again
            whole = max(listed, default="none")
            raise RuntimeError(f"{what} in {self.directory} failed: {error}; last whole checkpoint: {whole}") from error

    # --- restoring ---

    def restore(
        self, pipe: Pipeline, batch: Batch, tx: optax.GradientTransformation
    ) -> tuple[TrainState | None, PyTree]:
        """The state of the last whole checkpoint under this pipeline's layout, and the position in the data.

        A checkpoint that can't be read is passed over with a warning, and set aside as `damaged-300`.

        Args:
          pipe: a pipeline of the layers or of the model that was saved, in any number of stages and over any mesh.
          batch: a batch `[B, ...]`, or its shapes.
          tx: the optimiser; its state has to have the structure that was saved.

        Returns:
          `(state, position)`, or `(None, None)` if there is no checkpoint. Where all floats of a dtype were saved in
          another, it is the pipeline's from then on.

        Raises:
          ValueError: the checkpoint is of another model or of another optimiser, or other parameters were frozen; the
            first difference is named. Or it was written by a newer jpipe.
          RuntimeError: there are checkpoints, but none can be read.
        """
        self._check(pipe)
        self.wait()
        steps = files.steps_in(self.directory)
        if not steps:
            return None, None
        step, restored, damaged = _newest(self.directory, steps, lambda s: self._restored(s, pipe, batch, tx))
        if damaged:  # out of the way, so that their steps can be saved again
            files.set_aside(self.directory, damaged)
            self._manager.reload()
        self._done.add(step)
        return restored

    def _restored(
        self, step: int, pipe: Pipeline, batch: Batch, tx: optax.GradientTransformation
    ) -> tuple[TrainState, PyTree]:
        directory = self.directory / str(step)
        about = files.if_all_can(lambda: files.read_about(directory))
        keys = {name: on_all(_key_from_json(key), pipe.mesh) for name, key in about["random_keys"].items()}
        state = pipe.abstract_state(batch, tx, keys["key"])
        check_agree(pipe.plan, "init", batch)
        contents = Contents(pipe.plan.model, state, pipe.plan.cut)
        if difference := first_difference(about, contents.description()):
            before, pipe.planner = pipe.planner, pipe.planner.cast(contents.casts(about))
            if pipe.planner is not before:
                try:
                    return self._restored(step, pipe, batch, tx)
                except BaseException:
                    pipe.planner = before
                    raise
            kind = "layer" if pipe.plan.cut is None else "model"
            load = "load_model" if "model" in about else "load_layers"
            raise ValueError(
                f"{directory} doesn't fit this pipeline and optimiser: {difference}; use the same, or put what fits of "
                f"jpipe.{load}(directory), cast, into trees = pipe.{kind}_variables(pipe.init(key, batch)), and call "
                f"pipe.create_state(..., variables=pipe.from_{kind}_variables(trees, batch))"
            )
        arrays, named = read_all(directory, contents)
        named |= {path: keys["/".join(path)] for path in contents.random_keys}
        named["step",] = on_all(np.int32(about["step"]), pipe.mesh)
        return contents.filled(arrays, named), from_json(about["position"])


def load_layers(directory: str | os.PathLike[str], step: int | None = None) -> list[PyTree]:
    """Each layer's own variables from a checkpoint of a list of layers, on the host, without a pipeline.

    They are what `Pipeline.layer_variables` gives, without Flax's metadata boxes: for a linen layer `module.apply(item,
    x)` takes an item.

    Args:
      directory: the directory of a `Checkpointer`.
      step: which checkpoint; default: the newest that can be read.

    Raises:
      FileNotFoundError: there is no such checkpoint.
      RuntimeError: none can be read.
      TypeError, ValueError: `step` is no integer, or negative; the checkpoint is of a model that is one module.
    """
    return _loaded(directory, step, LAYERS)


def load_model(directory: str | os.PathLike[str], step: int | None = None) -> PyTree:
    """The variables of a model that is one module from a checkpoint, on the host, without a pipeline.

    They are what `Pipeline.model_variables` gives, without Flax's metadata boxes: for a linen module `model.apply(tree,
    x)` takes them.

    Args:
      directory: the directory of a `Checkpointer`.
      step: which checkpoint; default: the newest that can be read.

    Raises:
      FileNotFoundError: there is no such checkpoint.
      RuntimeError: none can be read.
      TypeError, ValueError: `step` is no integer, or negative; the checkpoint is of a list of layers.
    """
    return _loaded(directory, step, MODEL)[0]


def _loaded(directory: str | os.PathLike[str], step: int | None, item: str) -> list[PyTree]:
    """The trees of a checkpoint of a list of layers (`LAYERS`) or of one module (`MODEL`)."""
    if step is not None:
        step = as_integer("step", step, "pass that of a checkpoint, or None for the newest", least=0)
    path = files.as_path(directory)
    steps = files.listed(path)
    if (step is not None and step not in steps) or not steps:
        which = "" if step is None else f" of step {step}, but of {sorted(steps)}"
        folder = path.parent if path.name.isdigit() else "the folder of a jpipe.Checkpointer"
        raise FileNotFoundError(f"{path} has no checkpoint{which}; pass {folder}")

    def read(step: int) -> list[PyTree]:
        about = files.read_about(path / str(step))
        if item not in about:
            kind, load = ("one module", "load_model") if item == LAYERS else ("a list of layers", "load_layers")
            raise ValueError(f"{path} has checkpoints of {kind}; read them by jpipe.{load}(directory)")
        wanted = {name: shape for name, shape in files.shapes_in(about).items() if name[0] == item}
        with task(f"reading the {item} of step {step}"):
            arrays = files.read_arrays(path / str(step), wanted)
        return own_trees(about, arrays)

    return _newest(path, steps if step is None else [step], read)[1]


def _newest(directory: epath.Path, steps: Sequence[int], read: Callable[[int], Value]) -> tuple[int, Value, list[int]]:
    """Reads the first of some steps that can be read: `(step, the result of read, steps that are damaged)`.

    Raises:
      RuntimeError: none can.
    """
    reasons: dict[int, str] = {}
    for step in steps:
        try:
            value = read(step)
        except files.DamagedError as error:
            reasons[step] = f"step {step}: {error}"
            continue
        if reasons:
            warn_user(f"{directory}: going on from step {step}, since {'; '.join(reasons.values())}")
        return step, value, list(reasons)
    raise RuntimeError(f"no checkpoint in {directory} can be read: {'; '.join(reasons.values())}; use another folder")


def _key_to_json(key: jax.Array) -> Json:
    return {"impl": str(jax.random.key_impl(key)), "data": np.asarray(jax.random.key_data(key)).tolist()}


def _key_from_json(encoded: Json) -> jax.Array:
    return jax.random.wrap_key_data(jnp.asarray(encoded["data"], jnp.uint32), impl=encoded["impl"])
