"""One layer as a function of arrays, and how its arrays lie on the devices of a stage.

A `LayerFunction` makes of a layer (a Flax module, say) a function `(LayerArguments, activation) -> Results` whose
arrays are flat lists of leaves. It stands for all layers of a group: what differs between them (variables, random
keys, constants) is in the arguments. Arrays are whole here. It is one layer that is differentiated: never the loop
over layers, never a collective. `LayerShardings` says how each of these arrays lies on the devices of a stage.

Forward and backward are called with the same `LayerArguments`. So between the two only values that depend on the
layer's activation have to be stored (`jpipe.model.traced_layer`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from jpipe.jax.inside import meshes_of
from jpipe.jax.primitives import ClosedJaxpr
from jpipe.jax.tracing import equations_in, no_mesh, origins, replay, trace, uses, with_keys_by_index, without
from jpipe.jax.trees import is_float, named_leaves
from jpipe.layers.base import Activation, AnyLayer, Context, LayerError, LayerVariables, describe, positional
from jpipe.layers.calls import CACHE
from jpipe.model.groups import EVALUATION, GRADIENT, INIT, TRAIN, Constants, LayerGroup
from jpipe.model.loss import TracedLoss
from jpipe.model.remat import Remat
from jpipe.partitioner.axes import AXIS
from jpipe.partitioner.choice import Wanted, always, as_it_lies
from jpipe.partitioner.shardings import PARTIAL, REPLICATED, Axis, Sharding, replicated
from jpipe.partitioner.splits import Splits
from jpipe.types import Batch, Leaf, PyTree, Shapes

Made = TypeVar("Made")


class TracedInit(NamedTuple):
    """A layer's initialisation.

    Attributes:
      jaxpr: a random key, and constants if they are told apart -> the leaves of its variables, made of inputs of zeros.
      variables: their shapes by collection.
      check: called with the layer's name, raises a ValueError if they follow from more than the key and shapes.
      train: whether it is in training mode.
    """

    jaxpr: ClosedJaxpr
    variables: dict[str, Shapes]
    check: Callable[[str], None]
    train: bool = False


class LayerArguments(NamedTuple):
    """The arguments of a layer besides its activation, in forward and backward alike.

    Attributes:
      params: the leaves of its parameters.
      state: the leaves of its state as before the step, in the order of `LayerGroup.state_names`.
      fixed: the leaves of collections that it only reads, in the order of `LayerGroup.fixed_names`; then its constants
        (`LayerFunction.constants`).
      key: its random key for the micro-batch; None in evaluation without one.
      batch: the micro-batch, a pytree of `[b, ...]`; None for a layer that doesn't read it.
      known: what the loss that follows it needs of the whole mini-batch (`TracedLoss.known`); empty without one.
    """

    params: list[Leaf]
    state: list[Leaf]
    fixed: list[Leaf]
    key: Leaf | None
    batch: Batch
    known: Sequence[Leaf] = ()

    @property
    def variables(self) -> list[Leaf]:
        """The arguments that are the same for all micro-batches of a step. They are the first leaves of the tuple."""
        return [*self.params, *self.state, *self.fixed]


class Results(NamedTuple):
    """The results of a layer's forward.

    Attributes:
      outputs: the leaves of what the layer gives, `[b, ...]`. Where the loss follows the layer, scalars instead: the
        micro-batch's parts of the loss, then a sum and a weight for each metric (`TracedLoss.parts`).
      state: the leaves of the new state, of all collections in order; empty in evaluation.
    """

    outputs: list[Leaf]
    state: list[Leaf]


@dataclass(frozen=True, eq=False)
class LayerFunction:
    """The function that the layers of one group compute.

    Attributes:
      group: the layers.
      key: the type of their random keys; None in evaluation without one.
      remat: the choice of residuals (`jpipe.model.traced_layer` reads it).
      batch: the shapes of the micro-batch, `[b, ...]`.
      loss: the user's loss, which the last layer's function computes too; None for other layers, and where the model's
        outputs are wanted.
      train: whether the layers train.
    """

    group: LayerGroup
    key: jax.ShapeDtypeStruct | None
    remat: Remat
    batch: Shapes
    loss: TracedLoss | None = None
    train: bool = True

    @property
    def reads_batch(self) -> bool:
        """Whether it has to be called with the micro-batch."""
        return self.loss is not None or self.group.layer.reads_batch

    @property
    def constants(self) -> Constants:
        """The numbers in which the layers of the group differ."""
        if self.key is not None and not self.train:
            return self.group.sampled()
        return self.group.constants.get(TRAIN if self.train else EVALUATION, Constants())

    @property
    def arguments(self) -> LayerArguments:
        """The shapes of its arguments."""
        group = self.group
        return LayerArguments(
            params=jax.tree.leaves(group.variables.get("params")),
            state=group.leaves(group.state_names),
            fixed=[*group.leaves(group.fixed_names), *self.constants.shapes],
            key=self.key,
            batch=self.batch if self.reads_batch else None,
            known=[] if self.loss is None else [*self.loss.known],
        )

    @property
    def overwritten(self) -> list[int]:
        """The indices of the leaves of `LayerArguments.fixed` whose gradients are their new values ("gradient")."""
        rules = [self.group.rules[name] for name in self.group.fixed_names for _ in self.group.leaves([name])]
        return [i for i, rule in enumerate(rules) if rule == GRADIENT]

    def forward(self, arguments: LayerArguments, activation: list[Leaf]) -> Results:
        """Calls the layer, and the loss if it follows."""
        group, leaves = self.group, iter(arguments.variables)
        variables = {name: jax.tree.map(lambda _: next(leaves), group.variables[name]) for name in group.names}
        inputs = jax.tree.unflatten(jax.tree.structure(group.takes), activation)
        context = Context(arguments.key, self.train, arguments.batch)
        try:
            if self.constants.places:
                # The layer's code holds the numbers of the group's first layer, so its trace is run with others:
                # this layer's constants, which are what is left of `leaves`.
                called_with = group.variables, group.takes, self.arguments.batch, self.key
                jaxpr, shapes = trace_call(group.layer, *called_with, train=self.train)
                run = replay(self.constants.put_into(jaxpr, list(leaves)), shapes)
                outputs, new_state = run(variables, inputs, context.batch, context.key)
            else:
                outputs, new_state = group.layer.apply(variables, positional(inputs), context)
        except LayerError as error:
            raise ValueError(f"{group.layer.name} {error}") from error
        outputs = self._checked(outputs)
        if self.loss is not None:
            outputs = self.loss.parts(outputs, arguments.batch, arguments.known, arguments.key)
        return Results(jax.tree.leaves(outputs), jax.tree.leaves([new_state.get(name) for name in group.state_names]))

    def _checked(self, outputs: PyTree) -> PyTree:
        """Casts outputs to the dtypes that the layer was traced with; other shapes are an error."""
        gives = self.group.gives
        shapes = lambda tree: (jax.tree.structure(tree), list(map(np.shape, jax.tree.leaves(tree))))
        if shapes(outputs) != shapes(gives):
            fault = f"{self.group.layer.name} gives {describe(jax.tree.map(jnp.asarray, outputs))} in"
            mode = "training" if self.train else "evaluation"
            raise ValueError(f"{fault} {mode}, not {describe(gives)} as it was traced; give the same in both modes")
        return jax.tree.map(lambda leaf, want: jnp.asarray(leaf, want.dtype), outputs, gives)

    def differentiated(self, outputs: list[Leaf]) -> list[Leaf]:
        """Picks the outputs that have cotangents: the parts of the loss, or else the floating-point leaves."""
        if self.loss is not None:
            return outputs[: self.loss.num_differentiated]
        return [leaf for leaf in outputs if is_float(leaf)]

    def shardings(self, splits: Splits) -> LayerShardings:
        """Decides how all arrays that the layer works on lie, where the mesh axes of `splits` split them."""
        group, axes, whole = self.group, splits.axes, replicated(splits.axes)
        by_name = {name: list(map(splits.at_work, group.specs[name])) for name in group.names}
        if caches := self.caches_at(splits):
            by_name[CACHE] = caches
        constants = [whole] * len(self.constants.places)
        variables = [at for name in group.names for at in by_name[name]] + constants
        fixed = [at for name in group.fixed_names for at in by_name[name]]
        batch = [splits.of_examples(leaf.shape[0]) for leaf in jax.tree.leaves(self.arguments.batch)]
        takes_at, gives_at = (_with_stage(at, splits) for at in (group.takes_at, group.gives_at))
        at_once = self.loss is not None and self.loss.at_once is not None  # then it knows the gradient at its outputs
        known = _of_floats(group.gives, gives_at) if at_once else [whole] * len(self.arguments.known)
        input_gradients = [*(fixed[i] for i in self.overwritten), *_of_floats(group.takes, takes_at)]
        return LayerShardings(
            variables=variables,
            gathered=[splits.gathered(spec) for name in group.names for spec in group.specs[name]] + constants,
            state=[at for name in group.state_names for at in by_name[name]],
            arguments=[*variables, *[whole] * (self.key is not None), *batch, *known],
            activation=takes_at,
            outputs=gives_at if self.loss is None else None,
            sums=(lambda at: (*at[:-1], REPLICATED)) if splits.over_stages else as_it_lies,  # `stage` is the last axis
            cotangents=[whole] * self.loss.num_differentiated if self.loss else _of_floats(group.gives, gives_at),
            gradients=[*(_unreduced(at, axes) for at in by_name.get("params", ())), *map(always, input_gradients)],
        )

    def caches_at(self, splits: Splits) -> list[Sharding]:
        """Decides how the leaves of a decoding layer's cache lie: split over examples where they are `[b, ...]`.

        Empty for other layers.
        """
        group, size = self.group, jax.tree.leaves(self.batch)[0].shape[0]
        if group.rules.get(CACHE) != CACHE or CACHE not in group.variables:
            return []
        whole, split = replicated(splits.axes), splits.of_examples(size)
        return [split if leaf.shape[:1] == (size,) else whole for leaf in group.leaves([CACHE])]


@dataclass(frozen=True)
class LayerShardings:
    """How all arrays that a layer works on lie on the devices of its stage, leaf by leaf.

    Attributes:
      variables: its variables at work (`LayerArguments.variables`).
      gathered: the same once they are gathered along the data axes.
      state: its state.
      arguments: all leaves of its `LayerArguments`.
      activation: the leaves that it takes.
      outputs: how its outputs have to lie; None where the loss follows it.
      sums: how the loss's sums have to lie: they may be left partial, but not along `stage`.
      cotangents: the cotangents of `LayerFunction.differentiated`.
      gradients: how the results of the backward have to lie (`Gradients`): first the parameters' gradients, then the
        new values of `LayerFunction.overwritten`, then the cotangents of the activation.
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
        """Says how each leaf of `results` has to lie."""
        state = self.state if results.state else []  # evaluation gives no new state
        if self.outputs is None:
            return [*[self.sums] * len(results.outputs), *map(always, state)]
        return list(map(always, [*self.outputs, *state]))


def trace_call(
    layer: AnyLayer, variables: dict[str, Shapes], takes: Shapes, batch: Shapes, key: Shapes, *, train: bool = True
) -> tuple[ClosedJaxpr, tuple[Shapes, dict[str, Shapes]]]:
    """Traces a layer's call: (jaxpr: variables, inputs, batch, key -> outputs, new state; the shapes of these two)."""

    def call(v: LayerVariables, x: Activation, b: Batch, k: jax.Array | None) -> tuple[Activation, LayerVariables]:
        outputs, updates = layer.apply(v, positional(x), Context(k, train, b))
        _check_outputs(outputs)
        return outputs, updates

    closed, shapes = trace(call, variables, takes, batch, key)
    return _in_mesh(closed, jax.sharding.get_abstract_mesh()), shapes


def _in_mesh(closed: ClosedJaxpr, here: AbstractMesh) -> ClosedJaxpr:
    """Gives the jaxpr back, or refuses one that was traced for a mesh of another size: JAX can't mix the two."""
    for mesh in (mesh for equation in equations_in(closed.jaxpr.eqns) for mesh in meshes_of(equation)):
        if mesh.size != here.size and not (mesh.empty or here.empty):
            fault = f"works on the mesh {dict(mesh.shape)}, but the pipeline's is {dict(here.shape)}"
            raise LayerError(f"{fault}; pass that one to jpipe.Pipeline(..., mesh=), or make the model under pipe.mesh")
    return closed


def _check_outputs(outputs: Activation) -> None:
    """Checks that a layer gives a pytree of plain arrays, which a boundary can carry."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(outputs):
        place = jax.tree_util.keystr(path)
        if not isinstance(leaf, jax.Array | np.ndarray):
            raise LayerError(f"gives a {type(leaf).__name__} at outputs{place}; make it an array, or leave it out")
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise LayerError(f"gives {leaf.dtype} at {place}; give plain arrays, such as jax.random.key_data(key)")


def trace_init(layer: AnyLayer, key: Shapes, takes: Shapes, batch: Shapes, *, train: bool = False) -> TracedInit:
    """Traces a layer's initialisation, in evaluation mode or, for variables that only training has, in training mode.

    There are two tries. The first is without a mesh: Flax constrains new variables to the mesh axes in their metadata,
    whether or not the mesh has these axes. The second is with the mesh in context: a layer that constrains its own
    activations, or runs a `shard_map`, needs it.
    """

    def init(key: jax.Array, takes: Activation, batch: Batch) -> LayerVariables:
        return layer.init(positional(takes), Context(key, train, batch))

    here = jax.sharding.get_abstract_mesh()

    def traced() -> TracedInit:
        """Traces it for inputs of these shapes, zeros; its check refuses variables that follow from their values."""
        zeros = lambda: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), (takes, batch))
        of_inputs, made = trace(init, key, takes, batch)

        def check(name: str) -> None:
            follow = origins(of_inputs, {0: {}})
            # State that each step overwrites unread may begin with any value.
            read = uses(trace_call(layer, made, takes, batch, key)[0]) if any(follow) else []
            for (path, _), *both in zip(named_leaves("variables", made), follow, read, strict=False):
                if all(both):
                    fault = f"{name} makes {path} of the values of its inputs, and pipe.init knows only their shapes"
                    of_list = "pipe.from_layer_variables(trees, batch)"
                    raise ValueError(f"{fault}; use pipe.from_model_variables(model.init(key, x), batch), or {of_list}")

        jaxpr = trace(lambda key: replay(of_inputs, made)(key, zeros()), key)[0]
        # Where new variables lie is the layout's to say, not a constraint's.
        free = without(jaxpr, lambda equation: equation.primitive.name == "sharding_constraint")
        return TracedInit(_in_mesh(with_keys_by_index(free), here), made, check, train)

    try:
        with no_mesh():
            return traced()
    except (RuntimeError, NameError, ValueError):  # what a constraint, a sum or a shard_map raises without a mesh
        if jax.sharding.get_abstract_mesh().empty:
            raise
        return traced()


def in_either_mode(traced: Callable[[bool], Made]) -> Made:
    """Traces a layer with the variables of evaluation mode; if that fails, with those of training mode."""
    try:
        return traced(False)
    except Exception:
        with suppress(Exception):
            return traced(True)
        raise


def or_error(make: Callable[[], Made]) -> Made | str:
    """The result of a function, or the words of its ValueError, which is raised only if somebody uses the result."""
    try:
        return make()
    except ValueError as error:
        return str(error)


def trace_group_init(group: LayerGroup, key: jax.ShapeDtypeStruct, batch: Shapes) -> TracedInit:
    """Traces the initialisation of a group's layers, to make new variables; errors as of its `check`."""
    train = group.trace is not None and group.trace.init_trains
    traced = trace_init(group.layer, key, group.takes, batch, train=train)
    traced.check(group.in_words)
    constants = group.constants.get(INIT, Constants())
    if not constants.places:
        return traced
    init = lambda key, *scalars: replay(constants.put_into(traced.jaxpr, scalars), traced.variables)(key)
    return traced._replace(jaxpr=trace(init, key, *constants.shapes)[0])


def _with_stage(shardings: list[Sharding], splits: Splits) -> list[Sharding]:
    """Extends activations' shardings to an entry for each of a layer's axes.

    Along `stage`, where all stages compute the layer together, activations are whole. Costs ask for one device, without
    axes, of a model that was traced for more.
    """
    return [(*at, *(REPLICATED,) * splits.over_stages) if splits.axes else () for at in shardings]


def _of_floats(tree: Shapes, shardings: list[Sharding]) -> list[Sharding]:
    """Picks the shardings of the floating-point leaves of a tree from those of all its leaves."""
    return [at for leaf, at in zip(jax.tree.leaves(tree), shardings, strict=True) if is_float(leaf)]


def _unreduced(sharding: Sharding, axes: tuple[Axis, ...]) -> Wanted:
    """Decides how a parameter's gradient lies: as the parameter, but partial where the sum can wait for the step's end.

    Those are axes that don't split the parameter: the data axes always, and others if the gradient isn't whole on each
    device anyway. Along `stage` the sum can't wait, because only one stage holds the parameter.
    """

    def wanted(by_itself: Sharding) -> Sharding:
        waits = [
            at == REPLICATED and (axis.is_data or (lies != REPLICATED and axis.names != (AXIS,)))
            for at, lies, axis in zip(sharding, by_itself, axes, strict=True)
        ]
        return tuple(PARTIAL if late else at for at, late in zip(sharding, waits, strict=True))

    return wanted
