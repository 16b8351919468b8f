"""One layer as a function of arrays, and how its arrays lie on the devices of a stage.

A layer is called with the same arguments in forward and backward (`Arguments`), so that between the two only what
depends on its activation has to wait (`jpipe.model.traced_layer`). Activations and variables are flat lists of leaves
here. It is one layer, on whole arrays, that is differentiated: never the loop over layers, never a collective.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jpipe.arrays.dtypes import is_float
from jpipe.jaxprs.tracing import no_mesh, replay, trace
from jpipe.layers.base import Activation, AnyLayer, Context, LayerError, LayerVariables, describe, positional
from jpipe.layers.decode_mode import CACHE
from jpipe.mesh.axes import AXIS
from jpipe.mesh.splits import Splits
from jpipe.model.constants import Constants
from jpipe.model.groups import EVALUATION, GRADIENT, INIT, TRAIN, LayerGroup, same_shapes
from jpipe.model.loss import TracedLoss
from jpipe.model.remat import Remat
from jpipe.partitioner.choice import Wanted, always, as_it_lies
from jpipe.partitioner.shardings import PARTIAL, REPLICATED, Axis, Sharding, replicated
from jpipe.seam.jaxpr_types import ClosedJaxpr
from jpipe.types import Batch, Leaf, PyTree, Shapes


class Arguments(NamedTuple):
    """The arguments of a layer besides its activation, in forward and backward alike.

    Attributes:
      params: the leaves of its parameters.
      state: the leaves of its state, in the order of `LayerGroup.state_names`.
      fixed: the leaves of collections that it only reads, in the order of `LayerGroup.fixed_names`, then its constants
        (`LayerFunction.constants`).
      key: its random key for the micro-batch; None in evaluation.
      batch: the micro-batch `[b, ...]`, a pytree; None for a layer that doesn't look at it.
    """

    params: list[Leaf]
    state: list[Leaf]
    fixed: list[Leaf]
    key: Leaf | None
    batch: Batch

    @property
    def variables(self) -> list[Leaf]:
        """The arguments that are the same for all micro-batches, which come first: variables as before the step."""
        return [*self.params, *self.state, *self.fixed]


class Results(NamedTuple):
    """The results of a layer's forward.

    Attributes:
      outputs: the leaves of its activation; where the loss follows it, scalars: a sum and a weight for each term of the
        loss, and for each metric (`TracedLoss.sums`).
      state: the leaves of the new state, of all collections in order; empty in evaluation.
    """

    outputs: list[Leaf]
    state: list[Leaf]


@dataclass(frozen=True, eq=False)
class LayerFunction:
    """The function that the layers of one group compute.

    Attributes:
      group: the layers.
      key: the type of their random keys in training; None in evaluation.
      remat: which residuals its vjp keeps (`jpipe.model.traced_layer` takes it).
      batch: the shapes of the micro-batch.
      loss: of the last layer the user's, or None to return its outputs; None for all others.
    """

    group: LayerGroup
    key: jax.ShapeDtypeStruct | None
    remat: Remat
    batch: Shapes
    loss: TracedLoss | None = None

    @property
    def train(self) -> bool:
        """True in training, where there is a key."""
        return self.key is not None

    @property
    def reads_batch(self) -> bool:
        """Whether it has to be called with its micro-batch."""
        return self.loss is not None or self.group.layer.reads_batch

    @property
    def constants(self) -> Constants:
        """The numbers in which the layers differ."""
        return self.group.constants.get(TRAIN if self.train else EVALUATION, Constants())

    @property
    def arguments(self) -> Arguments:
        """The shapes of its arguments."""
        group = self.group
        return Arguments(
            params=jax.tree.leaves(group.variables.get("params")),
            state=group.leaves(group.state_names),
            fixed=[*group.leaves(group.fixed_names), *self.constants.shapes],
            key=self.key,
            batch=self.batch if self.reads_batch else None,
        )

    @property
    def overwritten(self) -> list[int]:
        """Which leaves of `Arguments.fixed` get their gradients as new values."""
        rules = [self.group.rules[name] for name in self.group.fixed_names for _ in self.group.leaves([name])]
        return [i for i, rule in enumerate(rules) if rule == GRADIENT]

    def forward(self, arguments: Arguments, activation: list[Leaf]) -> Results:
        """Calls the layer, and the loss if it follows."""
        group, leaves = self.group, iter(arguments.variables)
        filled = lambda name: jax.tree.map(lambda _: next(leaves), group.variables[name])
        variables = {name: filled(name) for name in group.names}
        inputs = jax.tree.unflatten(jax.tree.structure(group.takes), activation)
        context = Context(arguments.key, self.train, arguments.batch)
        try:
            if self.constants.places:
                jaxpr, results = trace_call(group.layer, group.variables, group.takes, self.arguments.batch, self.key)
                run = replay(self.constants.put_into(jaxpr, list(leaves)), results)
                outputs, new = run(variables, inputs, context.batch, context.key)
            else:
                outputs, new = group.layer.apply(variables, positional(inputs), context)
        except LayerError as error:
            raise ValueError(f"{group.layer.name} {error}") from error
        outputs = self._checked(outputs)
        if self.loss is not None:
            outputs = self.loss.sums(outputs, arguments.batch, arguments.key)
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
        """The outputs that have cotangents: the sums of the loss's terms, else the floating-point ones."""
        if self.loss is not None:
            return outputs[: 2 * len(self.loss.terms) : 2]
        return [leaf for leaf in outputs if is_float(leaf)]

    def shardings(self, splits: Splits) -> LayerShardings:
        """The shardings of all that the layer works on, where the axes of a stage split arrays so."""
        group, axes = self.group, splits.axes
        # A sharding has an entry for each axis. Costs ask for one device, without axes, of a model traced for more.
        # Along `stage`, where all stages compute it together, activations are whole.
        more = (REPLICATED,) * splits.over_stages
        over_axes = lambda shardings: [(*s, *more) for s in shardings] if axes else [()] * len(shardings)
        of_floats = lambda tree, at: [s for leaf, s in zip(jax.tree.leaves(tree), at, strict=True) if is_float(leaf)]
        caches = {CACHE: self.caches_at(splits)}
        of = lambda name: caches.get(name) or map(splits.at_work, group.specs[name])
        at_work = lambda names: [at for name in names for at in of(name)]
        constants = [replicated(axes)] * len(self.constants.places)
        variables, fixed = [*at_work(group.names), *constants], at_work(group.fixed_names)
        params = variables[: len(self.arguments.params)]
        key = [replicated(axes)] * self.train
        batch = [splits.of_examples(leaf.shape[0]) for leaf in jax.tree.leaves(self.arguments.batch)]
        takes_at, gives_at = over_axes(group.takes_at), over_axes(group.gives_at)
        whole = [*(fixed[i] for i in self.overwritten), *of_floats(group.takes, takes_at)]
        sums = [] if self.loss is None else [replicated(axes)] * len(self.loss.terms)
        return LayerShardings(
            variables=variables,
            gathered=[splits.gathered(spec) for name in group.names for spec in group.specs[name]] + constants,
            state=at_work(group.state_names),
            arguments=[*variables, *key, *batch],
            activation=takes_at,
            outputs=None if self.loss is not None else gives_at,
            sums=(lambda own: (*own[:-1], REPLICATED)) if splits.over_stages else as_it_lies,
            cotangents=sums if self.loss is not None else of_floats(group.gives, gives_at),
            gradients=[*(_unreduced(s, axes) for s in params), *map(always, whole)],
        )

    def caches_at(self, splits: Splits) -> list[Sharding]:
        """The shardings of the leaves of a decoding layer's cache, which are of examples; none of other layers."""
        group, size = self.group, jax.tree.leaves(self.batch)[0].shape[0]
        if group.rules.get(CACHE) != CACHE or CACHE not in group.variables:
            return []
        return [
            splits.of_examples(size) if leaf.shape[:1] == (size,) else replicated(splits.axes)
            for leaf in group.leaves([CACHE])
        ]


@dataclass(frozen=True)
class LayerShardings:
    """The shardings of all that a layer works on, on the devices of its stage, leaf by leaf.

    Attributes:
      variables: the leaves of its variables at work (`Arguments.variables`).
      gathered: the same, gathered over the data axes.
      state: those of its state.
      arguments: those of all its `Arguments`.
      activation: what it takes.
      outputs: how its outputs have to lie; None for sums of the loss.
      sums: how these have to lie: they may be left partial, but along `stage`.
      cotangents: of the outputs that have some (`LayerFunction.differentiated`).
      gradients: how the gradients of its parameters have to lie, what is overwritten, and the cotangents of the
        activation.
    """

    variables: list[Sharding]
    gathered: list[Sharding]
    state: list[Sharding]
    arguments: list[Sharding]
    activation: list[Sharding]
    outputs: list[Sharding] | None
    sums: Wanted
    cotangents: list[Sharding]
    gradients: list[Wanted]

    def results(self, results: Results) -> list[Wanted]:
        """How the leaves of `results` have to lie."""
        state = self.state if results.state else []  # evaluation gives no new state
        if self.outputs is None:
            return [*[self.sums] * len(results.outputs), *map(always, state)]
        return list(map(always, [*self.outputs, *state]))


def trace_call(
    layer: AnyLayer, variables: dict[str, Shapes], takes: Shapes, batch: Shapes, key: jax.ShapeDtypeStruct | None
) -> tuple[ClosedJaxpr, tuple[Shapes, dict[str, Shapes]]]:
    """(jaxpr: variables, inputs, batch, key -> outputs, new state; their shapes); in evaluation there is no key."""

    def call(v: LayerVariables, x: Activation, b: Batch, k: jax.Array | None) -> tuple[Activation, LayerVariables]:
        outputs, updates = layer.apply(v, positional(x), Context(k, key is not None, b))
        _check_outputs(outputs)
        return outputs, updates

    return trace(call, variables, takes, batch, key)


def _check_outputs(outputs: Activation) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(outputs):
        if not isinstance(leaf, jax.Array | np.ndarray):
            raise LayerError(
                f"gives a {type(leaf).__name__} at outputs{jax.tree_util.keystr(path)}; layers pass pytrees of "
                "arrays on, so make it an array or leave it out"
            )
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise LayerError(
                f"gives {leaf.dtype} at {jax.tree_util.keystr(path)}; a boundary carries plain arrays only, such as "
                "jax.random.key_data(key)"
            )


def trace_init(
    layer: AnyLayer, key: jax.ShapeDtypeStruct, takes: Shapes, batch: Shapes
) -> tuple[ClosedJaxpr, dict[str, Shapes]]:
    """(jaxpr: random key -> a layer's variables, their shapes).

    Traced as if there were no mesh, since Flax constrains what it makes to the mesh axes in its metadata, whether or
    not they exist. A layer that constrains its activations itself needs the mesh.
    """

    def init(key: jax.Array) -> LayerVariables:
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), (takes, batch))
        return layer.init(key, positional(zeros[0]), zeros[1])

    try:
        with no_mesh():
            return trace(init, key)
    except (RuntimeError, NameError, ValueError):  # as where a constraint, a sum or a shard_map finds no mesh
        if jax.sharding.get_abstract_mesh().empty:
            raise
        return trace(init, key)


def trace_group_init(
    group: LayerGroup, key: jax.ShapeDtypeStruct, batch: Shapes
) -> tuple[ClosedJaxpr, dict[str, Shapes]]:
    """(jaxpr: random key, constants -> the variables of one of a group's layers, their shapes)."""
    jaxpr, made = trace_init(group.layer, key, group.takes, batch)
    constants = group.constants.get(INIT, Constants())
    if constants.places:
        init = lambda key, *new: replay(constants.put_into(jaxpr, new), made)(key)
        jaxpr, _ = trace(init, key, *constants.shapes)
    return jaxpr, made


def _unreduced(sharding: Sharding, axes: tuple[Axis, ...]) -> Wanted:
    """The sharding of a parameter's gradient: the parameter's, but partial where the sum can be taken once a step.

    That is over axes that don't split it: always over data axes, over others if devices don't have all of it anyway,
    but never over `stage`, where only one stage holds it.
    """

    def wanted(own: Sharding) -> Sharding:
        is_late = [
            p == REPLICATED and (a.is_data or (o != REPLICATED and a.names != (AXIS,)))
            for p, o, a in zip(sharding, own, axes, strict=True)
        ]
        return tuple(PARTIAL if late else p for p, late in zip(sharding, is_late, strict=True))

    return wanted
