"""One layer as a function of arrays, and how what it works on lies on the devices of a stage.

A layer is called with the same arguments in forward and backward (`Arguments`), so that between the two only what
depends on its activation has to wait (`jpipe.model.traced_layer`). Activations and variables are flat lists of leaves
here. It is one layer, on whole arrays, that is differentiated: never the loop over layers, never a collective.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jpipe.jax_tools.dtypes import is_float
from jpipe.layers.base import Context, LayerError, describe, positional
from jpipe.mesh.splits import Splits
from jpipe.model.groups import LayerGroup, same_shapes
from jpipe.model.loss import LossFn, loss_sums
from jpipe.model.remat import Remat
from jpipe.partitioner.choice import Wanted, always, as_it_lies
from jpipe.partitioner.shardings import PARTIAL, REPLICATED, Axis, Sharding, replicated
from jpipe.types import Batch, Leaf, PyTree, Shapes


class Arguments(NamedTuple):
    """What a layer is called with besides its activation, in forward and backward alike.

    Attributes:
      params: the leaves of its parameters.
      state: the leaves of its other collections, in the order of `LayerGroup.state_names`.
      key: its random key for the micro-batch; None in evaluation.
      batch: the micro-batch `[b, ...]`, a pytree; None for a layer that doesn't look at it.
    """

    params: list[Leaf]
    state: list[Leaf]
    key: Leaf | None
    batch: Batch


class Results(NamedTuple):
    """What a layer's forward returns.

    Attributes:
      outputs: the leaves of its activation; where the loss follows it, scalars: the loss's sum, its weight's, and such
        a pair for each metric (`jpipe.model.loss.loss_sums`).
      state: the leaves of the new state, of all collections in order; empty in evaluation.
    """

    outputs: list[Leaf]
    state: list[Leaf]


@dataclass(frozen=True, eq=False)
class LayerFunction:
    """What the layers of one group compute.

    Attributes:
      group: the layers.
      key: the type of their random keys in training; None in evaluation.
      remat: which residuals its vjp keeps (`jpipe.model.traced_layer` takes it).
      batch: the shapes of the micro-batch.
      loss_fn: of the last layer the user's loss, or None to return its outputs; None for all others.
    """

    group: LayerGroup
    key: jax.ShapeDtypeStruct | None
    remat: Remat
    batch: Shapes
    loss_fn: LossFn | None = None

    @property
    def train(self) -> bool:
        """True in training, where there is a key."""
        return self.key is not None

    @property
    def reads_batch(self) -> bool:
        """Whether it has to be called with its micro-batch."""
        return self.loss_fn is not None or self.group.layer.reads_batch

    @property
    def arguments(self) -> Arguments:
        """The shapes of its arguments."""
        variables = self.group.variables
        return Arguments(
            params=jax.tree.leaves(variables.get("params")),
            state=[leaf for name in self.group.state_names for leaf in jax.tree.leaves(variables[name])],
            key=self.key,
            batch=self.batch if self.reads_batch else None,
        )

    def forward(self, arguments: Arguments, activation: list[Leaf]) -> Results:
        """Calls the layer, and the loss if it follows."""
        group, params, state = self.group, iter(arguments.params), iter(arguments.state)
        filled = lambda name, tree: jax.tree.map(lambda _: next(params if name == "params" else state), tree)
        variables = {name: filled(name, tree) for name, tree in group.variables.items()}
        inputs = jax.tree.unflatten(jax.tree.structure(group.takes), activation)
        context = Context(arguments.key, self.train, arguments.batch)
        try:
            outputs, new = group.layer.apply(variables, positional(inputs), context)
        except LayerError as error:
            raise ValueError(f"{group.layer.name} {error}") from error
        outputs = self._checked(outputs)
        if self.loss_fn is not None:
            outputs = loss_sums(self.loss_fn(outputs, arguments.batch))
        return Results(jax.tree.leaves(outputs), jax.tree.leaves([new.get(name) for name in group.state_names]))

    def _checked(self, outputs: PyTree) -> PyTree:
        """Outputs in the dtypes that the layer was traced with; of other shapes, they are an error."""
        gives = self.group.gives
        if not same_shapes(outputs, gives):
            raise ValueError(
                f"{self.group.layer.name} gives {describe(jax.tree.map(jnp.asarray, outputs))} in "
                f"{'training' if self.train else 'evaluation'}, not {describe(gives)} as it was traced; give the "
                "same structure and shapes in both modes"
            )
        return jax.tree.map(lambda leaf, want: jnp.asarray(leaf, want.dtype), outputs, gives)

    def differentiated(self, outputs: list[Leaf]) -> list[Leaf]:
        """The outputs that have cotangents: of the loss's sums the first, else the floating-point ones."""
        return outputs[:1] if self.loss_fn is not None else [leaf for leaf in outputs if is_float(leaf)]

    def shardings(self, splits: Splits) -> LayerShardings:
        """How all that the layer works on lies on the devices of a stage, where arrays are split so."""
        group, axes = self.group, splits.axes
        # A sharding has an entry for each axis. Costs ask for one device, without axes, of a model traced for more.
        over_axes = lambda shardings: list(shardings) if axes else [()] * len(shardings)
        of_floats = lambda tree, at: [s for leaf, s in zip(jax.tree.leaves(tree), at, strict=True) if is_float(leaf)]
        params = [splits.at_work(spec) for spec in group.specs.get("params", [])]
        state = [splits.at_work(spec) for name in group.state_names for spec in group.specs[name]]
        key = [replicated(axes)] * self.train
        batch = [splits.of_examples(leaf.shape[0]) for leaf in jax.tree.leaves(self.arguments.batch)]
        takes_at, gives_at = over_axes(group.takes_at), over_axes(group.gives_at)
        moved = [*(_unreduced(s, axes) for s in params), *map(always, of_floats(group.takes, takes_at))]
        return LayerShardings(
            params=params,
            gathered=[splits.gathered(spec) for spec in group.specs.get("params", [])],
            state=state,
            arguments=[*params, *state, *key, *batch],
            activation=takes_at,
            outputs=None if self.loss_fn is not None else gives_at,
            cotangents=[replicated(axes)] if self.loss_fn is not None else of_floats(group.gives, gives_at),
            gradients=moved,
        )


@dataclass(frozen=True)
class LayerShardings:
    """How what a layer works on lies on the devices of its stage, leaf by leaf.

    Attributes:
      params: the leaves of its parameters at work.
      gathered: the same, gathered over the data axes.
      state: those of its other variables.
      arguments: those of all its `Arguments`.
      activation: what it takes.
      outputs: how its outputs have to lie; None for sums of the loss, which may be left partial.
      cotangents: of the outputs that have some (`LayerFunction.differentiated`).
      gradients: how the gradients of its parameters have to lie, and the cotangents of the activation.
    """

    params: list[Sharding]
    gathered: list[Sharding]
    state: list[Sharding]
    arguments: list[Sharding]
    activation: list[Sharding]
    outputs: list[Sharding] | None
    cotangents: list[Sharding]
    gradients: list[Wanted]

    def results(self, results: Results) -> list[Wanted]:
        """How the leaves of `results` have to lie."""
        state = self.state if results.state else []  # evaluation gives no new state
        if self.outputs is None:
            return [*[as_it_lies] * len(results.outputs), *map(always, state)]
        return list(map(always, [*self.outputs, *state]))


def _unreduced(sharding: Sharding, axes: tuple[Axis, ...]) -> Wanted:
    """How the gradient of a parameter lies that lies so: as it, but partial where the sum can be taken once a step.

    That is over axes that don't split it: always over data axes, over others if devices don't have all of it anyway.
    """

    def wanted(own: Sharding) -> Sharding:
        is_late = [
            p == REPLICATED and (a.is_data or o != REPLICATED) for p, o, a in zip(sharding, own, axes, strict=True)
        ]
        return tuple(PARTIAL if late else p for p, late in zip(sharding, is_late, strict=True))

    return wanted
