"""A pipeline at a glance: which layers, how many parameters and which devices each stage has."""

from __future__ import annotations

import math
from itertools import groupby

import jax
import numpy as np

from jpipe.execution.planner import Planner
from jpipe.pictures.tables import Table
from jpipe.planning.partition import Partition
from jpipe.planning.plan import Plan
from jpipe.schedules.simulate import simulate

SHOWN_DEVICES = 4


def summarize(title: str, planner: Planner) -> Table:
    """A row for each virtual stage; what follows from shapes only once a batch was seen.

    Args:
      title: the pipeline in a line.
      planner: the pipeline's.
    """
    schedule = planner.request.schedule
    num_stages, num_chunks = schedule.num_stages, schedule.num_chunks
    timeline = simulate(schedule)
    columns: dict[str, list[str]] = {"stage": [str(stage) for stage in range(num_stages)] * num_chunks}
    if num_chunks > 1:
        columns["chunk"] = [str(chunk) for chunk in range(num_chunks) for _ in range(num_stages)]
    held = "pairs of micro-batch and chunk" if num_chunks > 1 else "micro-batches"
    notes = [
        f"bubble {timeline.bubble_fraction:.1%} where stages take equally long, and a backward twice a forward; "
        f"in flight: the most {held} that a stage holds"
    ]
    try:
        partition = planner.partition
    except ValueError:
        notes.append(f"the layers are cut when a batch is seen (balance={planner.request.balance!r})")
    else:
        columns |= _layers(planner, partition)
    if planner.plan is not None:
        columns["parameters"] = _parameters(planner.plan)
    columns["in flight"] = [str(peak) for peak in timeline.peak_in_flight] * num_chunks
    columns["devices"] = _devices(planner) * num_chunks
    rows = list(zip(*columns.values(), strict=True))
    return Table(title, list(columns), rows, {}, notes)


def _layers(planner: Planner, partition: Partition) -> dict[str, list[str]]:
    names = [layer.name for layer in planner.request.layers]
    columns: dict[str, list[str]] = {
        "layers": partition.ranges,
        "what": [in_words(names[start:stop]) for start, stop in partition.bounds],
    }
    total = math.fsum(partition.costs)
    if planner.plan is not None and total:
        columns["cost"] = [f"{cost / total:.1%}" for cost in partition.costs]
    return columns


def in_words(names: list[str]) -> str:
    """Names in order, equal ones counted.

    >>> in_words(["Embed", "Block", "Block", "Dense"])
    'Embed, 2 Block, Dense'
    """
    runs = [(name, len(list(run))) for name, run in groupby(names)]
    return ", ".join(f"{count} {name}" if count > 1 else name for name, count in runs)


def _parameters(plan: Plan) -> list[str]:
    """How many parameters the layers of each virtual stage have, shared ones at every use."""
    counts = [
        sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(plan.traced.group_at(index).variables.get("params", {})))
        for index in range(plan.traced.num_layers)
    ]
    return [f"{sum(counts[start:stop]):,}" for start, stop in plan.partition.bounds]


def _devices(planner: Planner) -> list[str]:
    """The devices of each stage, the first ones by name."""
    mesh = planner.request.mesh
    by_stage = np.moveaxis(mesh.devices, mesh.axis_names.index("stage"), 0).reshape(mesh.shape["stage"], -1)
    texts = []
    for devices in by_stage:
        names = [f"{device.platform}:{device.id}" for device in devices[:SHOWN_DEVICES]]
        more = [f"{len(devices) - SHOWN_DEVICES} more"] if len(devices) > SHOWN_DEVICES else []
        texts.append(" ".join(names) + "".join(f" and {text}" for text in more))
    return texts
