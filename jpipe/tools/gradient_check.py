"""`pipe.check_gradients`: compares loss and gradients with the plain model's, and tells rounding from errors.

A leaf whose true gradient is zero, such as the bias of an attention's keys, holds nothing but rounding: there two right
computations differ by 100%. So the plain model tells how much its gradients round: it is computed some more times, from
parameters that are off by the last bit of the narrowest type that it computes in. A pipeline may differ from it by as
much as it then differs from itself.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from jpipe.execution.before_ticks import joined_outputs, listed_known
from jpipe.jax.primitives import ClosedJaxpr, shapes_of
from jpipe.jax.tracing import equations_in, no_mesh, replay, replayed, trace
from jpipe.layers.base import Context, LayerVariables, positional
from jpipe.layers.connections import with_inputs
from jpipe.layers.frozen import parameter_paths
from jpipe.memory.batches import cut_batch, split_microbatches
from jpipe.memory.records import LayerTrees, to_items
from jpipe.model.groups import Model
from jpipe.model.loss import TracedLoss
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
Sizes = tuple[float, float, float]
"""The largest number of a leaf, the largest difference from it, and how much of that may be rounding."""

SAMPLES, FACTOR = 4, 8
"""How often the plain model is computed from parameters that are off by a bit; by how many times as much as it changes
then a pipeline may differ from it."""
LOSS_COUPLES = 'a loss of sums, or with loss_over="microbatch", sees the examples of one micro-batch alone'


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
      couples: what couples examples in the layers, in words: there a micro-batch sees its own alone.
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
        rows = [self.loss, *sorted(self.leaves, key=_how_far, reverse=True)[: max(8, len(self.differing))]]
        mark = lambda leaf: "<- differs" if not leaf.agrees else "<- zero" if leaf.is_zero else ""
        sizes = lambda leaf: (f"{size:.2g}" for size in (leaf.size, leaf.off, leaf.rounding))
        texts = [(leaf.layer, leaf.path, *sizes(leaf), mark(leaf)) for leaf in rows]
        notes = [
            f"{self._verdict()}; those that are furthest off are shown.",
            f"rounding: that of {self.narrowest}, which the plain model shows where its parameters are off by a bit.",
            *([] if self.agrees else [*self.couples, LOSS_COUPLES]),
        ]
        header = ("layer", "parameter", "largest", "off by", "rounding", "")
        return Table(f"Loss and gradients of {self.title}, and the plain model's", header, texts, notes)


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
    micro = planner.for_training(batch)
    model, couples = planner.model(micro), tuple(planner.examples(micro).in_words(planner.model(micro)))
    trees, batch, (loss, grads) = jax.device_get((trees, batch, computed))
    params, grads = _made_params(model, trees), _made_params(model, grads)
    device = planner.request.mesh.devices.flat[0]
    typed = jax.device_put(jax.random.key(0) if key is None else as_key(key), device)
    with no_mesh(), jax.default_device(device):
        plain = _of_reference(reference, planner, model) if reference else _of_layers(planner, trees, batch, typed)
        sizes, narrowest = _compared(plain, (loss, grads), params, trees, batch, typed)
    names, cut = [("", "loss")], planner.cut
    for i in sorted(grads):
        parts = jax.tree.leaves(cut.trees[i]["params"]) if cut else ()
        paths = [cut.parameter_names(i)[part] for part in parts] if cut else parameter_paths(grads[i])
        names += [(f"{i} ({planner.known_plan().layers[i].name})", path) for path in paths]
    of_loss, *leaves = [CheckedLeaf(*name, *size) for name, size in zip(names, sizes, strict=True)]
    return GradientCheck(title, of_loss, tuple(leaves), narrowest, couples)


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
        items = to_items(model, whole) if cut is None else cut.whole.layer.to_item(cut.to_model(whole))
        mean = reference(items, batch)
        if jnp.shape(mean) != ():
            raise ValueError(f"reference returned an array of shape {jnp.shape(mean)}; it has to return the mean loss")
        return mean

    return jax.value_and_grad(loss)


def _of_layers(planner: Planner, trees: LayerTrees, batch: Batch, key: jax.Array) -> Plain:
    """The layers one after the other, or a model that is one module as it is, each as its library has it.

    They take the whole mini-batch, as does the loss. If they draw random numbers, each micro-batch draws its own: then
    they take one after the other, and the loss takes all outputs.
    """
    micro, request, cut = planner.for_training(batch), planner.request, planner.cut
    model, loss = planner.model(micro), planner.loss(micro)
    own = request.layers if cut is None else [replace(cut.whole.layer, has_model_key=True)]
    layers = with_inputs(own, request.read_inputs)
    assert loss is not None, "without one there are no gradients"
    key_of = lambda key, i, m: layer_key(key, i, m, of_model=layers[i].has_model_key)

    def outputs(params: Params, trees: LayerTrees, part: Batch, m: jax.Array, key: Key) -> PyTree:
        x, variables = (), _whole(model, params, trees)
        for i, layer in enumerate(layers):
            of_layer = variables[i] if cut is None else cut.to_model(variables)
            x, _ = layer.apply(of_layer, positional(x), Context(key_of(key, i, m), True, part))
        return x if cut is None else cut.wanted(x)

    def traced(count: int) -> tuple[int, Callable[..., PyTree]]:
        shapes = _made_params(model, trees), trees, cut_batch(batch, count).shapes, np.int32(0), key_shape(key)
        with planner.tracing():
            jaxpr, given = trace(outputs, *shapes)
        return count, replay(_on_one_device(jaxpr), given)

    try:
        draws = loss.needs_key or any(group.needs_key for group in model.groups)
        count, run = traced(micro.count if draws else 1)
    except Exception:  # a model of one batch size, or an error that comes again
        count, run = traced(micro.count)

    def value(params: Params, trees: LayerTrees, batch: Batch, key: jax.Array) -> jax.Array:
        parts, indices = split_microbatches(batch, count), jnp.arange(count, dtype=jnp.int32)
        one = jax.checkpoint(lambda at: run(params, trees, at[1], at[0], key))
        of_all = jax.lax.map(one, (indices, parts))
        keys = [key_of(key, len(layers) - 1, m) for m in range(count)]
        if count > 1 and loss.needs_key and loss.at_once is None:
            terms = _parts(loss, of_all, parts, batch, keys)
        else:
            leaves, structure = jax.tree.flatten(of_all)
            whole = joined_outputs(leaves, planner.outputs_lie(micro)) if count > 1 else [leaf[0] for leaf in leaves]
            terms = loss.sums_at_once(jax.tree.unflatten(structure, whole), batch, keys[0])[: len(loss.terms)]
        return jnp.sum(jnp.stack(terms))

    return jax.value_and_grad(value)


def _parts(loss: TracedLoss, outputs: PyTree, parts: Batch, batch: Batch, keys: Sequence[Key]) -> list[jax.Array]:
    """Computes the parts of a loss that draws random numbers: each micro-batch draws its own.

    Args:
      loss: the loss.
      outputs, parts: of all micro-batches, `[M, b, ...]`.
      batch: the mini-batch, `[B, ...]`.
      keys: the last layer's for each micro-batch.
    """
    of_each = [jax.tree.map(lambda a, m=m: a[m], (outputs, parts)) for m in range(len(keys))]
    values = replayed(loss.numbers.ahead, batch) if loss.numbers else []
    weights = [replayed(loss.weights, part, key) for (_, part), key in zip(of_each, keys, strict=True)]
    totals = [] if loss.total_weights else list(map(sum, zip(*weights, strict=True)))
    known = listed_known(loss, len(keys), values, totals)
    of_part = lambda m: [a[m] if each else a for a, each in zip(known, loss.stacked, strict=True)]
    made = lambda m: loss.parts(of_each[m][0], of_each[m][1], of_part(m), keys[m])[: loss.num_differentiated]
    return [part for m in range(len(keys)) for part in made(m)]


def _on_one_device(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """A traced function of whole arrays without what says how they are split over a mesh."""
    if any(equation.primitive.name == "shard_map" for equation in equations_in(jaxpr.jaxpr.eqns)):
        raise ValueError("a layer calls jax.shard_map, which needs the mesh; pass reference=, a model on one device")
    return jaxpr_per_device(jaxpr, (), [()] * len(jaxpr.in_avals), [summed] * len(jaxpr.out_avals)).jaxpr


# --- differences ------------------------------------------------------------------------------------------------------


def _compared(plain: Plain, computed: PyTree, params: Params, *others: PyTree) -> tuple[list[Sizes], str]:
    """Compares with the plain model, with these parameters and with some that are off by a bit.

    Args:
      plain: the plain model.
      computed: loss and gradients of the pipeline.
      params: the parameters, on the host.
      others: the plain model's other arguments.

    Returns:
      The sizes of the loss and of each leaf, and the narrowest type of numbers that the plain model computes with.
    """
    traced = jax.jit(plain).trace(params, *others)
    dtypes = {shape.dtype for e in equations_in(traced.jaxpr.jaxpr.eqns) for shape in shapes_of(e.outvars)}
    floats = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact)]
    narrowest = jnp.dtype(max(floats, key=lambda dtype: jnp.finfo(dtype).eps))
    run, random, eps = traced.lower().compile(), np.random.default_rng(0), float(jnp.finfo(narrowest).eps)
    off_by_a_bit = lambda leaf: (leaf * (1 + eps * random.uniform(-1, 1, leaf.shape))).astype(leaf.dtype)
    variants = [params, *(jax.tree.map(off_by_a_bit, params) for _ in range(SAMPLES))]
    wanted, *noisy = [jax.device_get(run(variant, *others)) for variant in variants]
    largest = lambda a: float(np.max(np.abs(a), initial=0))

    def distances(tree: PyTree) -> list[float]:
        """The largest difference of each leaf from the wanted one, in at least 64 bits."""
        pairs = zip(*map(jax.tree.leaves, (tree, wanted)), strict=True)
        return [largest(np.asarray(a, np.promote_types(a.dtype, np.float64)) - b) for a, b in pairs]

    noise = np.max(list(map(distances, noisy)), axis=0).tolist()
    loss, grads = wanted
    by_layer = [list(map(largest, jax.tree.leaves(tree))) for tree in (loss, *grads.values())]
    # A layer's gradients are sums. The largest of them tells how much all of them are rounded.
    scales = [(size, max(sizes)) for sizes in by_layer for size in sizes]
    rows = zip(scales, distances(computed), noise, strict=True)
    return [(size, off, FACTOR * noisy + 4 * eps * scale) for (size, scale), off, noisy in rows], narrowest.name
