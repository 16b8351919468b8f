"""Does a stage's work on one micro-batch: runs its layers forward or backward, adds state and gradients to totals.

All stages run this same code, since one program is compiled for all devices. Which layers a stage has is a matter of
loop bounds (`LayerRanges`), which are read from a table by the index of the virtual stage. So the layers of one group
are compiled once, wherever they lie, and a layer that a stage doesn't have is a loop of no trips. A `lax.cond` would do
as well, but it copies the buffers that it hands through; a loop updates them in place (`jpipe.jax.in_place`).

`ACTIONS` has the function that carries out each kind of action: what an action reads is in rows, which the table of
ticks names in its `Now`, and so is what it keeps for later actions of its stage.

`g` is the index of a group, `position` that of a layer in it (the first and the last layer are each alone in theirs);
`v` is the index of a set of variables, and `instance` that of a record in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jpipe.execution.sweep import Counts, Job, sweep
from jpipe.jax.in_place import Index, Where, look_up, put_row, take_row, when
from jpipe.memory.buffers import compact_order, in_order
from jpipe.memory.storage import Boundaries, Buffers, Row
from jpipe.model.groups import WEIGHTS
from jpipe.model.layer_function import LayerArguments
from jpipe.model.random_keys import Key, layer_key
from jpipe.partitioner.axes import AXIS, on_all_stages
from jpipe.planning.kept import RESIDUALS, Kept
from jpipe.planning.step import Step
from jpipe.schedules.ticks import ROWS, Slot
from jpipe.types import Batch, Leaf

jax.tree_util.register_dataclass(Slot, [one.name for one in fields(Slot) if one.name != "kinds"], ["kinds"])
Now = Slot[Index]
"""A slot's entries for this device in one tick, integer scalars."""
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
      from_first: only with `ends="shared"`, else empty: leaves `[b, ...]` of the first layer's outputs.
      from_last: only with `ends="shared"`, else empty: leaves `[b, ...]` of the cotangents of the last layer's inputs.
      back: rows of residuals that have come back from the host for this slot, by name; empty if none do.
      host: rows of residuals on the host; empty without `offload=`.
    """

    forward: ForwardWork
    backward: BackwardWork
    waiting: dict[str, list[Buffers]]
    from_first: list[jax.Array]
    from_last: list[jax.Array]
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

    # --- actions ---

    def forward(self, counts: Counts, now: Now, carry: TickCarry, *, again: bool = False) -> TickCarry:
        """F, or `again` R: runs the virtual stage's layers, and keeps residuals unless a backward is to recompute them.

        R does so for the residuals alone: the state and the results have been counted by F.
        """
        step, groups = self.step, self.step.model.groups
        job = self._job(counts, now, keeps=again or step.stores_residuals)
        work = carry.forward._replace(activation=self._received("activation", job, now, carry))

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
            results, residuals = run(arguments, x)
            if work.results and job.g == step.model.last:
                work = work._replace(results=self.collected(job, work.results, results.outputs))
            if work.state and arguments.state:
                is_last, names = job.microbatch == step.schedule.num_microbatches - 1, groups[job.g].state_names
                totals = self._read(work.state, names, job.layer)
                new = step.mergings[job.g].accumulate(totals, arguments.state, results.state, is_last)
                state = self._write(work.state, names, job.layer, list(map(job.chosen, new, totals)))
                work = work._replace(state=state)
            if job.g != step.model.last:
                to, where = groups[job.g].indices[0], self._where(job)
                activation = step.activations.write(work.activation, to, 0, results.outputs, where=where)
                work = work._replace(activation=activation)
            if job.rows:
                where = self._where(job)  # other stages have something else in its place
                kept = step.kept.write(work.kept, job.layer, residuals, job.rows, RESIDUALS, where)
                work = work._replace(kept=kept)
            return work

        if again:
            kept = sweep(step, job, "F", reads, visit, work._replace(state={}, results=[])).kept
            return carry._replace(forward=carry.forward._replace(kept=kept))
        return carry._replace(forward=sweep(step, job, "F", reads, visit, work))

    def backward(self, counts: Counts, now: Now, carry: TickCarry, *, whole: bool = True) -> TickCarry:
        """B, or I if it isn't `whole`: runs the layers backwards, adding up gradients layer by layer.

        It starts from the cotangent that has arrived, or from the loss. I leaves late gradients
        (`jpipe.model.split_backward`) to W, and keeps what W needs.
        """
        step, job = self.step, self._job(counts, now)
        if not step.stores_residuals:
            # Nothing keeps residuals for this backward, unless an action R of the schedule has made them ahead of it.
            recomputes = "R" not in step.schedule.kinds or now.anew > 0
            carry = when(recomputes, now, partial(self.forward, counts, again=True), carry)
        work = carry.backward._replace(cotangent=self._received("cotangent", job, now, carry))

        def reads(job: Job, state: tuple[BackwardWork, Kept]) -> tuple[LayerInputs, list[Leaf], list[Leaf]]:
            """(the micro-batch, the layer's residuals, the cotangents of its outputs)."""
            (work, kept), boundary = state, step.model.groups[job.g].indices[0]
            is_last = job.g == step.model.last
            cotangents = self.of_loss() if is_last else step.cotangents.read(work.cotangent, boundary, 0)
            batch = self.batch_of(job)
            return batch, step.kept.read(kept, job.layer, job.rows, RESIDUALS, carry.back), cotangents

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
                # What others keep may lie there: of another layer, or of W's own micro-batch, where I runs beside it.
                where = job.counts if step.table.joins_parts else self._where(job)
                kept = step.kept.write(kept, job.layer, leaves, job.rows, ["w_input"], where)
            work = self.add_gradients(job, work, gradients)
            if new:
                names = [name for name in step.model.groups[job.g].fixed_names if name in work.overwritten]
                so_far = self._read(work.overwritten, names, job.layer)
                # Each micro-batch gives the largest amplitude that it saw; the batch's is the largest of those.
                largest = [jnp.maximum(a, b.astype(a.dtype)) for a, b in zip(so_far, new, strict=True)]
                largest = list(map(job.chosen, largest, so_far))
                work = work._replace(overwritten=self._write(work.overwritten, names, job.layer, largest))
            if first := step.model.groups[job.g].indices[0]:
                where = self._where(job)
                cotangent = step.cotangents.write(work.cotangent, first - 1, 0, cotangents, where=where)
                work = work._replace(cotangent=cotangent)
            return work, kept

        # What is kept is handed back so that the next action writes into the same memory.
        work, kept = sweep(step, job, "B" if whole else "I", reads, visit, (work, carry.forward.kept))
        return carry._replace(forward=carry.forward._replace(kept=kept), backward=work)

    def weight_gradients(self, counts: Counts, now: Now, carry: TickCarry) -> TickCarry:
        """W: adds up the gradients that I has left."""
        step, kept = self.step, carry.forward.kept

        def reads(job: Job, _: BackwardWork) -> tuple[LayerInputs, list[Leaf], list[Leaf]]:
            """(the micro-batch, the residuals that W needs, its inputs from I)."""
            residuals = step.kept.read(kept, job.layer, job.rows, ["late_residual"], carry.back)
            return self.batch_of(job), residuals, step.kept.read(kept, job.layer, job.rows, ["w_input"])

        def visit(job: Job, read: tuple[LayerInputs, list[Leaf], list[Leaf]], work: BackwardWork) -> BackwardWork:
            batch, residuals, w_inputs = read
            gradients = step.layers[job.g].backward_weights(self.arguments(job, batch), residuals, w_inputs)
            return self.add_gradients(job, work, gradients)

        return carry._replace(backward=sweep(step, self._job(counts, now), "W", reads, visit, carry.backward))

    def _job(self, counts: Counts, now: Now, *, keeps: bool = True) -> Job:
        """The action in this slot; its virtual stage is a Python integer if there is only one.

        A row of -1 is never used: its action neither reads nor writes such values. Only a stage that idles and works
        along may read there, so it reads row 0.
        """
        place = self.step.schedule.placement
        virtual_stage = 0 if place.num_virtual_stages == 1 else place.virtual_stage(self.device, now.chunk)
        at = {name: Row(getattr(now, name), self.device) for name in ROWS}
        chooses = self.step.plan.request.splits.on_gpu  # on others `_rows_back` in executor.py has chosen before
        at |= {name: Row(away.row, 0, away.stays if chooses else None) for name, away in now.away.items()}
        if counts is not True:
            at = {name: one._replace(row=jnp.maximum(one.row, 0)) for name, one in at.items()}
        rows = {name: at[name] for name in self.step.kept.storages} if keeps else {}
        return Job(now.microbatch, rows, counts, virtual_stage)

    def _received(self, name: str, job: Job, now: Now, carry: TickCarry) -> Buffers:
        """Boundary buffers with the "activation" or "cotangent" that an action receives: from its row, or a shared end.

        The rest of the buffers is only memory to write into: the stage's layers write each inner boundary before they
        read it. A row of -1 gives values of no use on the first or last virtual stage. With a buffer for each route it
        changes nothing: on other virtual stages what the action reads is there already.
        """
        place, (boundaries, buffers) = self.step.schedule.placement, self.at_boundary(name, carry)
        numbers, row = self.step.table.waiting[name], getattr(now, name)

        def take(at: tuple[Index, Buffers], buffers: Buffers) -> Buffers:
            row, rows = at
            return boundaries.with_crossed(buffers, jax.tree.map(lambda a: take_row(a, row), rows))

        for own, rows in zip(numbers, carry.waiting[name], strict=True):
            if len(numbers) == 1 and len(own):
                buffers = take((jnp.maximum(row, 0), rows), buffers)
            elif len(own):
                buffers = when((row >= own.start) & (row < own.stop), (row - own.start, rows), take, buffers)
        # The virtual stage beside a shared end finds there what the end gave in its turn.
        leaves, boundary, user = carry.from_first, 0, 0
        if name == "cotangent":
            leaves, boundary, user = carry.from_last, self.step.model.num_layers - 2, place.num_virtual_stages - 1
        mine = job.virtual_stage == user
        if not leaves:
            return buffers
        old = boundaries.read(buffers, boundary, 0)
        leaves = [jnp.where(mine, *pair) for pair in zip(leaves, old, strict=True)]
        return boundaries.write(buffers, boundary, 0, leaves)

    def at_boundary(self, name: str, carry: TickCarry) -> tuple[Boundaries, Buffers]:
        """The format of "activation"s or "cotangent"s, and the buffers with what the last action left there."""
        if name == "activation":
            return self.step.activations, carry.forward.activation
        return self.step.cotangents, carry.backward.cotangent

    # --- one layer ---

    def _where(self, job: Job) -> Where:
        """Whether the stage has the layer, where stages have unequally many of its group; None elsewhere."""
        return job.counts if job.g in self.step.idle_work.uneven else None

    def add_gradients(self, job: Job, work: BackwardWork, gradients: Sequence[Leaf | None]) -> BackwardWork:
        """Adds a layer's gradients, where there are some, to the sums of its set of variables."""
        if (v := self.step.model.groups[job.g].variable_set) is None:
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
            add = lambda a, new: a if new is None else a + new.astype(a.dtype)
            sums = list(map(add, work.shared_gradients[v], gradients))
            return work._replace(shared_gradients=work.shared_gradients | {v: sums})
        # A set that isn't shared has an instance for each position of its group, in order. A set of shared ends has one
        # instance, and the position of its layers is 0.
        on_gpu = self.step.plan.request.splits.on_gpu
        return work._replace(gradients=storage.add(work.gradients, v, job.position, gradients, on_gpu=on_gpu))

    def collected(self, job: Job, results: list[jax.Array], outputs: list[Leaf]) -> list[jax.Array]:
        """Results with what the last layer gave for a micro-batch."""
        pairs = list(zip(results, outputs, strict=True))
        if self.step.loss is not None:
            return [a + job.or_zeros(new).astype(a.dtype) for a, new in pairs]
        if job.counts is not True:
            pairs = [(a, job.chosen(new, take_row(a, job.microbatch))) for a, new in pairs]
        return [put_row(a, new, job.microbatch) for a, new in pairs]

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

    # --- after the ticks ---

    def summed_gradients(self, work: BackwardWork) -> Buffers:
        """This device's buffers of gradients, with those of the shared parameters that it holds, over all stages."""
        gradients, storage = work.gradients, self.step.storages["params"]
        for v, leaves in work.shared_gradients.items():
            total = [jax.lax.psum(leaf, AXIS) for leaf in leaves]
            mine = storage.record_types[v].devices[0] == self.device
            add = lambda total, buffers, v=v: storage.add(buffers, v, 0, total)
            gradients = when(mine, total, add, gradients)
        return gradients

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


ACTIONS: dict[str, Callable[[Stage, Counts, Now, TickCarry], TickCarry]] = {
    "F": Stage.forward,
    "R": partial(Stage.forward, again=True),
    "B": Stage.backward,
    "I": partial(Stage.backward, whole=False),
    "W": Stage.weight_gradients,
}
"""The function that carries out each kind of action. Its `counts` is traced where some stages only work along."""


def send_shared(step: Step, variables: dict[str, Buffers], device: Index) -> dict[int, dict[str, list[Leaf]]]:
    """Weights that several stages use, by set of variables and collection, as layers use them.

    The stage of a shared layer's first use holds its parameters. Each stage adds gradients of its own uses up in an
    accumulator of its own; in `Stage.summed_gradients` these meet, by one `psum` over the stages for each leaf.
    The stage that holds them sends them to all; of those that all stages compute with together, each has its part.
    """

    def sent(collection: str, v: int) -> list[Leaf]:
        storage = step.storages[collection]
        known, leaves = storage.record_types[v], storage.read(variables[collection], v, 0)
        mine = known.devices[0] == device  # such a set has one instance
        return [a if on_all_stages(spec) else from_stage(mine, a) for a, spec in zip(leaves, known.specs, strict=True)]

    shared = [v for v, known in enumerate(step.model.variable_sets) if known.shared or v in step.ends.sets]
    return {v: {name: sent(name, v) for name in step.collections(*WEIGHTS)} for v in shared}


def from_stage(mine: jax.Array | bool, array: jax.Array) -> jax.Array:
    """An array of one stage, on all of them. JAX sums bools as integers, so they are cast back."""
    return jax.lax.psum(jnp.where(mine, array, jnp.zeros_like(array)), AXIS).astype(array.dtype)
