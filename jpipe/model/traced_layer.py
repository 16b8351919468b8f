"""Traces a layer's forward and backward as two jaxprs, once, and finds the residuals between them.

`trace_layer` makes a `TracedLayer` of a layer's function: two jaxprs on whole arrays. `partition_layer` makes of this a
`DeviceLayer`: the same on the parts of arrays that one device of a stage has. `trace_forward` makes the forward alone,
which keeps nothing for a backward (evaluation, and the forwards of remat "stage").

`jax.vjp` returns a function that is a pytree. Its leaves are all values that the backward needs besides cotangents. A
leaf is one of three (`Source`):

- an *argument* of the layer (a weight, the micro-batch), which the backward is called with too;
- *remade*: it follows from variables alone (a kernel cast to bfloat16), and the backward computes it again;
- a *residual*: any other. It is stored from the forward until the backward.

Both jaxprs are replayed wherever the layer runs. So forward and backward agree on the residuals, and a layer's Python
code runs once for both. Names that end in `_at` hold shardings: how arrays lie on the devices of a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal as OneOf
from typing import NamedTuple, TypeVar

import jax

from jpipe.jax.inside import needed_part
from jpipe.jax.primitives import ClosedJaxpr, Literal, Var, shapes_of
from jpipe.jax.rewrites import row_additions_by_comparison, weight_products_as_they_lie
from jpipe.jax.tracing import depends_on, equations_in, replayed, trace, unrounded, uses, without, without_prints
from jpipe.jax.trees import is_float
from jpipe.model.layer_function import LayerArguments, LayerFunction, LayerShardings, Results
from jpipe.model.remat import is_mark
from jpipe.model.split_backward import SplitBackward, split_in_two
from jpipe.partitioner.choice import always, as_it_lies
from jpipe.partitioner.per_device import jaxpr_per_device, results_by_rules
from jpipe.partitioner.shardings import Axis, Sharding, summed
from jpipe.partitioner.splits import WHOLE, Splits
from jpipe.partitioner.way import Unsplit
from jpipe.types import Leaf, PyTree

T = TypeVar("T")
Structs = list[jax.ShapeDtypeStruct]


class Source(NamedTuple):
    """Where the backward finds a leaf of the vjp: its number among arguments, remade values or residuals."""

    where: OneOf["argument", "remade", "residual"]
    number: int


class Gradients(NamedTuple):
    """The results of a layer's backward.

    Attributes:
      params: the gradients of the parameters; in one part of a split backward, None for those of the other part.
      overwritten: those of the leaves of `LayerArguments.fixed` at the indices `LayerFunction.overwritten`; they are
        these leaves' new values (fp8 amplitudes).
      cotangents: those of the activation's floating-point leaves.
    """

    params: list[Leaf | None]
    overwritten: list[Leaf]
    cotangents: list[Leaf]


@dataclass(frozen=True, eq=False)
class TracedLayer:
    """A layer's forward and backward on whole arrays.

    Attributes:
      function: the function that the layer computes.
      forward: arguments, activation -> results, leaves of the vjp; all flat.
      remake: variables -> the leaves of the vjp that are remade.
      backward: leaves of the vjp, cotangents of the outputs -> the leaves of `gradients`.
      results: the shapes of the results.
      gradients: the shapes of the backward's results.
      sources: where the backward finds each leaf of the vjp.
      stored: the indices of the leaves of the vjp that are residuals.
      offloaded: for each residual, whether a `jax.checkpoint` policy has it go to the host.
    """

    function: LayerFunction
    forward: ClosedJaxpr
    remake: ClosedJaxpr
    backward: ClosedJaxpr
    results: Results
    gradients: Gradients
    sources: tuple[Source, ...]
    stored: list[int]
    offloaded: tuple[bool, ...]

    @property
    def residuals(self) -> Structs:
        """The shapes of the residuals."""
        return shapes_of(_chosen(self.backward.jaxpr.invars, self.stored))

    @property
    def are_inputs(self) -> tuple[bool, ...]:
        """For each residual whether it is a leaf of the layer's input."""
        inputs, num_results = {*self.forward.jaxpr.invars}, len(jax.tree.leaves(self.results))
        leaves = (self.forward.jaxpr.outvars[num_results + i] for i in self.stored)  # a literal is always remade
        return tuple(leaf in inputs for leaf in leaves)


def trace_layer(function: LayerFunction) -> TracedLayer:
    """Traces a layer's forward and its vjp, whose residuals remat chooses.

    The vjp is taken of parameters, of the leaves of `LayerArguments.fixed` at the indices `LayerFunction.overwritten`,
    and of the activation's floating-point leaves.
    """
    activation = jax.tree.leaves(function.group.takes)
    float_indices = [i for i, leaf in enumerate(activation) if is_float(leaf)]

    def with_vjp(arguments: LayerArguments, activation: list[Leaf]) -> tuple[Results, PyTree]:
        def run(params: list[Leaf], overwritten: list[Leaf], floats: list[Leaf]) -> tuple[list[Leaf], Results]:
            fixed = _replaced(arguments.fixed, function.overwritten, overwritten)
            differentiable = arguments._replace(params=params, fixed=fixed)
            results = function.forward(differentiable, _replaced(activation, float_indices, floats))
            return function.differentiated(results.outputs), results

        primals = arguments.params, _chosen(arguments.fixed, function.overwritten), _chosen(activation, float_indices)
        _, vjp, results = jax.vjp(function.remat.wrap(run), *primals, has_aux=True)
        return results, vjp

    try:
        # The vjp is a pytree: tracing returns it with shapes as its leaves, and the backward takes it as an argument.
        jaxpr, (results, vjp) = trace(with_vjp, function.arguments, activation)
        outputs = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in function.differentiated(results.outputs)]
        backward, gradients = trace(lambda vjp, cotangents: Gradients(*vjp(cotangents)), vjp, outputs)
    except Exception as error:
        error.add_note(f"The layer {function.group.layer.name} raised this while it was differentiated.")
        raise
    at_top = [equation for equation in jaxpr.jaxpr.eqns if is_mark(equation)]
    if len(at_top) < sum(map(is_mark, equations_in(jaxpr.jaxpr.eqns))):
        raise ValueError(
            f"{function.group.layer.name}: remat= offloads a value inside of a jit or scan; compute or save it outside"
        )
    marks = {v for equation in at_top for v in equation.outvars}
    marked = [isinstance(v, Var) and v in marks for v in jaxpr.jaxpr.outvars]
    # `jax.checkpoint` rounds all that it saves: copies, where numbers are wide.
    forward, backward = unrounded(without(jaxpr, is_mark)), without(backward, is_mark)
    num_results, num_arguments = len(jax.tree.leaves(results)), len(jax.tree.leaves(function.arguments))
    # Variables (parameters, state, what is only read) are the first leaves of `LayerArguments`.
    num_variables = len(function.arguments.variables)
    sources, remade, stored = _sources(forward, num_results, num_variables, num_arguments)
    wanted = [i - num_results in remade for i in range(len(forward.jaxpr.outvars))]
    variables = [i < num_variables for i in range(len(forward.jaxpr.invars))]  # it takes all of them, and nothing else
    remake = needed_part(without_prints(forward), wanted, keep=variables)[0]
    offloaded = tuple(marked[num_results + i] for i in stored)
    return TracedLayer(function, forward, remake, backward, results, gradients, sources, stored, offloaded)


def _sources(
    forward: ClosedJaxpr, num_results: int, num_variables: int, num_arguments: int
) -> tuple[tuple[Source, ...], list[int], list[int]]:
    """Sorts the leaves of the vjp: (the source of each, indices of those that are remade, of the residuals).

    The same variable of the forward may be several leaves. They have one source, and only the first of them is remade
    or stored. For y = x @ w16, where w16 = w cast, z = sin(y), and remat "none", the leaves of the vjp are

        x     the activation: not an argument, so a residual
        w     if the vjp needs it: an argument
        w16   follows from w alone: remade
        y     depends on x: a residual
    """
    inputs, leaves = forward.jaxpr.invars, forward.jaxpr.outvars[num_results:]
    depends = depends_on(forward, inputs[num_variables:])[num_results:]
    source_of: dict[Var | int, Source] = {v: Source("argument", i) for i, v in enumerate(inputs[:num_arguments])}
    # A literal is no variable, so each is a leaf of its own, known by its index; it depends on nothing and is remade.
    keys = [i if isinstance(leaf, Literal) else leaf for i, leaf in enumerate(leaves)]
    firsts: dict[str, list[int]] = {"remade": [], "residual": []}
    for i, (key, depends_on_more) in enumerate(zip(keys, depends, strict=True)):
        if key not in source_of:
            # A value that takes only the shape of an input doesn't depend on it, but computing it again needs it.
            this_leaf = [j == num_results + i for j in range(len(forward.jaxpr.outvars))]
            from_variables = not depends_on_more and not any(uses(forward, this_leaf)[num_variables:])
            where = "remade" if from_variables else "residual"
            source_of[key] = Source(where, len(firsts[where]))
            firsts[where].append(i)
    return tuple(source_of[key] for key in keys), firsts["remade"], firsts["residual"]


# --- as one device runs it --------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class DeviceForward:
    """A layer's forward, as one device of a stage runs it.

    Attributes:
      jaxpr: arguments, activation -> results, leaves of the vjp (none if nothing is kept for a backward); all flat.
      results: the shapes of the device's parts of the results.
      results_at: how each result of `jaxpr` lies.
      residual_indices: the indices of the residuals among the results of `jaxpr`.
      unsplit: the equations that every device carries out whole though an operand was split.
    """

    jaxpr: ClosedJaxpr
    results: Results
    results_at: list[Sharding]
    residual_indices: tuple[int, ...]
    unsplit: list[Unsplit]

    def __call__(self, arguments: LayerArguments, activation: list[Leaf]) -> tuple[Results, list[Leaf]]:
        """Runs the forward: (results, residuals)."""
        values = replayed(self.jaxpr, arguments, activation)
        leaves, structure = jax.tree.flatten(self.results)
        return jax.tree.unflatten(structure, values[: len(leaves)]), _chosen(values, self.residual_indices)


@dataclass(frozen=True, eq=False)
class DeviceLayer:
    """A layer's forward and backward, as one device of a stage runs them.

    Attributes:
      forward: the layer's forward that also returns its residuals.
      remake: variables -> the leaves of the vjp that are remade.
      backward_jaxpr: leaves of the vjp, cotangents -> the leaves of `gradients`; all flat. Plans and predictions read
        it, and it is the same for every kind of device.
      rewrite: makes of a backward one that this kind of device runs faster (`jpipe.jax.rewrites`).
      gradients: the structure of `Gradients`, with whole shapes.
      sources: where the backward finds each leaf of the vjp.
      residuals: the shapes of the device's parts of the residuals.
      gradients_at: how the gradients of its parameters lie.
      split: the backward in two parts, if it is to run so; its `early` and `late` are indices of leaves of `gradients`,
        its `reads` of leaves of the vjp.
      unsplit: the equations of its backward that every device carries out whole though an operand was split.
    """

    forward: DeviceForward
    remake: ClosedJaxpr
    backward_jaxpr: ClosedJaxpr
    rewrite: Callable[[ClosedJaxpr], ClosedJaxpr]
    gradients: Gradients
    sources: tuple[Source, ...]
    residuals: Structs
    gradients_at: list[Sharding]
    split: SplitBackward | None
    unsplit: list[Unsplit]

    @cached_property
    def backward_program(self) -> ClosedJaxpr:
        """The backward as this kind of device runs it."""
        return self.rewrite(self.backward_jaxpr)

    @cached_property
    def in_two_parts(self) -> DeviceLayer:
        """The same layer with a backward that may run in two parts.

        Other stages wait for all that the backward gives but parameters' gradients.
        """
        urgent = range(len(self.gradients.params), len(self.backward_jaxpr.jaxpr.outvars))
        residuals = {i for i, source in enumerate(self.sources) if source.where == "residual"}
        return replace(self, split=split_in_two(self.backward_program, urgent, residuals, len(self.sources)))

    @cached_property
    def waits(self) -> tuple[bool, ...]:
        """For each residual whether the second part of a split backward reads it, so that it waits for that part."""
        reads = () if self.split is None else _chosen(self.sources, self.split.reads)
        return tuple(Source("residual", i) in reads for i in range(len(self.residuals)))

    def backward(self, arguments: LayerArguments, residuals: list[Leaf], cotangents: list[Leaf]) -> Gradients:
        """Computes the whole backward."""
        values = replayed(self.backward_program, self._vjp_leaves(arguments, residuals), cotangents)
        return jax.tree.unflatten(jax.tree.structure(self.gradients), values)

    def backward_inputs(
        self, arguments: LayerArguments, residuals: list[Leaf], cotangents: list[Leaf]
    ) -> tuple[Gradients, list[Leaf]]:
        """Runs the first part of a split backward: (gradients, with None for those of the second part; W's inputs)."""
        assert self.split is not None
        values = replayed(self.split.inputs, self._vjp_leaves(arguments, residuals), cotangents)
        count = len(self.split.early)
        return self._gradients(values[:count], self.split.early), values[count:]

    def backward_weights(self, arguments: LayerArguments, late: list[Leaf], w_inputs: list[Leaf]) -> list[Leaf | None]:
        """Runs the second part: the other gradients of the parameters, with None for those of the first part.

        Args:
          arguments: as in the forward.
          late: the residuals that wait for this part (`waits`).
          w_inputs: as `backward_inputs` gives it.
        """
        assert self.split is not None
        rest = iter(late)
        leaves = self._vjp_leaves(arguments, [next(rest) if waits else None for waits in self.waits])
        values = replayed(self.split.weights, _chosen(leaves, self.split.reads), w_inputs)
        return self._gradients(values, self.split.late).params

    def _vjp_leaves(self, arguments: LayerArguments, residuals: Sequence[Leaf]) -> list[Leaf]:
        """Collects the leaves of the vjp from the three places where the backward finds them."""
        remade = replayed(self.remake, arguments.variables)
        return _picked(self.sources, argument=jax.tree.leaves(arguments), remade=remade, residual=residuals)

    def _gradients(self, values: Sequence[Leaf], indices: Sequence[int]) -> Gradients:
        """Makes the `Gradients` whose leaves at these indices are the values; the others are None."""
        by_index = dict(zip(indices, values, strict=True))
        leaves, structure = jax.tree.flatten(self.gradients)
        return jax.tree.unflatten(structure, map(by_index.get, range(len(leaves))))


def trace_forward(function: LayerFunction, splits: Splits = WHOLE) -> DeviceForward:
    """Traces a layer's forward alone, which keeps nothing for a backward, for one device of a stage."""
    jaxpr, results = trace(function.forward, function.arguments, jax.tree.leaves(function.group.takes))
    return _partition_forward(jaxpr, results, [], function.shardings(splits), splits.axes)


def partition_layer(layer: TracedLayer, splits: Splits = WHOLE) -> DeviceLayer:
    """Makes the programs that one device of a stage runs of a traced layer.

    Args:
      layer: the forward and backward on whole arrays.
      splits: the mesh axes that split arrays.
    """
    shardings, axes = layer.function.shardings(splits), splits.axes
    forward = _partition_forward(layer.forward, layer.results, layer.stored, shardings, axes)
    remake = jaxpr_per_device(layer.remake, axes, shardings.variables, [summed] * len(layer.remake.out_avals))
    residuals_at = _chosen(forward.results_at, forward.residual_indices)
    leaves_at = _picked(layer.sources, argument=shardings.arguments, remade=remake.shardings, residual=residuals_at)
    backward = jaxpr_per_device(layer.backward, axes, [*leaves_at, *shardings.cotangents], shardings.gradients)
    return DeviceLayer(
        forward=forward,
        remake=remake.jaxpr,
        backward_jaxpr=backward.jaxpr,
        rewrite=weight_products_as_they_lie if splits.on_cpu else row_additions_by_comparison,
        gradients=layer.gradients,
        sources=layer.sources,
        residuals=shapes_of(_chosen(forward.jaxpr.jaxpr.outvars, forward.residual_indices)),
        gradients_at=backward.shardings[: len(layer.gradients.params)],
        split=None,
        unsplit=remake.unsplit + backward.unsplit,
    )


def partition_once(layer: TracedLayer, splits: Splits, known: dict) -> DeviceLayer:
    """As `partition_layer`, unless it is in `known`, under a key of all that it follows from."""
    # Where weights lie at rest changes nothing where they are gathered; `sums`, `gradients` follow from the rest.
    lie = layer.function.shardings(splits)
    arrays = lie.arguments, lie.gathered, lie.state, lie.activation, lie.outputs or (), lie.cotangents
    decisive = layer.forward, layer.backward, splits.mesh, splits.axes, *map(tuple, arrays)
    if decisive not in known:
        known[decisive] = partition_layer(layer, splits)
    return known[decisive]


def _partition_forward(
    jaxpr: ClosedJaxpr, results: Results, stored: Sequence[int], shardings: LayerShardings, axes: tuple[Axis, ...]
) -> DeviceForward:
    """Makes one device's forward of one on whole arrays; `stored` says which leaves of the vjp are residuals."""
    count = len(jax.tree.leaves(results))
    inputs_at = [*shardings.arguments, *shardings.activation]
    # Residuals lie as the rules alone say where variables, the first arguments, lie as if gathered along the data axes
    # (`gathered`), with partial sums added up. A plan of the forward might split them further to send less, but the
    # backward might then have to gather them. The other leaves are dropped.
    by_rules = results_by_rules(jaxpr, axes, [*shardings.gathered, *inputs_at[len(shardings.gathered) :]])[count:]
    leaves = [always(summed(s)) if i in stored else as_it_lies for i, s in enumerate(by_rules)]
    local = jaxpr_per_device(jaxpr, axes, inputs_at, [*shardings.results(results), *leaves])
    shapes = jax.tree.unflatten(jax.tree.structure(results), shapes_of(local.jaxpr.jaxpr.outvars[:count]))
    return DeviceForward(local.jaxpr, shapes, local.shardings, tuple(count + i for i in stored), local.unsplit)


def _picked(sources: Sequence[Source], **places: Sequence[T]) -> list[T]:
    """Picks for each leaf of the vjp the item at its source: its value, or how it lies."""
    return [places[where][number] for where, number in sources]


def _chosen(items: Sequence[T], indices: Sequence[int]) -> list[T]:
    """Picks the items at these indices."""
    return [items[i] for i in indices]


def _replaced(items: Sequence[T], indices: Sequence[int], new: Sequence[T]) -> list[T]:
    """Replaces the items at these indices."""
    by_index = dict(zip(indices, new, strict=True))
    return [by_index.get(i, item) for i, item in enumerate(items)]
