"""Does a stage's work on one micro-batch: runs its layers forward or backward, adds state and gradients to totals.

All stages run this same code, since one program is compiled for all devices. Which layers a stage has is a matter of
loop bounds (`LayerRanges`), which are read from a table by the index of the virtual stage. So the layers of one group
are compiled once, wherever they lie, and a layer that a stage doesn't have is a loop of no trips. A `lax.cond` would do
as well, but it copies the buffers that it hands through; a loop updates them in place (`jpipe.jax.in_place`).

The executor calls `Stage.forward` (actions F and R), `Stage.backward` (B and I) and `Stage.weight_gradients` (W).

`g` is the index of a group, `position` that of a layer in it (the first and the last layer are each alone in theirs);
`v` is the index of a set of variables, and `instance` that of a record in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jpipe.execution.sweep import Job, sweep
from jpipe.jax.in_place import Index, look_up, put_row, take_row, when
from jpipe.memory.buffers import compact_order, in_order
from jpipe.memory.storage import Boundaries, Buffers
from jpipe.model.groups import WEIGHTS
from jpipe.model.layer_function import LayerArguments
from jpipe.model.random_keys import Key, layer_key
from jpipe.partitioner.axes import AXIS, on_all_stages
from jpipe.planning.kept import Kept
from jpipe.planning.step import Step
from jpipe.types import Batch, Leaf

LayerInputs = tuple[Batch, list[Leaf]]
"""What a layer reads besides its activation: a micro-batch, or None; what the loss needs of the whole mini-batch."""


class ForwardWork(NamedTuple):
    """The arrays that the forward of a stage's layers reads and writes. An empty one stays empty: it isn't computed.

    Attributes:
      activation: boundary buffers (`Boundaries`) with the input of the next layer to run, for one micro-batch.
      kept: buffers by `ROWS`: "residual" and "late_residual" hold residuals (those that W reads too are late),
        "w_input" what I leaves for W; a row for each micro-batch in flight.
      state: by collection, buffers with the totals of new state so far.
      results: with a loss, scalars: the sums over the micro-batches so far of its parts (`TracedLoss.parts`). Without a
        loss, the outputs of all micro-batches, `[M, b, ...]`.
    """

    activation: Buffers
    kept: Kept
    state: dict[str, Buffers]
    results: list[jax.Array]


class BackwardWork(NamedTuple):
    """The arrays that the backward of a stage's layers reads and writes.

    Attributes:
      cotangent: boundary buffers with the cotangents of the outputs of the next layer to run backwards.
      gradients: buffers with the sums of gradients so far, partial along axes as `Step.gradient_sums` says.
      shared_gradients: for each shared set of variables, this stage's sums of its gradients so far.
      overwritten: for each collection whose gradient is its new value (fp8), buffers with the largest so far.
    """

    cotangent: Buffers
    gradients: Buffers
    shared_gradients: dict[int, list[jax.Array]]
    overwritten: dict[str, Buffers]


class TickCarry(NamedTuple):
    """The arrays that a device carries from tick to tick. In a step that is forward only, those of backward are empty.

    Attributes:
      forward: what the device's last forward left at its boundary, and all that is kept of micro-batches in flight.
      backward: what the device's last backward left at its boundary, and the sums of gradients so far.
      waiting: "activation"s that have arrived and wait for their forward, and "cotangent"s for their backward, each
        array `[rows, ...]`: one set of rows, or one for each route (`TickTable.waiting`).
      entered: only with `ends="shared"`, else empty: leaves `[b, ...]` of the first layer's outputs.
      left: only with `ends="shared"`, else empty: leaves `[b, ...]` of the cotangents of the last layer's inputs.
      back: rows of residuals that have come back from the host for this slot, by name; empty if none do.
      host: rows of residuals on the host; empty without `offload=`.
    """

    forward: ForwardWork
    backward: BackwardWork
    waiting: dict[str, list[Buffers]]
    entered: list[jax.Array]
    left: list[jax.Array]
    back: dict[str, Buffers]
    host: dict[str, Buffers]


@dataclass(frozen=True, eq=False)
class Stage:
    """A stage's device during a step.

    Attributes:
      step: the step.
      variables: the device's buffers by collection, as they lie at work (`Step.storages`): weights that are gathered
        for a whole step are gathered already.
      batch: the device's own part of all micro-batches, `[M, b, ...]`.
      key: the step's key; None in evaluation.
      only: None, or for measurements `[slots, ticks, K]` of 0 and 1: only so many ticks run, and in them only the
        actions marked by 1. The results then mean nothing. Stages that have no action idle then, also on GPUs.
      known: what the loss needs of the whole mini-batch (`jpipe.execution.before_ticks`).
      shared: for each shared set of variables, its weights by collection, on every stage, as layers use them.
      device: the stage's index k, a Python integer if there is one stage only.
    """

    step: Step
    variables: dict[str, Buffers]
    batch: Batch
    key: Key | None
    only: jax.Array | None
    known: Sequence[jax.Array]
    shared: dict[int, dict[str, list[Leaf]]]
    device: Index

    def forward(self, job: Job, work: ForwardWork) -> ForwardWork:
        """Runs the virtual stage's layers; residuals go into the job's row, if it has one."""
        step, groups = self.step, self.step.model.groups

        def reads(job: Job, work: ForwardWork) -> tuple[LayerInputs, list[Leaf]]:
            """(the micro-batch, the layer's input out of the boundary buffers)."""
            first = groups[job.g].indices[0]
            # Equal leaves lie at the same place: the boundary before the group's first layer stands for all of them.
            return self.batch_of(job), step.activations.read(work.activation, first - 1, 0) if first else []

        def visit(job: Job, inputs: tuple[LayerInputs, list[Leaf]], work: ForwardWork) -> ForwardWork:
            """One layer: leaves the next activation and its residuals, adds to the state's totals and the results."""
            batch, x = inputs
            arguments = self.arguments(job, batch)
            # Without a row nothing stores residuals: then the plain forward runs, which makes none.
            run = step.forwards[job.g] if not job.rows else step.layers[job.g].forward
            results, new = run(arguments, x)
            if work.results and job.g == step.model.last:
                work = work._replace(results=self.collected(job, work.results, results.outputs))
            if work.state and arguments.state:
                is_last, names = job.microbatch == step.schedule.num_microbatches - 1, groups[job.g].state_names
                totals = self._read(work.state, names, job.layer)
                new_state = step.mergings[job.g].accumulate(totals, arguments.state, results.state, is_last)
                state = self._write(work.state, names, job.layer, job.chosen(new_state, totals))
                work = work._replace(state=state)
            if job.g != step.model.last:
                boundary = groups[job.g].indices[0]
                activation = self._passed_on(step.activations, job, boundary, results.outputs, work.activation)
                work = work._replace(activation=activation)
            if job.rows:
                if job.g in step.idle_work.uneven:  # other stages have something else in its place
                    old = step.kept.read_residuals(work.kept, job.layer, job.rows, {})
                    new, kept = job.chosen_for(work.kept, new, old)
                    work = work._replace(kept=kept)
                work = work._replace(kept=step.kept.write_residuals(work.kept, job.layer, new, job.rows))
            return work

        return sweep(step, job, "F", reads, visit, work)

    def backward(
        self, job: Job, work: BackwardWork, kept: Kept, back: Kept, *, whole: bool = True
    ) -> tuple[BackwardWork, Kept]:
        """Runs the virtual stage's layers backwards, adding up gradients layer by layer.

        Args:
          job: its rows are those of the residuals.
          work: what it reads and writes.
          kept: with the residuals.
          back: those that have come back from the host.
          whole: all gradients; else late ones (`jpipe.model.split_backward`) are left to `weight_gradients`.

        Returns:
          `work` and `kept`, with W's inputs written unless it is the whole.
        """
        step = self.step

        def reads(job: Job, state: tuple[BackwardWork, Kept]) -> tuple[LayerInputs, list[Leaf], list[Leaf]]:
            """(the micro-batch, the layer's residuals, the cotangents of its outputs)."""
            (work, kept), boundary = state, step.model.groups[job.g].indices[0]
            is_last = job.g == step.model.last
            cotangents = self.of_loss() if is_last else step.cotangents.read(work.cotangent, boundary, 0)
            return self.batch_of(job), step.kept.read_residuals(kept, job.layer, job.rows, back), cotangents

        def visit(
            job: Job, read: tuple[LayerInputs, list[Leaf], list[Leaf]], state: tuple[BackwardWork, Kept]
        ) -> tuple[BackwardWork, Kept]:
            """One layer: adds its gradients, leaves the cotangents of its inputs, and W's inputs."""
            (batch, residuals, cotangents), (work, kept) = read, state
            arguments, layer = self.arguments(job, batch), step.layers[job.g]
            if whole:
                gradients, new, cotangents = layer.backward(arguments, residuals, cotangents)
            else:
                (gradients, new, cotangents), leaves = layer.backward_inputs(arguments, residuals, cotangents)
                storage = step.kept.storages["w_input"]
                # What others keep may lie there: of another layer, or of W's own micro-batch, where I runs beside it.
                if job.g in step.idle_work.uneven or step.table.joins_parts:
                    old = storage.read(kept["w_input"], *job.layer, job.rows["w_input"])
                    leaves, kept = job.chosen_for(kept, leaves, old)
                kept = kept | {"w_input": storage.write(kept["w_input"], *job.layer, leaves, job.rows["w_input"])}
            work = self.add_gradients(job, work, gradients)
            if new:
                names = [name for name in step.model.groups[job.g].fixed_names if name in work.overwritten]
                so_far = self._read(work.overwritten, names, job.layer)
                # Each micro-batch gives the largest amplitude that it saw; the batch's is the largest of those.
                largest = [jnp.maximum(a, b.astype(a.dtype)) for a, b in zip(so_far, new, strict=True)]
                largest = job.chosen(largest, so_far)
                work = work._replace(overwritten=self._write(work.overwritten, names, job.layer, largest))
            if first := step.model.groups[job.g].indices[0]:
                passed_on = self._passed_on(step.cotangents, job, first - 1, cotangents, work.cotangent)
                work = work._replace(cotangent=passed_on)
            return work, kept

        return sweep(step, job, "B" if whole else "I", reads, visit, (work, kept))

    def weight_gradients(self, job: Job, work: BackwardWork, kept: Kept, back: Kept) -> BackwardWork:
        """Adds up the gradients that a `backward` which wasn't whole left."""
        step = self.step

        def reads(job: Job, _: BackwardWork) -> tuple[LayerInputs, list[Leaf], list[Leaf]]:
            """(the micro-batch, the residuals that W needs, its inputs from I)."""
            residuals = step.kept.read_residuals(kept, job.layer, job.rows, back, late=True)
            batch, storage = self.batch_of(job), step.kept.storages["w_input"]
            return batch, residuals, storage.read(kept["w_input"], *job.layer, job.rows["w_input"])

        def visit(job: Job, read: tuple[LayerInputs, list[Leaf], list[Leaf]], work: BackwardWork) -> BackwardWork:
            batch, residuals, w_inputs = read
            gradients = step.layers[job.g].backward_weights(self.arguments(job, batch), residuals, w_inputs)
            return self.add_gradients(job, work, gradients)

        return sweep(step, job, "W", reads, visit, work)

    def add_gradients(self, job: Job, work: BackwardWork, gradients: Sequence[Leaf | None]) -> BackwardWork:
        """Adds a layer's gradients, where there are some, to the sums of its set of variables."""
        v = self.step.model.groups[job.g].variable_set
        if v is None:
            return work
        storage, now = self.step.storages["params"], self.step.layers[job.g].gradients_at
        record = storage.record_types[v]
        # What idle stages compute along may be anything, NaN too, so it isn't multiplied by zero.
        gradients = [None if a is None else job.or_zeros(a) for a in gradients]
        gradients = self.step.gradient_sums.converted(record.buffers, gradients, now)
        # A set of shared ends is in `self.shared` too, since each stage reads its leaves there. But it takes the first
        # branch: each stage adds to its own part, so that nothing has to be summed over stages after the ticks. Where a
        # leaf isn't split, all stages have the same gradient of it, and only the stage that holds the leaf adds it.
        if v in self.step.ends.sets:
            mine = record.devices[0] == self.device
            part = lambda leaf, spec: leaf if on_all_stages(spec) else jnp.where(mine, leaf, jnp.zeros_like(leaf))
            gradients = [part(leaf, spec) for leaf, spec in zip(gradients, record.specs, strict=True)]
        elif v in self.shared:
            sums = [
                a if new is None else a + new.astype(a.dtype)
                for a, new in zip(work.shared_gradients[v], gradients, strict=True)
            ]
            return work._replace(shared_gradients=work.shared_gradients | {v: sums})
        # A set that isn't shared has an instance for each position of its group, in order. A set of shared ends has one
        # instance, and the position of its layers is 0.
        on_gpu = self.step.plan.request.splits.on_gpu
        return work._replace(gradients=storage.add(work.gradients, v, job.position, gradients, on_gpu=on_gpu))

    # --- one layer ---

    def collected(self, job: Job, results: list[jax.Array], outputs: list[Leaf]) -> list[jax.Array]:
        """Results with what the last layer gave for a micro-batch."""
        pairs = list(zip(results, outputs, strict=True))
        if self.step.loss is not None:
            return [a + job.or_zeros(new).astype(a.dtype) for a, new in pairs]
        if job.counts is not True:
            pairs = [(a, job.chosen(new, take_row(a, job.microbatch))) for a, new in pairs]
        return [put_row(a, new, job.microbatch) for a, new in pairs]

    def _passed_on(
        self, boundaries: Boundaries, job: Job, boundary: int, leaves: Sequence[Leaf], buffers: Buffers
    ) -> Buffers:
        """Boundary buffers with what a layer gives; where it isn't the virtual stage's own, with what they have."""
        if job.g in self.step.idle_work.uneven:
            leaves, buffers = job.chosen_for(buffers, [*leaves], boundaries.read(buffers, boundary, 0))
        return boundaries.write(buffers, boundary, 0, leaves)

    def batch_of(self, job: Job) -> LayerInputs:
        """(the micro-batch, for layers that look at it, else None; what the loss needs of the whole mini-batch).

        It is read in the order of dimensions in which the batch lies at rest. Else a compiler would change the order
        of all micro-batches ahead of the ticks, and pad the three channels of images to 128.
        """
        function = self.step.functions[job.g]
        if not function.reads_batch:
            return None, []
        order = lambda leaf: compact_order(leaf.shape[1:], self.step.plan.request.mesh)
        row = lambda leaf: in_order(take_row(leaf, job.microbatch), order(leaf))
        stacked = zip(self.known, function.loss.stacked, strict=True) if function.loss is not None else ()
        known = [take_row(a, job.microbatch) if each else a for a, each in stacked]
        return jax.tree.map(row, self.batch), known

    def arguments(self, job: Job, inputs: LayerInputs) -> LayerArguments:
        """The arguments of a layer besides its activation, in forward and backward."""
        group, key = self.step.model.groups[job.g], None
        if self.key is not None:
            of_model, index = group.layer.has_model_key, look_up(group.indices, job.position)
            key = layer_key(self.key, index, job.microbatch, of_model=of_model)
        params, fixed = self.weights(job)
        state = self._read(self.variables, group.state_names, job.layer)
        return LayerArguments(params, state, fixed, key, *inputs)

    def weights(self, job: Job) -> tuple[list[Leaf], list[Leaf]]:
        """(a layer's parameters, the leaves of collections that it only reads and its constants)."""
        group = self.step.model.groups[job.g]

        def read(names: list[str]) -> list[Leaf]:
            if group.variable_set in self.shared:
                return [leaf for name in names for leaf in self.shared[group.variable_set][name]]
            return self._read(self.variables, names, job.layer)

        params, fixed = read(["params"]), read(group.fixed_names)
        if group.variable_set is not None:
            # Of some there are narrow copies alone (`narrow_dtypes`), which the layer casts back.
            whole = self.step.storages["params"].record_types[group.variable_set].leaves
            params = [leaf.astype(shape.dtype) for leaf, shape in zip(params, whole, strict=True)]
        constants = self.step.functions[job.g].constants
        if constants.places:
            fixed = [*fixed, *constants.of(look_up(group.indices, job.position))]
        return params, fixed

    def of_loss(self) -> list[Leaf]:
        """The cotangents of the parts of the loss: it is their sum."""
        parts = self.step.functions[self.step.model.last].differentiated(self.step.outputs)
        return [jnp.ones((), part.dtype) for part in parts]

    # --- state ---

    def merged_state(self, totals: dict[str, Buffers]) -> dict[str, Buffers]:
        """New buffers of the collections that aren't parameters, from the totals that `forward` added up.

        Every collection has the same records, an instance of a set of variables each: those of "params" lead the way.
        """
        step = self.step
        group_of = [variable_set.group for variable_set in step.model.variable_sets]
        names = lambda v: step.model.groups[group_of[v]].state_names

        # Layers with state never share, so that their instance is their position.
        def read(v: int, instance: Index, _: object) -> list[list[Leaf]]:
            """The totals and the old state of an instance."""
            return [self._read(tree, names(v), (group_of[v], instance)) for tree in (totals, self.variables)]

        def visit(v: int, instance: Index, leaves: list[list[Leaf]], buffers: dict[str, Buffers]) -> dict[str, Buffers]:
            totals, old = leaves
            new = step.mergings[group_of[v]].finish(totals, old, step.schedule.num_microbatches)
            return self._write(buffers, names(v), (group_of[v], instance), new)

        zeros = {name: jax.tree.map(jnp.zeros_like, self.variables[name]) for name in totals}
        return step.storages["params"].for_each_local(read, visit, self.device, zeros)

    def _read(self, buffers: dict[str, Buffers], names: list[str], layer: tuple[int, Index]) -> list[Leaf]:
        """The leaves of some of a layer's collections, in order, out of buffers by collection; `layer` as of `Job`."""
        g, position = layer  # which is the instance, as in `add_gradients`
        storages, v = self.step.storages, self.step.model.groups[g].variable_set
        return [leaf for name in names if v is not None for leaf in storages[name].read(buffers[name], v, position)]

    def _write(
        self, buffers: dict[str, Buffers], names: list[str], layer: tuple[int, Index], leaves: list[Leaf]
    ) -> dict[str, Buffers]:
        """The inverse of `_read`: the buffers with these leaves written."""
        g, position = layer
        v, buffers, rest = self.step.model.groups[g].variable_set, dict(buffers), iter(leaves)
        for name in names:
            storage = self.step.storages[name]
            assert v is not None
            of_collection = [next(rest) for _ in storage.record_types[v].leaves]
            buffers[name] = storage.write(buffers[name], v, position, of_collection)
        return buffers


def send_shared(step: Step, variables: dict[str, Buffers], device: Index) -> dict[int, dict[str, list[Leaf]]]:
    """Weights that several stages use, by set of variables and collection, as layers use them.

    The stage of a shared layer's first use holds its parameters. Each stage adds gradients of its own uses up in an
    accumulator of its own; in `sum_shared_gradients` these meet, by one `psum` over the stages for each leaf.
    The stage that holds them sends them to all; of those that all stages compute with together, each has its part.
    """

    def sent(collection: str, v: int) -> list[Leaf]:
        storage = step.storages[collection]
        known, leaves = storage.record_types[v], storage.read(variables[collection], v, 0)
        mine = known.devices[0] == device  # such a set has one instance
        # JAX sums bools as integers, so they are cast back.
        to_all = lambda a: jax.lax.psum(jnp.where(mine, a, jnp.zeros_like(a)), AXIS).astype(a.dtype)
        return [a if on_all_stages(spec) else to_all(a) for a, spec in zip(leaves, known.specs, strict=True)]

    shared = [v for v, known in enumerate(step.model.variable_sets) if known.shared or v in step.ends.sets]
    return {v: {name: sent(name, v) for name in step.collections(*WEIGHTS)} for v in shared}


def sum_shared_gradients(stage: Stage, work: BackwardWork) -> Buffers:
    """This device's buffers of gradients, with those of the shared parameters that it holds, summed over the stages.

    Args:
      stage: this device.
      work: its sums of gradients, and those of its uses of shared parameters.
    """
    gradients, storage = work.gradients, stage.step.storages["params"]
    for v, leaves in work.shared_gradients.items():
        total = [jax.lax.psum(leaf, AXIS) for leaf in leaves]
        mine = storage.record_types[v].devices[0] == stage.device
        add = lambda total, buffers, v=v: storage.add(buffers, v, 0, total)
        gradients = when(mine, total, add, gradients)
    return gradients
