"""`pipe.communication`: lists what devices send in a step, by loop, layer, axis and the user's line."""

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial

import jax

from jpipe.execution import programs
from jpipe.model.groups import LayerGroup
from jpipe.partitioner.axes import AXIS
from jpipe.partitioner.conversions import Sent, sent_in
from jpipe.planning.layer_loops import IdleWork
from jpipe.planning.planner import Planner
from jpipe.planning.step import Step
from jpipe.processes.tables import Table, Tabular
from jpipe.schedules.actions import ACTION_KINDS
from jpipe.schedules.ticks import Run
from jpipe.tools.chips import MIB
from jpipe.types import Batch

FORWARD, BACKWARD, TICK, ENDS, STEP = "forward", "backward", "between stages", "shared ends", "step"
HOW_OFTEN = {
    FORWARD: "for each layer and micro-batch",
    BACKWARD: "for each layer and micro-batch",
    TICK: "in each tick",
    ENDS: "for each micro-batch, where all stages compute the first or the last layer together",
    STEP: "once in a step",
}
TURNS = ("enter", "leave", "back")
"""The scopes of what all stages compute together (`jpipe.planning.ends`)."""


@dataclass(frozen=True)
class Transfer:
    """A transfer at one place of the program.

    Attributes:
      loop: the loop that has it in each turn: "forward", "backward", "between stages", "shared ends" or "step".
      layer: the kind of layer and which ones, as "Block 1-8"; empty outside of layers.
      collective: "all_reduce", "all_gather", "reduce_scatter", "all_to_all" or "permute".
      axes: the mesh axes along which devices take part.
      devices: the number of devices that take part: all along these axes, or a part of them.
      array: the part that a device puts in, as "bfloat16[1,2048,4096]".
      bytes: the bytes that a device sends in one turn of the loop.
      count: the number of such collectives in one turn.
      line: the user's line that made it, as "model.py:12"; empty if none did.
    """

    loop: str
    layer: str
    collective: str
    axes: tuple[str, ...]
    devices: int
    array: str
    bytes: float
    count: float
    line: str


@dataclass(frozen=True)
class Communication(Tabular):
    """All transfers in a step of training; `print` it, or show it in a notebook.

    Attributes:
      title: the pipeline in a line.
      transfers: all transfers, in the order of the loops.
    """

    title: str
    transfers: tuple[Transfer, ...]

    def __repr__(self) -> str:
        return f"<Communication of {self.title}: {len(self.transfers)} transfers>"

    def bytes(self, loop: str) -> float:
        """The bytes that a device sends in one turn of a loop, through all kinds of layers."""
        return sum(transfer.bytes for transfer in self.transfers if transfer.loop == loop)

    def _table(self) -> Table:
        header = ("loop", "layer", "collective", "axes", "devices", "array", "times", "MiB sent", "line")
        rows = []
        for t in self.transfers:
            sizes = str(t.devices), t.array, f"{t.count:g}", f"{t.bytes / MIB:.3f}"
            rows.append((t.loop, t.layer, t.collective, ", ".join(t.axes), *sizes, t.line))
        notes = [f"{loop}: {often}" for loop, often in HOW_OFTEN.items() if any(t.loop == loop for t in self.transfers)]
        return Table(f"What a device sends in a step of {self.title}", header, rows, notes)


def communication(planner: Planner, batch: Batch, title: str) -> Communication:
    """Reads from the traced program what the devices of a pipeline send in a step of training.

    Args:
      planner: the pipeline's.
      batch: a batch `[B, ...]`, or its ShapeDtypeStructs.
      title: the pipeline in a line.
    """
    step = _as_one_run(planner.training_step(planner.for_training(batch)))
    variables = {name: layout.shapes for name, layout in step.plan.layouts.items()}
    traced = jax.make_jaxpr(partial(programs.value_and_grad, step))(variables, batch, None)
    names = {group.scope(g): words_of(group) for g, group in enumerate(step.model.groups)}
    counts: Counter[Transfer] = Counter()
    for sent in sent_in(traced.jaxpr, planner.request.mesh.shape):
        loop = _loop_of(sent)
        layer = next((names[scope] for scope in sent.scope if scope in names), "")
        times = math.prod(sent.loops if loop == STEP else sent.loops[1:])  # the outermost is that over ticks
        array = f"{sent.dtype}[{','.join(map(str, sent.shape))}]"
        kind = sent.collective, sent.axes, sent.devices
        counts[Transfer(loop, layer, *kind, array, sent.bytes, 1.0, sent.line)] += times
    transfers = [replace(one, bytes=one.bytes * count, count=count) for one, count in counts.items()]
    return Communication(title, tuple(sorted(transfers, key=lambda one: [*HOW_OFTEN].index(one.loop))))


def _as_one_run(step: Step) -> Step:
    """The step without what idle stages compute along: then each action and each layer is there once."""
    if not step.idle_work.trips:
        return step
    run = Run(0, step.table.num_ticks, ("",) * len(step.table.slots))
    return replace(step, table=replace(step.table, runs=(run,)), idle_work=IdleWork())


def words_of(group: LayerGroup) -> str:
    """The kind of layer and which ones, as "Block 1-8"."""
    first, last = group.indices[0], group.indices[-1]
    return f"{group.layer.name} {first}" + (f"-{last}" if last > first else "")


def _loop_of(sent: Sent) -> str:
    """The loop that runs a collective in each of its turns."""
    if "ticks" not in sent.scope:
        return STEP
    if any(scope in TURNS for scope in sent.scope[sent.scope.index("ticks") + 1 :][:1]):  # a user may call one so too
        return ENDS
    if AXIS in sent.axes:
        return TICK
    action = next(scope for scope in sent.scope if scope in ACTION_KINDS)  # a user may call a scope in it "B" too
    return FORWARD if action == "F" else BACKWARD
