"""`jpipe.forecast`: compiles a step for hardware that need not be there, and reports its memory and time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
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
from jpipe.processes.progress import task
from jpipe.processes.runtime import found_no_room, found_no_tiles
from jpipe.processes.tables import Table, Tabular, bytes_in_words
from jpipe.schedules.simulate import Timeline
from jpipe.tools.chips import ABSENT, DEFAULT, FRACTION, Chip, check_one, chip_of, parse_topology
from jpipe.tools.compiled_program import compile_with_text, count_cycles, read
from jpipe.tools.memory_model import bytes_at_rest
from jpipe.tools.step_cost import Parts, Predicted, StepCost
from jpipe.tools.summary import note, room_on
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
      advice: what takes most bytes if it doesn't fit, by the model of memory, and settings that would help.
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
        held = [*self.cost.rows_of_bytes(), *self.cost.rows_on_host()]
        rows = [*(row[:2] for row in held), ("FLOPs of a device", f"{self.flops:.3g}")]
        rows += [row[:2] for row in self.cost.rows_of_seconds()]
        if self.cost.seconds:
            rows.append(("bubble", f"{self.cost.bubble_fraction:.1%}"))
        notes = ["it fits" if self.fits else "it does not fit", *filter(None, [self.message]), *self.advice]
        notes += self.cost.notes
        return Table(self.title, ("of a device", "forecast"), rows, notes)


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
    known = Forecast(True, cost, title, _flops(planner, shapes))
    with task(f"compiling for {where}"):
        lowered = jax.jit(there.train_step, donate_argnums=0).lower(state, shapes)
        try:
            compiled, text = _compiled(lowered, device)
        except jax.errors.JaxRuntimeError as error:
            if not found_no_room(error):
                raise
            message = next((line.strip() for line in str(error).splitlines() if "memory" in line), "out of memory")
            return _too_large(known, message, note(planner, shapes, tx))
    known = replace(known, cost=_with_bytes(cost, compiled))
    chip = chip_of(device)
    if chip is not None and 0 < chip.host.memory < known.cost.host.total:
        used, most = bytes_in_words(known.cost.host.total), bytes_in_words(chip.host.memory)
        message = f"{used} would lie on the host, which has {most} for each of its devices"
        return _too_large(known, message, "would help: less in offload=, or more devices")
    if chip is None:
        return known
    if chip.gpu is not None:
        room = room_on(there.mesh) or chip.room
        if known.total_bytes > room:
            used, most = bytes_in_words(known.total_bytes), bytes_in_words(room)
            message = f"the step takes {used}, and JAX has at most {most} of a GPU's memory"
            return _too_large(known, message, note(planner, shapes, tx))
        share = known.total_bytes / chip.memory
        told = f"{FRACTION}={share:.2f} or more has to be set; by default it is {DEFAULT}" if share > DEFAULT else ""
        known = replace(known, message=told)
    time = _in_cycles(predict_time(planner, shapes, chip, tx=tx), planner, shapes, text, chip)
    return replace(known, cost=replace(time, source="compiled", bytes=known.cost.bytes, host=known.cost.host))


def _with_bytes(cost: StepCost, compiled: Compiled) -> StepCost:
    """The cost with what the compiler says of bytes besides those at rest, if it says something."""
    memory = compiled.memory_analysis()
    if not memory:
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


def _too_large(known: Forecast, message: str, advice: str) -> Forecast:
    """The forecast of a step that doesn't fit."""
    return replace(known, fits=False, message=message, advice=tuple(advice.splitlines()))


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
    """The FLOPs of a device in a step, the mean of all devices."""
    micro, mesh = planner.for_training(batch), planner.request.mesh
    costs = layer_costs(planner.model(micro), planner.layers(micro, key_shape()), "flops", mesh)
    return sum(cost.total for cost in costs) * planner.request.schedule.num_microbatches / mesh.size
