"""What one layer does with the leaves of its variables and inputs: forward, its vjp, the model's ends included.

A layer is given the same things in forward and backward (`Given`), so that only what depends on its inputs has to wait
in between (`jpipe.model.tape`). Nothing differentiates through a loop or a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jpipe.jax_tools.dtypes import is_float
from jpipe.jax_tools.jaxprs import only_needed, without_stops
from jpipe.jax_tools.random_keys import example_key
from jpipe.jax_tools.tracing import replay, trace
from jpipe.layers.base import Context, LayerError, describe, positional
from jpipe.model.groups import Kind, same_shapes
from jpipe.model.loss import loss_sums
from jpipe.model.remat import Remat
from jpipe.model.tape import Choose, Forward, LayerShardings, Tape, WholeTape, make_forward, partition_tape, trace_tape
from jpipe.sharding.shardings import PARTIAL, Axis, Sharding, in_runs, replicated
from jpipe.sharding.splits import WHOLE, Splits
from jpipe.sharding.spmd import partition_program


class Given(NamedTuple):
    """What a layer is given in forward and backward alike: leaves of its variables, its key and its micro-batch."""

    params: list[Any]
    state: list[Any]
    key: Any
    batch: Any


class Outcome(NamedTuple):
    """What a layer's forward returns: leaves of its outputs (or [loss_sum, weight_sum]) and of its new state."""

    outputs: list[Any]
    updates: list[Any]


@dataclass(frozen=True, eq=False)
class LayerStep:
    """Forward and backward of the layers of one kind.

    Attributes:
      kind: the layers.
      key: the type of its random key for a micro-batch in training; None in evaluation.
      read_inputs: batch -> the model's inputs, for the entry layer.
      loss_fn: (outputs, batch) -> loss or (loss_sum, weight_sum), for the final layer; None returns the outputs.
      remat: the policy for the residuals.
    """

    kind: Kind
    key: jax.ShapeDtypeStruct | None
    read_inputs: Callable[[Any], Any]
    loss_fn: Callable[[Any, Any], Any] | None
    remat: Remat

    @property
    def train(self) -> bool:
        """Training or evaluation mode."""
        return self.key is not None

    def forward(self, given: Given, x: list[Any]) -> Outcome:
        """Runs the layer on the leaves of its inputs (ignored by the entry layer)."""
        return self._run(given, self._inputs(given, x))

    def state_rates(self, shapes: Given, leaves: Sequence[int], splits: Splits) -> Callable[[], list[Any]]:
        """How fast each of these leaves of the state moves towards a micro-batch's value: 1 - d(new)/d(old).

        For running averages, which move at the same rate whatever they see: nothing is computed but constants.

        Returns:
          A function of nothing that gives the rates, a device's parts, in a program on all devices.
        """
        zeros = lambda tree: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), tree)

        def rates() -> list[Any]:
            given = zeros(shapes._replace(key=None))._replace(key=example_key(shapes.key))

            def update(*averages: Any) -> list[Any]:
                state = list(given.state)
                for i, leaf in zip(leaves, averages, strict=True):
                    state[i] = leaf
                new = self.forward(given._replace(state=state), jax.tree.leaves(zeros(self.kind.takes))).updates
                return [new[i] for i in leaves]

            averages = [given.state[i] for i in leaves]
            program = without_stops(trace(update, *averages)[0])  # nnx stops the gradients of what it keeps
            slopes = jax.jvp(replay(program, averages), averages, list(map(jnp.ones_like, averages)))[1]
            return [1 - slope for slope in slopes]

        if not leaves:
            return list
        program, found = trace(rates)
        wanted = [_as(self._state_at(splits)[i]) for i in leaves]
        return replay(partition_program(only_needed(program), splits.axes, [], wanted).program, found)

    def _state_at(self, splits: Splits) -> list[Sharding]:
        """How the leaves of the state lie."""
        specs = self.kind.specs
        return [splits.at_work(spec) for name in self.kind.state_names for spec in specs.get(name, [])]

    def traced(self, given: Given, splits: Splits = WHOLE) -> Forward:
        """The layer's forward, traced at these shapes, for one of the devices of a stage."""
        return make_forward(self.forward, given, self._takes, self._shardings(given, splits))

    def whole(self, given: Given) -> WholeTape:
        """The layer's forward and backward, traced at these shapes, on whole arrays."""
        has_cotangent = lambda outcome: self._differentiable(outcome.outputs)
        try:
            return trace_tape(self.differentiate, has_cotangent, given, self._takes)
        except Exception as error:
            error.add_note(f"The layer {self.kind.layer.name} raised this while it was differentiated.")
            raise

    def tape(self, given: Given, splits: Splits = WHOLE) -> Tape:
        """`whole`, for one of the devices of a stage."""
        return partition_tape(self.whole(given), self._shardings(given, splits))

    @property
    def _takes(self) -> list[Any]:
        """The shapes of the inputs; the entry layer has none, but reads them from its batch."""
        return [] if self.kind.entry else jax.tree.leaves(self.kind.takes)

    def _shardings(self, given: Given, splits: Splits) -> LayerShardings:
        """How all that the layer works on shardings."""
        kind, axes = self.kind, splits.axes
        at = lambda shardings: list(shardings) if axes else [()] * len(shardings)
        params, state = [splits.at_work(spec) for spec in kind.specs.get("params", [])], self._state_at(splits)
        batch = [] if given.batch is None else [splits.of_examples(a.shape[0]) for a in jax.tree.leaves(given.batch)]
        takes_at, gives_at = at([] if kind.entry else kind.takes_at), at(kind.gives_at)
        outputs_at = list(map(in_runs, gives_at)) if kind.final else gives_at
        loses = kind.final and self.loss_fn is not None  # sums of a micro-batch may be left partial

        def outcome(found: Outcome) -> list[Choose]:
            outputs = [lambda s: s] * len(found.outputs) if loses else list(map(_as, outputs_at))
            return [*outputs, *[_as(s) for s, _ in zip(state, found.updates, strict=False)]]

        moving = lambda tree, at: [s for a, s in zip(jax.tree.leaves(tree), at, strict=True) if is_float(a)]
        return LayerShardings(
            axes=axes,
            given=[*params, *state, *[replicated(axes)] * (given.key is not None), *batch],
            inputs=takes_at,
            outcome=outcome,
            cotangents=[replicated(axes)] if kind.final else moving(kind.gives, gives_at),
            gradients=[
                *[_as(_unreduced(s, axes)) for s in params],
                *[_as(s) for s in ([] if kind.entry else moving(kind.takes, takes_at))],
            ],
        )

    def _inputs(self, given: Given, x: list[Any]) -> Any:
        if self.kind.entry:
            return self.read_inputs(given.batch)
        return jax.tree.unflatten(jax.tree.structure(self.kind.takes), x)

    def _run(self, given: Given, inputs: Any) -> Outcome:
        kind, names = self.kind, self.kind.state_names
        leaves = iter(given.state)
        trees = {n: jax.tree.map(lambda _: next(leaves), kind.variables[n]) for n in names}
        if "params" in kind.variables:
            trees["params"] = jax.tree.unflatten(jax.tree.structure(kind.variables["params"]), given.params)
        try:
            outputs, updates = kind.layer.apply(trees, positional(inputs), Context(given.key, self.train, given.batch))
        except LayerError as error:
            raise ValueError(f"{kind.layer.name} {error}") from error
        if not same_shapes(outputs, kind.gives):
            raise ValueError(
                f"{kind.layer.name} gives {describe(jax.tree.map(jnp.asarray, outputs))} in "
                f"{'training' if self.train else 'evaluation'}, not {describe(kind.gives)} as it was traced; give the "
                "same structure and shapes in both modes"
            )
        outputs = jax.tree.map(lambda leaf, want: jnp.asarray(leaf, want.dtype), outputs, kind.gives)
        if kind.final and self.loss_fn is not None:
            outputs = loss_sums(self.loss_fn(outputs, given.batch))
        return Outcome(
            jax.tree.leaves(outputs), [u for n in names if n in updates for u in jax.tree.leaves(updates[n])]
        )

    def differentiate(self, given: Given, x: list[Any]) -> tuple[Outcome, Any]:
        """`forward`, and the vjp: cotangents of the differentiable outputs -> (gradients, cotangents of the inputs)."""
        structure, leaves = jax.tree.structure(self.kind.takes), jax.tree.leaves(self._inputs(given, x))
        moving = [not self.kind.entry and is_float(leaf) for leaf in leaves]

        def run(params: list[Any], floats: list[Any]) -> tuple[list[Any], Any]:
            rest = iter(floats)
            filled = [next(rest) if move else leaf for leaf, move in zip(leaves, moving, strict=True)]
            outcome = self._run(given._replace(params=params), jax.tree.unflatten(structure, filled))
            return self._differentiable(outcome.outputs), outcome

        floats = [leaf for leaf, move in zip(leaves, moving, strict=True) if move]
        _, vjp, outcome = jax.vjp(self.remat.wrap(run), given.params, floats, has_aux=True)
        return outcome, vjp

    def _differentiable(self, outputs: list[Any]) -> list[Any]:
        return outputs[:1] if self.kind.final else [leaf for leaf in outputs if is_float(leaf)]


def _as(sharding: Sharding) -> Choose:
    """However a result lies by itself, it has to lie like this."""
    return lambda _: sharding


def _unreduced(sharding: Sharding, axes: tuple[Axis, ...]) -> Sharding:
    """How the gradient of a micro-batch lies: over the data axes it stays a sum to be taken, once a step."""
    return tuple(PARTIAL if axis.of_examples else p for p, axis in zip(sharding, axes, strict=True))


def given_shapes(step: LayerStep, batch: Any) -> Given:
    """The shapes of what a layer is given."""
    kind = step.kind
    return Given(
        params=jax.tree.leaves(kind.variables.get("params")),
        state=[leaf for name in kind.state_names for leaf in jax.tree.leaves(kind.variables[name])],
        key=step.key,
        batch=batch if needs_batch(kind) else None,
    )


def needs_batch(kind: Kind) -> bool:
    """Whether a layer is given its micro-batch."""
    return kind.entry or kind.final or kind.layer.reads_batch
