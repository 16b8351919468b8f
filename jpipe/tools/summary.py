"""`print(pipe)`: a pipeline as a table, with the layers, parameters, memory and devices of each stage.

The error of a step that finds no room gets a note: what the step holds, by part.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import groupby

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from jpipe.model.examples_in_layers import follow_examples
from jpipe.planning.plan import Plan
from jpipe.planning.planner import Planner
from jpipe.processes.progress import is_traced
from jpipe.processes.runtime import found_no_room
from jpipe.processes.tables import Table, bytes_in_words
from jpipe.schedules.simulate import simulate
from jpipe.tools.chips import chip_of
from jpipe.tools.memory_model import held_by_device, held_by_stages, predict_memory
from jpipe.tools.step_cost import Parts
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
        columns["parameters"] = [f"{amount.elements:,}" for amount in held_by_stages(plan, "params")]
        notes += [_held(plan), *_memory(planner, plan), *follow_examples(plan.model).in_words(plan.model)]
        by_costs = simulate(schedule, *plan.stage_times).bubble_fraction
        bubble = f"{by_costs:.1%} by the layers' costs; {bubble}"
    columns["in flight"] = [str(peak) for peak in even.peak_in_flight] * num_chunks
    columns["devices"] = _devices(planner) * num_chunks
    units = "pairs of micro-batch and chunk" if num_chunks > 1 else "micro-batches"
    notes += [f"bubble: {bubble}", f"in flight: the most {units} that a stage holds"]
    return Table(title, list(columns), list(zip(*columns.values(), strict=True)), notes)


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


def _held(plan: Plan) -> str:
    """A line on what each device holds, whatever its stage has."""
    name = lambda collection: "parameters" if collection == "params" else collection
    amounts = held_by_device(plan).items()
    texts = [f"{amount.elements:,} {name(c)} ({bytes_in_words(amount.bytes)})" for c, amount in amounts]
    return f"each device holds {' and '.join(texts)}: of each type of array the most that a stage has"


def _memory(planner: Planner, plan: Plan) -> list[str]:
    """Lines on a step's memory by its model; none for a pipeline that doesn't train."""
    if plan.loss is None:
        return []
    try:
        return memory_in_words(planner, plan.batch)
    except (TypeError, ValueError, NotImplementedError) as error:  # printing is no place to refuse layers
        return [f"no step of training can be planned: {error}"]


def memory_in_words(planner: Planner, batch: Batch, tx: optax.GradientTransformation | None = None) -> list[str]:
    """Lines on what a step holds on a device, and on its host, by the model of memory, the parts by size."""
    memory, hosted = predict_memory(planner, batch, tx)
    without = "" if tx else ", without the optimiser's state"

    def line(parts: Parts[int], where: str) -> str:
        by_size = sorted(parts.items(), key=lambda part: -part[1])
        texts = [f"{name.replace('_', ' ')} {bytes_in_words(size)}" for name, size in by_size if size]
        return f"a training step holds {bytes_in_words(parts.total)} {where} (predicted{without}): {', '.join(texts)}"

    return [line(memory, "a device")] + [line(hosted, "of the host for each device")] * bool(hosted)


def _devices(planner: Planner) -> list[str]:
    """The devices of each stage."""
    mesh = planner.request.mesh
    by_stage = np.moveaxis(mesh.devices, mesh.axis_names.index("stage"), 0).reshape(mesh.shape["stage"], -1)
    more = by_stage.shape[1] - SHOWN_DEVICES
    names = [" ".join(f"{device.platform}:{device.id}" for device in row[:SHOWN_DEVICES]) for row in by_stage]
    return [f"{text} and {more} more" if more > 0 else text for text in names]


# --- no room ----------------------------------------------------------------------------------------------------------


PAGE = 'the page "Out of memory?" (docs/howto/out-of-memory.md)'


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
                held = [_held(planner.known_plan())] if batch is None else memory_in_words(planner, batch, tx)
                error.add_note("\n".join([*held, f"What makes each part smaller, and what that costs: {PAGE}"]))
        raise


def room_on(mesh: Mesh) -> int | None:
    """The bytes that a device, or a chip of its kind, has for programs; None if they aren't known."""
    here = [device for device in mesh.devices.flat if device in jax.local_devices()]
    stats, chip = here[0].memory_stats() if here else None, chip_of(mesh.devices.flat[0])
    return (stats or {}).get("bytes_limit") or (chip and chip.room)
