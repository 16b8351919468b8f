"""What a training step asks of GPUs that aren't there, as their compiler wrote it down, beside plain JAX.

The compiler for GPUs estimates no cycles. What can be read instead is how often the runtime stops the host
(`host_stops`), how many kernels a layer has and which bytes they read and write,
which transfers have products beside them, and the memory. Plain JAX is that of `tpu_speed.py`: a scan over
micro-batches of a scan over as many equal blocks as a stage has, its gradients added up, under the same remat, on one
device with the examples that a device of the pipeline has. Kernels and bytes of a layer are those of all that is done
with it for a micro-batch; in plain JAX its part of what the micro-batch does outside of the loops over layers is among
them. Needs `pip install "jpipe[gpu-compiler]"`, and no GPU.

    python benchmarks/gpu_speed.py --schedule 1f1b --remat none --chip b200
    python benchmarks/gpu_speed.py --table
"""

import argparse
import itertools
import re
import time
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np
import optax
from common import (
    Size,
    batch_shapes,
    chosen_settings,
    console,
    lowered_step,
    make_layers,
    mib,
    on_cpu,
    show,
    transformer_pipeline,
)
from jax.sharding import Mesh
from tpu_speed import lower_plain

import jpipe
from absent_cudnn import absent_cudnn
from collectives import COLLECTIVES, PERMUTE
from compiled_transfers import counted, host_stops, transfers
from gpu_program import Kernels, compile_with_text, kernels, largest_copy
from jpipe.planning.step import Step
from jpipe.schedules.ticks import Run
from jpipe.tools.chips import parse_topology
from jpipe.tools.forecaster import Loop, read

BLOCK = "Block.1"
COLUMNS = (
    "step",
    "stops a tick",
    "a step",
    "kernels of a layer",
    "MiB of a layer",
    "copied",
    "cast",
    "a tick beyond layers",
    "largest copy",
    "permutes beside products",
    "others",
    "arguments",
    "temporaries",
    "compile, s",
)


@dataclass(frozen=True)
class Setting:
    """One row of the table.

    Attributes:
      chip: of `jpipe.tools.chips.CHIPS`, eight on one host.
      blocks: of a stage.
      attention: "plain", or the `implementation` of `jax.nn.dot_product_attention`.
      data: devices along a data axis; `fsdp` says where parameters that are split over it are gathered, if they are.
      tensor: devices along an axis that heads and hidden units are split over.
    """

    chip: str = "h100"
    stages: int = 4
    width: int = 1024
    microbatch: int = 2
    seq: int = 1024
    remat: str = "layer"
    schedule: str = "1f1b"
    chunks: int = 1
    blocks: int = 2
    vocab: int = 256  # so small that the ends take next to nothing
    ends: str = "own"
    attention: str = "plain"
    data: int = 1
    fsdp: str = ""
    tensor: int = 1
    microbatches: int = 8

    def __str__(self) -> str:
        """All that differs from the defaults, with schedule and remat."""
        chunks = f", V={self.chunks}" if self.chunks > 1 else ""
        words = [self.chip, f"{self.schedule}{chunks}", self.remat]
        words += [f"{self.attention} attention"] * (self.attention != "plain")
        words += [f"{name} {getattr(self, name)}" for name in ("data", "tensor") if getattr(self, name) > 1]
        words += [f"fsdp, gathered {'at each use' if self.fsdp == 'use' else 'once a step'}"] * bool(self.fsdp)
        words += [f"{self.vocab} words, ends {self.ends}"] * (self.vocab > 256)
        sizes = ("stages", "width", "microbatch", "seq", "microbatches")
        return ", ".join(words + [f"{name} {getattr(self, name)}" for name in sizes if self._is_other(name)])

    def _is_other(self, name: str) -> bool:
        return getattr(self, name) != getattr(Setting, name)

    @property
    def size(self) -> Size:
        layers = self.blocks * self.stages
        return Size(layers, self.width, self.width // 64, self.seq, self.vocab, self.microbatch, "bfloat16")

    @property
    def layers(self) -> list[Any]:
        attention = None if self.attention == "plain" else self.attention
        return make_layers(self.size, attention=attention, axis="model" if self.tensor > 1 else None)

    def mesh(self) -> Mesh:
        """Stages, and those other axes that have several devices."""
        axes = {"stage": self.stages} | {k: n for k, n in (("data", self.data), ("model", self.tensor)) if n > 1}
        devices = parse_topology(f"{self.chip}:8").devices()[: int(np.prod([*axes.values()]))]
        return Mesh(np.asarray(devices).reshape([*axes.values()]), tuple(axes))


V = {"chunks": 2, "blocks": 4}
"""Two blocks a chunk: one alone has no loop of its own."""
REMATS = ("none", "layer", "stage", "full")
SCHEDULES: dict[str, dict[str, int]] = {"gpipe": {}, "1f1b": {}, "interleaved": V, "zero_bubble": {}, "v": V}
COMPUTED_TWICE = ("stage", "full")  # refused where a backward is split
TABLE = [
    *[
        Setting(schedule=name, remat=remat, **more)
        for name, more in SCHEDULES.items()
        for remat in REMATS
        if name != "zero_bubble" or remat not in COMPUTED_TWICE
    ],
    *[Setting(attention="cudnn", remat=remat) for remat in REMATS],
    *[Setting(data=2, remat=remat, fsdp=fsdp) for fsdp in ("", "step", "use") for remat in ("none", "layer")],
    *[Setting(data=2, remat="none", attention="cudnn")],
    *[Setting(tensor=2, remat=remat) for remat in ("none", "layer")],
    *[Setting(tensor=2, remat="none", attention="cudnn")],
    *[Setting("b200", schedule=name, remat="none", **more) for name, more in SCHEDULES.items()],
    *[Setting("b200", attention="cudnn", remat="none"), Setting("b200", data=2, fsdp="use", remat="none")],
]
"""What benchmarks/results/gpu_speed.md shows."""


# --- plain JAX ---


def plain_kernels(setting: Setting) -> Kernels | None:
    """Those of a layer, for a micro-batch; None where a device of the pipeline has a part of a layer, or gathers it."""
    if setting.tensor > 1 or setting.fsdp == "use":
        return None
    examples = setting.microbatch // setting.data
    blocks = setting.blocks // setting.chunks
    return _plain_kernels(
        setting.chip,
        setting.attention,
        setting.remat,
        setting.width,
        setting.seq,
        examples,
        blocks,
        setting.microbatches,
    )


@lru_cache
def _plain_kernels(
    chip: str, attention: str, remat: str, width: int, seq: int, examples: int, blocks: int, count: int
) -> Kernels:
    setting = Setting(chip, width=width, seq=seq, microbatch=examples, attention=attention)
    device = parse_topology(f"{chip}:8").devices()[0]
    with absent_cudnn():
        lowered = lower_plain(setting.layers[1], setting.size, blocks, count, remat, device)
    (microbatch,) = read(compile_with_text(lowered)[1]).inner
    return kernels(microbatch.inner) + kernels([microbatch]) * (1 / blocks)


# --- jpipe ---


def make_pipeline(setting: Setting) -> jpipe.Pipeline:
    """The model of a setting, compiled for devices that need not be there."""
    split = {"shard_over": "data", "gather": setting.fsdp} if setting.fsdp else {}
    return transformer_pipeline(
        setting.size,
        setting.stages,
        setting.microbatches,
        setting.layers,
        mesh=setting.mesh(),
        remat=setting.remat,
        schedule=setting.schedule,
        num_chunks=setting.chunks,
        ends=setting.ends,
        **split,
    )


class Ticks:
    """The loops over ticks of a compiled step: one for each run of ticks, of which the longest is the steady one.

    Args:
      step: the step.
      program: the step, compiled.

    Raises:
      SystemExit: the loops don't turn as often as the table says.
    """

    def __init__(self, step: Step, program: Loop):
        self.step, self.runs = step, list[tuple[Run, Loop]]()
        self.groups = {group.scope(g): g for g, group in enumerate(step.model.groups)}
        whiles = [operation for operation in program.operations if operation.opcode == "while"]
        inner = [(*each, operation) for each, operation in zip(counted(program), whiles, strict=True)]
        inner = [each for each in inner if "ticks" in each[0].scope.split("/")]
        for run in step.table.runs:
            if inner and inner[0][0].name == "ticks" and inner[0][1] == run.stop - run.start:
                self.runs.append((run, inner.pop(0)[0]))
            else:  # a single tick, which has no loop of its own; only the loops in it are known
                own = list(itertools.takewhile(lambda each: each[0].name != "ticks", inner))
                loops, operations = [loop for loop, *_ in own], [operation for *_, operation in own]
                self.runs.append((run, Loop("", operations, loops, program.computations)))
                inner = inner[len(own) :]
        if inner:
            raise SystemExit(f"the table has no ticks for {[loop.scope for loop, *_ in inner]}")
        self.steady = max(self.runs, key=lambda each: each[0].stop - each[0].start)

    def stops(self, run: Run, loop: Loop) -> np.ndarray:
        """`[ticks, K]`, how often the host is stopped in each tick of a run on each stage."""
        ticks, stages = range(run.start, run.stop), range(self.step.schedule.num_stages)
        return np.array([[host_stops(loop, partial(self._trips, t, k)) for k in stages] for t in ticks])

    def _trips(self, tick: int, stage: int, loop: Loop) -> int:
        """How often a loop turns that the compiler doesn't count: by the table if it is in a slot, else once."""
        number = re.search(r"\bslot(\d+)/([A-Z])\b", loop.scope)
        if number is None:
            return 1
        slot = self.step.table.slots[int(number[1])]
        works = slot.kind[tick, stage] in slot.codes(number[2])
        if loop.name not in self.groups:
            return int(works)
        virtual_stage = self.step.schedule.placement.virtual_stage(stage, int(slot.chunk[tick, stage]))
        ranges = self.step.ranges
        return int(works and (ranges.stop - ranges.start)[virtual_stage, :, self.groups[loop.name]].sum())

    def layer(self) -> Kernels:
        """The kernels of all that is done with a block for a micro-batch, the mean of a step's actions."""
        schedule, total = self.step.schedule, Kernels()
        actions = schedule.num_microbatches * schedule.placement.num_virtual_stages
        for run, loop in self.runs:
            for i, slot in enumerate(self.step.table.slots):
                for code, kind in enumerate(slot.kinds, 1):
                    share = float((slot.kind[run.start : run.stop] == code).sum() / actions)
                    total += kernels(loop.find(f"slot{i}", kind, BLOCK)) * share
        return total

    def beyond_layers(self) -> Kernels:
        """The kernels of a steady tick of a stage that works, without those of layers."""
        of_layers = lambda scope: not self.groups.keys().isdisjoint(scope.split("/"))
        loops = [loop for loop in self.steady[1].walk() if not of_layers(loop.scope)]
        return kernels(loops, lambda operation: not of_layers(operation.op_name))


def measure(setting: Setting) -> tuple[str, ...]:
    """A row of the table, or why there is none."""
    try:
        return _measure(setting)
    except jax.errors.JaxRuntimeError as error:  # the compiler refuses it, or it doesn't fit
        return (str(setting), str(error).partition("\n")[0][:80], *[""] * (len(COLUMNS) - 2))


def _measure(setting: Setting) -> tuple[str, ...]:
    begin = time.perf_counter()
    pipe, shapes = make_pipeline(setting), batch_shapes(setting.size, setting.microbatches)
    with absent_cudnn():
        compiled, text = compile_with_text(lowered_step(pipe, optax.adam(1e-3), shapes))
        step = pipe.planner.training_step(pipe.planner.for_training(shapes))
    seconds, memory = time.perf_counter() - begin, compiled.memory_analysis()
    ticks, plain = Ticks(step, read(text)), plain_kernels(setting)
    layer, beyond = ticks.layer(), ticks.beyond_layers()
    loops = [inner for _, loop in ticks.runs for inner in loop.walk() if inner.scope]
    moves = [move for loop in loops for move in transfers(loop, COLLECTIVES)]
    permutes = [move.beside_products for move in moves if move.operation.opcode.startswith(PERMUTE)]
    others = [move.beside_products for move in moves if not move.operation.opcode.startswith(PERMUTE)]
    steady = ticks.stops(*ticks.steady)
    stops = sum(ticks.stops(*run).sum(axis=0) for run in ticks.runs)
    beside = lambda name, show: f"{show(getattr(layer, name))}" + (f" ({show(getattr(plain, name))})" if plain else "")
    return (
        str(setting),
        f"{steady.min()} to {steady.max()}",
        f"{np.max(stops)}",
        beside("count", lambda n: f"{n:.0f}"),
        *(beside(name, mib) for name in ("bytes", "copied", "cast")),
        f"{beyond.count:.0f}, {mib(beyond.bytes)}",
        mib(max(largest_copy(loop) for _, loop in ticks.runs)),
        f"{sum(permutes)} of {len(permutes)}",
        f"{sum(others)} of {len(others)}" if others else "",
        mib(memory.argument_size_in_bytes),
        mib(memory.temp_size_in_bytes),
        f"{seconds:.0f}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--table", action="store_true", help="print the rows of benchmarks/results/gpu_speed.md")
    settings, options = chosen_settings(parser, Setting, TABLE)
    on_cpu()
    rows = []
    for setting in settings:
        rows.append(measure(setting))
        console.print(*rows[-1], sep=" | ", highlight=False)
    if options.table:
        for row in (COLUMNS, ["---"] * len(COLUMNS), *rows):
            print("|", " | ".join(row), "|")
    else:
        show(
            "A training step on GPUs, as their compiler wrote it down", COLUMNS, rows, f"jax {jax.__version__}; in MiB"
        )


if __name__ == "__main__":
    main()
