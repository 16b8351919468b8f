"""What one stage does for one micro-batch: its layers forward, or backward.

All stages run this same code. Which layers are theirs is a matter of loop bounds (`Route`), read from a table by the
index of the virtual stage, so that layers of one kind are compiled once wherever they lie, and no layer is run that the
stage doesn't have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jpipe.execution.program import Program
from jpipe.jax_tools.dtypes import is_float
from jpipe.jax_tools.indexing import look_up, put_row, take_row, take_slice
from jpipe.jax_tools.loops import anchor, each, of_trip
from jpipe.jax_tools.random_keys import layer_key
from jpipe.memory.storage import Row
from jpipe.model.groups import Kind
from jpipe.model.layer_step import Given, Outcome, needs_batch
from jpipe.sharding.shardings import local_structs

Carry = dict[str, Any]
Gather = Callable[[int, list[Any]], list[Any]]
"""(home, parameters as they lie at rest or gathered for the step) -> as a layer takes them."""


@dataclass(frozen=True, eq=False)
class Stage:
    """A stage's device during a step.

    Attributes:
      program: the step.
      variables: the device's buffers, by collection.
      batch: the device's own part of all micro-batches, `[M, b, ...]`.
      key: the step's key; None in evaluation.
      shared: the leaves of shared parameters, by home.
      rates: how fast running averages move, by kind; see `jpipe.model.state`.
      device: the stage index k, a Python integer if there is one stage only.
      gather: (home, a layer's parameters as they lie in `variables`) -> as its forward and backward take them.
      cast_at_use: what a layer makes of its parameters alone isn't kept for the next micro-batch.
    """

    program: Program
    variables: dict[str, Any]
    batch: Any
    key: Any
    shared: dict[int, list[Any]]
    rates: list[list[Any]]
    device: Any
    gather: Gather
    cast_at_use: bool

    def forward(self, virtual_stage: Any, microbatch: Any, carry: Carry, save: Row | None) -> Carry:
        """Runs the stage's layers on `carry["x"]`.

        With `save`, writes the residuals into that row of `carry["residuals"]`. Where `carry` has them, adds new state
        to `carry["updates"]` and the loss to `carry["loss"]`, and writes the outputs into `carry["outputs"]`.
        """

        def visit(c: int, member: Any, trip: Any, carry: Carry) -> tuple[Any, Carry]:
            """One layer forward: reads its input from the carrier and puts its output there."""
            carry, kind = dict(carry), self.program.model.kinds[c]
            x = [] if kind.entry else self.program.carrier.unpack(carry["x"], self._local(kind.takes, kind.takes_at))
            (at, row), trip = anchor((microbatch, save), trip)
            batch = self._batch_of(kind, at)
            if len(kind.members) == 1:
                (batch, x), trip = anchor((batch, x), trip)
            given = self._given(c, member, at, batch)
            run = self.program.forwards[c] if row is None else self.program.tapes[c].forward
            outcome, stored = run(given, x)
            if row is not None:
                assert self.program.residuals is not None
                carry["residuals"] = self.program.residuals.write(carry["residuals"], c, member, stored, row)
            if not kind.final:
                carry["x"] = self.program.carrier.pack(carry["x"], outcome.outputs)
            elif "loss" in carry:
                carry["loss"] = [a + y.astype(a.dtype) for a, y in zip(carry["loss"], outcome.outputs, strict=True)]
            elif "outputs" in carry:
                carry["outputs"] = [put_row(a, y, at) for a, y in zip(carry["outputs"], outcome.outputs, strict=True)]
            if "updates" in carry:
                carry["updates"] = self._accumulate(carry["updates"], c, member, at, given, outcome)
            return trip, carry

        return self._sweep(virtual_stage, visit, carry)

    def backward(self, virtual_stage: Any, microbatch: Any, carry: Carry, residuals: Any, saved: Row) -> Carry:
        """Runs the stage's layers backwards on `carry["dx"]`, adding to `carry["grads"]` layer by layer."""
        assert self.program.residuals is not None
        places = self.program.residuals

        def visit(c: int, member: Any, trip: Any, carry: Carry) -> tuple[Any, Carry]:
            """One layer backward: the same with cotangents."""
            carry, kind, tape = dict(carry), self.program.model.kinds[c], self.program.tapes[c]
            (at, row), trip = anchor((microbatch, saved), trip)
            shapes = [leaf for leaf in self._local(kind.gives, kind.gives_at) if is_float(leaf)]
            dy = [jnp.ones(leaf.shape, leaf.dtype) for leaf in tape.outputs]  # of the loss
            if not kind.final:
                dy = self.program.cotangents.unpack(carry["dx"], shapes)
            batch, stored = self._batch_of(kind, at), places.read(residuals, c, member, row)
            if len(kind.members) == 1:
                (batch, stored, dy), trip = anchor((batch, stored, dy), trip)
            gradients, dx = tape.backward(self._given(c, member, at, batch), stored, dy)
            home = self.program.model.home_of(c)
            if home in self.shared:
                sums = [a + g.astype(a.dtype) for a, g in zip(carry["shared"][home], gradients, strict=True)]
                carry["shared"] = carry["shared"] | {home: sums}
            else:
                carry["grads"] = self.program.storages["params"].add(carry["grads"], c, member, gradients)
            if not kind.entry:
                carry["dx"] = self.program.cotangents.pack(carry["dx"], dx)
            return trip, carry

        return self._sweep(virtual_stage, visit, carry, reverse=True)

    def _sweep(self, virtual_stage: Any, visit: Callable, carry: Carry, *, reverse: bool = False) -> Carry:
        """`trip, carry = visit(kind, member, trip, carry)` for each of the virtual stage's layers, or backwards.

        Whether there is a trip says whether the stage has the layer at all, so what is costly has to be anchored to it.
        What says where to read is enough if the trips of a loop are of different members; of a member that is alone,
        what is read is anchored too.
        """
        route, kinds = self.program.route, self.program.model.kinds

        def one_layer(c: int, i: Any, carry: Carry) -> tuple[Any, Carry]:
            return visit(c, 0 if len(kinds[c].members) == 1 else i, i, carry)

        def one_round(r: Any, carry: Carry) -> tuple[Any, Carry]:
            if isinstance(virtual_stage, int):
                start, stop = route.start[virtual_stage, r].tolist(), route.stop[virtual_stage, r].tolist()
            else:
                table = jnp.asarray([route.start, route.stop])
                at = (0, virtual_stage, r)
                start, stop = take_slice(table, at, (2, 1, 1, len(kinds))).reshape(2, len(kinds))
            for c in reversed(range(len(kinds))) if reverse else range(len(kinds)):
                with jax.named_scope(f"{kinds[c].layer.name}.{c}"):
                    if rounds == 1 and once[0, c]:
                        carry = one_layer(c, start[c], carry)[1]
                    else:
                        carry = each(start[c], stop[c], partial(one_layer, c), carry, reverse=reverse)
            return r, carry

        once = ((route.stop - route.start) == 1).all(axis=0)  # [R, C]: a loop of one trip on all virtual stages
        rounds = route.start.shape[1]
        if rounds == 1 or isinstance(virtual_stage, int):
            for r in reversed(range(rounds)) if reverse else range(rounds):
                carry = one_round(r, carry)[1]
            return carry
        return each(0, look_up(route.num_rounds.tolist(), virtual_stage), one_round, carry, reverse=reverse)

    def _local(self, tree: Any, shardings: list[Any]) -> list[Any]:
        """The types of a device's parts of the leaves at a boundary."""
        return local_structs(tree, shardings, self.program.model.axes)

    def _batch_of(self, kind: Kind, microbatch: Any) -> Any:
        """The micro-batch, for layers that look at it."""
        if not needs_batch(kind):
            return None
        return jax.tree.map(lambda a: take_row(a, microbatch), self.batch)

    def _given(self, c: int, member: Any, microbatch: Any, batch: Any) -> Given:
        kind, step, storages = self.program.model.kinds[c], self.program.steps[c], self.program.storages
        key = None
        if step.train:
            key = layer_key(self.key, look_up(kind.members, member) - self.program.model.first, microbatch)
        home = self.program.model.home_of(c)
        params = self.shared.get(home)
        if params is None:
            params = self.gather(home, storages["params"].read(self.variables["params"], c, member))
        if self.cast_at_use:
            params = [of_trip(leaf, microbatch) for leaf in params]
        return Given(params, self._read_state(self.variables, c, member), key, batch)

    def _accumulate(
        self, updates: dict[str, Any], c: int, member: Any, microbatch: Any, given: Given, outcome: Outcome
    ) -> dict[str, Any]:
        if not given.state:
            return updates
        is_last = microbatch == self.program.schedule.num_microbatches - 1
        totals = self._read_state(updates, c, member)
        totals = self.program.mergings[c].accumulate(totals, given.state, outcome.updates, self.rates[c], is_last)
        return self._write_state(updates, c, member, totals)

    def merged_state(self, updates: dict[str, Any]) -> dict[str, Any]:
        """New buffers of the collections that aren't parameters, from what `forward` accumulated."""

        model, mergings, count = self.program.model, self.program.mergings, self.program.schedule.num_microbatches

        def read(c: int, member: Any, _: Any) -> Any:
            has_state = c < len(model.kinds) and model.kinds[c].state_names
            return [self._read_state(tree, c, member) for tree in (updates, self.variables)] if has_state else None

        def visit(c: int, member: Any, values: Any, buffers: dict[str, Any]) -> dict[str, Any]:
            if values is None:
                return buffers
            totals, old = values
            return self._write_state(buffers, c, member, mergings[c].finish(totals, old, self.rates[c], count))

        empty = {name: jax.tree.map(jnp.zeros_like, self.variables[name]) for name in updates}
        return self.program.storages["params"].for_each_local(read, visit, self.device, empty)

    def _read_state(self, buffers: dict[str, Any], c: int, member: Any) -> list[Any]:
        names = self.program.model.kinds[c].state_names
        return [leaf for name in names for leaf in self.program.storages[name].read(buffers[name], c, member)]

    def _write_state(self, buffers: dict[str, Any], c: int, member: Any, leaves: list[Any]) -> dict[str, Any]:
        buffers, rest = dict(buffers), iter(leaves)
        for name in self.program.model.kinds[c].state_names:
            storage = self.program.storages[name]
            own = [next(rest) for _ in storage.shelves[c].leaves]
            buffers[name] = storage.write(buffers[name], c, member, own)
        return buffers
