"""Counts the cycles of a compiled step by action, and how long a chip waits for its collectives.

The compiler notes cycles beside each operation, and how often loops turn follows from the step: that over ticks from
the table, those over layers from the ranges of each virtual stage, those of a layer's own from their conditions.

Each collective takes the time that its bytes take on the links along its mesh axes. Those that the compiler starts and
ends apart are under way meanwhile; what the operations in between leave of their time is waited for.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from jax.sharding import Mesh

from jpipe.planning.step import Step
from jpipe.schedules.actions import ACTION_KINDS
from jpipe.schedules.simulate import Timeline, Work, in_time
from jpipe.schedules.ticks import Run
from jpipe.tools.chips import Chip
from jpipe.tools.compiled_program import COLLECTIVES, PERMUTE, RAGGED, Loop, Operation
from jpipe.tools.time_model import Network

Groups = tuple[tuple[int, ...], ...]
"""The devices that work together in a collective, by their places in the mesh; of a permute (source, target)."""


def axes_along(groups: Groups, mesh: Mesh) -> tuple[str, ...]:
    """The axes of a mesh along which the devices of a group differ."""
    places = [np.stack(np.unravel_index(list(group), mesh.devices.shape)) for group in groups]
    varies = [any(len(set(place[i])) > 1 for place in places) for i in range(len(mesh.axis_names))]
    return tuple(name for name, does in zip(mesh.axis_names, varies, strict=True) if does)


def groups_of(line: str) -> Groups:
    """The groups of devices, or pairs, that a collective names; empty if it means all.

    Raises:
      ValueError: they are written in another way.
    """
    pairs = re.search(r"source_target_pairs=\{((?:\{\d+,\s*\d+\},?\s*)*)\}", line)
    listed = pairs or re.search(r"replica_groups=\{((?:\{[\d,\s]*\},?\s*)*)\}", line)
    if listed:
        return tuple(tuple(_numbers(group)) for group in re.findall(r"\{([\d,\s]*)\}", listed.group(1)))
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    if iota:
        shape, sizes, order = (_numbers(part or "") for part in iota.groups())
        devices = np.arange(np.prod(sizes)).reshape(sizes)
        devices = devices.transpose(order) if order else devices
        return tuple(tuple(int(i) for i in group) for group in devices.reshape(shape))
    order = r"(?:, device_ids=\(([^()]*(?:\([\d,]*\))?)\))?"
    named = re.search(rf"replica_groups=mesh\[([^\]]*)\]{order} *\{{([^{{}}]*)\}}", line)
    if named:
        axes, order, over = named.groups()
        return _in_order(_groups_by_axes(axes, over), order)
    if "replica_groups=" in line or "source_target_pairs=" in line:
        raise ValueError(f"groups of devices written in an unknown way: {line.strip()[:300]}")
    return ()


def _in_order(groups: Groups, order: str | None) -> Groups:
    """Groups of places in a mesh as groups of devices.

    Args:
      groups: of places.
      order: the devices at these places, such as "[2,2]T(1,0)" or "0,2,1,3"; None if they are in order.

    >>> _in_order(((0, 1), (2, 3)), "[2,2]T(1,0)")
    ((0, 2), (1, 3))
    """
    if order is None:
        return groups
    iota = re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", order.strip())
    if iota:
        sizes, axes = (_numbers(part or "") for part in iota.groups())
        devices = np.arange(np.prod(sizes, dtype=int)).reshape(sizes)
        devices = (devices.transpose(axes) if axes else devices).reshape(-1)
    else:
        devices = np.asarray(_numbers(order))
    return tuple(tuple(int(devices[i]) for i in group) for group in groups)


def _groups_by_axes(axes: str, over: str) -> Groups:
    """The groups over some axes of a mesh in the order of devices.

    Args:
      axes: names and sizes, such as "'a'=2,'b'=4".
      over: names, such as "'b'"; or parts of one, "'b':(2)2" the part of size 2 inside of the first 2.

    >>> _groups_by_axes("'a'=2,'b'=4", "'a','b':(2)2")
    ((0, 1, 4, 5), (2, 3, 6, 7))
    """
    sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", axes)}
    parts = re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", over)
    cuts = {name: {1, size} for name, size in sizes.items()}
    for name, before, size in parts:
        cuts[name] |= {int(before), int(before) * int(size)} if size else set()
    pieces = [(name, a, b) for name, ends in cuts.items() for a, b in itertools.pairwise(sorted(ends))]
    taken = [(name, int(before or 1), int(before or 1) * int(size or sizes[name])) for name, before, size in parts]
    inside = [any(name == n and a <= start and end <= b for n, a, b in taken) for name, start, end in pieces]
    shape = [end // start for _, start, end in pieces]
    order = sorted(range(len(pieces)), key=lambda i: inside[i])
    width = int(np.prod([size for size, is_in in zip(shape, inside, strict=True) if is_in]))
    devices = np.arange(np.prod(shape, dtype=int)).reshape(shape).transpose(order).reshape(-1, width)
    return tuple(tuple(int(i) for i in group) for group in devices)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


# --- waits ------------------------------------------------------------------------------------------------------------


_BITS = {"pred": 8, "token": 0, "opaque": 0, "c64": 64, "c128": 128}


@dataclass(frozen=True)
class TransferInTime:
    """A collective in time.

    Attributes:
      name: the collective's.
      begin, end: in seconds, from when it is on its way to when it has arrived.
      waited: how many of them the chip waits for its end.
      at: the operation at which it waits.
    """

    name: str
    begin: float
    end: float
    waited: float
    at: str


def with_waits(program: Loop, network: Network, mesh: Mesh) -> Loop:
    """The same program, in which an operation that waits for a collective takes as many cycles more.

    Args:
      program: as compiled for a TPU.
      network: the links.
      mesh: the devices that it runs on.
    """
    takes, clock = transfer_seconds(program, network, mesh), network.chip.clock or 0.0
    waits = {one.at: one.waited for loop in program.walk() for one in turn_in_time(loop, takes, network.chip)[1]}

    def later(loop: Loop) -> Loop:
        operations = [replace(o, cycles=o.cycles + round(waits.get(o.name, 0.0) * clock)) for o in loop.operations]
        return replace(loop, operations=operations, inner=[later(inner) for inner in loop.inner])

    return later(program)


def transfer_seconds(program: Loop, network: Network, mesh: Mesh, *, beside: tuple[str, ...] = ()) -> dict[str, float]:
    """The seconds that each collective of a program takes by itself, by its name.

    A permute goes over one link, others over all that there are along their axes. Of a ragged all-to-all, whose rows
    follow from the data, every device is taken to send as much to each.

    Args:
      program: as compiled for a TPU.
      network: the links.
      mesh: the devices that it runs on.
      beside: those along just these axes are left out.
    """
    found = {}
    for computation, operations in program.computations.items():
        types = {operation.name: operation.type for operation in operations}
        for operation in operations:
            kind = operation.opcode.removesuffix("-start")
            if kind not in COLLECTIVES:
                continue
            if computation.startswith("all-reduce-scatter"):  # a fusion with the slice that a device keeps
                kind = "reduce-scatter"
            groups = tuple(filter(None, groups_of(operation.line))) or (tuple(range(mesh.size)),)
            axes, p = axes_along(groups, mesh), max(map(len, groups))
            sizes = [type_bytes(types.get(name, "")) for name in operation.operands]
            taken, given = sum(sizes), type_bytes(operation.type)
            if operation.opcode.endswith("-start") and kind != "all-reduce":
                given -= taken  # the operands are in the tuple too
            share = 1.0 if kind == PERMUTE else (p - 1) / p * (2 if kind == "all-reduce" else 1)
            moved = taken if kind == PERMUTE else min(sizes[0], given) if kind == RAGGED else max(taken, given)
            if axes and axes != beside:
                links = network.chip.link_bandwidth if kind == PERMUTE else network.bandwidth(axes)
                found[operation.name] = share * moved / links
    return found


def turn_in_time(
    loop: Loop, takes: dict[str, float], chip: Chip
) -> tuple[list[tuple[float, Operation]], list[TransferInTime]]:
    """When the operations of one turn of a loop begin, and its transfers.

    The operations follow each other in time, by the compiler's cycles. A transfer begins with its start, when the one
    before it that goes the same way has ended; one that has no start is waited for in full. A loop within the loop
    hides what is under way. A v5e's compiler cuts a gather into steps that it joins to products: it begins with the
    first of them, and ends with the last.

    Args:
      loop: of a compiled program.
      takes: by collective, its seconds; those without are left out.
      chip: whose clock counts the cycles.
    """
    now, free, under_way = 0.0, dict[str, float](), dict[str, TransferInTime]()
    begun, found, clock = list[tuple[float, Operation]](), list[TransferInTime](), chip.clock or 1.0
    for operation in loop.operations:
        collective = _collective(operation, loop, takes)
        name, key = (collective.name, _gather_of(collective, operation)) if collective else ("", "")
        begins, ends = (operation.name.startswith(f"async-collective-{word}") for word in ("start", "done"))
        if collective and (operation.opcode.endswith("-start") or begins):
            way = re.search(r"source_target_pairs=({{\d+,\d+)", operation.line)
            begin = max(free.get(way[1] if way else "", 0.0), now)
            end = free[way[1] if way else ""] = begin + takes[name]
            under_way[key or operation.name] = TransferInTime(name, begin, end, 0.0, "")
        elif collective and key not in under_way and (ends or not key):
            found.append(TransferInTime(name, now, now + takes[name], takes[name], operation.name))
            now += takes[name]
        elif operation.opcode == "async-update" and operation.operands[0] in under_way:
            under_way[operation.name] = under_way[operation.operands[0]]
        elif (ends or operation.opcode.endswith("-done")) and (key or operation.operands[0]) in under_way:
            one = under_way[key or operation.operands[0]]
            found.append(replace(one, waited=max(0.0, one.end - now), at=operation.name))
            now = max(now, one.end)
        elif operation.opcode == "while":
            now = max(now, *free.values(), 0.0)
        begun.append((now, operation))
        now += operation.cycles / clock
    return begun, found


def _gather_of(step: Operation, holder: Operation) -> str:
    """Which gather a step belongs to that a fusion holds; empty for what isn't a step of one."""
    match = re.search(r"channel_id=\d+(?=.*chain_id)", step.line) if holder.opcode == "fusion" else None
    return match[0] if match else ""


def _collective(operation: Operation, loop: Loop, takes: dict[str, float]) -> Operation | None:
    """Which collective an operation is, or holds, as a fusion does; None for none."""
    called = loop.computations.get(operation.attribute("calls") or "", ())
    return next((one for one in (operation, *called) if one.name in takes), None)


def type_bytes(text: str) -> int:
    """Bytes of a type, or of a tuple of them.

    >>> type_bytes("(f32[2,8]{1,0:T(8,128)}, bf16[], pred[3])")
    69
    """
    found = re.findall(r"(\w+)\[([\d,<=]*)\]", text)
    return sum(_bits(name) * math.prod(map(int, re.findall(r"\d+", dims))) for name, dims in found) // 8


def _bits(name: str) -> int:
    digits = re.search(r"\d+", name)  # f8e4m3fn has 8
    return _BITS[name] if name in _BITS else int(digits[0]) if digits else 0


# --- cycles -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepCycles:
    """Cycles of a step.

    Attributes:
      actions: by kind, the cycles of one action of each virtual stage `[K*V]`.
      ticks: the cycles of all ticks, beyond their actions.
      ends: the cycles of the first and the last layer where all stages compute them together.
      update: the cycles outside of ticks: the optimiser's update above all.
      timeline: the schedule with these actions, in cycles.
    """

    actions: dict[str, tuple[float, ...]]
    ticks: float
    ends: float
    update: float
    timeline: Timeline

    @property
    def total(self) -> float:
        """All cycles of the step."""
        return self.timeline.makespan + self.ticks + self.ends + self.update

    @property
    def of_layers(self) -> float:
        """The cycles of a stage's actions, the mean of all stages."""
        return sum(self.timeline.busy) / len(self.timeline.busy)

    @property
    def bubble(self) -> float:
        """The cycles in which a stage idles, the mean of all stages."""
        return self.timeline.makespan - self.of_layers


def count_cycles(step: Step, program: Loop) -> StepCycles:
    """The cycles of a training step.

    Args:
      step: the step.
      program: the step's compiled program.

    Raises:
      ValueError: the program has no ticks.
    """
    outside, bodies = _bodies(step, program)
    schedule, virtual_stages = step.schedule, range(step.schedule.placement.num_virtual_stages)
    actions = {kind: tuple(_action(step, bodies, kind, s) for s in virtual_stages) for kind in sorted(schedule.kinds)}
    ends = {name: sum(int((getattr(turns, name) >= 0).sum()) for turns in step.ends.turns) for name in ENDS}
    takes = {name: _mean(bodies, name, _turned) for name, turns in ends.items() if turns}
    # Of parts that run in place of whole backwards there may be no actions.
    beyond = lambda body: body.own - sum(_unlooped(body, name) for name in (*ACTION_KINDS, *ENDS))
    # Runs of one tick lie one after the other, so that what they take is that of all of them.
    between = sum(beyond(body) * max([run.stop - run.start for run in runs], default=1) for body, runs in bodies)
    timeline = in_time(schedule, Work(actions, [0.0] * len(virtual_stages)))
    of_ends = sum(ends[name] * takes[name] for name in takes)
    return StepCycles(actions, float(between), of_ends, float(outside.own + sum(map(_turned, outside.inner))), timeline)


ENDS = ("enter", "leave", "back")
"""The scopes of what all stages compute together (`jpipe.planning.ends`)."""
Bodies = list[tuple[Loop, list[Run]]]
"""What runs in ticks, and the runs that it is for: a loop for each, the longest first; last all those of one tick."""


def _bodies(step: Step, program: Loop) -> tuple[Loop, Bodies]:
    """The program without its ticks, and these. Runs of one tick are no loops: they lie in the program itself."""
    in_ticks = lambda scope: "ticks" in scope.split("/")
    loops = [loop for loop in program.inner if loop.name == "ticks"]
    own = [operation for operation in program.operations if not in_ticks(operation.op_name)]
    single = [
        operation for operation in program.operations if in_ticks(operation.op_name) and operation.opcode != "while"
    ]
    others = [loop for loop in program.inner if in_ticks(loop.scope) and loop.name != "ticks"]
    if not (loops or others or single):
        raise ValueError("the compiled program has no ticks; a step has some")
    short, long = (
        [run for run in step.table.runs if (run.stop - run.start > 1) == is_long] for is_long in (False, True)
    )
    bodies = [(loop, [run]) for loop, run in zip(loops, long, strict=False)]
    bodies.sort(key=lambda body: body[1][0].start - body[1][0].stop)
    bodies.append((replace(program, operations=single, inner=others), short))
    return replace(program, operations=own, inner=[loop for loop in program.inner if not in_ticks(loop.scope)]), bodies


def _action(step: Step, bodies: Bodies, kind: str, virtual_stage: int) -> float:
    """Cycles of one action, the mean of the slots that have it; 0 of a W that has nothing to do."""
    names = {group.scope(g): g for g, group in enumerate(step.model.groups)}
    layers = (step.ranges.stop - step.ranges.start)[virtual_stage].sum(axis=0)
    passes = int(step.ranges.passes_of[virtual_stage])

    def turned(loop: Loop) -> float:
        if loop.name in names:
            trips = layers[names[loop.name]] / passes
        elif any(inner.name in names for inner in loop.walk()):
            trips = passes
        else:
            return _turned(loop)
        return float(trips * (loop.own + sum(map(turned, loop.inner))))

    return _mean(bodies, kind, turned)


def _mean(bodies: Bodies, name: str, turned: Callable[[Loop], float]) -> float:
    """Cycles of what has a name, in the longest run of ticks that has it: the mean of its slots."""
    for body, runs in bodies:
        if loops := body.find(name):
            return sum(loop.own + sum(map(turned, loop.inner)) for loop in loops) / len(loops)
        inner = [loop for loop in body.inner if name in loop.scope.split("/")]
        if cycles := _unlooped(body, name) + sum(map(turned, inner)):
            return cycles / max(1, sum(name in kinds for run in runs for kinds in run.together))
    return 0.0


def _unlooped(body: Loop, name: str) -> float:
    """Cycles of what has a name and no loop around it, as it runs on all stages."""
    if body.find(name):
        return 0.0
    return sum(operation.cycles for operation in body.operations if name in operation.op_name.split("/"))


def _turned(loop: Loop) -> float:
    """Cycles of a loop whose condition says how often it turns; once, if it doesn't."""
    return (1 if loop.trips is None else loop.trips) * (loop.own + sum(map(_turned, loop.inner)))
