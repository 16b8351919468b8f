"""A model that is one module, and its traces: nothing here knows Flax, the module is one `AnyLayer`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import jax
from jax.sharding import PartitionSpec

from jpipe.cutting.pieces import Traced
from jpipe.cutting.straight import Straight, straighten
from jpipe.cutting.unread import outputs_read
from jpipe.jax.tracing import trace, uses
from jpipe.layers.base import Activation, AnyLayer, Context, LayerVariables, describe, positional
from jpipe.model.groups import strong
from jpipe.model.layer_function import TracedInit, trace_init
from jpipe.model.loss import LossFn
from jpipe.model.random_keys import key_shape
from jpipe.model.trace import check_updates, described_inputs, inputs_of, telling, warn_of_dropouts
from jpipe.types import Batch, PyTree, Shapes

Read = Callable[[Batch], PyTree]
"""From a batch to the model's inputs."""


@dataclass(frozen=True, eq=False)
class WholeModel:
    """A model that is one module.

    Attributes:
      layer: the module as one layer.
      variables: the shapes of its variables by collection.
      init: how new variables are made; None if the module has its values already.
      read: for each leaf of the outputs, whether the loss reads it; None before that is known.
    """

    layer: AnyLayer
    variables: dict[str, Shapes]
    init: TracedInit | None
    read: tuple[bool, ...] | None = None

    @cached_property
    def collections(self) -> list[str]:
        """The collection of each leaf of the variables."""
        return [name for name in sorted(self.variables) for _ in jax.tree.leaves(self.variables[name])]

    @cached_property
    def paths(self) -> list[tuple[str, ...]]:
        """The path of each leaf of the variables within its collection."""
        # The variables of a `Layer` may be a bare array, without a path.
        in_words = lambda path: tuple(jax.tree_util.keystr((key,), simple=True) for key in path[1:]) or ("value",)
        return [in_words(path) for path, _ in jax.tree_util.tree_leaves_with_path(self.unboxed)]

    @cached_property
    def specs(self) -> list[PartitionSpec]:
        """The mesh axes that the model's metadata names for each leaf of the variables."""
        by_name = self.layer.partition_specs(self.variables)
        return [spec for name in sorted(self.variables) for spec in by_name[name]]

    @cached_property
    def unboxed(self) -> dict[str, Shapes]:
        """The shapes of the variables, without boxes of Flax's metadata."""
        return self.layer.from_item(self.layer.to_item(self.variables))

    def trace(self, read_inputs: Read, batch: Shapes) -> Modes:
        """The model's traces for the shapes of a micro-batch `[b, ...]`."""
        (training, outputs), (evaluation, _) = (self.trace_mode(read_inputs, batch, train) for train in (True, False))
        modes = Modes(Traced(training), Traced(evaluation), outputs, len(jax.tree.leaves(batch)))
        return modes if self.read is None else modes.reading(self.read)

    def read_by(self, loss_fn: LossFn | None, modes: Modes, batch: Shapes) -> tuple[WholeModel, Modes]:
        """(the model that knows which outputs a loss reads, its traces of these).

        Args:
          loss_fn: the loss that follows, if there is one.
          modes, batch: the model's traces of all outputs for a micro-batch, and that one.
        """
        read = outputs_read(loss_fn, modes.outputs, batch)
        return replace(self, read=read), modes.reading(read)

    def trace_mode(self, read_inputs: Read, batch: Shapes, train: bool) -> tuple[Straight, Shapes]:
        """(the model's equations in training or evaluation, the shapes of its outputs)."""

        def call(variables: LayerVariables, batch: Batch, key: jax.Array | None) -> tuple[Activation, LayerVariables]:
            return self.layer.apply(variables, positional(read_inputs(batch)), Context(key, train, batch))

        told = lambda: told_of(trace(read_inputs, batch)[1], self.variables)
        with telling(self.layer.name, told), self.layer.dropouts() as dropouts:
            closed, (outputs, updates) = trace(call, self.variables, batch, key_shape() if train else None)
            check_updates(self.variables, updates, closed)
        if train and not uses(closed)[-1]:
            warn_of_dropouts(self.layer.name, dropouts)
        state = [i for i, name in enumerate(self.collections) if name in updates]
        return straighten(closed, len(self.collections), len(jax.tree.leaves(outputs)), state), strong(outputs)


def make_whole(layer: AnyLayer, read_inputs: Read, batch: Shapes) -> WholeModel:
    """A model with variables for the shapes of a micro-batch `[b, ...]`.

    Raises:
      ValueError: the inputs can't be read, or the model raises an error.
    """
    if layer.ready is not None:
        return WholeModel(layer, strong(jax.eval_shape(lambda v: v, layer.ready)), None)
    inputs = inputs_of(read_inputs, batch)
    with telling(layer.name, lambda: told_of(inputs)):
        init = trace_init(layer, key_shape(), inputs, batch)
    return WholeModel(layer, strong(init.variables), init)


def told_of(inputs: Shapes, variables: dict[str, Shapes] | None = None) -> list[str]:
    """The lines that explain an error of a model: what it was called with, and its parameters."""
    has = [f"it has the parameters {describe(variables['params'])}"] if variables and "params" in variables else []
    return [f"it was called with {described_inputs(inputs)}", *has]


@dataclass(frozen=True, eq=False)
class Modes:
    """The traces of a model at some shapes.

    Attributes:
      training: in training.
      evaluation: in evaluation.
      outputs: the shapes of the model's outputs, `[b, ...]`, also of those that nobody reads.
      num_leaves: how many leaves the batch has.
    """

    training: Traced
    evaluation: Traced
    outputs: Shapes
    num_leaves: int

    def reading(self, read: tuple[bool, ...]) -> Modes:
        """The same traces, of which only these outputs are read."""
        modes = [replace(traced.straight, read=read) for traced in (self.training, self.evaluation)]
        # No piece has a slice of what some place uses whole, in whichever mode.
        both = [straight.depths_read for straight in modes]
        depths = {leaf: min(d[leaf] for d in both if leaf in d) for leaf in {*both[0], *both[1]}}
        training, evaluation = (Traced(replace(straight, depths=depths)) for straight in modes)
        return Modes(training, evaluation, self.outputs, self.num_leaves)
