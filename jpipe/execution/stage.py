"""What one stage does for one micro-batch: its layers forward, or backward.

All stages run this same code. Which layers are theirs is a matter of loop bounds (`LayerRanges`), read from a table by
the index of the virtual stage, so that layers of one group are compiled once wherever they lie, and no layer is run
that the stage doesn't have.

`g` is the index of a group, `position` that of a layer in it (the first and the last layer are each alone in theirs);
`v` is the index of a set of variables, and `instance` that of a record in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jpipe.execution.step import Step
from jpipe.jax_tools.indexing import look_up, put_row, take_row, take_slice
from jpipe.jax_tools.loops import each, of_trip, tie
from jpipe.jax_tools.random_keys import layer_key
from jpipe.memory.buffers import Index
from jpipe.memory.storage import Buffers, Leaf, Row
from jpipe.model.layer_function import Arguments, Results

Carry = TypeVar("Carry")
Visit = Callable[[int, Index, Index, Carry], tuple[Index, Carry]]
"""`(group, position, trip, carry) -> (trip, carry)`, for one layer.

The trip returned is the one that `tie` gave: the loop counts on from it, or the compiler would drop the tie."""
Gather = Callable[[int, list[Leaf]], list[Leaf]]
"""`(set of variables, a layer's parameters as they lie in the variables)` -> as its forward and backward take them."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ForwardWork:
    """What the forward of a stage's layers reads and writes, in training.

    Attributes:
      activation: boundary buffers with what the next layer takes.
      residuals: buffers of residuals, a row for each micro-batch in flight.
      state: by collection, buffers with the totals of new state so far.
      loss: sums over the micro-batches so far, scalars: of the loss, of its weight, and such a pair for each metric.
    """

    activation: Buffers
    residuals: Buffers
    state: dict[str, Buffers]
    loss: list[jax.Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BackwardWork:
    """What the backward of a stage's layers reads and writes.

    Attributes:
      cotangent: boundary buffers with the cotangents of what the next layer (backwards) gives.
      gradients: buffers with the sums of gradients so far, over this device's own examples; not split over data axes.
      shared_gradients: for each shared set of variables, this stage's sums of its gradients so far.
    """

    cotangent: Buffers
    gradients: Buffers
    shared_gradients: dict[int, list[jax.Array]]


class _Ran(NamedTuple):
    """A layer's forward: the micro-batch and row, tied to its trip, what it was called with, and what it gave."""

    microbatch: Index
    row: Row | None
    arguments: Arguments
    results: Results
    residuals: list[Leaf]


@dataclass(frozen=True, eq=False)
class Stage:
    """A stage's device during a step.

    Attributes:
      step: the step.
      variables: the device's buffers, by collection.
      batch: the device's own part of all micro-batches, `[M, b, ...]`.
      key: the step's key; None in evaluation.
      shared: for each shared set of variables, the leaves of its parameters, on every stage, gathered over data axes.
      device: the stage's index k, a Python integer if there is one stage only.
      gather: gathers a layer's parameters over the data axes; the identity if they are gathered once a step.
      cast_at_use: whether parameters are cast anew for each micro-batch, so that no cast copy of all of them is kept.
    """

    step: Step
    variables: dict[str, Buffers]
    batch: Any
    key: Any
    shared: dict[int, list[Leaf]]
    device: Index
    gather: Gather
    cast_at_use: bool

    def forward(self, virtual_stage: Index, microbatch: Index, work: ForwardWork, row: Row | None) -> ForwardWork:
        """Runs the virtual stage's layers in training; residuals go into a row, if one is given."""
        is_last_microbatch = lambda at: at == self.step.num_microbatches - 1

        def visit(g: int, position: Index, trip: Index, work: ForwardWork) -> tuple[Index, ForwardWork]:
            """One layer: takes its activation, adds to the loss and the state's totals, leaves the next activation."""
            ran, trip = self._run(g, position, microbatch, row, work.activation, trip)
            loss, totals = work.loss, work.state
            if g == self.step.model.last:
                loss = [total + new.astype(total.dtype) for total, new in zip(loss, ran.results.outputs, strict=True)]
            if ran.arguments.state:
                old, last = ran.arguments.state, is_last_microbatch(ran.microbatch)
                found = self._read_state(totals, g, position)
                found = self.step.mergings[g].accumulate(found, old, ran.results.state, last)
                totals = self._write_state(totals, g, position, found)
            return trip, ForwardWork(
                activation=self._pass_on(g, work.activation, ran),
                residuals=self._keep(g, position, work.residuals, ran),
                state=totals,
                loss=loss,
            )

        return self._sweep(virtual_stage, visit, work)

    def recompute(self, virtual_stage: Index, microbatch: Index, activation: Buffers, residuals: Buffers) -> Buffers:
        """Runs the virtual stage's layers again, from its input, for their residuals alone: the first row of these."""

        def visit(g: int, position: Index, trip: Index, carry: tuple[Buffers, Buffers]) -> tuple[Index, Any]:
            activation, residuals = carry
            ran, trip = self._run(g, position, microbatch, Row(0, self.device), activation, trip)
            return trip, (self._pass_on(g, activation, ran), self._keep(g, position, residuals, ran))

        return self._sweep(virtual_stage, visit, (activation, residuals))[1]

    def infer(
        self, virtual_stage: Index, microbatch: Index, activation: Buffers, results: list[jax.Array]
    ) -> tuple[Buffers, list[jax.Array]]:
        """Runs the virtual stage's layers in evaluation.

        Args:
          virtual_stage: its index.
          microbatch: its index.
          activation: boundary buffers with the virtual stage's input.
          results: sums of the loss so far, or the outputs of all micro-batches `[M, b, ...]`.

        Returns:
          (boundary buffers with the virtual stage's output, results with what the last layer gave).
        """
        loses = self.step.spec.loss_fn is not None

        def visit(g: int, position: Index, trip: Index, carry: tuple[Buffers, list[jax.Array]]) -> tuple[Index, Any]:
            activation, results = carry
            ran, trip = self._run(g, position, microbatch, None, activation, trip)
            if g == self.step.model.last:
                pairs = list(zip(results, ran.results.outputs, strict=True))
                results = [a + y.astype(a.dtype) if loses else put_row(a, y, ran.microbatch) for a, y in pairs]
            return trip, (self._pass_on(g, activation, ran), results)

        return self._sweep(virtual_stage, visit, (activation, results))

    def backward(
        self, virtual_stage: Index, microbatch: Index, work: BackwardWork, residuals: Buffers, row: Row
    ) -> BackwardWork:
        """Runs the virtual stage's layers backwards, adding up gradients layer by layer."""
        step = self.step
        assert step.residuals is not None
        stored = step.residuals

        def visit(g: int, position: Index, trip: Index, work: BackwardWork) -> tuple[Index, BackwardWork]:
            """One layer: takes the cotangents of its outputs, adds its gradients, leaves those of its inputs."""
            group, layer = step.model.groups[g], step.layers[g]
            (at, own_row), trip = tie((microbatch, row), trip)
            if g == step.model.last:
                # d loss_sum / d loss_sum: the only output of the last layer that is differentiated.
                cotangents = [jnp.ones(leaf.shape, leaf.dtype) for leaf in layer.outputs]
            else:
                cotangents = step.cotangents.unpack(work.cotangent, group.indices[0])
            batch, kept = self._batch_of(g, at), stored.read(residuals, g, position, own_row)
            if len(group.indices) == 1:
                (batch, kept, cotangents), trip = tie((batch, kept, cotangents), trip)
            gradients, cotangents = layer.backward(self._arguments(g, position, at, batch), kept, cotangents)
            work = self._add_gradients(g, position, work, gradients)
            if group.indices[0] > 0:
                packed = step.cotangents.pack(work.cotangent, group.indices[0] - 1, cotangents)
                work = replace(work, cotangent=packed)
            return trip, work

        return self._sweep(virtual_stage, visit, work, reverse=True)

    def _add_gradients(self, g: int, position: Index, work: BackwardWork, gradients: list[Leaf]) -> BackwardWork:
        """Adds a layer's gradients to the sums of its set of variables."""
        variable_set = self.step.model.groups[g].variable_set
        if variable_set is None:
            return work
        if variable_set in self.shared:
            sums = [
                a + new.astype(a.dtype) for a, new in zip(work.shared_gradients[variable_set], gradients, strict=True)
            ]
            return replace(work, shared_gradients=work.shared_gradients | {variable_set: sums})
        return replace(
            work, gradients=self.step.storages["params"].add(work.gradients, variable_set, position, gradients)
        )

    # --- one layer ---

    def _run(
        self, g: int, position: Index, microbatch: Index, row: Row | None, activation: Buffers, trip: Index
    ) -> tuple[_Ran, Index]:
        """The forward of one layer, which reads its input from the boundary buffers; (what it did, trip)."""
        group = self.step.model.groups[g]
        first = group.indices[0]  # equal leaves lie at the same place: its boundary stands for those of all the group
        x = self.step.activations.unpack(activation, first - 1) if first else []
        (at, row), trip = tie((microbatch, row), trip)
        batch = self._batch_of(g, at)
        if len(group.indices) == 1:
            (batch, x), trip = tie((batch, x), trip)
        arguments = self._arguments(g, position, at, batch)
        # Without a row nothing stores residuals: then the plain forward runs, which makes none.
        run = self.step.forwards[g] if row is None else self.step.layers[g].forward
        results, residuals = run(arguments, x)
        return _Ran(at, row, arguments, results, residuals), trip

    def _pass_on(self, g: int, activation: Buffers, ran: _Ran) -> Buffers:
        """The boundary buffers with what a layer gave, unless it is the last one."""
        if g == self.step.model.last:
            return activation
        return self.step.activations.pack(activation, self.step.model.groups[g].indices[0], ran.results.outputs)

    def _keep(self, g: int, position: Index, residuals: Buffers, ran: _Ran) -> Buffers:
        """The buffers of residuals with those of a layer in its row, if it has one."""
        if ran.row is None:
            return residuals
        assert self.step.residuals is not None
        return self.step.residuals.write(residuals, g, position, ran.residuals, ran.row)

    def _batch_of(self, g: int, microbatch: Index) -> Any:
        """The micro-batch, for layers that look at it."""
        if not self.step.functions[g].reads_batch:
            return None
        return jax.tree.map(lambda a: take_row(a, microbatch), self.batch)

    def _arguments(self, g: int, position: Index, microbatch: Index, batch: Any) -> Arguments:
        """What the layer at a position of a group is called with."""
        group, params = self.step.model.groups[g], []
        key = None
        if self.step.functions[g].train:
            key = layer_key(self.key, look_up(group.indices, position), microbatch)
        if group.variable_set in self.shared:
            params = self.shared[group.variable_set]
        elif group.variable_set is not None:
            read = self.step.storages["params"].read(self.variables["params"], group.variable_set, position)
            params = self.gather(group.variable_set, read)
        # A layer that computes in another dtype casts its parameters. Times a one that only the trip knows, they can't
        # be cast ahead of the ticks, all of them at once.
        if self.cast_at_use:
            params = [of_trip(leaf, microbatch) for leaf in params]
        return Arguments(params, self._read_state(self.variables, g, position), key, batch)

    # --- all layers ---

    def _sweep(self, virtual_stage: Index, visit: Visit, carry: Carry, *, reverse: bool = False) -> Carry:
        """`trip, carry = visit(group, position, trip, carry)` for each of the virtual stage's layers, or backwards.

        A stage that lacks a layer runs its loop for zero trips. A compiler may move what doesn't depend on the trip out
        of the loop, and such a stage would compute it too. So `visit` ties what it reads to the trip. In a group of
        several layers, tying the micro-batch and the row is enough, since the trip is the position, which selects the
        data. In a group of one layer the position is always 0, so the data are tied too.

        A pass goes once through all groups, in order; layers A, B, A, B take two passes.
        """
        ranges, groups = self.step.ranges, self.step.model.groups
        num_passes, always_one = ranges.start.shape[1], ranges.always_one

        def one_layer(g: int, trip: Index, carry: Carry) -> tuple[Index, Carry]:
            return visit(g, 0 if len(groups[g].indices) == 1 else trip, trip, carry)

        def one_pass(p: Index, carry: Carry) -> tuple[Index, Carry]:
            if isinstance(virtual_stage, int):
                start, stop = ranges.start[virtual_stage, p].tolist(), ranges.stop[virtual_stage, p].tolist()
            else:
                table = jnp.asarray([ranges.start, ranges.stop])
                start, stop = take_slice(table, (0, virtual_stage, p), (2, 1, 1, len(groups))).reshape(2, len(groups))
            for g in reversed(range(len(groups))) if reverse else range(len(groups)):
                with jax.named_scope(f"{groups[g].layer.name}.{g}"):
                    if num_passes == 1 and always_one[0, g]:
                        carry = one_layer(g, start[g], carry)[1]
                    else:
                        carry = each(start[g], stop[g], partial(one_layer, g), carry, reverse=reverse)
            return p, carry

        if num_passes == 1 or isinstance(virtual_stage, int):
            for p in reversed(range(num_passes)) if reverse else range(num_passes):
                carry = one_pass(p, carry)[1]
            return carry
        return each(0, look_up(ranges.passes_of.tolist(), virtual_stage), one_pass, carry, reverse=reverse)

    # --- state ---

    def merged_state(self, totals: dict[str, Buffers]) -> dict[str, Buffers]:
        """New buffers of the collections that aren't parameters, from the totals that `forward` added up.

        Every collection has the same records, an instance of a set of variables each: those of "params" lead the way.
        """
        step, sets = self.step, self.step.model.variable_sets  # layers with state never share: instance is position

        def read(v: int, instance: Index, _: Any) -> Any:
            g = sets[v].group
            if not step.model.groups[g].state_names:
                return None
            return [self._read_state(tree, g, instance) for tree in (totals, self.variables)]

        def visit(v: int, instance: Index, values: Any, buffers: dict[str, Buffers]) -> dict[str, Buffers]:
            if values is None:
                return buffers
            g, (found, old) = sets[v].group, values
            new = step.mergings[g].finish(found, old, step.num_microbatches)
            return self._write_state(buffers, g, instance, new)

        zeros = {name: jax.tree.map(jnp.zeros_like, self.variables[name]) for name in totals}
        return step.storages["params"].for_each_local(read, visit, self.device, zeros)

    def _read_state(self, buffers: dict[str, Buffers], g: int, position: Index) -> list[Leaf]:
        """The leaves of a layer's state, of all its collections in order, out of buffers by collection."""
        group = self.step.model.groups[g]
        storages, v = self.step.storages, group.variable_set
        return [leaf for n in group.state_names if v is not None for leaf in storages[n].read(buffers[n], v, position)]

    def _write_state(
        self, buffers: dict[str, Buffers], g: int, position: Index, leaves: list[Leaf]
    ) -> dict[str, Buffers]:
        """The inverse of `_read_state`: the buffers with these leaves written."""
        group, buffers, rest = self.step.model.groups[g], dict(buffers), iter(leaves)
        for name in group.state_names:
            storage, v = self.step.storages[name], group.variable_set
            assert v is not None
            own = [next(rest) for _ in storage.record_types[v].leaves]
            buffers[name] = storage.write(buffers[name], v, position, own)
        return buffers
