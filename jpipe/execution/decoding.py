"""Lays out generation: the layers as they decode one or several tokens at a time, and where their caches lie.

A layer's cache stays on its stage, with a row for each micro-batch. How tokens go round is in `generator`.

Only a layer that treats each token by itself may decode without a cache. Attention without one would see one token in
place of all, and positions counted within a call would all be the first: wrong tokens, and no error. So a layer's jaxpr
on whole sequences is followed as a loss is (`jpipe.partitioner.examples`), with tokens in place of micro-batches. A
layer that treats each token by itself then couples none, and reads nothing that each token has a part of.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jpipe.cutting.lines import with_lines
from jpipe.cutting.module import Read, WholeModel, told_of, without_unread
from jpipe.cutting.pieces import NoSuchPlace, unused_parts
from jpipe.cutting.places import Traced
from jpipe.cutting.straight import Part
from jpipe.cutting.whole import CutModel
from jpipe.jax.inside import line_of, needed_part
from jpipe.jax.tracing import compiled, equations_in, no_mesh, replay, trace
from jpipe.layers.base import AnyLayer, Context, describe, positional
from jpipe.layers.calls import CACHE, decoding
from jpipe.layers.connections import with_inputs
from jpipe.memory.storage import Storage, build_storage
from jpipe.model.alike import Kinds
from jpipe.model.groups import KEEP, LayerGroup, Model, same_type, strong
from jpipe.model.layer_function import LayerFunction, trace_init
from jpipe.model.random_keys import key_shape
from jpipe.model.trace import telling, trace_model
from jpipe.partitioner.axes import AXIS, shapes_only
from jpipe.partitioner.examples import CouplesError, Examples
from jpipe.partitioner.shardings import REPLICATED, Shard, names_in, part_structs, replicated
from jpipe.planning.plan import Plan
from jpipe.planning.step import Step, make_step
from jpipe.processes.progress import warn_user
from jpipe.schedules.orders import forward_only
from jpipe.types import Leaf, PyTree, Shapes


def on_inputs(plan: Plan) -> Sequence[LayerFunction]:
    """Each group in evaluation, on the model's inputs instead of the batch, which may be longer than they are."""
    traced, remat, cut = plan.model, plan.request.remat, plan.cut
    if cut is not None:
        layers = cut.layers(cut.whole.trace(lambda inputs: inputs, traced.inputs))
        groups = [replace(group, layer=layers[group.indices[0]]) for group in traced.groups]
        return [LayerFunction(group, None, remat, traced.inputs, train=False) for group in groups]
    first, *others = traced.groups
    (layer,) = with_inputs(plan.request.layers[:1], lambda inputs: inputs)
    of_others = [LayerFunction(group, None, remat, traced.batch, train=False) for group in others]
    return [LayerFunction(replace(first, layer=layer), None, remat, traced.inputs, train=False), *of_others]


def warn_of_uncached(plan: Plan, model: Model) -> None:
    """Warns of layers that keep no cache in decode mode, and don't treat each token by itself in training.

    Args:
      plan: with the layers as they train, on sequences.
      model: the same layers in decode mode.
    """
    for function in on_inputs(plan):
        group = function.group
        if model.group_at(group.indices[0]).variables.get(CACHE):
            continue
        if sight := sees_more(function, jax.tree.leaves(plan.model.inputs)[0].shape[1]):
            warn_user(
                f"generate: {group.in_words} {sight}, but keeps no cache in decode mode: what follows may be wrong. "
                "Give it a field `decode` and a collection `cache` (Linen), or `init_cache` (nnx)"
            )


def sees_more(function: LayerFunction, length: int) -> str:
    """Says how a layer looks beyond a single token; "" if it treats each token by itself.

    A layer with a program of single devices (`jax.shard_map`) can't be followed: "" too.

    Args:
      function: the layer in evaluation mode, on whole sequences.
      length: T, the tokens of a sequence: dimension 1 of what the layer takes, or the first that is so long.
    """
    # Split along its tokens: dimension 1, or another one where a whole model is cut within attention.
    at = lambda leaf: next((Shard(i) for i in range(1, leaf.ndim) if leaf.shape[i] == length), REPLICATED)
    arguments, takes = function.arguments, jax.tree.leaves(function.group.takes)
    jaxpr, _ = trace(function.forward, arguments, takes)
    if length == 1 or any(equation.primitive.name == "shard_map" for equation in equations_in(jaxpr.jaxpr.eqns)):
        return ""
    sequences: list[Leaf] = [*jax.tree.leaves(arguments.batch), *takes]
    weights = len(jaxpr.jaxpr.invars) - len(sequences)
    lying, late = [*[REPLICATED] * weights, *map(at, sequences)], [False] * weights + [True] * len(sequences)
    tokens = Examples(jaxpr, length, lying, late, strict=False)
    try:
        if tokens.couplings:
            raise CouplesError(tokens.couplings[0])
        by_place = tokens.reads_places(list(zip(tokens.flat.results, map(at, jaxpr.out_avals), strict=True)))
    except CouplesError as error:
        return f"looks at other tokens ({line_of(error.args[0].flat.equation) or 'of no line'})"
    return "looks at the places of tokens" if by_place else ""


PickLogits = Callable[[PyTree], jax.Array]
"""A model's outputs -> the one of them that is its logits, `[b, T, vocabulary]`."""


@dataclass(frozen=True, eq=False)
class Decoding:
    """The layers and layouts of generation, for micro-batches of one size and sequences of one length.

    Attributes:
      step: one token through all layers, forward only; its micro-batches are K.
      prefill: the same of several tokens of a prompt; None if it is fed by single ones.
      caches: where caches lie, a row for each micro-batch; a record type for each group, a record for each layer of it.
      starts: by the name of a buffer, the number that all of it starts from.
      logits: the index of the logits among the leaves of the outputs.
    """

    step: Step
    prefill: Step | None
    caches: Storage
    starts: dict[str, float]
    logits: int


def make_decoding(plan: Plan, size: int, length: int, prefill: int, logits: int) -> Decoding:
    """Traces the layers in decode mode and lays out their caches.

    Args:
      plan: the pipeline's.
      size: b, the sequences of a micro-batch.
      length: the longest sequence that is fed: what caches are made for.
      prefill: the tokens of a prompt that layers take at a time.
      logits: the index of the logits among the leaves of the outputs.

    Raises:
      ValueError: the model's ends are shared in a way that can't be undone; no layer has a cache, or one too short;
        decoding needs other variables than training.
    """
    (tokens,) = jax.tree.leaves(plan.model.inputs)
    plan = _with_own_ends(plan) if plan.request.shares_ends else plan
    if plan.cut is not None:
        layers_for = cut_decoder(plan.cut, plan.model.inputs, size, length)
    else:
        takes = map(plan.model.called_with, range(plan.model.num_layers))
        layers = [decoding(*pair, size, length) for pair in zip(plan.request.layers, takes, strict=True)]
        layers_for = lambda tokens: layers
    fed = lambda count: jax.ShapeDtypeStruct((size, count), tokens.dtype)
    step = _decoding_step(plan, layers_for(fed(1)), fed(1), length)
    warn_of_uncached(plan, step.model)
    try:
        first = _decoding_step(plan, layers_for(fed(prefill)), fed(prefill), length) if prefill > 1 else None
    except ValueError as error:
        raise ValueError(f"generate: prefill={prefill}, but in decode mode {error}\nUse prefill=1") from error
    caches, starts = _cache_storage(step)
    return Decoding(step, first, caches, starts, logits)


def _decoding_step(plan: Plan, layers: Sequence[AnyLayer], tokens: jax.ShapeDtypeStruct, length: int) -> Step:
    """Lays out the forward step of tokens `[b, T]` through all layers, as they decode."""
    request, traced = plan.request, plan.model
    names = {name for group in traced.groups for name in group.variables} - {"params"}
    rules = {**request.rules, **dict.fromkeys(names, KEEP), CACHE: CACHE}
    model = trace_model(layers, lambda batch: batch, tokens, request.splits, rules, traced)
    _check_model(plan, model, length)
    last, of_examples = model.groups[-1], request.splits.of_examples(tokens.shape[0])
    at = lambda leaf: of_examples if leaf.shape[:1] == tokens.shape[:1] else replicated(request.splits.axes)
    whole = replace(last, gives_at=list(map(at, jax.tree.leaves(last.gives))))  # logits among them, to choose by
    model = replace(model, groups=(*model.groups[:-1], whole))
    placement = request.schedule.placement
    sizes = request.schedule.sizes | {"num_microbatches": placement.num_stages}
    schedule = forward_only(**sizes, style=placement.style)
    functions = [LayerFunction(group, None, request.remat, model.batch, train=False) for group in model.groups]
    return make_step(plan, model, schedule, functions, idles_work=False)


def find_logits(plan: Plan, logits: PickLogits | None) -> int:
    """The index of the logits among the leaves of the outputs.

    Args:
      plan: the pipeline's.
      logits: picks them out of the outputs; None if the model gives nothing else.

    Raises:
      ValueError: the model takes no tokens `[b, T]`, or this is none of its outputs that may be logits.
    """
    inputs, gives = jax.tree.leaves(plan.model.inputs), plan.model.groups[-1].gives
    takes_tokens = len(inputs) == 1 and inputs[0].ndim == 2 and jnp.issubdtype(inputs[0].dtype, jnp.integer)
    outputs, structure = jax.tree.flatten(gives)
    marks = [object() for _ in outputs]  # so that one is picked as it is
    try:
        picked = marks if logits is None else [logits(jax.tree.unflatten(structure, marks))]
    except Exception as error:
        raise ValueError(f"generate: logits raised {error!r}; return one of the outputs, {describe(gives)}") from error
    if not takes_tokens or len(picked) != 1 or picked[0] not in marks or outputs[marks.index(picked[0])].ndim != 3:
        raise ValueError(
            f"generate makes logits [B, T, vocabulary] of tokens [B, T]; this takes {describe(plan.model.inputs)} "
            f"and gives {describe(gives)}. Say which are logits: pipe.generate(..., logits=lambda outputs: outputs[0])"
        )
    return marks.index(picked[0])


def _with_own_ends(plan: Plan) -> Plan:
    """The plan with each end on its own stage: its weights are joined there once, for all tokens.

    Raises:
      ValueError: another axis splits the same dimension of such a weight, so that no stage can join its parts.
    """
    specs = (spec for layout in plan.layouts.values() for kind in layout.storage.record_types for spec in kind.specs)
    if any(AXIS in names_in(entry) and len(names_in(entry)) > 1 for spec in specs for entry in spec):
        raise ValueError(
            "generate: ends='shared' splits weights over stages and another mesh axis along one dimension; make one "
            "with ends='own' or 'spread', and pass pipe.from_layer_variables(trained.layer_variables(variables), batch)"
        )
    return replace(plan, request=replace(plan.request, ends="spread"))


def _check_model(plan: Plan, model: Model, length: int) -> None:
    """Checks that layers in decode mode have the variables that they were trained with, and long enough caches."""
    cached = [group for group in model.groups if group.variables.get(CACHE)]
    if not cached:
        names = ", ".join(dict.fromkeys(group.layer.name for group in model.groups))
        raise ValueError(
            f"generate: no layer keeps a cache ({names}); give layers that look at other tokens a field `decode`, by "
            "which Flax's attention keeps one (Linen), or an attention with `init_cache` (nnx)"
        )
    for index in range(model.num_layers):
        old, new = plan.model.group_at(index), model.group_at(index)
        without = lambda group: {name: tree for name, tree in group.variables.items() if name != CACHE}
        if not same_type(without(old), without(new)):
            raise ValueError(
                f"layer {index} ({old.layer.name}) has {describe(without(new))} in decode mode and "
                f"{describe(without(old))} in training; give it the same in both"
            )
        if old.indices != new.indices:
            raise ValueError(
                f"generate: layer {index} ({old.layer.name}) is one of equal layers, {list(old.indices)} in training "
                f"and {list(new.indices)} in decode mode; use layers that don't constrain the dimension of tokens"
            )
    for group in cached:
        leaves = jax.tree.leaves(group.variables[CACHE])
        counts = any(leaf.ndim == 0 and jnp.issubdtype(leaf.dtype, jnp.integer) for leaf in leaves)
        short = [leaf for leaf in leaves if counts and leaf.ndim > 2 and leaf.shape[1] < length]
        if short:
            raise ValueError(
                f"generate: {length} tokens exceed the cache of {group.in_words}, {describe(short[0])}; make it longer"
            )


def _cache_storage(step: Step) -> tuple[Storage, dict[str, float]]:
    """Lays out all caches, as one device has them, with the number that each of their buffers starts from."""
    model, place = step.model, step.schedule.placement
    stage_of = [place.stage_of(s) for s, run in enumerate(step.plan.partition.bounds) for _ in range(*run)]
    owners = [[stage_of[i] for i in group.indices] for group in model.groups]
    leaves = [
        part_structs(group.variables.get(CACHE, {}), function.caches_at(step.plan.request.splits), model.axes)
        for group, function in zip(model.groups, step.functions, strict=True)
    ]
    count = place.num_stages
    starts = [_starts(group, step) for group in model.groups]
    numbers = sorted(set(itertools.chain(*starts)))
    # Each leaf of a cache lies in a buffer of its own. If keys and values shared one, a compiler would copy all of it
    # where one is read after the other was written. Leaves that start from other numbers have other buffers, too.
    labels = [[(i, numbers.index(number)) for i, number in enumerate(group_starts)] for group_starts in starts]
    storage = build_storage(
        leaves,
        owners,
        device_of=range(count),
        rows=[count] * count,
        orders=[[tuple(range(leaf.ndim)) for leaf in cache] for cache in leaves],
        labels=labels,
        waste=None,
    )
    names = itertools.chain(*(record_type.buffers for record_type in storage.record_types))
    return storage, dict(zip(names, itertools.chain(*starts), strict=True))


def _starts(group: LayerGroup, step: Step) -> list[float]:
    """The number that all of each leaf of a layer's cache starts from."""
    if not group.variables.get(CACHE):
        return []
    zeros = lambda tree: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), tree)

    def extremes() -> PyTree:
        """The smallest and the largest number of each leaf of a new cache."""
        context = Context(jax.random.key(0), False, zeros(step.model.batch))
        made = group.layer.init(positional(zeros(group.takes)), context)[CACHE]
        return jax.tree.map(lambda a: jnp.stack([a.min(), a.max()]) if a.size else jnp.zeros(2, a.dtype), made)

    with shapes_only(step.plan.request.mesh):
        closed, shapes = trace(extremes)
    alone = needed_part(closed, [True] * len(closed.out_avals))[0]  # nothing else of the layer
    with no_mesh():
        pairs = jax.tree_util.tree_leaves_with_path(jax.device_get(compiled(replay(alone, shapes))()))
    for path, (smallest, largest) in pairs:
        if smallest != largest or np.iscomplexobj(smallest):
            raise ValueError(
                f"generate: the cache of {group.in_words} starts from different numbers, or complex ones, at "
                f"{jax.tree_util.keystr(path)}; start from one real number, such as 0"
            )
    return [float(smallest) for _, (smallest, _) in pairs]


# --- a model that is one module: cut as in training, each piece has the caches that it uses --------------------------


def cut_decoder(
    model: CutModel, inputs: Shapes, size: int, length: int
) -> Callable[[jax.ShapeDtypeStruct], tuple[AnyLayer, ...]]:
    """Cuts a model in decode mode: tokens `[b, T]` -> the pieces as layers that take these and write their caches.

    Args:
      model: as it is cut in training.
      inputs: the shapes of what it is called with in training; the only array in them is the tokens, `[b, T]`.
      size: the sequences that it is called with at a time.
      length: of the longest sequence.

    Raises:
      ValueError: it has other variables in decode mode, does other things there, or uses a cache in several pieces.
    """
    layer, structure = decoding(model.whole.layer, inputs, size, length), jax.tree.structure(inputs)
    tokens = jax.ShapeDtypeStruct((size, 1), jax.tree.leaves(inputs)[0].dtype)
    read: Read = lambda tokens: jax.tree.unflatten(structure, [tokens])
    with telling(f"generate: {layer.name}", lambda: told_of(read(tokens))):
        train = model.whole.init is not None and model.whole.init.train
        init = trace_init(layer, key_shape(), read(tokens), tokens, train=train)
    whole = replace(model.whole, layer=layer, variables=strong(init.variables), init=init)
    cutting = model.cutting.renumbered(_numbers(model.whole, whole))
    decoder = CutModel(whole, cutting)
    caches = _caches(decoder, *_trace_again(decoder, read, tokens)[:2])
    parts = tuple((*own, *more) for own, more in zip(cutting.parts, caches, strict=True))
    return partial(_pieces_in_decode_mode, CutModel(whole, replace(cutting, parts=parts)), read)


def _pieces_in_decode_mode(model: CutModel, read: Read, tokens: jax.ShapeDtypeStruct) -> tuple[AnyLayer, ...]:
    """The pieces of a model in decode mode; `read` makes of tokens what it is called with.

    Raises:
      ValueError: the model can't be cut for so many tokens; or a piece but the first reads the tokens.
    """
    traced, places, outputs = _trace_again(model, read, tokens)
    pieces = model.pieces_of(traced, places, Kinds())
    for index, piece in enumerate(pieces[1:], start=1):
        if piece.data:
            raise ValueError(
                f"generate: the piece {model.names[index]} of {model.whole.layer.name} reads the tokens in decode "
                "mode; only the first may: leave out there what is made of them, such as a mask of padding"
            )
    return model.as_layers((pieces,) * 3, outputs, 1, (CACHE,))


def _numbers(training: WholeModel, decoder: WholeModel) -> list[int]:
    """For each leaf of the variables in training, its index in decode mode."""
    named = lambda whole: list(zip(whole.collections, whole.paths, strict=True))
    by_name = {name: i for i, name in enumerate(named(decoder)) if name[0] != CACHE}
    if [*by_name] != named(training):
        own = describe({name: tree for name, tree in decoder.unboxed.items() if name != CACHE})
        raise ValueError(
            f"{training.layer.name} has {own} in decode mode and {describe(training.unboxed)} in training; give it the "
            "same in both"
        )
    return list(by_name.values())


def _trace_again(model: CutModel, read: Read, tokens: jax.ShapeDtypeStruct) -> tuple[Traced, list[int], Shapes]:
    """(the trace of a model in decode mode, with slices where training has slices; its places; outputs as trained)."""
    whole, (straight, outputs) = model.whole, model.whole.trace_mode(read, tokens, train=False)
    depths = {part.leaf: len(part.indices) for part in model.cutting.all_parts}
    straight = replace(straight, depths=straight.depths_read | depths)
    if whole.read is not None and len(whole.read) == len(straight.read):
        straight, outputs = replace(straight, read=whole.read), without_unread(outputs, whole.read)
        straight = with_lines(straight, whole.lines)
    try:
        return (traced := Traced(straight)), model.cutting.places_in(traced), outputs
    except NoSuchPlace as error:
        raise ValueError(
            f"generate: {model.whole.layer.name} does in decode mode other things than in training behind the piece "
            f"{model.names[error.args[0]]}; mark places that both have by x = jpipe.cut(x)"
        ) from None


def _caches(model: CutModel, traced: Traced, places: Sequence[int]) -> list[list[Part]]:
    """For each piece the parts of caches that it has.

    Raises:
      ValueError: several pieces use one.
    """
    whole, cutting = model.whole, model.cutting
    is_cache = lambda part: whole.collections[part.leaf] == CACHE
    used = [traced.used(*pair) for pair in itertools.pairwise([0, *places, len(traced.straight.main)])]
    caches = [sorted(filter(is_cache, own)) for own in used]
    users: dict[Part, int] = {}
    for index, (own, parts) in enumerate(zip(used, cutting.parts, strict=True)):
        if strange := [part for part in own if not is_cache(part) and part not in parts]:
            name = "/".join(whole.paths[strange[0].leaf])
            raise ValueError(f"generate: {whole.layer.name} uses {name} in decode mode in {model.names[index]} too")
        for part in caches[index]:
            if users.setdefault(part, index) != index:
                raise ValueError(
                    f"generate: {whole.layer.name} uses its cache {'/'.join(whole.paths[part.leaf])} in the pieces "
                    f"{model.names[users[part]]} and {model.names[index]}; give each block a cache of its own"
                )
    shapes = [leaf.shape for leaf in jax.tree.leaves(whole.variables)]
    first = next((i for i, tied in enumerate(cutting.tied) if tied is None), 0)
    caches[first] += sorted(filter(is_cache, unused_parts([*cutting.all_parts, *users], shapes)))
    return caches
