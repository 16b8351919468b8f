"""Traces a layer's forward and backward as two jaxprs, once, and finds the residuals between them.

`jax.vjp` returns a pytree: its leaves are what the backward needs. Some are at hand in the backward anyway (arguments
of the layer), some follow from the variables alone (a cast kernel) and are made again, the rest are the *residuals*,
which have to be stored. Forward and backward are kept as jaxprs and replayed: so both agree on the residuals wherever
they run, and a layer's Python code runs once for both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal as OneOf
from typing import NamedTuple, TypeVar

import jax

from jpipe.arrays.dtypes import is_float
from jpipe.jaxprs.rewriting import depends_on, uses, without_prints, without_roundings
from jpipe.jaxprs.tracing import replay, trace
from jpipe.mesh.splits import WHOLE, Splits
from jpipe.model.layer_function import Arguments, LayerFunction, LayerShardings, Results
from jpipe.model.split_backward import split_in_two
from jpipe.model.weight_products import weight_products_as_they_lie
from jpipe.partitioner.choice import always, as_it_lies
from jpipe.partitioner.per_device import jaxpr_per_device, results_by_rules
from jpipe.partitioner.shardings import Axis, Sharding, summed
from jpipe.partitioner.way import Unsplit
from jpipe.seam.inside import needed_part
from jpipe.seam.jaxpr_types import ClosedJaxpr, Literal, Var, shapes_of
from jpipe.types import Leaf, PyTree

T = TypeVar("T")
Structs = list[jax.ShapeDtypeStruct]
Computed = Callable[[ClosedJaxpr], ClosedJaxpr]
"""A device's program -> the same as this kind of device computes it."""


class _Source(NamedTuple):
    """Where the backward finds a leaf of the vjp, and its index there.

    It is among the leaves of the layer's arguments, those made again, or the residuals.
    """

    where: OneOf["argument", "made again", "residual"]
    number: int


@dataclass(frozen=True, eq=False)
class TracedLayer:
    """A layer's forward and backward on whole arrays.

    Attributes:
      function: what it computes.
      forward: arguments, activation -> results, leaves of the vjp; all flat.
      remake: variables -> those leaves of the vjp that are made again.
      backward: leaves of the vjp, cotangents of the outputs -> what `gradients` lists.
      results: the shapes of the results.
      gradients: the shapes of what the backward gives.
      sources: where the backward finds each leaf of the vjp.
      stored: indices of the leaves of the vjp that are residuals.
    """

    function: LayerFunction
    forward: ClosedJaxpr
    remake: ClosedJaxpr
    backward: ClosedJaxpr
    results: Results
    gradients: Gradients
    sources: tuple[_Source, ...]
    stored: list[int]

    @property
    def residuals(self) -> Structs:
        """The shapes of the residuals."""
        return shapes_of(_chosen(self.backward.jaxpr.invars, self.stored))


def trace_layer(function: LayerFunction) -> TracedLayer:
    """Traces a layer's forward and its vjp, whose residuals remat chooses."""
    activation = jax.tree.leaves(function.group.takes)
    moving = [i for i, leaf in enumerate(activation) if is_float(leaf)]

    def with_vjp(arguments: Arguments, activation: list[Leaf]) -> tuple[Results, PyTree]:
        def run(params: list[Leaf], overwritten: list[Leaf], floats: list[Leaf]) -> tuple[list[Leaf], Results]:
            fixed = _replaced(arguments.fixed, function.overwritten, overwritten)
            given = arguments._replace(params=params, fixed=fixed)
            results = function.forward(given, _replaced(activation, moving, floats))
            return function.differentiated(results.outputs), results

        overwritten, floats = _chosen(arguments.fixed, function.overwritten), _chosen(activation, moving)
        _, vjp, results = jax.vjp(function.remat.wrap(run), arguments.params, overwritten, floats, has_aux=True)
        return results, vjp

    try:
        # A vjp is a function and a pytree, so here it comes out with shapes as leaves, and the backward takes it.
        jaxpr, (results, vjp) = trace(with_vjp, function.arguments, activation)
        outputs = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in function.differentiated(results.outputs)]
        backward, gradients = trace(lambda vjp, cotangents: Gradients(*vjp(cotangents)), vjp, outputs)
    except Exception as error:
        error.add_note(f"The layer {function.group.layer.name} raised this while it was differentiated.")
        raise
    forward = without_roundings(jaxpr)  # which `jax.checkpoint` puts on what it saves: copies, where numbers are wide
    num_results, num_arguments = len(jax.tree.leaves(results)), len(jax.tree.leaves(function.arguments))
    num_variables = len(function.arguments.variables)
    sources, again, stored = _sources(forward, num_results, num_variables, num_arguments)
    wanted = [i - num_results in again for i in range(len(forward.jaxpr.outvars))]
    needed = [i < num_variables for i in range(len(forward.jaxpr.invars))]
    # It takes all variables and nothing else.
    remake = needed_part(without_prints(forward), wanted, keep=needed)[0]
    return TracedLayer(
        function=function,
        forward=forward,
        remake=remake,
        backward=backward,
        results=results,
        gradients=gradients,
        sources=sources,
        stored=stored,
    )


def _sources(
    forward: ClosedJaxpr, num_results: int, num_variables: int, num_arguments: int
) -> tuple[tuple[_Source, ...], list[int], list[int]]:
    """(where the backward finds each leaf of the vjp, the leaves that are made again, those that are residuals).

    Leaves that are one variable of the forward have one source, and only the first of them is made again or stored.
    For y = x @ w16, where w16 = w cast, and z = sin(y), and remat "none", the leaves of the vjp are

        x     the activation: not an argument, so a residual
        w     if the vjp needs it: an argument
        w16   follows from w alone: made again
        y     depends on x: a residual
    """
    inputs, leaves = forward.jaxpr.invars, forward.jaxpr.outvars[num_results:]
    depends = depends_on(forward, inputs[num_variables:])[num_results:]
    found: dict[Var | int, _Source] = {v: _Source("argument", i) for i, v in enumerate(inputs[:num_arguments])}
    keys = [i if isinstance(leaf, Literal) else leaf for i, leaf in enumerate(leaves)]
    firsts: dict[str, list[int]] = {"made again": [], "residual": []}
    for i, (key, depends_on_more) in enumerate(zip(keys, depends, strict=True)):
        if key not in found:
            # An operation may use only the shape of an input. The value doesn't depend on that input, but making it
            # again needs it.
            alone = [j == num_results + i for j in range(len(forward.jaxpr.outvars))]
            from_variables = not depends_on_more and not any(uses(forward, alone)[num_variables:])
            where = "made again" if from_variables else "residual"
            found[key] = _Source(where, len(firsts[where]))
            firsts[where].append(i)
    return tuple(found[key] for key in keys), firsts["made again"], firsts["residual"]


# --- as one device runs it --------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class DeviceForward:
    """A layer's forward, as one device of a stage runs it.

    Attributes:
      jaxpr: arguments, activation -> results, leaves of the vjp (none if nothing is kept for a backward); all flat.
      results: the shapes of the device's parts of the results.
      results_at: how all that `jaxpr` gives lies.
      residuals_at: indices among `jaxpr`'s results of the residuals.
      unsplit: the equations that every device carries out whole though an operand was split.
    """

    jaxpr: ClosedJaxpr
    results: Results
    results_at: list[Sharding]
    residuals_at: tuple[int, ...]
    unsplit: list[Unsplit]

    def __call__(self, arguments: Arguments, activation: list[Leaf]) -> tuple[Results, list[Leaf]]:
        """(results, residuals)."""
        found = replay(self.jaxpr, [0] * len(self.jaxpr.out_avals))(arguments, activation)
        count = len(jax.tree.leaves(self.results))
        results = jax.tree.unflatten(jax.tree.structure(self.results), found[:count])
        return results, _chosen(found, self.residuals_at)


class Gradients(NamedTuple):
    """The results of a layer's backward.

    Attributes:
      params: the gradients of the parameters; in one part of a split backward, None for those of the other part.
      overwritten: the new values of `LayerFunction.overwritten`.
      cotangents: those of the activation's floats.
    """

    params: list[Leaf | None]
    overwritten: list[Leaf]
    cotangents: list[Leaf]


@dataclass(frozen=True, eq=False)
class SplitLayer:
    """The two parts of a layer's backward, as one device runs them (`jpipe.model.split_backward`).

    Attributes:
      inputs: leaves of the vjp, cotangents -> (gradients, stash).
      weights: those leaves of the vjp that `reads` lists, stash -> gradients of the parameters.
      reads: indices of leaves of the vjp.
      kept: indices of the residuals that `weights` needs.
      stash: its shapes.
      stash_at: indices of the stash among the results of `jaxpr`.
      jaxpr: what `inputs` runs.
    """

    inputs: Callable[[list[Leaf], list[Leaf]], tuple[Gradients, list[Leaf]]]
    weights: Callable[[list[Leaf], list[Leaf]], list[Leaf | None]]
    reads: tuple[int, ...]
    kept: tuple[int, ...]
    stash: Structs
    stash_at: range
    jaxpr: ClosedJaxpr


@dataclass(frozen=True, eq=False)
class DeviceLayer:
    """A layer's forward and backward, as one device of a stage runs them.

    Attributes:
      forward: the layer's forward that also returns its residuals.
      remake: variables -> those leaves of the vjp that are made again.
      backward_jaxpr: leaves of the vjp, cotangents -> what `backward` gives; all flat.
      program: the same as this kind of device computes it; predictions and plans look at `backward_jaxpr`.
      gradients: of the structure of that.
      sources: where the backward finds each leaf of the vjp.
      residuals: the shapes of a device's parts of the residuals.
      gradients_at: how the gradients of its parameters lie.
      split: the backward in two parts, if it is to run so.
      unsplit: the equations of its backward that every device carries out whole though an operand was split.
    """

    forward: DeviceForward
    remake: Callable[[list[Leaf]], list[Leaf]]
    backward_jaxpr: ClosedJaxpr
    program: ClosedJaxpr
    gradients: Gradients
    sources: tuple[_Source, ...]
    residuals: Structs
    gradients_at: list[Sharding]
    split: SplitLayer | None
    unsplit: list[Unsplit]

    @property
    def waits(self) -> tuple[bool, ...]:
        """For each residual whether it waits for the second part of the backward."""
        return tuple(self.split is not None and i in self.split.kept for i in range(len(self.residuals)))

    def backward(self, arguments: Arguments, residuals: list[Leaf], cotangents: list[Leaf]) -> Gradients:
        """The whole backward."""
        return replay(self.program, self.gradients)(self._leaves(arguments, residuals), cotangents)

    def backward_inputs(
        self, arguments: Arguments, residuals: list[Leaf], cotangents: list[Leaf]
    ) -> tuple[Gradients, list[Leaf]]:
        """(the early part of the backward, in which late gradients are None; the stash)."""
        assert self.split is not None
        return self.split.inputs(self._leaves(arguments, residuals), cotangents)

    def backward_weights(self, arguments: Arguments, kept: list[Leaf], stash: list[Leaf]) -> list[Leaf | None]:
        """The late gradients of the parameters, in which early ones are None.

        Args:
          arguments: as in the forward.
          kept: the residuals that `split.kept` lists.
          stash: as `backward_inputs` gives it.
        """
        assert self.split is not None
        residuals = dict(zip(self.split.kept, kept, strict=True))
        leaves = self._leaves(arguments, [residuals.get(i) for i in range(len(self.residuals))])
        return self.split.weights([leaves[i] for i in self.split.reads], stash)

    def _leaves(self, arguments: Arguments, residuals: Sequence[Leaf]) -> list[Leaf]:
        """The leaves of the vjp."""
        found = {
            "argument": jax.tree.leaves(arguments),
            "made again": self.remake(arguments.variables),
            "residual": residuals,
        }
        return [found[source.where][source.number] for source in self.sources]


def trace_forward(function: LayerFunction, splits: Splits = WHOLE) -> DeviceForward:
    """Traces a layer's forward alone, of which nothing is kept, for one of the devices of a stage."""
    jaxpr, results = trace(function.forward, function.arguments, jax.tree.leaves(function.group.takes))
    return _partition_forward(jaxpr, results, [], function.shardings(splits), splits.axes)


def partition_layer(layer: TracedLayer, splits: Splits = WHOLE, *, in_parts: bool = False) -> DeviceLayer:
    """A traced layer as one of the devices of a stage runs it; `in_parts` if its backward may run so."""
    shardings, axes = layer.function.shardings(splits), splits.axes
    forward = _partition_forward(layer.forward, layer.results, layer.stored, shardings, axes)
    remake = jaxpr_per_device(layer.remake, axes, shardings.variables, [summed] * len(layer.remake.out_avals))
    lying = {
        "argument": shardings.arguments,
        "made again": remake.shardings,
        "residual": _chosen(forward.results_at, forward.residuals_at),
    }
    leaves_at = [lying[source.where][source.number] for source in layer.sources]
    backward = jaxpr_per_device(layer.backward, axes, [*leaves_at, *shardings.cotangents], shardings.gradients)
    as_computed: Computed = weight_products_as_they_lie if splits.on_cpu else lambda jaxpr: jaxpr
    return DeviceLayer(
        forward=forward,
        remake=replay(remake.jaxpr, [0] * len(layer.remake.out_avals)),
        backward_jaxpr=backward.jaxpr,
        program=as_computed(backward.jaxpr),
        gradients=layer.gradients,
        sources=layer.sources,
        residuals=shapes_of(_chosen(forward.jaxpr.jaxpr.outvars, forward.residuals_at)),
        gradients_at=backward.shardings[: len(layer.function.arguments.params)],
        split=_split_layer(layer, backward.jaxpr, as_computed) if in_parts else None,
        unsplit=remake.unsplit + backward.unsplit,
    )


def _split_layer(layer: TracedLayer, backward: ClosedJaxpr, as_computed: Computed) -> SplitLayer:
    """A layer's backward in two parts, from the whole of it as a device runs it."""
    residuals = {i: source.number for i, source in enumerate(layer.sources) if source.where == "residual"}
    num_params = len(layer.gradients.params)
    others = range(num_params, len(jax.tree.leaves(layer.gradients)))
    parts = split_in_two(backward, others, residuals, len(layer.sources))
    count = len(parts.early)
    stash = shapes_of(parts.inputs.jaxpr.outvars[count:])
    early, late = as_computed(parts.inputs), as_computed(parts.weights)

    def gradients_of(found: Sequence[Leaf], indices: Sequence[int]) -> Gradients:
        known = dict(zip(indices, found, strict=True))
        return jax.tree.unflatten(jax.tree.structure(layer.gradients), map(known.get, range(num_params + len(others))))

    def inputs(leaves: list[Leaf], cotangents: list[Leaf]) -> tuple[Gradients, list[Leaf]]:
        found = replay(early, [0] * len(early.out_avals))(leaves, cotangents)
        return gradients_of(found[:count], parts.early), found[count:]

    def weights(leaves: list[Leaf], stash: list[Leaf]) -> list[Leaf | None]:
        return gradients_of(replay(late, [0] * len(parts.late))(leaves, stash), parts.late).params

    return SplitLayer(
        inputs=inputs,
        weights=weights,
        reads=parts.reads,
        kept=tuple(sorted({residuals[i] for i in parts.reads if i in residuals})),
        stash=stash,
        stash_at=range(count, count + len(stash)),
        jaxpr=parts.inputs,
    )


def _partition_forward(
    jaxpr: ClosedJaxpr, results: Results, stored: Sequence[int], shardings: LayerShardings, axes: tuple[Axis, ...]
) -> DeviceForward:
    """A forward as one device runs it, of whose leaves of the vjp those in `stored` are residuals."""
    count = len(jax.tree.leaves(results))
    given = [*shardings.arguments, *shardings.activation]
    # Residuals lie as the rules alone say for gathered weights, partial sums added up: what a plan of the forward
    # splits, so that less is sent, might have to be gathered in the backward. The other leaves of the vjp are dropped.
    by_rules = results_by_rules(jaxpr, axes, [*shardings.gathered, *given[len(shardings.gathered) :]])[count:]
    leaves = [always(summed(s)) if i in stored else as_it_lies for i, s in enumerate(by_rules)]
    local = jaxpr_per_device(jaxpr, axes, given, [*shardings.results(results), *leaves])
    shapes = jax.tree.unflatten(jax.tree.structure(results), shapes_of(local.jaxpr.jaxpr.outvars[:count]))
    return DeviceForward(local.jaxpr, shapes, local.shardings, tuple(count + i for i in stored), local.unsplit)


def _chosen(items: Sequence[T], indices: Sequence[int]) -> list[T]:
    return [items[i] for i in indices]


def _replaced(items: Sequence[T], indices: Sequence[int], new: Sequence[T]) -> list[T]:
    """The items, those at these indices replaced."""
    at = dict(zip(indices, new, strict=True))
    return [at.get(i, item) for i, item in enumerate(items)]
