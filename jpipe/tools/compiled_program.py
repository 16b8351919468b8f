"""Reads a compiled program: its loops, the cycles of a step by action, how long a chip waits for its collectives.

The TPU compiler notes `estimated_cycles` beside each operation, whether or not the machine exists; the GPU compiler
notes none. A loop's own are those of one trip without the loops inside. How often loops turn follows from the step:
that over ticks from the table, those over layers from the ranges of each virtual stage, those of a layer's own from
their conditions.

Each collective takes the time that its bytes take on the links along its mesh axes. Those that the compiler starts and
ends apart are under way meanwhile; what the operations in between leave of their time is waited for.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from jax.sharding import Mesh
from jax.stages import Compiled, Lowered

from jpipe.planning.step import Step
from jpipe.schedules.actions import ACTION_KINDS
from jpipe.schedules.simulate import Timeline, Work, in_time
from jpipe.schedules.ticks import Run
from jpipe.tools.chips import Chip, Network
from jpipe.tools.communication import TURNS
from jpipe.tools.step_cost import Parts

PERMUTE, RAGGED = "collective-permute", "ragged-all-to-all"
COLLECTIVES = (PERMUTE, "all-gather", "all-reduce", "all-to-all", RAGGED, "reduce-scatter")
_OPERATION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((.*)")


@dataclass(frozen=True)
class Operation:
    """One operation of a compiled program.

    Attributes:
      name: the instruction's.
      opcode: its kind, such as "fusion".
      type: the type of its result, with its layout.
      operands: the names of its operands.
      cycles: the compiler's estimate; 0 where it has none.
      op_name: the scopes of the code that it was made from, such as "jit(f)/ticks/while/body/F/while".
      line: its whole text.
    """

    name: str
    opcode: str
    type: str
    operands: tuple[str, ...]
    cycles: int
    op_name: str
    line: str

    def attribute(self, name: str) -> str | None:
        """The computation that an attribute such as `body` names."""
        match = re.search(rf"\b{name}=%?([\w.\-]+)", self.line)
        return match[1] if match else None


Trips = Callable[["Loop"], float]
"""How often a loop turns."""


@dataclass(frozen=True)
class Loop:
    """A `while` of the program, or the program itself, or a branch of a `conditional`.

    Attributes:
      scope: the `op_name` of the `while`; empty for the program.
      operations: the operations of its body, in the order in which they are scheduled.
      inner: the loops in its body.
      computations: the operations of all of the program's computations, by name.
      trips: the number of its turns, if the compiler notes it or its condition has it as a number; else None.
    """

    scope: str
    operations: list[Operation]
    inner: list[Loop]
    computations: dict[str, list[Operation]]
    trips: int | None = None

    @property
    def name(self) -> str:
        """The innermost named scope around it: of ".../F/while/body/Block.1/while" Block.1."""
        return self.scope.removesuffix("/while").rpartition("/")[2]

    @property
    def own(self) -> int:
        """Cycles of one trip, without the loops inside."""
        return sum(operation.cycles for operation in self.operations)

    def turn(self, trips: Trips) -> float:
        """Cycles of one trip, with those of the loops inside, by how often each turns."""
        return self.own + sum(trips(loop) * loop.turn(trips) for loop in self.inner)

    def walk(self) -> Iterator[Loop]:
        """This loop and all loops inside."""
        yield self
        for loop in self.inner:
            yield from loop.walk()

    def find(self, *names: str) -> list[Loop]:
        """The loops inside that lie in loops of these names, the last their own."""
        return [loop for loop in self.walk() if loop.name == names[-1] and {*names} <= {*loop.scope.split("/")}]


def compile_with_text(lowered: Lowered) -> tuple[Compiled, str]:
    """(compiled, its text) of `jitted.lower(...)`.

    The text is what the compiler wrote down itself: `compiled.as_text()` reads the program back, and fails on some for
    v4 and v5p ("async-update instruction should have 1 operands").
    """
    with tempfile.TemporaryDirectory() as folder:
        compiled = lowered.compile(compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        (file,) = Path(folder).glob("*.after_codegen.txt")
        return compiled, file.read_text()


def read(text: str) -> Loop:
    """The loops of a compiled program."""
    computations: dict[str, list[Operation]] = {}
    name = entry = ""
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" ") and (match := re.match(r"(ENTRY )?%?([\w.\-]+) ", line)):
            name = match.group(2)
            computations[name] = []
            entry = name if match.group(1) else entry
        elif name and (match := _OPERATION.match(line)):
            computations[name].append(_operation(line, *match.groups()))
    return loop_of(computations, entry, "")


def _operation(line: str, name: str, kind: str, opcode: str, rest: str) -> Operation:
    """Makes an operation of its line, and of the parts of it that `_OPERATION` matches."""
    cycles = re.search(r'"estimated_cycles":"(\d+)"', line)
    op_name = re.search(r'op_name="([^"]*)"', line)
    operands = tuple(re.findall(r"%([\w.\-]+)", rest.partition(")")[0]))
    return Operation(name, opcode, kind, operands, int(cycles[1]) if cycles else 0, op_name[1] if op_name else "", line)


def loop_of(computations: dict[str, list[Operation]], body: str, scope: str, trips: int | None = None) -> Loop:
    """The loop, the program or the branch whose body is the computation of that name."""
    operations = list(_flat(computations, body))
    inner = [
        loop_of(computations, operation.attribute("body") or "", operation.op_name, _trips(computations, operation))
        for operation in operations
        if operation.opcode == "while"
    ]
    return Loop(scope, operations, inner, computations, trips)


def _trips(computations: dict[str, list[Operation]], loop: Operation) -> int | None:
    """The number of a loop's turns that the compiler notes; else the one number that its condition compares with."""
    condition = computations.get(loop.attribute("condition") or "", [])
    noted = re.findall(r'"known_trip_count":\{"n":"(\d+)"', loop.line)
    compared = re.findall(r" s32\[\]\S* constant\((\d+)\)", "\n".join(operation.line for operation in condition))
    numbers = noted or compared
    return int(numbers[0]) if len(numbers) == 1 else None


def _flat(computations: dict[str, list[Operation]], name: str) -> Iterator[Operation]:
    """The operations of a computation, with those that it calls in their place."""
    for operation in computations[name]:
        called = operation.attribute("to_apply") if operation.opcode == "call" else None
        if called:
            yield from _flat(computations, called)
        else:
            yield operation


# --- device groups ----------------------------------------------------------------------------------------------------


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
    listed = re.search(r"(?:source_target_pairs|replica_groups)=\{((?:\{[\d,\s]*\},?\s*)*)\}", line)
    if listed:
        return tuple(tuple(_numbers(group)) for group in re.findall(r"\{([\d,\s]*)\}", listed[1]))
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", line)
    if iota:
        return tuple(map(tuple, _in_order(iota[2]).reshape(_numbers(iota[1])).tolist()))
    order = r"(?:, device_ids=\(([^()]*(?:\([\d,]*\))?)\))?"
    named = re.search(rf"replica_groups=mesh\[([^\]]*)\]{order} *\{{([^{{}}]*)\}}", line)
    if named:
        places = _places_by_axes(named[1], named[3])
        return tuple(map(tuple, (_in_order(named[2])[places] if named[2] else places).tolist()))
    if "replica_groups=" in line or "source_target_pairs=" in line:
        raise ValueError(f"groups of devices written in an unknown way: {line.strip()[:300]}")
    return ()


def _in_order(text: str) -> np.ndarray:
    """Devices in the order that a text gives, listed or as those of a mesh whose axes are turned.

    >>> _in_order("[2,2]T(1,0)").tolist(), _in_order("0,2,1,3").tolist()
    ([0, 2, 1, 3], [0, 2, 1, 3])
    """
    if not text.startswith("["):
        return np.asarray(_numbers(text))
    sizes, _, axes = text.partition("T")
    devices = np.arange(np.prod(_numbers(sizes), dtype=int)).reshape(_numbers(sizes))
    return (devices.transpose(_numbers(axes)) if axes else devices).reshape(-1)


def _places_by_axes(axes: str, over: str) -> np.ndarray:
    """`[groups, devices of a group]`: the groups over some axes of a mesh, as places in it.

    Args:
      axes: names and sizes, such as "'a'=2,'b'=4".
      over: names, such as "'b'"; or parts of one, "'b':(2)2" the part of size 2 inside of the first 2.

    >>> _places_by_axes("'a'=2,'b'=4", "'a','b':(2)2").tolist()
    [[0, 1, 4, 5], [2, 3, 6, 7]]
    """
    sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", axes)}
    shape = tuple(sizes.values())
    places = dict(zip(sizes, np.unravel_index(np.arange(np.prod(shape, dtype=int)), shape), strict=True))
    for name, before, part in re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", over):
        size = int(part or sizes[name])
        inside = sizes[name] // (int(before or 1) * size)
        places[name] = places[name] - places[name] // inside % size * inside  # the first of its group along this part
    firsts = np.ravel_multi_index(tuple(places.values()), shape)
    return np.argsort(firsts, kind="stable").reshape(len(np.unique(firsts)), -1)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


# --- waits ------------------------------------------------------------------------------------------------------------


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

    def later(loop: Loop) -> Loop:
        waits = {one.at: round(one.waited * clock) for one in turn_in_time(loop, takes, network.chip)[1]}
        operations = [replace(o, cycles=o.cycles + waits.get(o.name, 0)) for o in loop.operations]
        return replace(loop, operations=operations, inner=list(map(later, loop.inner)))

    return later(program)


def transfer_seconds(program: Loop, network: Network, mesh: Mesh) -> dict[str, float]:
    """The seconds that each collective of a program takes by itself, by its name.

    A permute goes over one link, others over all that there are along their axes. Of a ragged all-to-all, whose rows
    follow from the data, every device is taken to send as much to each.

    Args:
      program: as compiled for a TPU.
      network: the links.
      mesh: the devices that it runs on.
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
            if axes:
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
    found = re.findall(r"([a-z]+)(\d*)\w*\[([\d,<=]*)\]", text)  # f8e4m3fn has 8 bits, a token none
    bits = lambda kind, digits: 8 if kind == "pred" else int(digits or 0)
    return sum(bits(kind, digits) * math.prod(_numbers(dims)) for kind, digits, dims in found) // 8


# --- cycles -----------------------------------------------------------------------------------------------------------


def count_cycles(step: Step, program: Loop) -> tuple[Work, Parts[float], Timeline]:
    """Counts the cycles of a training step in its compiled program; raises ValueError if that has no ticks.

    Returns:
      The cycles of one action of each virtual stage; those of the step; and the schedule with these actions. The parts
      of a step are its stages' actions ("layers") and what they idle ("bubble"), each the mean of all stages; all ticks
      beyond their actions ("ticks"); the first and the last layer where all stages compute them together ("ends"); and
      what is outside of ticks, the optimiser's update above all.
    """
    outside, bodies = _bodies(step, program)
    schedule = step.schedule
    trips = [_trips_of(step, s) for s in range(schedule.placement.num_virtual_stages)]
    actions = {kind: [_mean(bodies, kind, of_stage) for of_stage in trips] for kind in sorted(schedule.kinds)}
    work = Work(actions, [0.0] * len(trips))
    timeline = in_time(schedule, work)
    layers = sum(timeline.busy) / len(timeline.busy)
    turns = {name: sum(int((getattr(turns, name) >= 0).sum()) for turns in step.ends.turns) for name in TURNS}
    ends = sum(count * _mean(bodies, name, _noted) for name, count in turns.items() if count)
    # Of parts that run in place of whole backwards there may be no actions.
    beyond = lambda body: body.own - sum(_unlooped(body, name) for name in (*ACTION_KINDS, *TURNS))
    # Runs of one tick lie one after the other, so that what they take is that of all of them.
    ticks = sum(beyond(body) * max([run.stop - run.start for run in runs], default=1) for body, runs in bodies)
    parts = {"layers": layers, "bubble": timeline.makespan - layers, "ticks": ticks, "ends": ends}
    return work, Parts(parts, update=outside.turn(_noted)), timeline


Bodies = list[tuple[Loop, list[Run]]]
"""What runs in ticks, and the runs that it is for: a loop for each, the longest first; last all those of one tick."""


def _bodies(step: Step, program: Loop) -> tuple[Loop, Bodies]:
    """The program without its ticks, and these. Runs of one tick are no loops: they lie in the program itself."""
    in_ticks = lambda scope: "ticks" in scope.split("/")
    loops = [loop for loop in program.inner if loop.name == "ticks"]
    single = [op for op in program.operations if in_ticks(op.op_name) and op.opcode != "while"]
    others = [loop for loop in program.inner if in_ticks(loop.scope) and loop.name != "ticks"]
    if not (loops or others or single):
        raise ValueError("the compiled program has no ticks; a step has some")
    runs = lambda is_long: [run for run in step.table.runs if (run.stop - run.start > 1) == is_long]
    bodies = [(loop, [run]) for loop, run in zip(loops, runs(True), strict=False)]
    bodies.sort(key=lambda body: body[1][0].start - body[1][0].stop)
    bodies.append((replace(program, operations=single, inner=others), runs(False)))
    outside = [operation for operation in program.operations if not in_ticks(operation.op_name)]
    apart = [loop for loop in program.inner if not in_ticks(loop.scope)]
    return replace(program, operations=outside, inner=apart), bodies


def _noted(loop: Loop) -> float:
    """How often a loop turns, by its condition; once, if that doesn't say."""
    return 1 if loop.trips is None else loop.trips


def _trips_of(step: Step, virtual_stage: int) -> Trips:
    """How often loops turn in an action: those over layers as often as a virtual stage has these."""
    names = {group.scope(g): g for g, group in enumerate(step.model.groups)}
    layers = (step.ranges.stop - step.ranges.start)[virtual_stage].sum(axis=0)
    passes = int(step.ranges.passes_of[virtual_stage])

    def trips(loop: Loop) -> float:
        if loop.name in names:
            return float(layers[names[loop.name]] / passes)
        return passes if any(inner.name in names for inner in loop.walk()) else _noted(loop)

    return trips


def _mean(bodies: Bodies, name: str, trips: Trips) -> float:
    """Cycles of what has a name, in the longest run of ticks that has it: the mean of its slots; 0 if none has."""
    for body, runs in bodies:
        if loops := body.find(name):
            return sum(loop.turn(trips) for loop in loops) / len(loops)
        inner = [loop for loop in body.inner if name in loop.scope.split("/")]
        if cycles := replace(body, operations=[], inner=inner).turn(trips) + _unlooped(body, name):
            return cycles / max(1, sum(name in kinds for run in runs for kinds in run.together))
    return 0.0


def _unlooped(body: Loop, name: str) -> float:
    """Cycles of what has a name and no loop around it, as it runs on all stages."""
    if body.find(name):
        return 0.0
    return sum(operation.cycles for operation in body.operations if name in operation.op_name.split("/"))
