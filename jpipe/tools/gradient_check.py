"""`pipe.check_gradients`: compares loss and gradients with the plain model's, and tells rounding from errors.

A leaf whose true gradient is zero, such as the bias of an attention's keys, holds nothing but rounding: there two right
computations differ by 100%. So the plain model tells how much its gradients round: it is computed some more times, from
parameters that are off by the last bit of the narrowest type that it computes in. A pipeline
may differ from it by as much as it then differs from itself.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from jpipe.execution.before_ticks import joined_outputs, listed_known
from jpipe.jax.inside import raised
from jpipe.jax.primitives import ClosedJaxpr, shapes_of
from jpipe.jax.tracing import equations_in, no_mesh, replay, trace
from jpipe.layers.base import Context, LayerVariables, positional
from jpipe.layers.connections import with_inputs
from jpipe.layers.frozen import parameter_paths
from jpipe.memory.batches import MicroBatch, split_microbatches
from jpipe.memory.records import LayerTrees, to_items
from jpipe.model.groups import Model
from jpipe.model.loss import TracedLoss, trace_loss
from jpipe.model.random_keys import Key, as_key, key_shape, layer_key
from jpipe.partitioner.per_device import jaxpr_per_device
from jpipe.partitioner.shardings import summed
from jpipe.planning.planner import Planner
from jpipe.processes.tables import Table, Tabular
from jpipe.types import Batch, PyTree

Params = Mapping[int, PyTree]
"""The parameters of each layer that makes some; those that share them aren't in it."""
Reference = Callable[[PyTree, Batch], jax.Array]
"""`(trees, batch) -> loss`: a user's own model, given each layer's variables as `layer_variables` has them; or the
variables of a model that is one module, as `model_variables` has them."""
Plain = Callable[[Params, LayerTrees, Batch, jax.Array], tuple[jax.Array, Params]]
"""`(parameters, all variables, batch, key) -> (loss, gradients)`."""

SAMPLES, FACTOR = 4, 8
"""How often the plain model is computed from parameters that are off by a bit; by how many times as much as it changes
then a pipeline may differ from it."""


@dataclass(frozen=True)
class CheckedLeaf:
    """One parameter's gradient, or the loss, beside that of the plain model.

    Attributes:
      layer: the index and the name of its layer, as "3 (Block)"; empty for the loss.
      path: the parameter's place in its layer, as "attention/key/bias", or in a model that is one module.
      size: the largest of the plain model's numbers.
      off: the largest difference.
      rounding: the largest difference that is rounding.
    """

    layer: str
    path: str
    size: float
    off: float
    rounding: float

    @property
    def agrees(self) -> bool:
        """Whether the difference is rounding."""
        return self.off <= self.rounding

    @property
    def is_zero(self) -> bool:
        """Whether the plain model's numbers are rounding themselves."""
        return self.size <= self.rounding / 2


@dataclass(frozen=True)
class GradientCheck(Tabular):
    """Loss and gradients of a pipeline beside the plain model's; `print` it, or show it in a notebook.

    Attributes:
      title: the pipeline in a line.
      loss: the loss.
      leaves: the gradient of each parameter, in the order of layers.
      narrowest: the narrowest type of the floating-point numbers that the plain model computes with.
      couples: what couples examples in the layers and in the loss, in words: there a micro-batch sees its own alone.
    """

    title: str
    loss: CheckedLeaf
    leaves: tuple[CheckedLeaf, ...]
    narrowest: str
    couples: tuple[str, ...] = ()

    @property
    def agrees(self) -> bool:
        """Whether all differences are rounding."""
        return all(leaf.agrees for leaf in (self.loss, *self.leaves))

    @property
    def differing(self) -> tuple[CheckedLeaf, ...]:
        """The leaves that differ by more than rounding; the furthest off come first."""
        return tuple(leaf for leaf in sorted((self.loss, *self.leaves), key=_how_far, reverse=True) if not leaf.agrees)

    def __repr__(self) -> str:
        return f"<GradientCheck of {self.title}: {self._verdict()}>"

    def _verdict(self) -> str:
        if self.agrees:
            return f"loss and all {len(self.leaves)} gradients equal the plain model's, but for rounding"
        return f"{len(self.differing)} of {1 + len(self.leaves)} differ from the plain model's by more than rounding"

    def _table(self) -> Table:
        """Shows the loss, all leaves that differ, and a few of those that agree, the furthest off first."""
        shown = sorted(self.leaves, key=_how_far, reverse=True)[: max(8, len(self.differing))]
        rows = [self.loss, *shown]
        texts = [(leaf.layer, leaf.path, *(f"{x:.2g}" for x in (leaf.size, leaf.off, leaf.rounding))) for leaf in rows]
        kinds = [("zero" if leaf.is_zero else "") if leaf.agrees else "differs" for leaf in rows]
        marks = {i: kind for i, kind in enumerate(kinds) if kind}
        hidden, zeros = len(self.leaves) - len(shown), sum(leaf.is_zero and leaf.agrees for leaf in self.leaves)
        notes = [
            f"{self._verdict()}{f'; {hidden} that are nearer are left out here' if hidden else ''}.",
            f"rounding: that of {self.narrowest}, which the plain model shows where its parameters are off by a bit.",
            *[f"zero: {zeros} gradients are zero but for rounding, so that any two computations differ."] * (zeros > 0),
        ]
        notes += [] if self.agrees else self.couples
        header = ("layer", "parameter", "largest", "off by", "rounding")
        return Table(f"Loss and gradients of {self.title}, and the plain model's", header, texts, marks, notes)


def _how_far(leaf: CheckedLeaf) -> float:
    """The difference in units of rounding: 0 if there is none, infinity if it is no number."""
    if not leaf.rounding > 0 or np.isnan(leaf.off):
        return 0.0 if leaf.agrees else np.inf
    return leaf.off / leaf.rounding


def check_gradients(
    planner: Planner,
    trees: LayerTrees,
    batch: Batch,
    key: jax.Array | None,
    computed: tuple[jax.Array, LayerTrees],
    reference: Reference | None,
    title: str,
) -> GradientCheck:
    """A pipeline's loss and gradients beside the plain model's.

    Args:
      planner: the pipeline's.
      trees: the variables of each layer, by collection.
      batch: a batch `[B, ...]`.
      key: a random key, or None.
      computed: the pipeline's loss and gradients.
      reference: the plain model; None for the layers one after the other, or the module itself.
      title: the pipeline in a line.

    Raises:
      ValueError: there are several processes, of which none has all of the model; or the plain model can't be run.
    """
    if planner.request.mesh.is_multi_process:
        raise ValueError("check_gradients runs the plain model on one device, which needs one process; call it in one")
    model = planner.model(planner.for_training(batch))
    trees, batch, (loss, grads) = jax.device_get((trees, batch, computed))
    params, grads = _made_params(model, trees), _made_params(model, grads)
    typed = jax.random.key(0) if key is None else as_key(key)
    with no_mesh(), jax.default_device(planner.request.mesh.devices.flat[0]):
        typed = jax.random.wrap_key_data(jax.device_get(jax.random.key_data(typed)), impl=jax.random.key_impl(typed))
        plain = _of_reference(reference, planner, model) if reference else _of_layers(planner, trees, batch, typed)
        results, narrowest = _with_rounding(plain, params, trees, batch, typed)
    layers = {i: f"{i} ({planner.request.layers[i].name})" for i in sorted(grads)}
    paths = {i: parameter_paths(grads[i]) for i in layers}
    if (cut := planner.cut) is not None:
        of_params = {i: jax.tree.leaves(cut.trees[i]["params"]) for i in layers}
        paths = {i: [cut.parameter_names(i)[part] for part in of_params[i]] for i in layers}
    names: list[tuple[str, str]] = [("", "loss"), *((layer, path) for i, layer in layers.items() for path in paths[i])]
    sizes = _compared((loss, grads), results, float(jnp.finfo(narrowest).eps))
    of_loss, *leaves = [CheckedLeaf(*name, *size) for name, size in zip(names, sizes, strict=True)]
    return GradientCheck(title, of_loss, tuple(leaves), narrowest.name, _couples(planner, planner.for_training(batch)))


def _couples(planner: Planner, micro: MicroBatch) -> tuple[str, ...]:
    """Says what couples the examples of a mini-batch."""
    model, loss = planner.model(micro), planner.loss(micro)
    lines = planner.examples(micro).in_words(model)
    assert loss is not None
    if micro.count > 1 and loss.at_once is None:
        try:
            gives, lying = model.groups[-1].gives, planner.outputs_lie(micro)
            with planner.tracing():
                trace_loss(loss.function, gives, micro.shapes, lying=lying, count=micro.count, pairs=True)
        except ValueError as error:
            lines = [*lines, str(error).partition(". ")[0]]
    return tuple(lines)


# --- the plain model --------------------------------------------------------------------------------------------------


def _makers(model: Model) -> dict[int, int]:
    """The layer that makes the parameters of each layer with variables: another one, if it shares them."""
    return {user: users[0] for variables in model.variable_sets for users in variables.users for user in users}


def _made_params(model: Model, trees: LayerTrees) -> Params:
    """The parameters of all layers that make some."""
    makers = _makers(model)
    return {i: tree["params"] for i, tree in trees.items() if makers[i] == i and jax.tree.leaves(tree["params"])}


def _whole(model: Model, params: Params, trees: LayerTrees) -> dict[int, LayerVariables]:
    """The variables of all layers: `trees`, but with these parameters."""
    whole = {i: {**trees[i], "params": params.get(maker, {})} for i, maker in _makers(model).items()}
    return {i: {name: whole[i][name] for name in model.group_at(i).variables} for i in range(model.num_layers)}


def _of_reference(reference: Reference, planner: Planner, model: Model) -> Plain:
    """A user's own model: its loss, differentiated."""
    cut = planner.cut

    def loss(params: Params, trees: LayerTrees, batch: Batch, _: jax.Array) -> jax.Array:
        whole = _whole(model, params, trees)
        try:
            items = to_items(model, whole) if cut is None else cut.whole.layer.to_item(cut.to_model(whole))
            mean = reference(items, batch)
        except Exception as error:
            raise ValueError(
                f"reference(trees, batch) raised {raised(error)}; it is called with each layer's variables (or "
                "those of a model that is one module) and the whole batch, and returns the mean loss"
            ) from error
        if jnp.shape(mean) != ():
            raise ValueError(f"reference returned an array of shape {jnp.shape(mean)}; it has to return the mean loss")
        return mean

    return jax.value_and_grad(loss)


def _of_layers(planner: Planner, trees: LayerTrees, batch: Batch, key: jax.Array) -> Plain:
    """The layers one after the other, or a model that is one module as it is, each as its library has it.

    They take the whole mini-batch, as does the loss. If they draw random numbers, each micro-batch draws its own: then
    they take one after the other, and the loss takes all outputs.
    """
    micro, request = planner.for_training(batch), planner.request
    model, loss, cut, count = planner.model(micro), planner.loss(micro), planner.cut, micro.count
    own = request.layers if cut is None else [replace(cut.whole.layer, has_model_key=True)]
    layers = with_inputs(own, request.read_inputs)
    assert loss is not None, "without one there are no gradients"
    draws = loss.needs_key or any(group.needs_key for group in model.groups)
    key_of = lambda key, i, m: layer_key(key, i, m, of_model=layers[i].has_model_key)
    total = lambda terms: jnp.sum(jnp.stack(terms))

    def outputs(params: Params, trees: LayerTrees, part: Batch, m: jax.Array, key: Key) -> PyTree:
        x, variables = (), _whole(model, params, trees)
        for i, layer in enumerate(layers):
            of_layer = variables[i] if cut is None else cut.to_model(variables)
            x, _ = layer.apply(of_layer, positional(x), Context(key_of(key, i, m), True, part))
        return x if cut is None else cut.wanted(x)

    def of_loss(outputs: PyTree, batch: Batch, key: Key) -> jax.Array:
        return total(loss.sums_at_once(outputs, batch, key_of(key, len(layers) - 1, 0))[: len(loss.terms)])

    whole = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), batch)
    params, number = _made_params(model, trees), jax.ShapeDtypeStruct((), np.int32)
    with planner.tracing():
        traced = lambda shapes: trace(outputs, params, trees, shapes, number, key_shape(key))
        try:
            jaxpr, given = traced(micro.shapes if draws else whole)
        except Exception:  # a model of one batch size, or an error that comes again
            jaxpr, given, draws = *traced(micro.shapes), True
        run = replay(_on_one_device(jaxpr), given)

    def value(params: Params, trees: LayerTrees, batch: Batch, key: jax.Array) -> jax.Array:
        if not draws or count == 1:
            return of_loss(run(params, trees, batch, 0, key), batch, key)
        parts, indices = split_microbatches(batch, count), jnp.arange(count, dtype=jnp.int32)
        one = jax.checkpoint(lambda at: run(params, trees, at[1], at[0], key))
        all_outputs = jax.lax.map(one, (indices, parts))
        if loss.needs_key and loss.at_once is None:
            keys = [key_of(key, len(layers) - 1, m) for m in range(count)]
            return total(_parts(loss, all_outputs, parts, jax.tree.leaves(batch), keys))
        leaves, structure = jax.tree.flatten(all_outputs)
        whole = joined_outputs(leaves, planner.outputs_lie(micro))
        return of_loss(jax.tree.unflatten(structure, whole), batch, key)

    return jax.value_and_grad(value)


def _parts(
    loss: TracedLoss, outputs: PyTree, parts: Batch, leaves: list[jax.Array], keys: list[Key]
) -> list[jax.Array]:
    """Computes the parts of a loss that draws random numbers: each micro-batch draws its own.

    Args:
      loss: the loss.
      outputs, parts: of all micro-batches, `[M, b, ...]`.
      leaves: those of the mini-batch, `[B, ...]`.
      keys: the last layer's for each micro-batch.
    """
    of_each = [jax.tree.map(lambda a, m=m: a[m], (outputs, parts)) for m in range(len(keys))]
    ahead = loss.numbers.ahead if loss.numbers else None
    values = replay(ahead, [0] * len(ahead.out_avals))(leaves) if ahead else []
    weights = [replay(loss.weights, [*loss.terms])(part, key) for (_, part), key in zip(of_each, keys, strict=True)]
    totals = [] if loss.total_weights else list(map(sum, zip(*weights, strict=True)))
    known = listed_known(loss, len(keys), values, totals)
    of_part = lambda m: [a[m] if each else a for a, each in zip(known, loss.stacked, strict=True)]
    made = lambda m: loss.parts(of_each[m][0], of_each[m][1], of_part(m), keys[m])[: loss.num_differentiated]
    return [part for m in range(len(keys)) for part in made(m)]


def _on_one_device(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """A traced function of whole arrays without what says how they are split over a mesh."""
    if any(equation.primitive.name == "shard_map" for equation in equations_in(jaxpr.jaxpr.eqns)):
        raise ValueError(
            "a layer calls jax.shard_map, which needs the mesh, while the plain model runs on one device; pass "
            "reference=, a model that doesn't"
        )
    return jaxpr_per_device(jaxpr, (), [()] * len(jaxpr.in_avals), [summed] * len(jaxpr.out_avals)).jaxpr


# --- differences ------------------------------------------------------------------------------------------------------


def _with_rounding(plain: Plain, params: Params, *others: PyTree) -> tuple[list[PyTree], np.dtype]:
    """Computes the plain model's results, first with these parameters, then with some that are off by a bit.

    Args:
      plain: the plain model.
      params: the parameters, on the host.
      others: the plain model's other arguments.

    Returns:
      The results, and the narrowest type of numbers that the plain model computes with.
    """
    traced = jax.jit(plain).trace(params, *others)
    dtypes = {shape.dtype for e in equations_in(traced.jaxpr.jaxpr.eqns) for shape in shapes_of(e.outvars)}
    floats = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact)]
    narrowest = jnp.dtype(max(floats, key=lambda dtype: jnp.finfo(dtype).eps))
    run, random, eps = traced.lower().compile(), np.random.default_rng(0), float(jnp.finfo(narrowest).eps)

    def off_by_a_bit(leaf: np.ndarray) -> np.ndarray:
        return (leaf * (1 + eps * random.uniform(-1, 1, leaf.shape))).astype(leaf.dtype)

    variants = [params, *(jax.tree.map(off_by_a_bit, params) for _ in range(SAMPLES))]
    return [jax.device_get(run(variant, *others)) for variant in variants], narrowest


def _compared(computed: PyTree, results: Sequence[PyTree], eps: float) -> list[tuple[float, float, float]]:
    """The size of the loss and of each leaf, the distance from the right value, and how much of it may be rounding.

    Args:
      computed: loss and gradients of the pipeline.
      results: loss and gradients of the plain model, as `_with_rounding` returns them.
      eps: the spacing of numbers around 1.
    """
    wanted, *others = results

    def largest(a: np.ndarray) -> float:
        return float(np.max(np.abs(a), initial=0))

    def distances(tree: PyTree) -> list[float]:
        """The largest difference of each leaf from the wanted one, in at least 64 bits."""
        pairs = zip(*map(jax.tree.leaves, (tree, wanted)), strict=True)
        return [largest(np.asarray(a, np.promote_types(a.dtype, np.float64)) - b) for a, b in pairs]

    noise = np.max(list(map(distances, others)), axis=0).tolist()
    loss, grads = wanted
    by_layer = [list(map(largest, jax.tree.leaves(tree))) for tree in (loss, *grads.values())]
    # A layer's gradients are sums. The largest of them tells how much all of them are rounded.
    scales = [(size, max(sizes)) for sizes in by_layer for size in sizes]
    rows = zip(scales, distances(computed), noise, strict=True)
    return [(size, distance, FACTOR * noisy + 4 * eps * scale) for (size, scale), distance, noisy in rows]
