"""Traces a model: follows shapes through its layers, groups equal ones, explains layers' errors, warns of dropout.

`trace_model` makes a `Model` (`jpipe.model.groups`) of the user's layers and the shapes of one micro-batch. Layer by
layer it asks what the layer gives for what the one before it gave. A layer that is the same function of the same shapes
as an earlier one joins its group, and isn't traced again. Nothing is computed and nothing compiled. So a layer that
doesn't fit is reported at once, with the shapes that it was called with and the layers that gave them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from jpipe.jax.flat_jaxpr import flatten
from jpipe.jax.inside import raised, shortened
from jpipe.jax.primitives import ClosedJaxpr
from jpipe.jax.tracing import trace, uses
from jpipe.jax.trees import lists_in
from jpipe.layers.base import AnyLayer, LayerError, describe, is_same
from jpipe.layers.calls import CACHE, MODE_NAMES
from jpipe.layers.connections import with_inputs
from jpipe.layers.frozen import FROZEN
from jpipe.model.alike import Alike
from jpipe.model.groups import DEFAULT_RULES, KEEP, WEIGHTS, LayerGroup, LayerTrace, Model, role_of, same_type, strong
from jpipe.model.layer_function import in_either_mode, trace_call, trace_init
from jpipe.model.random_keys import key_shape
from jpipe.partitioner.per_device import named_axes, results_by_rules
from jpipe.partitioner.shardings import Sharding, in_runs, replicated, summed
from jpipe.partitioner.splits import WHOLE, Splits
from jpipe.processes.progress import warn_once
from jpipe.processes.runtime import is_of_a_constraint, lacks_an_argument, lacks_rngs
from jpipe.types import Batch, PyTree, Shapes


def trace_model(
    layers: Sequence[AnyLayer],
    read_inputs: Callable[[Batch], PyTree],
    batch: Shapes,
    splits: Splits = WHOLE,
    rules: Mapping[str, str] = DEFAULT_RULES,
    like: Model | None = None,
    traces: dict[int, LayerTrace] | None = None,
) -> Model:
    """Follows the shapes of one micro-batch through the layers, and groups those that are the same but for numbers.

    Args:
      layers: the adapted layers, N of them.
      read_inputs: micro-batch -> the first layer's inputs.
      batch: the shapes of the micro-batch `[b, ...]`.
      splits: the mesh axes that split arrays.
      rules: what becomes of collections other than parameters, by name.
      like: the same layers as traced before, at other shapes. Layers of different groups there stay apart here.
      traces: by index, traces of the same layers at the same shapes; those that are missing are added.

    Raises:
      ValueError: the inputs can't be read; or a layer can't take what the one before it gives (both indices and shapes
        are named), has a leaf that is no array, or parameters that can't be differentiated.
    """
    inputs = inputs_of(read_inputs, batch)
    layers = with_inputs(layers, read_inputs)  # the first layer takes `()`, and reads its inputs from the micro-batch
    groups: list[LayerGroup] = []
    traces = {} if traces is None else traces
    same: dict[int, int] = {}
    alike, earlier_groups = Alike(layers, batch, traces, same), None if like is None else like.group_of
    takes, takes_at = (), []
    taken: list[Shapes] = []
    for index, layer in enumerate(layers):
        last = index == len(layers) - 1  # it is alone in its group, because the loss follows it
        seen = (i for i in dict.fromkeys(same.values()) if same_type(taken[i], takes) and is_same(layers[i], layer))
        same[index] = next(seen, index)
        taken.append(takes)
        if index not in traces and same[index] != index:
            traces[index] = traces[same[index]]
        elif index not in traces:
            sharing = (g for g in groups if layer.shared is not None and g.layer.shared is layer.shared)
            way_here = partial(_way_here, layers[:index], inputs, tuple(groups))
            traces[index] = _trace_layer((index, layer, way_here), takes, batch, next(sharing, None))
        for g, group in enumerate(() if last else groups):
            may_join = earlier_groups is None or earlier_groups[group.indices[0]] == earlier_groups[index]
            fits = may_join and same_type(group.takes, takes) and group.takes_at == takes_at
            if fits and (joined := alike.joined(group, index, before=like is not None)) is not None:
                groups[g] = joined
                break
        else:
            g = len(groups)
            group = _group_of((index, layer), traces[index], takes, takes_at, batch, splits, rules)
            # A PartitionSpec describes the model's outputs. It can't say that a device has several runs of elements.
            gives_at = [in_runs(s, splits.axes) for s in group.gives_at] if last else group.gives_at
            groups.append(replace(group, gives_at=gives_at))
        takes, takes_at = groups[g].gives, groups[g].gives_at
    return Model(tuple(_with_rules(groups, traces, rules)), batch, inputs, splits.axes).with_variable_sets()


def inputs_of(read_inputs: Callable[[Batch], PyTree], batch: Shapes) -> Shapes:
    """Calls `read_inputs` for the shapes of the first layer's inputs.

    Args:
      read_inputs: micro-batch -> inputs.
      batch: the shapes of the micro-batch `[b, ...]`.

    Raises:
      ValueError: it looks for what the batch lacks, or returns no arrays.
    """
    try:
        inputs = trace(read_inputs, batch)[1]
    except (LookupError, AttributeError) as error:
        raise ValueError(f"inputs raised {error!r} for the batch {describe(batch)}; return the inputs") from error
    if not jax.tree.leaves(inputs):
        raise ValueError(f"inputs returned {inputs!r} for the batch {describe(batch)}, which holds no arrays")
    return inputs


def _trace_layer(
    place: tuple[int, AnyLayer, Callable[[], str]], takes: Shapes, batch: Shapes, sharing: LayerGroup | None
) -> LayerTrace:
    """Traces a layer, as it is initialised and trained.

    Args:
      place: the layer's index, the layer, and a function that tells for errors how its inputs came about.
      takes: its inputs.
      batch: the shapes of the micro-batch `[b, ...]`.
      sharing: an earlier group that makes its variables (`jpipe.Shared`), if there is one.
    """
    index, layer, way_here = place
    name = f"layer {index} ({layer.name})"
    variables: dict[str, Shapes] = {}

    def told() -> list[str]:
        has = [f"{name} has the parameters {describe(variables['params'])}"] if "params" in variables else []
        return [way_here(), *has]

    with telling(name, told):
        made = layer.ready if sharing is None else sharing.variables

        def traced(train: bool) -> LayerTrace:
            new = trace_init(layer, key_shape(), takes, batch, train=train).variables if made is None else made
            variables.clear()
            variables.update(strong(jax.eval_shape(lambda v: v, new)))
            _check_parameters(variables)
            with layer.dropouts() as dropouts:
                jaxpr, (gives, updates) = trace_call(layer, variables, takes, batch, key_shape())
            written = check_updates(variables, updates, jaxpr)
            updated = [name for name in sorted(updates) for _ in jax.tree.leaves(updates[name])]
            return LayerTrace(jaxpr, dict(variables), strong(gives), dropouts, updated, written, train)

        return in_either_mode(traced)


def _group_of(
    place: tuple[int, AnyLayer],
    trace: LayerTrace,
    takes: Shapes,
    takes_at: list[Sharding],
    batch: Shapes,
    splits: Splits,
    rules: Mapping[str, str],
) -> LayerGroup:
    """Makes the group of which a layer is the first.

    Args:
      place: the layer's index, and the layer.
      trace: of its call.
      takes, takes_at: its inputs, and their shardings.
      batch: the shapes of the micro-batch `[b, ...]`.
      splits: the mesh axes that split arrays.
      rules: what becomes of collections other than parameters, by name.
    """
    (index, layer), (jaxpr, variables, gives, dropouts, *_) = place, trace
    name = f"layer {index} ({layer.name})"
    weights = [collection for collection in variables if role_of(collection, rules) in WEIGHTS]
    with telling(name, list):
        asked = layer.partition_specs(variables)
    needs_key = uses(jaxpr)[-1]
    decodes = rules.get(CACHE) == CACHE  # in evaluation mode, where nothing is dropped
    is_frozen = FROZEN in variables and not jax.tree.leaves(variables.get("params"))
    if not needs_key and not decodes and not is_frozen:
        warn_of_dropouts(name, dropouts)
    specs, named = splits.at_rest(name, variables, asked, weights), named_axes(jaxpr)
    group = LayerGroup(
        layer, (index,), takes, gives, variables, specs, takes_at, [], needs_key, named, rules, trace=trace
    )
    # The partitioner's errors need the layer's name alone: such as that a `jax.shard_map` in the layer can't be carried
    # out on these axes.
    try:
        return replace(group, gives_at=_outputs_at(jaxpr, group, batch, splits))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _with_rules(groups: list[LayerGroup], traces: dict[int, LayerTrace], rules: Mapping[str, str]) -> list[LayerGroup]:
    """The groups, with the rule `KEEP` for what shared layers have besides their weights: constants, such as tables.

    Caches are left out, of which each use has its own.

    Raises:
      ValueError: a layer gives new values of such a collection.
    """
    shared = {name for group in groups if group.layer.shared is not None for name in group.variables}
    only_read = {name for name in shared if role_of(name, rules) not in WEIGHTS and rules.get(name) != CACHE}
    for group in groups:
        index = group.indices[0]
        for name in sorted(only_read & {*traces[index].written, *group.fixed_names}):  # the latter by their gradients
            raise ValueError(
                f"layer {index} ({group.layer.name}) gives new values of its collection {name!r} in training, which is "
                "shared. Give each place what has state as a layer of its own, or make one layer of all places"
            )
    return [replace(group, rules={**rules, **dict.fromkeys(only_read, KEEP)}) for group in groups]


@contextmanager
def telling(name: str, told: Callable[[], Sequence[str]]) -> Iterator[None]:
    """Runs a user's code: what it raises is told with a name, and in further lines how its inputs came about.

    Raises:
      ValueError: for any error.
    """
    try:
        yield
    except LayerError as error:
        raise ValueError(f"{name} {error}") from (error.__cause__ and shortened(error.__cause__))
    except Exception as error:
        raise ValueError("\n  ".join([f"{name} {_fault(error)}", *told()])) from shortened(error)


def warn_of_dropouts(name: str, dropouts: Sequence[str]) -> None:
    """Warns that a layer has dropouts, if it does: it draws no random numbers in training."""
    if dropouts:
        warn_once(
            f"{name} holds a {dropouts[0]}, but draws no random numbers in training. To tell it that it trains, name "
            f"an argument {MODE_NAMES}; where dropout is meant to be off, give it the rate 0"
        )


def _outputs_at(jaxpr: ClosedJaxpr, group: LayerGroup, batch: Shapes, splits: Splits) -> list[Sharding]:
    """Decides how a layer's outputs lie in training: as the rules alone say, with partial sums added up."""
    weights = [splits.gathered(spec) for name in sorted(group.variables) for spec in group.specs[name]]
    examples = [splits.of_examples(leaf.shape[0]) for leaf in jax.tree.leaves(batch)]
    arguments_at = [*weights, *group.takes_at, *examples, replicated(splits.axes)]
    return list(map(summed, results_by_rules(jaxpr, splits.axes, arguments_at)[: len(jax.tree.leaves(group.gives))]))


_IO_EFFECTS = {"IO", "OrderedIO", "OrderedDebug"}
"""The effects, by their names, of a jaxpr that calls back into Python exactly once for each call, or in order."""


def _check_parameters(variables: dict[str, Shapes]) -> None:
    """Checks that parameters can be differentiated."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(variables.get("params", {})):
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise LayerError(f"has the parameter {jax.tree_util.keystr(path)} of dtype {leaf.dtype}; make it a float")


def check_updates(variables: dict[str, Shapes], updates: dict[str, Shapes], jaxpr: ClosedJaxpr) -> frozenset[str]:
    """Checks a layer's effects and its new state, in its trace; returns the collections that it changes.

    State keeps its structure and shapes. Floating-point numbers stay floating-point, but may become wider:
    `Merging.finish` casts them back. Frozen parameters aren't written, because new values of them would be lost.
    """
    if not _IO_EFFECTS.isdisjoint(map(str, jaxpr.effects)):
        fault = "calls back into Python by io_callback or in order, which can't be differentiated or computed again"
        raise LayerError(f"{fault}; use jax.debug.callback, or jax.pure_callback inside of a jax.custom_vjp")
    for name, new in updates.items():
        old = variables[name]
        if _outline(old) != _outline(new):
            fault = f"changes the type of its collection {name!r} in training: {describe(new)} after {describe(old)}"
            raise LayerError(f"{fault}; keep structure, shapes and dtypes")
    flat = flatten(jaxpr)
    named = lambda tree: [name for name in sorted(tree) for _ in jax.tree.leaves(tree[name])]
    old = [pair for pair in zip(named(variables), flat.arguments, strict=False) if pair[0] in updates]
    written = frozenset(pair[0] for pair, new in zip(old, flat.results[-len(old) :], strict=False) if pair[1] != new)
    if FROZEN in written:
        raise LayerError(f"writes to its collection {FROZEN!r} in training, which jpipe.freeze keeps; rename it")
    return written


def _outline(tree: Shapes) -> tuple[object, list[object]]:
    """The structure, and each leaf's shape and kind of dtype: integer, floating-point, or the dtype itself."""
    kind_of = lambda dtype: next((kind for kind in (jnp.integer, jnp.inexact) if jnp.issubdtype(dtype, kind)), dtype)
    return jax.tree.structure(tree), [(leaf.shape, kind_of(leaf.dtype)) for leaf in jax.tree.leaves(tree)]


def _way_here(before: Sequence[AnyLayer], inputs: Shapes, groups: Sequence[LayerGroup]) -> str:
    """Says in words which layers last changed the shapes that the next layer is called with, and gave them to it.

    Args:
      before: the layers before it.
      inputs: the first layer's inputs.
      groups: the groups of these layers.
    """
    lines, takes = [f"the batch holds as inputs: {described_inputs(inputs)}"], inputs
    for index, layer in enumerate(before):
        group = next(group for group in groups if index in group.indices)
        line = f"layer {index} ({layer.name}) takes {describe(takes)}, gives {describe(group.gives)}"
        is_unchanged = same_type(takes, group.gives)
        lines, takes = [lines[0], line] if is_unchanged else [line], group.gives
    return "\n  ".join(lines)


def described_inputs(inputs: Shapes) -> str:
    """A model's inputs in words, with the likely mistake: what takes arrays may raise any error for a list or dict."""
    of_list = " (a list is several arrays; if its items are examples, pass np.stack(examples) in its place)"
    of_dict = " (a dict is one argument; to pass its items by keyword: inputs=lambda batch: jpipe.Arguments(**batch))"
    return describe(inputs) + of_list * bool(lists_in("inputs", inputs)) + of_dict * isinstance(inputs, dict)


def _fault(error: Exception) -> str:
    """Says in words which error a layer raised, and the likely remedy."""
    fault = f"raised {raised(error)}"
    if is_of_a_constraint(error):
        return (
            f"constrains an array to be split as it can't be. It {fault}. Name axes of the mesh, one for each "
            "dimension that Flax makes an array with: nn.DenseGeneral makes its kernel flat, [in, out]"
        )
    if lacks_rngs(error):
        return f"{fault}. A function that makes an nnx module takes rngs, as in lambda rngs: Block(width, rngs=rngs)"
    if lacks_an_argument(error):
        return (
            f"{fault}. Whether it trains, a layer is told by an argument called {MODE_NAMES}. A layer before it can "
            'give a tuple of arguments; what the batch holds is read by jpipe.reads(layer, lambda batch: batch["mask"])'
        )
    return fault
