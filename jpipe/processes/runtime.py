"""Uses what isn't public of running programs: processes that meet, threads that end, the words of errors.

As in `jpipe.jax.inside`, each has its reason, what losing it would cost, and what public way was looked for.
"""

from __future__ import annotations

import atexit
import importlib
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jpipe.processes.progress import warn_once

# --- compilers --------------------------------------------------------------------------------------------------------


def register_gpu_compiler(version: int) -> None:
    """Registers the plugin that has the compiler for GPUs, which JAX leaves out where it finds no CUDA.

    JAX checks CUDA's libraries before it registers the plugin, unless `JAX_PLATFORMS` names others or
    `JAX_SKIP_CUDA_CONSTRAINTS_CHECK` is set when it first looks for devices. To compile takes no CUDA. `initialize` is
    what JAX calls of a plugin; no page lists it. Without this `JAX_PLATFORMS=cpu` is needed to compile for GPUs.

    Args:
      version: the version of CUDA that the plugin is for.
    """
    variable = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
    before = os.environ.get(variable)
    os.environ[variable] = "1"
    try:
        importlib.import_module(f"jax_plugins.xla_cuda{version}").initialize()
    finally:
        os.environ.pop(variable)
        if before is not None:
            os.environ[variable] = before


# --- processes --------------------------------------------------------------------------------------------------------


def shared_store() -> Any:
    """The client of the key-value store that `jax.distributed` keeps for all processes; None if there is none.

    It has `key_value_set(key, value, allow_overwrite)`, `key_value_delete(key)` and `key_value_dir_get(folder)`, a list
    of (key, value), all texts; `wait_for` reads a value that is still to come. JAX shows it nowhere; `multihost_utils`
    exchanges values too, but on the devices, where a process waits for ever if another one doesn't come. Without it
    nobody checks that all processes want the same, and none knows how far the others have come.
    """
    if not jax.distributed.is_initialized():
        return None
    try:
        from jax._src.distributed import global_state

        return global_state.client
    except (ImportError, AttributeError):
        warn_once("this JAX hides the processes' store; use another, or nobody checks whether they all want the same")
        return None


def wait_for(store: Any, key: str, seconds: float) -> str | None:
    """Waits for the value under a key of the shared store; None if that takes too long.

    JAX has one kind of error for all that goes wrong here; only its message says that it took too long. Without it, a
    late process is reported as a lost one.

    Raises:
      RuntimeError: the store can't be reached.
    """
    try:
        return store.blocking_key_value_get(key, max(1, int(seconds * 1000)))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" in str(error):
            return None
        raise RuntimeError(f"this process has lost the others: {error}") from error


def is_computed(array: jax.Array) -> bool:
    """Whether the devices have computed an array, or failed to; without waiting. True for a donated array.

    Uses `is_ready`, which JAX's arrays have though no page lists it. What is public (`jax.block_until_ready`) waits, in
    a thread that can't be ended. Without it `jpipe.watch` notices a device that is stuck only where the main thread is
    stuck, too.
    """
    try:
        return array.is_ready()  # pyright: ignore[reportAttributeAccessIssue]
    except (AttributeError, RuntimeError):
        return True


def finds_no_cluster(error: ValueError) -> bool:
    """Whether `jax.distributed.initialize` without arguments raised this because it found no cluster.

    Reads its message. Without this a program that calls `jpipe.initialize()` everywhere fails where it runs alone. What
    JAX looks for (`ClusterEnv`) isn't public.
    """
    return "coordinator_address should be defined" in str(error)


# --- the end of a program ---------------------------------------------------------------------------------------------


def before_threads_end(function: Callable[[], object]) -> None:
    """Has the program's end call a function while threads can still be started.

    Uses `threading._register_atexit`, as `concurrent.futures` of the standard library does. `atexit`, which is public,
    comes after Python has stopped the threads that orbax writes with: a checkpoint that nobody waited for is lost.
    """
    register = getattr(threading, "_register_atexit", None)
    if register is None:
        warn_once("this Python may end before a checkpoint is written; use the Checkpointer in a `with` block")
        register = atexit.register
    register(function)


# --- words of errors --------------------------------------------------------------------------------------------------


def lacks_an_argument(error: Exception) -> bool:
    """Whether Python or Flax raised this because a function was called with too few arguments.

    Reads its message; `inspect.signature` doesn't say which of the calls inside of a layer it was. Without it the error
    of a layer that takes more than the one before it gives lacks a hint.
    """
    words = {TypeError: "required positional argument", ValueError: "must be passed to the constructor or at call time"}
    return _says(error, words)


def lacks_rngs(error: Exception) -> bool:
    """Whether Flax raised this because a module of nnx got an activation for its random numbers.

    Reads its message; the function that makes the module is one like any other. Without it the error of a factory whose
    argument has another name than `rngs` lacks a hint.
    """
    return _says(error, {AttributeError: "Tracer has no attribute params", TypeError: "rngs must be a Rngs"})


def found_no_room(error: Exception) -> bool:
    """Whether a compiler raised this because a device has too little memory for a program.

    Reads its message; JAX has one kind of error for all that compilers refuse. Without it a forecast of a step that
    doesn't fit is the compiler's error.
    """
    return _says(error, {jax.errors.JaxRuntimeError: "RESOURCE_EXHAUSTED"})


def _says(error: Exception, words: Mapping[type[Exception], str]) -> bool:
    """Whether an error is of one of these types, and says that word."""
    return any(isinstance(error, kind) and word in str(error) for kind, word in words.items())


def found_no_tiles(error: Exception) -> bool:
    """Whether XLA raised this because Triton, which multiplies matrices for a GPU, found no sizes of tiles.

    Reads its message; a GPU that is there would try other kernels, by timing them. Without it some steps have no
    forecast.
    """
    return _says(error, {jax.errors.JaxRuntimeError: "output tile sizes"})


def is_of_a_constraint(error: Exception) -> bool:
    """Whether JAX raised this because an array can't be split as a sharding constraint says.

    Reads its message. Without this the error of such a layer says what it was called with, which isn't the fault.
    """
    words = ("sharding annotation", "with_sharding_constraint", "can only refer to Auto axes")
    return isinstance(error, ValueError) and any(word in str(error) for word in words)


_PASSING = ("UNAVAILABLE", "PERMISSION_DENIED", "UNAUTHENTICATED", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED")


def may_pass(words: str) -> bool:
    """Whether an error, as a text, is of a storage that is out of reach for now, and not of a damaged file.

    Reads the names of gRPC's status codes, since tensorstore raises ValueErrors for everything. Without it a checkpoint
    that can't be reached counts as damaged, and an older one is restored.
    """
    return any(word in words for word in _PASSING)
