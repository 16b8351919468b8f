"""`jpipe.forecast`: compiles a step for hardware that need not be there, and reports its memory and time.

Here compiled programs are read, too. The TPU compiler notes `estimated_cycles` beside each operation, whether or not
the machine exists; the GPU compiler notes none. A loop's own cycles are those of one trip without the loops inside. How
often loops turn follows from the step: that over ticks from the table, those over layers from the ranges of each
virtual stage, those in a layer from their conditions.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from jax.stages import Compiled, Lowered

from jpipe.memory.batches import cut_for_evaluation
from jpipe.model.random_keys import key_shape
from jpipe.partitioner.users_mesh import make_mesh
from jpipe.pipeline import Pipeline
from jpipe.planning.costs import layer_costs
from jpipe.planning.planner import Planner
from jpipe.planning.step import Step
from jpipe.processes.progress import task
from jpipe.processes.runtime import found_no_room, found_no_tiles
from jpipe.processes.tables import Table, Tabular, bytes_in_words
from jpipe.schedules.actions import ACTION_KINDS
from jpipe.schedules.simulate import Timeline, Work, in_time
from jpipe.schedules.ticks import Run
from jpipe.tools.chips import ABSENT, DEFAULT, FRACTION, Chip, check_one, chip_of, parse_topology
from jpipe.tools.communication import TURNS
from jpipe.tools.memory_model import bytes_at_rest
from jpipe.tools.step_cost import Parts, Predicted, StepCost
from jpipe.tools.summary import memory_in_words, room_on
from jpipe.tools.time_model import predict_time
from jpipe.types import Batch, Device

ROOFLINE = "seconds are predicted by a roofline, as by jpipe.plan: this compiler estimates none"


@dataclass(frozen=True)
class Forecast(Predicted, Tabular):
    """The result of `jpipe.forecast`. Printed, or shown in a notebook, it is a table.

    Attributes:
      title: the pipeline and the hardware, in a line.
      fits: whether there is room for the step: a TPU's compiler says so; on GPUs the bytes are compared with the memory
        that JAX may be given, and with `offload=` those on the host with its own.
      cost: seconds of the step by what they go into, as `jpipe.plan` predicts them; on TPUs computation, bubble, update
        and what ticks take "between layers" are the compiler's cycles at the chip's clock. Bytes on a device:
        "parameters", "optimizer", "other variables", "batch", "temporaries" (gradients, residuals, activations); of a
        step that the compiler refuses the first three. Bytes on its host: the "optimizer", and the residuals that wait,
        "temporaries". The schedule with what stages take.
        A transfer takes the time of its bytes on the links along its axes. What stages hand on goes beside work, what
        layers send is waited for. Latencies, the network's load and input from the host are left out, and the
        compiler's estimates may be wrong.
      flops: the FLOPs of a device in a step, the mean of all devices; what remat computes again is included.
      message: a word on memory: the compiler's message if the step doesn't fit; for GPUs jpipe's own.
      advice: if it doesn't fit, what takes how many bytes by the model of memory, the most first.
    """

    title: str
    flops: float
    message: str = ""
    advice: tuple[str, ...] = ()

    @property
    def slices(self) -> dict[str, float] | None:
        """Seconds of the step by what they go into; None if they aren't known."""
        return dict(self.cost.seconds) or None

    @property
    def timeline(self) -> Timeline | None:
        """The schedule in seconds, to `plot`; None if they aren't known."""
        return self.cost.timeline

    def _table(self) -> Table:
        cost = self.cost.table()
        fits = "it fits" if self.fits else "it does not fit"
        notes = [fits, *filter(None, [self.message]), *self.advice, *cost.notes]
        return replace(cost, title=self.title, rows=[*cost.rows, ("FLOPs", f"{self.flops:.3g}", "-")], notes=notes)


def forecast(
    pipe: Pipeline,
    batch: Batch,
    tx: optax.GradientTransformation,
    *,
    topology: str | None = None,
    devices: Sequence[Device] | None = None,
) -> Forecast:
    """Compiles a pipeline's training step for hardware that need not be there; no parameters are made.

    Args:
      pipe: the pipeline, on a mesh of any devices; the sizes of its axes count.
      batch: a batch `[B, ...]`, or its ShapeDtypeStructs.
      tx: any optax transformation.
      topology: a slice of TPUs, such as "v5e:2x4", or GPUs, such as "h100:8" or "h100:4x8" (four hosts), of which the
        first devices are taken; needs `jpipe[tpu]` or `jpipe[gpu-compiler]`.
      devices: instead of it, devices at hand, or such as a topology has; default: those of the mesh. For CPUs
        neither cycles nor seconds are known.

    Raises:
      ImportError: the TPU compiler, or the GPU compiler, isn't installed.
      ValueError: the topology is unknown, both are given, or there are fewer devices than the mesh has.
    """
    check_one(topology, devices)
    targets = parse_topology(topology).devices() if topology is not None else devices
    there = pipe if targets is None else _moved(pipe, targets, topology)
    shapes = cut_for_evaluation(batch, 1, 1).shapes  # of the whole batch, checked
    device, planner = there.mesh.devices.flat[0], there.planner
    state, where = there.abstract_state(shapes, tx), topology or device.device_kind
    title, cost = f"A step of {pipe!r} on {where}", StepCost("compiled", Parts(), bytes_at_rest(state))
    report = partial(Forecast, title=title, flops=_flops(planner, shapes))
    with task(f"compiling for {where}"):
        lowered = jax.jit(there.train_step, donate_argnums=0).lower(state, shapes)
        try:
            compiled, text = _compiled(lowered, device)
        except jax.errors.JaxRuntimeError as error:
            if not found_no_room(error):
                raise
            message = next((line.strip() for line in str(error).splitlines() if "memory" in line), "out of memory")
            return report(False, cost, message=message, advice=tuple(memory_in_words(planner, shapes, tx)))
    cost, chip, message = _with_bytes(cost, compiled), chip_of(device), ""
    if chip is None:
        return report(True, cost)
    if 0 < chip.host.memory < cost.host.total:
        used, most = bytes_in_words(cost.host.total), bytes_in_words(chip.host.memory)
        message = f"{used} would lie on the host, which has {most} for each of its devices"
        return report(False, cost, message=message, advice=("would help: less in offload=, or more devices",))
    if chip.gpu is not None:
        room, share = room_on(there.mesh) or chip.room, cost.bytes.total / chip.memory
        if cost.bytes.total > room:
            used, most = bytes_in_words(cost.bytes.total), bytes_in_words(room)
            message = f"the step takes {used}, and JAX has at most {most} of a GPU's memory"
            return report(False, cost, message=message, advice=tuple(memory_in_words(planner, shapes, tx)))
        if share > DEFAULT:
            message = f"{FRACTION}={share:.2f} or more has to be set; by default it is {DEFAULT}"
    time = _in_cycles(predict_time(planner, shapes, chip, tx=tx), planner, shapes, text, chip)
    return report(True, replace(time, source="compiled", bytes=cost.bytes, host=cost.host), message=message)


def _with_bytes(cost: StepCost, compiled: Compiled) -> StepCost:
    """The cost with what the compiler says of bytes besides those at rest, if it says something."""
    if not (memory := compiled.memory_analysis()):
        return cost
    beyond = {
        "batch": max(0, memory.argument_size_in_bytes - cost.bytes.total),
        "temporaries": memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes,
    }
    new = memory.host_output_size_in_bytes - memory.host_alias_size_in_bytes
    hosted = {"optimizer": memory.host_argument_size_in_bytes, "temporaries": memory.host_temp_size_in_bytes + new}
    return replace(cost, bytes=Parts(cost.bytes, **beyond), host=Parts({k: n for k, n in hosted.items() if n}))


def _compiled(lowered: Lowered, device: Device) -> tuple[Compiled, str]:
    """(compiled, its text if it is a TPU's)."""
    if device.platform == "tpu":
        return compile_with_text(lowered)
    options = ABSENT if device.platform == "gpu" and device not in jax.devices() else {}
    try:
        return lowered.compile(options), ""
    except jax.errors.JaxRuntimeError as error:
        if not found_no_tiles(error):
            raise
        return lowered.compile(options | {"xla_gpu_enable_triton_gemm": False}), ""


def _in_cycles(time: StepCost, planner: Planner, batch: Batch, text: str, chip: Chip) -> StepCost:
    """The predicted step, on a TPU with its compiler's cycles in place of the roofline's seconds."""
    if chip.clock is None or time.timeline is None:
        return replace(time, notes=(*time.notes, ROOFLINE))
    step, hop = planner.training_step(planner.for_training(batch)), time.timeline.transfer
    _, compiled = count_cycles(step, read(text), chip.clock, hop)
    waits = {name: seconds for name, seconds in time.seconds.items() if name not in compiled.seconds}
    return replace(time, seconds=Parts(compiled.seconds, **waits), timeline=compiled.timeline)


def _moved(pipe: Pipeline, devices: Sequence[Device], topology: str | None) -> Pipeline:
    """The same pipeline on other devices."""
    mesh = pipe.mesh
    if len(devices) < mesh.size:
        raise ValueError(
            f"{topology or 'devices'} has {len(devices)} devices, but the pipeline's mesh {dict(mesh.shape)} takes "
            f"{mesh.size}; pass a larger one"
        )
    if len(devices) == mesh.size and mesh.axis_names[0] == "stage":
        there = make_mesh(devices=devices, axis_types=mesh.axis_types, **mesh.shape)
    else:
        chosen = np.asarray(devices[: mesh.size]).reshape(mesh.devices.shape)
        there = Mesh(chosen, mesh.axis_names, axis_types=mesh.axis_types)
    return cast("partial[Pipeline]", pipe.__reduce__()[0])(mesh=there)


def _flops(planner: Planner, batch: Batch) -> float:
    """The FLOPs of a device in a step: those of all layers and micro-batches, over the number of devices."""
    micro, mesh = planner.for_training(batch), planner.request.mesh
    costs = layer_costs(planner.model(micro), planner.layers(micro, key_shape()), "flops", mesh)
    return sum(cost.total for cost in costs) * planner.request.schedule.num_microbatches / mesh.size


# --- compiled programs ------------------------------------------------------------------------------------------------


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
        if operation.opcode == "call" and (called := operation.attribute("to_apply")):
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
    bubble = timeline.bubble_fraction * timeline.makespan
    turns = {name: sum(int((getattr(turns, name) >= 0).sum()) for turns in step.ends.turns) for name in TURNS}
    ends = sum(count * _mean(bodies, name, _noted) for name, count in turns.items() if count)
    # Of all kinds, whichever the schedule has: the program may compute I and W in place of B.
    beyond = lambda body: body.own - sum(_unlooped(body, name) for name in (*ACTION_KINDS, *TURNS))
    # A loop's body turns once for each tick of its run. All runs of one tick are one body, which counts once.
    turns_of = lambda runs: max((run.stop - run.start for run in runs), default=1)
    ticks = sum(beyond(body) * turns_of(runs) for body, runs in bodies) / clock
    seconds = {"computation": timeline.makespan - bubble + ends / clock, "bubble": bubble, "between layers": ticks}
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
