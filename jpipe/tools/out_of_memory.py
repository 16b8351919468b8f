"""Adds a note to the error of a step that finds no room: what the step holds, and what makes each part smaller."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import jax
import optax
from jax.sharding import Mesh

from jpipe.model.remat import MODES
from jpipe.planning.planner import Planner
from jpipe.planning.request import Request
from jpipe.processes.progress import is_traced
from jpipe.processes.runtime import found_no_room
from jpipe.processes.tables import bytes_in_words
from jpipe.tools.chips import chip_of
from jpipe.tools.memory_model import holdings, predict_host_memory, predict_memory
from jpipe.types import Batch, PyTree

PAGE = 'the page "Out of memory?" (docs/howto/out-of-memory.md)'
HOST_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
MOST = 4
"""How many parts a note names."""
LESS = {"none": 'remat="layer"', "layer": 'remat="full"', "stage": 'remat="full"', "full": ""}
"""For each mode of remat, the next one that keeps less."""


@contextmanager
def notes_on_room(
    planner: Planner, arguments: PyTree, batch: Batch = None, tx: optax.GradientTransformation | None = None
) -> Iterator[None]:
    """A context around a call of a jitted function: where devices have no room for it, its error gets a note.

    The error stays what it is. Nothing is looked at before one is raised, and nothing of a call that is only traced.

    Args:
      planner: the pipeline's.
      arguments: the arguments besides the batch that are tracers if the call is traced itself.
      batch: a batch `[B, ...]`, if the call trains; else the note names what lies on the devices between calls.
      tx: the optimiser of the call, if there is one.
    """
    try:
        yield
    except Exception as error:
        if found_no_room(error) and not is_traced((arguments, batch)):
            with suppress(Exception):  # whatever is wrong with the note, the error is what counts
                error.add_note(note(planner, batch, tx))
        raise


def note(planner: Planner, batch: Batch = None, tx: optax.GradientTransformation | None = None) -> str:
    """The lines of the note: the largest parts of a device's bytes, and the settings that make each smaller.

    Args:
      planner, batch, tx: as of `notes_on_room`.
    """
    smaller = remedies(planner.request)
    if batch is None:
        held = {name: amount.bytes for name, amount in holdings(planner.known_plan()).device.items()}
        parts, what = {"parameters": held.pop("params"), **held}, "The variables take"
        rest = [f"  and the batch, the outputs, activations, caches; smaller by {', '.join(smaller['boundaries'])}"]
    else:
        parts, what = dict(predict_memory(planner, batch, tx)), "By jpipe's model of memory a step of training takes"
        rest = _on_host(predict_host_memory(planner, batch, tx).total, planner.request)
    room = _room(planner.request.mesh)
    has = f", which has {bytes_in_words(room)}" if room else ""
    largest = sorted(((size, name) for name, size in parts.items() if size), reverse=True)[:MOST]
    lines = [f"{what} {bytes_in_words(sum(parts.values()))} of each device{has}:"]
    for size, name in largest:
        settings = ", ".join(smaller.get(name, smaller["others"]))
        lines.append(f"  {name.replace('_', ' ')} {bytes_in_words(size)}; smaller by {settings}")
    return "\n".join([*lines, *rest, f"What each of these costs: {PAGE}"])


def _on_host(size: int, request: Request) -> list[str]:
    """A line for bytes on the host, of which there may be too many as well."""
    most = f"; there JAX takes at most 64 GiB for a process, unless {HOST_LIMIT} is set" * request.splits.on_gpu
    return [f"  and {bytes_in_words(size)} of its host{most}"] if size else []


def remedies(request: Request) -> dict[str, list[str]]:
    """The settings that make each part of a device's memory smaller and aren't chosen yet, the cheapest first."""
    schedule, splits, ends = request.schedule, request.splits, request.options.ends
    mode = next((name for name, mode in MODES.items() if mode == request.remat), "none")
    in_flight = ['schedule="1f1b"'] * (schedule.name == "gpipe")
    offload, stores = request.options.offload, not request.remat.keep_inputs
    hosted = {"residuals": stores and not (offload.residuals or offload.boundaries), "optimizer": not offload.optimizer}
    hosts = {word: [f'offload="{word}"'] * (goes and not splits.on_cpu) for word, goes in hosted.items()}
    remat = [LESS[mode]] * bool(LESS[mode]) * (mode == "none" or not schedule.splits)
    micro = [f"more than {schedule.num_microbatches} micro-batches"]
    stages = [f"more than {schedule.num_stages} stages"]
    sharded = [f"shard_over={splits.batch_axes!r}"] * (splits.num_shards > 1 and not splits.shard_over)
    at_use = ['gather="use"'] * (bool(splits.shard_over) and splits.gather == "step")
    spread = ['ends="spread"'] * (ends == "own" and schedule.num_stages > 1)
    shared = ['ends="shared"'] * (ends != "shared" and schedule.num_stages > 1)
    at_rest = [*sharded, *spread, *stages]
    return {
        "parameters": at_rest,
        "optimizer": [*hosts["optimizer"], *at_rest],
        "gradients": [*at_use, *shared, *stages],
        "others": [*at_use, *stages],
        "batch": ["a mesh axis of data"],
        "boundaries": [*in_flight, *micro],
        "residuals": [*in_flight, *micro, *hosts["residuals"], *remat],
        "work": [*micro, *shared, "a tensor axis"],
        "casts": ['cast="use"'],
    }


def _room(mesh: Mesh) -> int | None:
    """The bytes that a device, or a chip of its kind, has for programs; None if they aren't known."""
    here = [device for device in mesh.devices.flat if device in jax.local_devices()]
    stats, chip = here[0].memory_stats() if here else None, chip_of(mesh.devices.flat[0])
    return (stats or {}).get("bytes_limit") or (chip and chip.room)
