"""Measures a step on the pipeline's own devices: seconds of it and of each stage's actions, and bytes held.

The program of the step is timed with some of its actions left out: all of them, all but one stage's forwards, all but
its backwards. The time of the actions that run is the time of such a run minus that of the run without any, inside of
the real loops, with the real buffers. Runs follow each other in rounds, so that a machine that gets slower slows all of
them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jpipe.batches.rows import on_all, on_mesh
from jpipe.costs.step_cost import Parts
from jpipe.execution import programs
from jpipe.pipeline import Pipeline
from jpipe.schedules.ticks import TickTable
from jpipe.terminal.progress import task
from jpipe.training.train_state import TrainState
from jpipe.training.train_step import apply_update
from jpipe.types import Batch, PyTree

SHORTEST = 1e-9
"""Seconds that a stage takes at least: a run can come out shorter than the one without its actions, by noise."""


@dataclass(frozen=True)
class Measured:
    """The measured seconds of a step and of its parts.

    Attributes:
      forward: `[K]`, one micro-batch's forward on each stage, all its chunks.
      backward: `[K]`, the same of its backward, with what remat computes again.
      step: a training step, its batch on the devices before it begins.
      update: the optimiser's update in it, compiled on its own.
      idle: loss and gradients without any action: transfers, and what is done once a step (set-up, reductions).
      setup: the latter alone, without a tick.
      weight: `[K]`, of the part of the backward that W takes; empty where no backward is split.
      noise: by how much the step differs from round to round: the middle half of the rounds, over their median.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    step: float
    update: float
    idle: float
    setup: float
    noise: float
    weight: tuple[float, ...] = ()


class Program:
    """Loss and gradients of a step, compiled so that which of its actions run is an argument.

    Args:
      pipe: the pipeline.
      state: its state; the step's key and the parameters are those of its next step.
      batch: a batch `[B, ...]`.

    Attributes:
      table: the ticks.
      batch: the batch on the devices, so that no run has to bring it there.
      set_up: runs the part of the step that needs no tick.
    """

    def __init__(self, pipe: Pipeline, state: TrainState, batch: Batch):
        planner = pipe.planner
        with task("compiling the measured step"):
            step = planner.training_step(planner.for_training(batch), state.key)
            self.table: TickTable = step.table
            self.batch, self._mesh = on_mesh(batch, pipe.mesh), pipe.mesh
            self._arguments = state.variables, self.batch, jax.jit(jax.random.fold_in)(state.key, state.step)
            run = jax.jit(partial(programs.value_and_grad, step))
            self._compiled = run.lower(*self._arguments, self.only("FRBIW")).compile()
            without = *self._arguments, on_all(np.asarray(self.only(""))[:, :0], pipe.mesh)
            self.set_up = partial(run.lower(*without).compile(), *without)

    @property
    def temporary_bytes(self) -> int:
        """The bytes on a device besides arguments and results, all actions run and nothing updated.

        The compiler says it; 0 if it doesn't.
        """
        analysis = self._compiled.memory_analysis()
        return int(analysis.temp_size_in_bytes) if analysis else 0

    def only(self, kinds: str, stage: int | None = None) -> jax.Array:
        """The actions of these kinds on a stage, or on all of them: `[slots, T, K]` of 1 and 0 on the devices."""
        numbers = [[1 + i for i, kind in enumerate(slot.kinds) if kind in kinds] for slot in self.table.slots]
        slots = zip(self.table.slots, numbers, strict=True)
        chosen = np.stack([np.isin(slot.kind, of_slot) for slot, of_slot in slots])
        if stage is not None:
            chosen &= np.arange(chosen.shape[-1]) == stage
        return on_all(chosen.astype(np.int32), self._mesh)

    def run(self, only: jax.Array) -> PyTree:
        """`((loss, updates, metrics), grads)`, which mean nothing unless all actions run."""
        return self._compiled(*self._arguments, only)


def measure(pipe: Pipeline, program: Program, state: TrainState, rounds: int) -> Measured:
    """Times the whole step and its parts.

    Args:
      pipe: the pipeline.
      program: its program for a batch.
      state: a state, which is copied: the caller's stays as it is.
      rounds: the number of runs of each, besides one to warm up; the median counts.
    """
    num_stages, num_microbatches = pipe.schedule.num_stages, pipe.schedule.num_microbatches
    runs = _trained(pipe, program, state) | {"idle": partial(program.run, program.only("")), "setup": program.set_up}
    parts = ("F", "RBIW", *"W" * pipe.schedule.splits)
    for kinds, k in product(parts, range(num_stages)):
        runs[f"{kinds}{k}"] = partial(program.run, program.only(kinds, k))
    seconds = _in_rounds(runs, rounds)
    medians = {name: float(np.median(times)) for name, times in seconds.items()}

    def of_stages(kinds: str) -> tuple[float, ...]:
        """Seconds of these actions of one micro-batch on each stage, `[K]`."""
        above_idle = [float(np.median(seconds[f"{kinds}{k}"] - seconds["idle"])) for k in range(num_stages)]
        return tuple(max(SHORTEST, total / num_microbatches) for total in above_idle)

    measured = Measured(
        forward=of_stages("F"),
        backward=of_stages("RBIW"),
        step=medians["step"],
        update=medians["update"],
        idle=medians["idle"],
        setup=min(medians["setup"], medians["idle"]),
        noise=noise_of(seconds["step"]),
        weight=of_stages("W") if pipe.schedule.splits else (),
    )
    # All processes go on with the times of the first: they have to reach the same findings.
    return Measured(**jax.tree.map(float, multihost_utils.broadcast_one_to_all(asdict(measured))))


def noise_of(seconds: Sequence[float] | np.ndarray) -> float:
    """The distance between the quartiles of some times over their median.

    >>> noise_of([10.0, 8.0, 9.0, 11.0, 30.0])
    0.2
    """
    low, middle, high = np.percentile(seconds, [25, 50, 75])
    return float((high - low) / middle)


def _in_rounds(runs: Mapping[str, Callable[[], PyTree]], rounds: int) -> dict[str, np.ndarray]:
    """The seconds of each run in each round, `[rounds]`; the first round isn't counted."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    with task("timing the step and its parts", total=1 + rounds, unit="rounds") as advance:
        for _ in range(1 + rounds):
            for name, run in runs.items():
                start = time.perf_counter()
                jax.block_until_ready(run())
                seconds[name].append(time.perf_counter() - start)
            advance()
    return {name: np.asarray(times[1:]) for name, times in seconds.items()}


def _trained(pipe: Pipeline, program: Program, state: TrainState) -> dict[str, Callable[[], PyTree]]:
    """Runs of the whole step, and of the optimiser's update alone, each from the state that the last one left."""
    (loss, updates, metrics), grads = program.run(program.only("FRBIW"))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    update = jax.jit(apply_update, donate_argnums=0, out_shardings=(shardings, None))
    current = jax.tree.map(jnp.copy, state)

    def run(step: Callable[[TrainState], tuple[TrainState, PyTree]]) -> PyTree:
        nonlocal current
        current, metrics = step(current)
        return current, metrics

    return {
        "step": partial(run, lambda state: pipe.train_step(state, program.batch)),
        "update": partial(run, lambda state: update(state, loss, updates, metrics, grads)),
    }


def memory_of(program: Program, state: TrainState) -> Parts[int]:
    """The bytes that a step of this program holds with this state, on the fullest device of this process.

    `temporaries` are what the program holds besides while it runs, as its compiler says: residuals and activations of
    the micro-batches in flight, sums of gradients, whatever a layer needs.
    """
    params = state.variables["params"]
    rest = {name: tree for name, tree in state.variables.items() if name != "params"}
    return Parts(
        parameters=_on_a_device(params),
        other_variables=_on_a_device(rest),
        optimizer=_on_a_device(state.opt_state),
        gradients=_on_a_device(params),  # laid out and typed like them
        temporaries=program.temporary_bytes,
    )


def _on_a_device(tree: PyTree) -> int:
    """The bytes of a pytree of arrays on the device of this process that has the most of them."""
    held: Counter[int] = Counter()
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            held[shard.device.id] += shard.data.nbytes
    return max(held.values(), default=0)
