"""What a training step takes on TPUs that aren't there, by the compiler's own estimate, beside plain JAX.

A step is compiled for a named topology, and the `estimated_cycles` of its operations are added up along its loops,
which turn as often as the table of ticks and the route say. Plain JAX is a scan over as many equal blocks as a stage
has, its gradients added up, under the same remat. Needs `pip install libtpu`, and no TPU.

The ideal step is the same table of ticks in which layers take what they take in plain JAX, and nothing else takes any
time: M/(M+K-1) of the machine. Transfers that have work beside them take none; those that don't are named.
"""

import argparse
import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import kernels
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
    stage_mesh,
    tpu_devices,
    transformer_pipeline,
    versions,
)
from jax.sharding import NamedSharding, PartitionSpec

import jpipe
from jpipe.model.remat import MODES
from jpipe.schedules.simulate import Work, in_time
from jpipe.schedules.ticks import lower
from tpu_program import compile_with_text, largest_move, read, transfers

BLOCK = "Block.1"
CHIPS = {
    "v3": {4: "v3:2x1", 8: "v3:2x2", 32: "v3:4x4"},
    "v4": {4: "v4:2x2x1", 8: "v4:2x2x2", 32: "v4:4x4x2"},
    "v5e": {4: "v5e:2x2", 8: "v5e:2x4", 32: "v5e:4x8"},
    "v5p": {4: "v5p:2x2x1", 8: "v5p:2x2x2", 32: "v5p:4x4x2"},
    "v6e": {4: "v6e:2x2", 8: "v6e:2x4", 32: "v6e:4x8"},
}
COLUMNS = (
    "step",
    "F",
    "of plain",
    "B",
    "of plain",
    "of plain that adds nothing up",
    "tick beyond layers",
    "step, Mcycles",
    "share of the ideal",
    "largest move",
    "permutes beside work",
    "arguments",
    "temporaries",
    "compile, s",
)


@dataclass(frozen=True)
class Setting:
    """One row of the table."""

    chip: str = "v5e"
    stages: int = 4
    width: int = 1024
    microbatch: int = 1
    seq: int = 1024
    remat: str = "layer"
    schedule: str = "1f1b"
    chunks: int = 1
    blocks: int = 4  # of a stage
    vocab: int = 256  # so small that the ends take next to nothing
    ends: str = "own"
    attention: str = "plain"
    microbatches: int = 0  # 4 a stage

    def __str__(self) -> str:
        schedule = f"{self.schedule}, V={self.chunks}" if self.chunks > 1 else self.schedule
        sizes = f"{self.width} wide, {self.microbatch}x{self.seq}"
        attention = f", {self.attention} attention" if self.attention != "plain" else ""
        count = f", M={self.microbatches}" if self.microbatches else ""
        ends = f", {self.vocab} words, ends {self.ends}" if self.vocab > 256 else ""
        sizes = f"K={self.stages}{count}, {sizes}"
        return f"{self.chip}, {sizes}, {self.remat}{attention}, {schedule}{ends}"

    @property
    def size(self) -> Size:
        layers = self.blocks * self.stages
        return Size(layers, self.width, self.width // 64, self.seq, self.vocab, self.microbatch, "bfloat16")

    @property
    def count(self) -> int:
        """M."""
        return self.microbatches or 4 * self.stages

    @property
    def layers(self) -> list[Any]:
        return make_layers(self.size) if self.attention == "plain" else kernels.make_layers(self.size, self.attention)

    def devices(self) -> list[Any]:
        return tpu_devices(CHIPS[self.chip][self.stages])


LARGE = {"width": 2048, "seq": 2048}
TABLE = [
    Setting(),
    *[Setting(chip, microbatch=4, remat=r) for chip in ("v4", "v5e", "v5p", "v6e") for r in ("layer", "none", "stage")],
    *[Setting(schedule="gpipe", remat=remat) for remat in ("layer", "none")],
    *[Setting(schedule="interleaved", chunks=2, remat=remat) for remat in ("layer", "none")],
    *[Setting("v5p", 8, **LARGE, remat=remat) for remat in ("layer", "none", "stage")],
    Setting("v5e", 8, **LARGE),
    Setting("v5p", 8, **LARGE, microbatch=4),
    *[Setting("v5p", 32, **LARGE, remat=remat) for remat in ("layer", "none")],
]
"""What benchmarks/results/tpu_speed.md shows."""


@dataclass(frozen=True)
class Plain:
    """Cycles of one block in plain JAX.

    Attributes:
      forward: of the forward.
      backward: of the backward.
      adding: of adding its gradients to those of the micro-batches before.
    """

    forward: float
    backward: float
    adding: float


def lower_plain(block: Any, size: Size, blocks: int, count: int, remat: str, device: Any) -> Any:
    """A scan over the micro-batches, of a scan over so many blocks."""
    x = jax.ShapeDtypeStruct((size.microbatch, size.seq, size.width), jnp.bfloat16)
    sharding = NamedSharding(stage_mesh([device], 1), PartitionSpec())
    variables = jax.eval_shape(block.init, jax.random.key(0), x)
    stacked = lambda n, a: jax.ShapeDtypeStruct((n, *a.shape), a.dtype, sharding=sharding)
    params = jax.tree.map(lambda a: stacked(blocks, a), variables)
    run = block.apply
    if remat != "none":
        run = jax.checkpoint(run, policy=MODES[remat].policy, prevent_cse=False)

    def apply(params: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, p: (run(p, x), None), x, params)[0]

    if MODES[remat].keep_inputs:
        apply = jax.checkpoint(apply)

    def step(params: Any, inputs: Any, cotangents: Any) -> Any:
        def microbatch(grads: Any, part: Any) -> Any:
            x, dy = part
            y, vjp = jax.vjp(apply, params, x)
            found, dx = vjp(dy)
            return jax.tree.map(jnp.add, grads, found), (y, dx)

        return jax.lax.scan(microbatch, jax.tree.map(jnp.zeros_like, params), (inputs, cotangents))

    return jax.jit(step).lower(params, stacked(count, x), stacked(count, x))


def plain_cycles(text: str, setting: Setting) -> Plain:
    """Of one block: the forward's loop, the backward's (with what it computes again), and the rest, shared out."""
    (microbatch,) = read(text).inner
    forward, *backward = (loop.own for loop in microbatch.inner)
    return Plain(forward, sum(backward), microbatch.own / (setting.blocks // setting.chunks))


def make_pipeline(setting: Setting) -> jpipe.Pipeline:
    """The model of a setting, compiled for devices that need not be there."""
    size, stages = setting.size, setting.stages
    return transformer_pipeline(
        size,
        stages,
        setting.count,
        setting.layers,
        mesh=stage_mesh(setting.devices(), stages),
        remat=setting.remat,
        schedule=setting.schedule,
        num_chunks=setting.chunks,
        ends=setting.ends,
    )


class Walk:
    """A compiled step of a pipeline of embedding, blocks and head, its loops taken as often as they turn.

    Args:
      pipe: the pipeline.
      setting: what it was made from.
      text: its step, compiled.
    """

    def __init__(self, pipe: jpipe.Pipeline, setting: Setting, text: str):
        self.schedule = pipe.schedule
        self.table = lower(pipe.schedule, keep_inputs=MODES[setting.remat].keep_inputs)
        self.num_stages, self.blocks = setting.stages, setting.blocks // setting.chunks
        head, last = "Head.2", setting.stages * setting.chunks - 1
        own = int(setting.ends != "shared")
        place = pipe.schedule.placement
        self.acts = {
            (a.kind, place.virtual_stage(k, a.chunk)) for k, own in enumerate(pipe.schedule.actions) for a in own
        }
        self.trips = [{"Embed.0": own * (s == 0), BLOCK: self.blocks, head: own * (s == last)} for s in range(last + 1)]
        self.step = read(text)
        (self.ticks,) = self.step.find("ticks")
        # How often all stages compute the ends together.
        enter = 2 if MODES[setting.remat].keep_inputs else 1
        self.turns = {} if own else {"enter": enter * setting.count, "leave": setting.count, "back": setting.count}

    def layer(self, kind: str, name: str) -> float:
        """Cycles of one layer's action (a letter), what it computes again included; 0 of a W that has nothing to do.

        Raises:
          SystemExit: it has no loop, so that this can't be a step as it is known here.
        """
        slots = sum(kind in slot.kinds for slot in self.table.slots)  # each has loops of its own
        loops = self.ticks.find(kind, name)
        if not loops and kind != "W":
            raise SystemExit(f"the compiled program has no loop {kind}/{name}")
        return sum(loop.own for loop in loops) / slots

    def action(self, kind: str, virtual_stage: int, take: Callable[[str, str], float] | None = None) -> float:
        """Cycles of an action, or of its layers alone if they take what `take` says."""
        slots = sum(kind in slot.kinds for slot in self.table.slots)
        own = 0 if take else sum(loop.own for loop in self.ticks.find(kind)) / slots
        return own + sum(n * (take or self.layer)(kind, name) for name, n in self.trips[virtual_stage].items() if n)

    def actions(self, take: Callable[[str, str], float] | None = None) -> float:
        """Cycles of all actions of a step: in each slot of each tick those of the slowest stage.

        Where backwards are split, stages do not wait for each other after each slot: then as simulated.
        """
        if self.schedule.splits:
            stages = range(self.schedule.placement.num_virtual_stages)
            acts = lambda kind, s: self.action(kind, s, take) if (kind, s) in self.acts else 0.0
            times = {kind: [acts(kind, s) for s in stages] for kind in sorted(self.schedule.kinds)}
            return in_time(self.schedule, Work(times, [0.0] * len(stages))).makespan
        total = 0.0
        for slot in self.table.slots:
            for t, code in itertools.product(range(self.table.num_ticks), range(1, len(slot.kinds) + 1)):
                stages = np.flatnonzero(slot.kind[t] == code)
                virtual = [self.schedule.placement.virtual_stage(int(k), int(slot.chunk[t, k])) for k in stages]
                total += max((self.action(slot.kinds[code - 1], s, take) for s in virtual), default=0)
        return total

    def ends(self) -> float:
        """Cycles of the first and the last layer, where all stages compute them together; 0 where they don't.

        Raises:
          SystemExit: they have no loops, or loops in them, of which it isn't known how often they turn.
        """
        total = 0.0
        for name, turns in self.turns.items():
            loops = self.ticks.find(name)
            if not loops or any(loop.inner for loop in loops):
                raise SystemExit(f"the compiled program has no loops {name}, or loops in them")
            total += turns * sum(loop.own for loop in loops) / len(loops)
        return total

    def cycles(self) -> float:
        """Cycles of the step, the optimiser's among them."""
        return self.step.own + self.table.num_ticks * self.ticks.own + self.actions() + self.ends()


def measure(setting: Setting) -> tuple[str, ...]:
    """A row of the table, or why there is none."""
    try:
        return _measure(setting)
    except jax.errors.JaxRuntimeError as error:  # it doesn't fit
        return (str(setting), str(error).partition("\n")[0][:60], *[""] * (len(COLUMNS) - 2))


def _measure(setting: Setting) -> tuple[str, ...]:
    begin = time.perf_counter()
    pipe, size = make_pipeline(setting), setting.size
    with ThreadPoolExecutor(2) as pool:
        blocks, device = setting.blocks // setting.chunks, setting.devices()[0]
        by_hand = lower_plain(setting.layers[1], size, blocks, setting.count, setting.remat, device)
        alone = pool.submit(compile_with_text, by_hand)
        step = lowered_step(pipe, optax.sgd(1e-3), batch_shapes(size, setting.count))
        compiled, text = pool.submit(compile_with_text, step).result()
        plain = plain_cycles(alone.result()[1], setting)
    seconds, memory = time.perf_counter() - begin, compiled.memory_analysis()
    walk = Walk(pipe, setting, text)
    kinds = "B" if "B" in pipe.schedule.kinds else "IW"
    forward, backward = walk.layer("F", BLOCK), sum(walk.layer(kind, BLOCK) for kind in kinds)
    share = (plain.backward + plain.adding) / backward
    cycles = {("F", BLOCK): plain.forward} | {(kind, BLOCK): share * walk.layer(kind, BLOCK) for kind in kinds}
    if kinds == "B" and pipe.schedule.splits:
        cycles |= {(kind, BLOCK): share * walk.layer(kind, BLOCK) for kind in "IW"}
    ideal = walk.actions(lambda kind, name: cycles.get((kind, name)) or walk.layer(kind, name))
    used, ends = walk.actions(walk.layer), walk.ends()
    moves = transfers(walk.ticks)
    hidden = sum(bool(move.loops) for move in moves)
    return (
        str(setting),
        f"{forward / 1e6:.3f}",
        f"{forward / plain.forward:.3f}",
        f"{backward / 1e6:.3f}",
        f"{backward / (plain.backward + plain.adding):.3f}",
        f"{backward / plain.backward:.3f}",
        f"{(walk.cycles() - walk.step.own) / (used + ends) - 1:.1%}",
        f"{walk.cycles() / 1e6:.1f}",
        f"{(ideal + ends) / (walk.cycles() - walk.step.own):.3f}",
        f"{largest_move(walk.step) / 2**20:.1f}",
        f"{hidden} of {len(moves)}",
        mib(memory.argument_size_in_bytes),
        mib(memory.temp_size_in_bytes),
        f"{seconds:.0f}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    settings, _ = chosen_settings(parser, Setting, TABLE)
    on_cpu()
    rows = []
    for setting in settings:
        rows.append(measure(setting))
        console.print(*rows[-1], sep=" | ", highlight=False)
    show("A training step on TPUs, as their compiler estimates it", COLUMNS, rows, versions(tpu=True))


if __name__ == "__main__":
    main()
