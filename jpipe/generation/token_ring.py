"""Runs generation: tokens go round the stages and are drawn on the last; K micro-batches in flight keep all at work.

A micro-batch is one token of each of its sequences. It takes a tick on each virtual stage. The last stage chooses the
next token and sends it to the first, which goes on with it in the next tick. The table shows which (micro-batch, token)
each stage takes, for K=3, one chunk a stage, and a prompt of two tokens, both "p", to which three are added:

    tick       0    1    2    3    4    5    6    7    8   ...
    stage 0   0.p  1.p  2.p  0.p  1.p  2.p  0.3  1.3  2.3
    stage 1    .   0.p  1.p  2.p  0.p  1.p  2.p  0.3  1.3
    stage 2    .    .   0.p  1.p  2.p  0.p  1.p  2.p  0.3      tick 5, the second p of micro-batch 0, gives its token 3

A layer's cache stays on its stage, with a row for each micro-batch. Where layers take several tokens of a prompt at a
time (prefill), these go round first, as one "token" here; then the first that is said is a prompt of one token.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jpipe.arrays.in_place import Index, put_slice, take_row, take_slice, when
from jpipe.execution.executor import moved
from jpipe.execution.stage import Stage
from jpipe.execution.sweep import Job, Sweep, Turn
from jpipe.generation.decoding import Decoding
from jpipe.memory.memory_order import in_order
from jpipe.memory.storage import Buffers, Row
from jpipe.mesh.axes import AXIS
from jpipe.model.layer_function import LayerArguments
from jpipe.schedules.actions import Placement
from jpipe.types import Leaf


class Round(NamedTuple):
    """The values of one call that all devices know.

    Attributes:
      prompts: `[K, b, S]`.
      rows: `[K, b]`, the index of each prompt among all.
      temperatures: `[K, b]`, of samples; None takes the likeliest token.
      num_tokens: to add to each prompt.
      start: the place of a prompt's first token in its sequence.
    """

    prompts: jax.Array
    rows: jax.Array
    temperatures: jax.Array | None
    num_tokens: int
    start: int = 0


class DecodingCarry(NamedTuple):
    """The arrays that a device carries from tick to tick, where layers take T tokens at a time.

    Attributes:
      activation: boundary buffers with what the next layer takes.
      caches: buffers of all layers' caches.
      tokens: `[b, T]`, on the first stage those that it takes next, on the last the one that it said, T times.
      said: `[K, b, num_tokens]`, filled on the last stage.
    """

    activation: Buffers
    caches: Buffers
    tokens: jax.Array
    said: jax.Array


def ring(placement: Placement, num_rounds: int) -> np.ndarray:
    """Returns `[ticks, 4, K]`: for each tick and stage its micro-batch, virtual stage, round (-1 where it idles), and
    the route by which its next activation arrives.

    Micro-batch m begins with tick m; where the chain turns (a "v"), with tick 2m, so that no stage has two at a time.

    >>> ring(Placement(num_stages=2, num_chunks=1), 2)[:, 2].tolist()
    [[0, -1], [0, 0], [1, 0], [1, 1], [-1, 1]]
    """
    count, hop = placement.num_virtual_stages, 2 if placement.style == "v" and placement.num_stages > 1 else 1
    table = np.zeros((count * num_rounds + hop * (placement.num_stages - 1), 4, placement.num_stages), np.int32)
    table[:, 2] = -1
    routes = [{receiver: sender for sender, receiver in route} for route in placement.routes(+1)]
    for m in range(placement.num_stages):
        for t in range(count * num_rounds):
            s = t % count
            k = placement.stage_of(s)
            table[t + hop * m, :3, k] = m, s, t // count
            if s > 0:
                sender = placement.stage_of(s - 1)
                table[t + hop * m - 1, 3, k] = next(i for i, route in enumerate(routes) if route.get(k) == sender)
    return table


def run_decoding(stage: Stage, plan: Decoding, call: Round) -> jax.Array:
    """Returns prompts with the tokens that follow, `[K, b, S + num_tokens]`, on any device of a `shard_map`."""
    caches = {n: jnp.full(a.shape, plan.starts[n], a.dtype) for n, a in plan.caches.named_buffers}
    done = call.prompts
    if plan.prefill is not None:
        first = call._replace(num_tokens=1)
        said, caches = _go_round(replace(stage, step=plan.prefill), plan, first, caches)
        done = jnp.concatenate([done, said], axis=-1)
        call = call._replace(prompts=said, num_tokens=call.num_tokens - 1, start=call.prompts.shape[-1])
    if call.num_tokens:
        said, _ = _go_round(stage, plan, call, caches)
        done = jnp.concatenate([done, said], axis=-1)
    return done


def _go_round(stage: Stage, plan: Decoding, call: Round, caches: Buffers) -> tuple[jax.Array, Buffers]:
    """Returns (the tokens that follow prompts, `[K, b, num_tokens]`, on all stages; the caches after them)."""
    step, place, at_once = stage.step, stage.step.schedule.placement, stage.step.model.batch.shape[1]
    num_rounds = call.prompts.shape[-1] // at_once + call.num_tokens - 1
    table = jnp.moveaxis(jnp.asarray(ring(place, num_rounds)), -1, 0)
    turns = take_row(table, stage.device)
    said = jnp.zeros((*call.prompts.shape[:2], call.num_tokens), call.prompts.dtype)
    # The last layer's weights are brought to their order once. They may lie transposed, and a compiler would copy them
    # in every tick.
    rows = lambda leaves: [in_order(leaf, tuple(range(leaf.ndim))) for leaf in leaves]
    head = tuple(map(rows, stage.weights(Turn(step.model.last, 0, 0, {}))))
    carry = DecodingCarry(step.activations.empty(), caches, call.prompts[0, :, :at_once], said)

    def tick(carry: DecodingCarry, now: jax.Array) -> tuple[DecodingCarry, None]:
        microbatch, virtual_stage, round_, route = now
        virtual_stage = 0 if place.num_virtual_stages == 1 else virtual_stage
        work = lambda at, carry: _work(stage, plan, call, head, at, carry)
        carry = when(round_ >= 0, (microbatch, virtual_stage, round_), work, carry)
        return _passed_on(stage, place, route, carry), None

    with jax.named_scope("ticks"):
        carry = jax.lax.scan(tick, carry, turns)[0]
    is_last = stage.device == place.stage_of(place.num_virtual_stages - 1)
    return jax.lax.psum(jnp.where(is_last, carry.said, 0), AXIS), carry.caches


def _work(
    stage: Stage,
    plan: Decoding,
    call: Round,
    head: tuple[list[Leaf], ...],
    at: tuple[jax.Array, Index, jax.Array],
    carry: DecodingCarry,
) -> DecodingCarry:
    """Sends tokens through layers; `at` is (micro-batch, virtual stage, round), `head` the last layer's weights."""
    step, groups, (microbatch, virtual_stage, round_) = stage.step, stage.step.model.groups, at
    prompt_length, at_once = call.prompts.shape[-1], carry.tokens.shape[1]
    begin = round_ * at_once  # of these tokens, counted from the prompt's first
    column = jnp.minimum(begin, prompt_length - at_once)
    of_prompt = take_slice(call.prompts, (microbatch, 0, column), (1, *carry.tokens.shape))[0]
    begins = (virtual_stage == 0) & (begin < prompt_length)
    carry = carry._replace(tokens=jnp.where(begins, of_prompt, carry.tokens))

    def reads(turn: Turn, carry: DecodingCarry) -> tuple[Leaf, list[Leaf], list[Leaf]]:
        """(the tokens, what the layer takes, its cache)."""
        first = groups[turn.g].indices[0]
        x = step.activations.read(carry.activation, first - 1, 0) if first else []
        row = Row(turn.microbatch, stage.device)
        return carry.tokens, x, plan.caches.read(carry.caches, turn.g, turn.position, row)

    def visit(turn: Turn, arrays: tuple[Leaf, list[Leaf], list[Leaf]], carry: DecodingCarry) -> DecodingCarry:
        tokens, x, cache = arrays
        params, fixed = head if turn.g == step.model.last else stage.weights(turn)
        batch = tokens if step.functions[turn.g].reads_batch else None
        results, _ = step.forwards[turn.g](LayerArguments(params, cache, fixed, None, batch), x)
        if cache:
            row = Row(turn.microbatch, stage.device)
            carry = carry._replace(caches=plan.caches.write(carry.caches, turn.g, turn.position, results.state, row))
        if turn.g != step.model.last:
            buffers = step.activations.write(carry.activation, groups[turn.g].indices[0], 0, results.outputs)
            return carry._replace(activation=buffers)
        return _said(stage, call, turn.microbatch, begin + at_once, plan.logits(results.outputs)[:, -1], carry)

    return Sweep(stage.step, Job(virtual_stage, microbatch, {}), reads, visit, "F", reverse=False).run(carry)


def _said(
    stage: Stage, call: Round, microbatch: Index, count: Index, logits: jax.Array, carry: DecodingCarry
) -> DecodingCarry:
    """Adds to the carry the token `[b]` that follows `count` others, chosen by logits `[b, vocabulary]`."""
    logits = logits.astype(jnp.promote_types(jnp.float32, logits.dtype))
    if call.temperatures is None:
        token = jnp.argmax(logits, axis=-1)
    else:
        temperatures = take_row(call.temperatures, microbatch)[:, None].astype(logits.dtype)
        token = sample(stage.key, take_row(call.rows, microbatch), call.start + count, logits / temperatures)
    token = token.astype(carry.tokens.dtype)[:, None]
    # What is said within the prompt is written to the first place, over which the first new token is written later.
    column = jnp.maximum(count - call.prompts.shape[-1], 0)
    said = put_slice(carry.said, token[None], (microbatch, 0, column))
    return carry._replace(tokens=jnp.broadcast_to(token, carry.tokens.shape), said=said)


def sample(key: jax.Array | None, rows: jax.Array, place: Index, logits: jax.Array) -> jax.Array:
    """Draws a token for each row, `[b]`, from `softmax(logits)` `[b, vocabulary]`, by (key, row, place) alone."""
    assert key is not None
    keys = jax.vmap(lambda row: jax.random.fold_in(jax.random.fold_in(key, row), place))(rows)
    return jax.vmap(jax.random.categorical)(keys, logits)


def _passed_on(stage: Stage, place: Placement, route: Index, carry: DecodingCarry) -> DecodingCarry:
    """Adds to the carry what neighbours sent: activations, and on the first stage the token that was chosen."""
    begins_on, ends_on = place.stage_of(0), place.stage_of(place.num_virtual_stages - 1)
    if begins_on != ends_on:
        carry = carry._replace(tokens=jax.lax.ppermute(carry.tokens, AXIS, [(ends_on, begins_on)]))
    boundaries = stage.step.activations
    sent = boundaries.crossing(carry.activation)
    arrived = [moved(sent, pairs, stage.device) for pairs in place.routes(+1)]
    if not arrived:
        return carry
    chosen = lambda first, *others: jax.lax.select_n(route, first, *others) if others else first
    taken = jax.tree.map(chosen, arrived[0], *arrived[1:])
    return carry._replace(activation=boundaries.with_crossed(carry.activation, taken))
