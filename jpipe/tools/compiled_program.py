"""Reads a compiled program: its loops, and the cycles of a step by action.

The TPU compiler notes `estimated_cycles` beside each operation, whether or not the machine exists; the GPU compiler
notes none. A loop's own cycles are those of one trip without the loops inside. How often loops turn follows from the
step: that over ticks from the table, those over layers from the ranges of each virtual stage, those in a layer from
their conditions.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from jax.stages import Compiled, Lowered

from jpipe.planning.step import Step
from jpipe.schedules.actions import ACTION_KINDS
from jpipe.schedules.simulate import Work, in_time
from jpipe.schedules.ticks import Run
from jpipe.tools.communication import TURNS
from jpipe.tools.step_cost import Parts, StepCost

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
        """The loops with the last of these names, in the scopes of all others: this loop, or some inside."""
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


# --- cycles -----------------------------------------------------------------------------------------------------------


def count_cycles(step: Step, program: Loop, clock: float = 1.0, hop: float = 0.0) -> tuple[Work, StepCost]:
    """The work of a training step and its slices, by the cycles of its compiled program.

    Args:
      step, program: the step, and the program that it was compiled to.
      clock: cycles/s.
      hop: the seconds of a transfer between stages, of which the compiler estimates none.

    Returns:
      The seconds of one action of each virtual stage, and what the step takes with them: in the stages' actions, and in
      ends that all compute together ("computation"); in waiting for each other ("bubble"), each the mean of all stages;
      in ticks beyond their actions ("between layers"); and outside of ticks, in the optimiser's "update" above all.

    Raises:
      ValueError: the program has no ticks.
    """
    outside, bodies = _bodies(step, program)
    schedule = step.schedule
    trips = [_trips_of(step, s) for s in range(schedule.placement.num_virtual_stages)]
    actions = {kind: [_mean(bodies, kind, of_stage) / clock for of_stage in trips] for kind in sorted(schedule.kinds)}
    work = Work(actions, [0.0] * len(trips))
    timeline = in_time(schedule, work, hop)
    busy = sum(timeline.busy) / len(timeline.busy)
    turns = {name: sum(int((getattr(turns, name) >= 0).sum()) for turns in step.ends.turns) for name in TURNS}
    ends = sum(count * _mean(bodies, name, _noted) for name, count in turns.items() if count)
    # Of all kinds, whichever the schedule has: the program may compute I and W in place of B.
    beyond = lambda body: body.own - sum(_unlooped(body, name) for name in (*ACTION_KINDS, *TURNS))
    # Runs of one tick lie one after the other, so that what they take is that of all of them.
    ticks = sum(beyond(body) * max([run.stop - run.start for run in runs], default=1) for body, runs in bodies)
    seconds = {"computation": busy + ends / clock, "bubble": timeline.makespan - busy, "between layers": ticks / clock}
    return work, StepCost("compiled", Parts(seconds, update=outside.turn(_noted) / clock), Parts(), timeline)


Bodies = list[tuple[Loop, list[Run]]]
"""The loops over ticks, each with the run that it is for, the longest first; last, as one, all runs of one tick."""


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
    """Cycles of the code in a scope, in the longest run of ticks that has it: the mean of its slots; 0 if none has."""
    for body, runs in bodies:
        if loops := body.find(name):
            return sum(loop.turn(trips) for loop in loops) / len(loops)
        inner = [loop for loop in body.inner if name in loop.scope.split("/")]
        if cycles := replace(body, operations=[], inner=inner).turn(trips) + _unlooped(body, name):
            return cycles / max(1, sum(name in kinds for run in runs for kinds in run.together))
    return 0.0


def _unlooped(body: Loop, name: str) -> float:
    """Cycles of the code in a scope that no loop is around, so that all stages run it."""
    if body.find(name):
        return 0.0
    return sum(operation.cycles for operation in body.operations if name in operation.op_name.split("/"))
