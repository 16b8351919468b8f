"""Measures a step on the pipeline's own devices, and divides its seconds into slices; bytes held.

The program of the step is timed with some of its actions left out: all of them, all but one stage's forwards, all but
its backwards. The time of the actions that run is the time of such a run minus that of the run without any, inside of
the real loops, with the real buffers. Runs follow each other in rounds, so that a machine that gets slower slows all of
them. Single layers are timed with recomputation and without.

A step is predicted from its stages' times, by the simulator, and divided into its six slices. K is the number of
stages, M of micro-batches. A step is the work of the stages in the order of the schedule, what is done without any of
them (transfers, set-up), and the optimiser's update:

    step = contention * makespan + idle + update

`makespan` is `simulate`'s, of stages that were timed alone. `contention` is what is left to explain the measured step:
how many times as long stages take when all run at once. On accelerators of their own it is about 1; simulated devices
share cores, so it is more. A stage's V chunks count as equally long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jpipe.execution import programs
from jpipe.memory.batches import cut_batch, on_all, on_mesh
from jpipe.model.random_keys import key_shape
from jpipe.model.remat import MODES
from jpipe.model.traced_layer import trace_layer
from jpipe.pipeline import Pipeline
from jpipe.planning.costs import Cost, seconds_of, timed_costs
from jpipe.planning.partition import Partition, partition
from jpipe.planning.planner import Planner
from jpipe.processes.progress import task
from jpipe.schedules.schedule import Schedule
from jpipe.schedules.simulate import Timeline, simulate
from jpipe.tools.memory_model import bytes_at_rest
from jpipe.tools.step_cost import Parts, StepCost
from jpipe.training.train_state import TrainState, apply_update
from jpipe.types import Batch, PyTree

SLICES = ("computation", "recomputation", "bubble", "imbalance", "transfer and set-up", "weight update")
"""What a step's time goes into (GPipe, NeurIPS version, section 3: the breakdown of the time step)."""


class StageTimes(NamedTuple):
    """Seconds for one micro-batch, `[K]` each, by stage, all its chunks together.

    Attributes:
      forward: the forward.
      backward: the backward, without what it computes anew.
      recompute: the part of the backward that computes the forward anew (remat).
      weight: the part of the backward that W takes, where it is split; else 0.
    """

    forward: np.ndarray
    backward: np.ndarray
    recompute: np.ndarray
    weight: np.ndarray

    @property
    def total(self) -> np.ndarray:
        """Seconds by stage, forward and backward."""
        return self.forward + self.backward + self.recompute

    @property
    def even(self) -> StageTimes:
        """The same work, shared equally among the stages."""
        return StageTimes(*(np.full_like(times, times.mean()) for times in self))

    def scaled(self, factors: float | np.ndarray) -> StageTimes:
        """Times multiplied by a factor, or by one for each stage, `[K]`."""
        return StageTimes(*(times * factors for times in self))

    def timeline(self, schedule: Schedule) -> Timeline:
        """The schedule with these times."""
        forward, backward, recompute, weight = (times.tolist() for times in self)
        return simulate(schedule, forward, backward, weight=weight, recompute=recompute)


@dataclass(frozen=True)
class StepModel:
    """The time of a step by its parts, as the module's docstring puts them together.

    Attributes:
      schedule: the schedule it was measured under.
      stages: what the stages take alone.
      measured: seconds of a training step, its batch on the devices before it begins.
      update: seconds of the optimiser's update in it, compiled on its own.
      idle: seconds of loss and gradients without any action: transfers, and what is done once a step (set-up, sums).
      noise: by how much the step differs from round to round: the middle half of the rounds, over their median.
    """

    schedule: Schedule
    stages: StageTimes
    measured: float
    update: float
    idle: float
    noise: float = 0.0

    @cached_property
    def contention(self) -> float:
        """How many times as long stages take when all run at once.

        Raises:
          ValueError: the step took less than what was measured around the stages' work: it is too short.
        """
        contention = (self.measured - self.update - self.idle) / self.stages.timeline(self.schedule).makespan
        if contention <= 0:
            raise ValueError(
                f"the step takes {self.measured * 1e3:.3g} ms, what isn't work of stages "
                f"{(self.idle + self.update) * 1e3:.3g} ms: it is too short to be taken apart on this machine; use a "
                "larger batch or model, or more rounds"
            )
        return contention

    def what_if(self, stages: StageTimes | None = None) -> StepCost:
        """The seconds of a step by `SLICES`, of a stage on average, with other times of stages than those measured.

        Imbalance is the time that stages wait beyond what they would if all took equally long; the bubble is the rest
        of their waiting. (Stages of unlike forwards and backwards may wait less: then there is no imbalance.)
        """
        stages = stages or self.stages
        even, count, makespan = stages.even, self.schedule.num_microbatches, stages.timeline(self.schedule).makespan
        computation, recomputation = count * (even.forward[0] + even.backward[0]), count * even.recompute[0]
        imbalance = max(0.0, makespan - even.timeline(self.schedule).makespan)
        bubble = max(0.0, makespan - computation - recomputation - imbalance)  # where nobody waits 0 but for rounding
        work = [self.contention * seconds for seconds in (computation, recomputation, bubble, imbalance)]
        slices: dict[str, float] = dict(zip(SLICES, [*work, self.idle, self.update], strict=True))
        return StepCost("measured", Parts(slices), Parts())


# --- layers alone -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of each layer alone for one micro-batch, `[N]`, on one device, all timed by turns.

    On a mesh with data axes: for the examples that one device has of a micro-batch.

    Attributes:
      planner: the pipeline's, which knows the stages that layers are on.
      here: the layers as the pipeline runs them.
      kept: where residuals are kept and nothing is computed anew (remat "none").
    """

    planner: Planner
    here: list[Cost]
    kept: list[Cost]

    def stage_of_layers(self, cut: Partition | None = None) -> np.ndarray:
        """`[N]`, the stage that each layer is on, in the pipeline or under another cut."""
        counts = (cut or self.planner.partition).counts
        return np.repeat(self.planner.request.schedule.placement.stage_of(np.arange(len(counts))), counts)

    def by_stage(self, values: Sequence[float] | np.ndarray, cut: Partition | None = None) -> np.ndarray:
        """Sums `[K]` of values of layers, `[N]`, over each stage's."""
        return np.bincount(self.stage_of_layers(cut), values, minlength=self.planner.request.schedule.num_stages)

    def over_here(self, costs: Sequence[Cost], part: str = "total") -> np.ndarray:
        """`[K]`, how many times as long as now each stage would take if its layers took these costs.

        Args:
          costs: those of each layer, `[N]`.
          part: what of them counts: "forward", "backward" or "total".
        """
        sums = lambda times: self.by_stage([getattr(cost, part) for cost in times])
        return sums(costs) / sums(self.here)

    def with_recomputation(self, stages: StageTimes) -> StageTimes:
        """The stages' times as measured, with recomputation apart from the rest of the backward."""
        again = stages.backward * np.clip(1.0 - self.over_here(self.kept, "backward"), 0.0, 1.0)
        return stages._replace(backward=stages.backward - again, recompute=again)

    def best_cut(self, stages: StageTimes) -> tuple[Partition, StageTimes]:
        """The best cut for the times of single layers, and what stages that take this now would take with it.

        Layers share the time of their stage in proportion to what they take alone. Equal layers take the same alone. In
        stages they differ by noise, and a cut by their times there would follow it.
        """
        schedule, on = self.planner.request.schedule, self.stage_of_layers()
        cut = partition([cost.total for cost in self.here], schedule.num_stages, num_chunks=schedule.num_chunks)

        def moved(seconds: np.ndarray, part: str) -> np.ndarray:
            alone = np.asarray([getattr(cost, part) for cost in self.here])
            sums = self.by_stage(alone)[on]
            return self.by_stage(alone * seconds[on] / np.where(sums, sums, 1.0), cut)

        return cut, StageTimes(*map(moved, stages, ("forward", "backward", "backward", "backward")))


def measure_layers(planner: Planner, batch: Batch) -> LayerTimes:
    """Times each layer alone, in micro-batches of this batch `[B, ...]`."""
    micro = cut_batch(batch, planner.request.schedule.num_microbatches * planner.request.splits.num_shards)
    model, layers = planner.model(micro), planner.layers(micro, key_shape())
    variants = [layers]
    if planner.request.remat is not MODES["none"]:
        with planner.tracing():
            variants.append(tuple(trace_layer(replace(one.function, remat=MODES["none"])) for one in layers))
    times = timed_costs(model, variants, planner.request.mesh)
    return LayerTimes(planner, times[0], times[-1])


# --- a step by parts --------------------------------------------------------------------------------------------------


SHORTEST = 1e-9
"""Seconds that a stage takes at least: a run can come out shorter than the one without its actions, by noise."""


class Program:
    """Loss and gradients of a step, compiled so that which of its actions run is an argument.

    Args:
      pipe: the pipeline.
      state: its state; the step's key and the parameters are those of its next step.
      batch: a batch `[B, ...]`.

    Attributes:
      table: the ticks.
      batch: the batch on the devices, so that no run has to bring it there.
      compiled: the program itself.
    """

    def __init__(self, pipe: Pipeline, state: TrainState, batch: Batch):
        planner = pipe.planner
        with task("compiling the measured step"):
            step = planner.training_step(planner.for_training(batch), state.key)
            self.table = step.table
            self.batch, self._mesh = on_mesh(batch, pipe.mesh), pipe.mesh
            self._arguments = state.variables, self.batch, jax.jit(jax.random.fold_in)(state.key, state.step)
            run = jax.jit(partial(programs.value_and_grad, step))
            self.compiled = run.lower(*self._arguments, self.only("FRBIW")).compile()

    def only(self, kinds: str, stage: int | None = None) -> jax.Array:
        """The actions of these kinds on a stage, or on all of them: `[slots, T, K]` of 1 and 0 on the devices."""
        chosen = np.stack([np.isin(slot.kind, slot.codes(kinds)) for slot in self.table.slots])
        if stage is not None:
            chosen &= np.arange(chosen.shape[-1]) == stage
        return on_all(chosen.astype(np.int32), self._mesh)

    def run(self, only: jax.Array) -> PyTree:
        """`((loss, updates, metrics), grads)`, which mean nothing unless all actions run."""
        return self.compiled(*self._arguments, only)


def measure_step(pipe: Pipeline, program: Program, state: TrainState, rounds: int) -> StepModel:
    """Times the whole step and its parts; what a backward computes anew isn't apart yet.

    Args:
      pipe: the pipeline.
      program: its program for a batch.
      state: a state, which is copied: the caller's stays as it is.
      rounds: the number of runs of each, besides one to warm up; the median counts.
    """
    num_stages, num_microbatches = pipe.schedule.num_stages, pipe.schedule.num_microbatches
    runs = _trained(pipe, program, state) | {"idle": partial(program.run, program.only(""))}
    parts = ("F", "RBIW", *"W" * pipe.schedule.splits)
    for kinds, k in product(parts, range(num_stages)):
        runs[f"{kinds}{k}"] = partial(program.run, program.only(kinds, k))
    seconds = _in_rounds(runs, rounds)

    def of_stages(kinds: str) -> np.ndarray:
        """Seconds of these actions of one micro-batch on each stage, `[K]`."""
        above_idle = np.array([np.median(seconds[f"{kinds}{k}"] - seconds["idle"]) for k in range(num_stages)])
        return np.maximum(SHORTEST, above_idle / num_microbatches)

    step, update, idle = (float(np.median(seconds[name])) for name in ("step", "update", "idle"))
    whole = {"measured": step, "update": update, "idle": idle, "noise": noise_of(seconds["step"])}
    none = np.zeros(num_stages)
    stages = StageTimes(of_stages("F"), of_stages("RBIW"), none, of_stages("W") if pipe.schedule.splits else none)
    # All processes go on with the times of the first: they have to reach the same findings.
    stages, whole = multihost_utils.broadcast_one_to_all((stages, whole))
    return StepModel(pipe.schedule, stages, **{name: float(value) for name, value in whole.items()})


def noise_of(seconds: Sequence[float] | np.ndarray) -> float:
    """The distance between the quartiles of some times over their median.

    >>> noise_of([10.0, 8.0, 9.0, 11.0, 30.0])
    0.2
    """
    low, middle, high = np.percentile(seconds, [25, 50, 75])
    return float((high - low) / middle)


def _in_rounds(runs: Mapping[str, Callable[[], PyTree]], rounds: int) -> dict[str, np.ndarray]:
    """The seconds of each run in each round, `[rounds]`; the first round isn't counted."""
    seconds: list[list[float]] = []
    with task("timing the step and its parts", total=1 + rounds, unit="rounds") as advance:
        for _ in range(1 + rounds):
            seconds.append(list(map(seconds_of, runs.values())))
            advance()
    return dict(zip(runs, np.transpose(seconds[1:]), strict=True))


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
    """The bytes that a step of this program holds with this state, on a device.

    `temporaries` are what the program holds besides while it runs, as its compiler says: residuals and activations of
    the micro-batches in flight, sums of gradients, whatever a layer needs.
    """
    held = bytes_at_rest(state)
    analysis = program.compiled.memory_analysis()  # None where the compiler doesn't say
    temporaries = int(analysis.temp_size_in_bytes) if analysis else 0
    return Parts(held, gradients=held["parameters"], temporaries=temporaries)  # gradients lie as parameters do
