"""`print(pipe)`: a pipeline as a table, with the layers, parameters, memory and devices of each stage.

The error of a step that finds no room gets a note: what the step holds, and what makes each part smaller.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from jpipe.model.examples_in_layers import follow_examples
from jpipe.model.remat import MODES
from jpipe.planning.plan import Plan
from jpipe.planning.planner import Planner
from jpipe.planning.request import Request
from jpipe.processes.progress import is_traced
from jpipe.processes.runtime import found_no_room
from jpipe.processes.tables import Table, bytes_in_words
from jpipe.schedules.simulate import simulate
from jpipe.tools.chips import chip_of
from jpipe.tools.memory_model import held_by_device, held_by_stages, predict_memory
from jpipe.types import Batch, PyTree

SHOWN_DEVICES = 4


def summarize(title: str, planner: Planner) -> Table:
    """A row for each virtual stage; what follows from shapes only once a batch was seen.

    Args:
      title: the pipeline in a line.
      planner: the pipeline's.
    """
    schedule, plan = planner.request.schedule, planner.plan
    num_stages, num_chunks = schedule.num_stages, schedule.num_chunks
    even = simulate(schedule)
    columns: dict[str, list[str]] = {"stage": [str(stage) for stage in range(num_stages)] * num_chunks}
    if num_chunks > 1:
        columns["chunk"] = [str(chunk) for chunk in range(num_chunks) for _ in range(num_stages)]
    notes = []
    try:
        partition = planner.partition
    except ValueError:
        notes.append(f"the layers are cut when a batch is seen (balance={planner.request.balance!r})")
    else:
        columns["layers"] = partition.ranges
        names = [layer.name for layer in (plan or planner.request).layers]
        columns["what"] = [in_words(names[a:b]) for a, b in partition.bounds]
        total = math.fsum(partition.costs)
        if plan is not None and total:
            columns["cost"] = [f"{cost / total:.1%}" for cost in partition.costs]
    bubble = f"{even.bubble_fraction:.1%} if stages take equally long, and a backward twice a forward"
    if plan is not None:
        shared = [variables.users[0] for variables in plan.model.variable_sets if variables.shared]
        columns["parameters"] = _parameters(plan, shared)
        notes += [_held(plan), *_memory(planner, plan), *_shared(plan, shared)]
        notes += follow_examples(plan.model).in_words(plan.model)
        by_costs = simulate(schedule, *plan.stage_times).bubble_fraction
        bubble = f"{by_costs:.1%} by the layers' costs; {bubble}"
    columns["in flight"] = [str(peak) for peak in even.peak_in_flight] * num_chunks
    columns["devices"] = _devices(planner) * num_chunks
    units = "pairs of micro-batch and chunk" if num_chunks > 1 else "micro-batches"
    notes += [f"bubble: {bubble}", f"in flight: the most {units} that a stage holds"]
    return Table(title, list(columns), list(zip(*columns.values(), strict=True)), {}, notes)


def in_words(names: list[str]) -> str:
    """Names in order, equal ones counted; of many names that all differ the first and the last.

    >>> in_words(["Embed", "Block", "Block", "Dense"])
    'Embed, 2 Block, Dense'
    >>> in_words(["table", "h_0", "h_1", "h_2", "h_3"])
    'table to h_3'
    """
    if len(set(names)) == len(names) > 4:
        return f"{names[0]} to {names[-1]}"
    runs = [(name, len(list(run))) for name, run in groupby(names)]
    return ", ".join(f"{count} {name}" if count > 1 else name for name, count in runs)


def _parameters(plan: Plan, shared: Sequence[Sequence[int]]) -> list[str]:
    """How many parameters each virtual stage has, and whether its layers use others, which lie on another."""
    texts = []
    for amount, (start, stop) in zip(held_by_stages(plan, "params"), plan.partition.bounds, strict=True):
        elsewhere = any(first < start <= layer < stop for first, *others in shared for layer in others)
        texts.append(f"{amount.elements:,}" + " + shared" * elsewhere)
    return texts


def _held(plan: Plan) -> str:
    """A line on what each device holds, whatever its stage has."""
    name = lambda collection: "parameters" if collection == "params" else collection
    amounts = held_by_device(plan).items()
    texts = [f"{amount.elements:,} {name(c)} ({bytes_in_words(amount.bytes)})" for c, amount in amounts]
    return f"each device holds {' and '.join(texts)}: of each type of array the most that a stage has"


def _memory(planner: Planner, plan: Plan) -> list[str]:
    """Lines on a step's memory by its model, the parts by size; none for a pipeline that doesn't train."""
    if plan.loss is None:
        return []
    try:
        memory, hosted = predict_memory(planner, plan.batch)
    except (TypeError, ValueError, NotImplementedError) as error:  # printing is no place to refuse layers
        return [f"no step of training can be planned: {error}"]
    said = "a training step holds {} {} (predicted, without the optimiser's state): {}"
    places = [("a device", memory)] + [("of the host for each device", hosted)] * bool(hosted)
    texts = lambda parts: [f"{name.replace('_', ' ')} {bytes_in_words(size)}" for size, name in _largest(parts)]
    return [said.format(bytes_in_words(parts.total), where, ", ".join(texts(parts))) for where, parts in places]


def _largest(parts: Mapping[str, int]) -> list[tuple[int, str]]:
    """The parts that aren't empty, the largest first."""
    return sorted(((size, name) for name, size in parts.items() if size), key=lambda part: -part[0])


def _shared(plan: Plan, shared: Sequence[Sequence[int]]) -> list[str]:
    """Notes on what all stages compute together, and on which layers share parameters, and where these lie."""
    placement, starts = plan.request.schedule.placement, [start for start, _ in plan.partition.bounds]
    last, notes = plan.model.num_layers - 1, []
    if plan.request.shares_ends:
        notes.append(f"ends='shared': all stages compute layers 0 and {last}, and have parts of their parameters")
    for users in shared:
        stage = placement.stage_of(int(np.searchsorted(starts, users[0], "right")) - 1)
        verb = "count" if plan.request.shares_ends and {*users} <= {0, last} else "lie and count"
        notes.append(f"layers {', '.join(map(str, users))} share parameters, which {verb} on stage {stage} alone")
    return notes


def _devices(planner: Planner) -> list[str]:
    """The devices of each stage, the first ones by name."""
    mesh = planner.request.mesh
    by_stage = np.moveaxis(mesh.devices, mesh.axis_names.index("stage"), 0).reshape(mesh.shape["stage"], -1)
    more = by_stage.shape[1] - SHOWN_DEVICES
    names = [" ".join(f"{device.platform}:{device.id}" for device in row[:SHOWN_DEVICES]) for row in by_stage]
    return [f"{text} and {more} more" if more > 0 else text for text in names]


# --- no room ----------------------------------------------------------------------------------------------------------


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
        held = {name: amount.bytes for name, amount in held_by_device(planner.known_plan()).items()}
        parts, what = {"parameters": held.pop("params"), **held}, "The variables take"
        rest = [f"  and the batch, the outputs, activations, caches; smaller by {', '.join(smaller['boundaries'])}"]
    else:
        (parts, away), what = predict_memory(planner, batch, tx), "By jpipe's model of memory a step of training takes"
        most = f"; there JAX takes at most 64 GiB for a process, unless {HOST_LIMIT} is set"
        rest = [f"  and {bytes_in_words(away.total)} of its host{most * planner.request.splits.on_gpu}"] * bool(away)
    has = f", which has {bytes_in_words(room)}" if (room := room_on(planner.request.mesh)) else ""
    lines = [f"{what} {bytes_in_words(sum(parts.values()))} of each device{has}:"]
    for size, name in _largest(parts)[:MOST]:
        settings = ", ".join(smaller.get(name, smaller["others"]))
        lines.append(f"  {name.replace('_', ' ')} {bytes_in_words(size)}; smaller by {settings}")
    return "\n".join([*lines, *rest, f"What each of these costs: {PAGE}"])


def remedies(request: Request) -> dict[str, list[str]]:
    """The settings that make each part of a device's memory smaller and aren't chosen yet, the cheapest first."""
    schedule, splits, ends = request.schedule, request.splits, request.ends
    mode = next((name for name, mode in MODES.items() if mode == request.remat), "none")
    in_flight = ['schedule="1f1b"'] * (schedule.name == "gpipe")
    offload, stores = request.offload, not request.remat.keep_inputs
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
    }


def room_on(mesh: Mesh) -> int | None:
    """The bytes that a device, or a chip of its kind, has for programs; None if they aren't known."""
    here = [device for device in mesh.devices.flat if device in jax.local_devices()]
    stats, chip = here[0].memory_stats() if here else None, chip_of(mesh.devices.flat[0])
    return (stats or {}).get("bytes_limit") or (chip and chip.room)
