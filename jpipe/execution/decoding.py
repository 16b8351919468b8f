"""Decoding: tokens go round the stages, K micro-batches of prompts in flight, so that after the fill no stage waits.

A micro-batch is one token of each of its sequences. It takes a tick on each virtual stage; what the last one says is
sent to the first, which goes on with it in the next tick. With K=3, one chunk each, and a prompt of two tokens, p, that
three more follow, stages take (micro-batch, token) as

    tick       0    1    2    3    4    5    6    7    8   ...
    stage 0   0.p  1.p  2.p  0.p  1.p  2.p  0.3  1.3  2.3
    stage 1    .   0.p  1.p  2.p  0.p  1.p  2.p  0.3  1.3
    stage 2    .    .   0.p  1.p  2.p  0.p  1.p  2.p  0.3      its second says token 3 of micro-batch 0, in tick 5

A layer's cache stays on its stage, with a row for each micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jpipe.execution.executor import moved
from jpipe.execution.stage import Job, Stage, Turn
from jpipe.execution.step import Step, build_step
from jpipe.jax_tools.indexing import Index, put_slice, take_row, take_slice
from jpipe.jax_tools.loops import when
from jpipe.jax_tools.memory_order import in_order
from jpipe.jax_tools.tracing import no_mesh
from jpipe.layers.base import describe, positional
from jpipe.layers.decode_mode import CACHE, decoding
from jpipe.memory.storage import Buffers, Row, Storage, build_storage
from jpipe.mesh.axes import AXIS
from jpipe.model.groups import KEEP, LayerGroup, Model, same_type
from jpipe.model.layer_function import Arguments, LayerFunction
from jpipe.model.trace import trace_model
from jpipe.partitioner.shardings import names_in, part_structs
from jpipe.planning.plan import Plan
from jpipe.schedules.orders import forward_only
from jpipe.schedules.placement import Placement
from jpipe.types import Leaf


@dataclass(frozen=True, eq=False)
class Decoding:
    """What generation follows, for micro-batches of some size and sequences of some length.

    Attributes:
      step: one token through all layers, forward only; its micro-batches are K.
      caches: where caches lie, a row for each micro-batch; record types as `Model.variable_sets`.
      starts: by the name of a buffer, the number that all of it starts from.
    """

    step: Step
    caches: Storage
    starts: dict[str, float]


class Round(NamedTuple):
    """What all devices know of one call, as each has it.

    Attributes:
      prompts: `[K, b, S]`.
      rows: `[K, b]`, the index of each prompt among all.
      temperatures: `[K, b]`, of samples; None takes the likeliest token.
      num_tokens: to add to each prompt.
    """

    prompts: jax.Array
    rows: jax.Array
    temperatures: jax.Array | None
    num_tokens: int


class DecodingCarry(NamedTuple):
    """What a device carries from tick to tick.

    Attributes:
      activation: boundary buffers with what the next layer takes.
      caches: buffers of all layers' caches.
      token: `[b]`, on the first stage what it takes next, on the last what it said.
      place: of that token in its sequence, from 0.
      said: `[K, b, num_tokens]`, filled on the last stage.
    """

    activation: Buffers
    caches: Buffers
    token: jax.Array
    place: Index
    said: jax.Array


# --- before it runs ---------------------------------------------------------------------------------------------------


def make_decoding(plan: Plan, size: int, length: int) -> Decoding:
    """Traces the layers in decode mode and lays out their caches.

    Args:
      plan: the pipeline's.
      size: b, the sequences of a micro-batch.
      length: the longest sequence that is fed: what caches are made for.

    Raises:
      ValueError: the model takes no tokens or gives no logits; its ends are shared in a way that can't be undone; no
        layer has a cache, or one too short; decoding needs other variables than training.
    """
    request, traced = plan.request, plan.traced
    tokens = _check_tokens(plan)
    plan = _with_ends_apart(plan) if plan.shares_ends else plan
    takes = [traced.called_with(i) for i in range(traced.num_layers)]
    layers = [decoding(*pair, size, length) for pair in zip(request.layers, takes, strict=True)]
    names = {name for group in traced.groups for name in group.variables} - {"params"}
    rules = {**request.rules, **dict.fromkeys(names, KEEP), CACHE: CACHE}
    one = jax.ShapeDtypeStruct((size, 1), tokens.dtype)
    model = trace_model(layers, lambda batch: batch, one, request.splits, rules)
    _check_model(plan, model, length)
    last = replace(model.groups[-1], gives_at=[request.splits.of_examples(size)])  # whole logits, to choose by
    model = replace(model, groups=(*model.groups[:-1], last))
    placement = request.schedule.placement
    schedule = forward_only(
        **request.schedule.sizes | {"num_microbatches": placement.num_stages}, style=placement.style
    )
    functions = [LayerFunction(group, None, request.remat, model.batch) for group in model.groups]
    step = build_step(plan, model, schedule, functions)
    caches, starts = _cache_storage(step)
    return Decoding(step, caches, starts)


def _check_tokens(plan: Plan) -> jax.ShapeDtypeStruct:
    """The type of what the model takes, `[b, T]`."""
    given, said = jax.tree.leaves(plan.traced.inputs), jax.tree.leaves(plan.traced.groups[-1].gives)
    takes = len(given) == 1 and given[0].ndim == 2 and jnp.issubdtype(given[0].dtype, jnp.integer)
    if not takes or len(said) != 1 or said[0].ndim != 3:
        raise ValueError(
            f"generate needs a model that takes tokens [B, T] and gives logits [B, T, vocabulary]; this one takes "
            f"{describe(plan.traced.inputs)} and gives {describe(plan.traced.groups[-1].gives)}"
        )
    return given[0]


def _with_ends_apart(plan: Plan) -> Plan:
    """The plan with each end on its own stage, where its weights are brought to for all tokens.

    Raises:
      ValueError: another axis splits the same dimension of such a weight, of which the stages then have no runs.
    """
    specs = (spec for layout in plan.layouts.values() for known in layout.storage.record_types for spec in known.specs)
    if any(AXIS in names_in(entry) and len(names_in(entry)) > 1 for spec in specs for entry in spec):
        raise ValueError(
            "generate: ends='shared' splits weights of the ends over the stages and another mesh axis along one "
            "dimension, of which no stage can have all; make a pipeline with ends='own' or 'spread', and pass it "
            "pipe.from_layer_variables(trained.layer_variables(variables), batch)"
        )
    return replace(plan, ends_apart=True)


def _check_model(plan: Plan, model: Model, length: int) -> None:
    """Checks that layers in decode mode have the variables that they were trained with, and caches that do."""
    kept = [group for group in model.groups if group.variables.get(CACHE)]
    if not kept:
        names = ", ".join(dict.fromkeys(group.layer.name for group in model.groups))
        raise ValueError(
            f"generate: no layer keeps a cache ({names}), so that none would see the tokens before; give the layers "
            "that look at other tokens a field `decode` with which Flax's attention keeps one (Linen), or an attention "
            "with `init_cache` (nnx)"
        )
    for index in range(model.num_layers):
        old, new = plan.traced.group_at(index), model.group_at(index)
        without = lambda group: {name: tree for name, tree in group.variables.items() if name != CACHE}
        if not same_type(without(old), without(new)) or old.indices != new.indices:
            raise ValueError(
                f"layer {index} ({old.layer.name}) has {describe(without(new))} in decode mode and "
                f"{describe(without(old))} in training, so that it can't take over what was trained"
            )
    for group in kept:
        leaves = jax.tree.leaves(group.variables[CACHE])
        counts = any(leaf.ndim == 0 and jnp.issubdtype(leaf.dtype, jnp.integer) for leaf in leaves)
        short = [leaf for leaf in leaves if counts and leaf.ndim > 2 and max(leaf.shape[1:-1]) < length]
        if short:
            raise ValueError(
                f"generate: sequences of {length} tokens are longer than the cache of layer {group.indices[0]} "
                f"({group.layer.name}), {describe(short[0])}; shorten the prompts, ask for less, or make it longer"
            )


def _cache_storage(step: Step) -> tuple[Storage, dict[str, float]]:
    """The places of all caches, as one device has them, and what each of their buffers starts from."""
    model, place = step.model, step.schedule.placement
    groups = [model.groups[known.group] for known in model.variable_sets]
    stage_of = [
        place.stage_of(s) for s, (start, stop) in enumerate(step.plan.partition.bounds) for _ in range(start, stop)
    ]
    owners = [[stage_of[users[0]] for users in known.users] for known in model.variable_sets]
    functions = [step.functions[known.group] for known in model.variable_sets]
    leaves = [
        part_structs(group.variables.get(CACHE, {}), function.caches_at(step.plan.request.splits), model.axes)
        for group, function in zip(groups, functions, strict=True)
    ]
    count = place.num_stages
    starts = [_starts(group, step) for group in groups]
    numbers = sorted({number for own in starts for number in own})
    # Each leaf of a cache lies in a buffer of its own: were keys and values in one, a compiler would copy all of it
    # where one is read after the other was written. So do leaves that start from other numbers.
    tags = [[(i, numbers.index(number)) for i, number in enumerate(own)] for own in starts]
    storage = build_storage(
        leaves,
        owners,
        device_of=range(count),
        rows=[count] * count,
        orders=[[tuple(range(leaf.ndim)) for leaf in own] for own in leaves],
        tags=tags,
    )
    found: dict[str, float] = {}
    for known, own in zip(storage.record_types, starts, strict=True):
        for name, number in zip(known.buffers, own, strict=True):
            if found.setdefault(name, number) != number:
                raise ValueError(f"generate: caches start from {found[name]} and from {number} in one buffer")
    return storage, found


def _starts(group: LayerGroup, step: Step) -> list[float]:
    """The number that all of each leaf of a layer's cache starts from."""
    if not group.variables.get(CACHE):
        return []
    zeros = lambda tree: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), tree)
    init = lambda: group.layer.init(jax.random.key(0), positional(zeros(group.takes)), zeros(step.model.batch))[CACHE]
    with jax.ensure_compile_time_eval(), no_mesh():
        made = jax.jit(init)()
    for path, leaf in jax.tree_util.tree_leaves_with_path(made):
        if np.ptp(np.asarray(leaf, np.float64)) != 0:
            raise ValueError(
                f"generate: the cache of layer {group.indices[0]} ({group.layer.name}) starts from different numbers "
                f"at {jax.tree_util.keystr(path)}; start from one number, such as 0"
            )
    return [float(np.ravel(leaf)[0]) for leaf in jax.tree.leaves(made)]


def ring(placement: Placement, num_rounds: int) -> np.ndarray:
    """`[ticks, 4, K]`: of each stage in each tick the micro-batch, virtual stage and round (-1 where it idles), and the
    route by which what it takes in the next tick arrives.

    Micro-batch m begins with tick m; where the chain turns (a "v"), with tick 2m, so that no stage has two at a time.

    >>> ring(Placement(num_stages=2, num_chunks=1), 2)[:, 2].tolist()
    [[0, -1], [0, 0], [1, 0], [1, 1], [-1, 1]]
    """
    count, hop = placement.num_virtual_stages, 2 if placement.style == "v" and placement.num_stages > 1 else 1
    found = np.zeros((count * num_rounds + hop * (placement.num_stages - 1), 4, placement.num_stages), np.int32)
    found[:, 2] = -1
    routes = [{receiver: sender for sender, receiver in route} for route in placement.routes(+1)]
    for m in range(placement.num_stages):
        for t in range(count * num_rounds):
            s = t % count
            k = placement.stage_of(s)
            found[t + hop * m, :3, k] = m, s, t // count
            if s > 0:
                sender = placement.stage_of(s - 1)
                found[t + hop * m - 1, 3, k] = next(i for i, route in enumerate(routes) if route.get(k) == sender)
    return found


# --- as it runs -------------------------------------------------------------------------------------------------------


def run_decoding(stage: Stage, plan: Decoding, call: Round) -> jax.Array:
    """Prompts and what follows them, `[K, b, S + num_tokens]`, on one device of a `shard_map`; all stages get it."""
    step, place = stage.step, stage.step.schedule.placement
    num_rounds = call.prompts.shape[-1] + call.num_tokens - 1
    table = jnp.moveaxis(jnp.asarray(ring(place, num_rounds)), -1, 0)
    mine = take_row(table, stage.device)
    said = jnp.zeros((*call.prompts.shape[:2], call.num_tokens), call.prompts.dtype)
    caches = {n: jnp.full(a.shape, plan.starts.get(n, 0), a.dtype) for n, a in plan.caches.named_buffers}
    # The last layer's weights are brought to their order once: they may lie turned, and be copied in every tick else.
    rows = lambda leaves: [in_order(leaf, tuple(range(leaf.ndim))) for leaf in leaves]
    head = tuple(map(rows, stage.weights(Turn(step.model.last, 0, 0, {}))))
    carry = DecodingCarry(step.activations.empty(), caches, call.prompts[0, :, 0], jnp.zeros((), jnp.int32), said)

    def tick(carry: DecodingCarry, now: jax.Array) -> tuple[DecodingCarry, None]:
        microbatch, virtual_stage, round_, route = now
        virtual_stage = 0 if place.num_virtual_stages == 1 else virtual_stage
        carry = carry._replace(place=round_)
        work = lambda at, carry: _work(stage, plan, call, head, at, carry)
        carry = when(round_ >= 0, (microbatch, virtual_stage), work, carry)
        return _passed_on(stage, place, route, carry), None

    with jax.named_scope("ticks"):
        carry = jax.lax.scan(tick, carry, mine)[0]
    is_last = stage.device == place.stage_of(place.num_virtual_stages - 1)
    said = jax.lax.psum(jnp.where(is_last, carry.said, 0), AXIS)
    return jnp.concatenate([call.prompts, said], axis=-1)


def _work(
    stage: Stage,
    plan: Decoding,
    call: Round,
    head: tuple[list[Leaf], ...],
    at: tuple[jax.Array, Index],
    carry: DecodingCarry,
) -> DecodingCarry:
    """One token of a micro-batch through the layers of a virtual stage; `head` are the last layer's weights."""
    step, groups, (microbatch, virtual_stage) = stage.step, stage.step.model.groups, at
    prompt_length = call.prompts.shape[-1]
    of_prompt = take_slice(
        call.prompts, (microbatch, 0, jnp.minimum(carry.place, prompt_length - 1)), (1, *call.prompts.shape[1:2], 1)
    )
    begins = (virtual_stage == 0) & (carry.place < prompt_length)
    carry = carry._replace(token=jnp.where(begins, of_prompt[0, :, 0], carry.token))

    def reads(turn: Turn, carry: DecodingCarry) -> tuple[Leaf, list[Leaf], list[Leaf]]:
        """(the token, what the layer takes, its cache)."""
        first, v = groups[turn.g].indices[0], groups[turn.g].variable_set
        x = step.activations.read(carry.activation, first - 1, 0) if first else []
        row = Row(turn.microbatch, stage.device)
        cache = [] if v is None else plan.caches.read(carry.caches, v, turn.position, row)
        return carry.token[:, None], x, cache

    def visit(turn: Turn, found: tuple[Leaf, list[Leaf], list[Leaf]], carry: DecodingCarry) -> DecodingCarry:
        token, x, cache = found
        params, fixed = head if turn.g == step.model.last else stage.weights(turn)
        batch = token if step.functions[turn.g].reads_batch else None
        results, _ = step.forwards[turn.g](Arguments(params, cache, fixed, None, batch), x)
        v = groups[turn.g].variable_set
        if cache and v is not None:
            row = Row(turn.microbatch, stage.device)
            carry = carry._replace(caches=plan.caches.write(carry.caches, v, turn.position, results.state, row))
        if turn.g != step.model.last:
            buffers = step.activations.write(carry.activation, groups[turn.g].indices[0], 0, results.outputs)
            return carry._replace(activation=buffers)
        return _said(stage, call, turn.microbatch, results.outputs[0][:, 0], carry)

    return stage.sweep(Job(virtual_stage, microbatch, {}), reads, visit, carry)


def _said(stage: Stage, call: Round, microbatch: Index, logits: jax.Array, carry: DecodingCarry) -> DecodingCarry:
    """The carry with the next token `[b]`, chosen by logits `[b, vocabulary]`."""
    logits, place = logits.astype(jnp.promote_types(jnp.float32, logits.dtype)), carry.place + 1
    if call.temperatures is None:
        token = jnp.argmax(logits, axis=-1)
    else:
        temperatures = take_row(call.temperatures, microbatch)[:, None].astype(logits.dtype)
        token = sample(stage.key, take_row(call.rows, microbatch), place, logits / temperatures)
    token = token.astype(carry.token.dtype)
    # What is said within the prompt is written to the first place, over which the first new token is written later.
    column = jnp.maximum(place - call.prompts.shape[-1], 0)
    said = put_slice(carry.said, token[None, :, None], (microbatch, 0, column))
    return carry._replace(token=token, said=said)


def sample(key: jax.Array | None, rows: jax.Array, place: Index, logits: jax.Array) -> jax.Array:
    """A token of each row, `[b]`, from `softmax(logits)` `[b, vocabulary]`, by (key, row, place) alone."""
    assert key is not None
    own = lambda row, logits: jax.random.categorical(jax.random.fold_in(jax.random.fold_in(key, row), place), logits)
    return jax.vmap(own)(rows, logits)


def _passed_on(stage: Stage, place: Placement, route: Index, carry: DecodingCarry) -> DecodingCarry:
    """The carry with what neighbours left: activations, and on the first stage the token that was said."""
    first, last = place.stage_of(0), place.stage_of(place.num_virtual_stages - 1)
    if first != last:
        carry = carry._replace(token=jax.lax.ppermute(carry.token, AXIS, [(last, first)]))
    boundaries = stage.step.activations
    sent = boundaries.crossing(carry.activation)
    arrived = [moved(sent, pairs, stage.device) for pairs in place.routes(+1)]
    if not arrived:
        return carry
    chosen = jax.tree.map(
        lambda *found: found[0] if len(found) == 1 else jnp.where(route == 1, found[1], found[0]), *arrived
    )
    return carry._replace(activation=boundaries.with_crossed(carry.activation, chosen))
