"""Checks what `Pipeline.generate` is asked for, and sends tokens round.

Tokens go round the stages and are drawn on the last; K micro-batches in flight keep all at work. A micro-batch is one
token of each of its sequences. It takes a tick on each virtual stage. The last stage chooses the next token and sends
it to the first, which goes on with it in the next tick. The table shows which (micro-batch, token) each stage takes,
for K=3, one chunk a stage, and a prompt of two tokens, both "p", to which three are added:

    tick       0    1    2    3    4    5    6    7    8   ...
    stage 0   0.p  1.p  2.p  0.p  1.p  2.p  0.3  1.3  2.3
    stage 1    .   0.p  1.p  2.p  0.p  1.p  2.p  0.3  1.3
    stage 2    .    .   0.p  1.p  2.p  0.p  1.p  2.p  0.3      tick 5, the second p of micro-batch 0, gives its token 3

A layer's cache stays on its stage, with a row for each micro-batch. Where layers take several tokens of a prompt at a
time (prefill), these go round first, as one "token" here; the token that follows them is then a prompt of one token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec

from jpipe.execution.before_ticks import joined
from jpipe.execution.decoding import Decoding, PickLogits, find_logits, make_decoding
from jpipe.execution.executor import moved
from jpipe.execution.programs import run_step
from jpipe.execution.stage import Stage
from jpipe.execution.sweep import Job, sweep
from jpipe.jax.in_place import Index, put_slice, take_row, take_slice, when
from jpipe.layers.base import describe
from jpipe.memory.buffers import in_order
from jpipe.memory.layout import StageTree
from jpipe.memory.storage import Buffers, Row
from jpipe.model.layer_function import LayerArguments
from jpipe.model.random_keys import as_key
from jpipe.partitioner.axes import AXIS
from jpipe.partitioner.shardings import Shard, to_spec
from jpipe.planning.planner import Planner
from jpipe.processes.progress import task
from jpipe.schedules.actions import Placement
from jpipe.types import Batch, Leaf
from jpipe.users_numbers import as_integer, as_number, integer_or_none


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


def timetable(placement: Placement, num_rounds: int) -> np.ndarray:
    """Returns `[ticks, 4, K]`: for each tick and stage its micro-batch, virtual stage, round (-1 where it idles), and
    the route by which its next activation arrives.

    Micro-batch m begins with tick m; where the chain turns (a "v"), with tick 2m, so that no stage has two at a time.

    >>> timetable(Placement(num_stages=2, num_chunks=1), 2)[:, 2].tolist()
    [[0, -1], [0, 0], [1, 0], [1, 1], [-1, 1]]
    """
    count, hop = placement.num_virtual_stages, 2 if placement.style == "v" and placement.num_stages > 1 else 1
    table = np.zeros((count * num_rounds + hop * (placement.num_stages - 1), 4, placement.num_stages), np.int32)
    table[:, 2] = -1
    for m in range(placement.num_stages):
        for t in range(count * num_rounds):
            s = t % count
            k = placement.stage_of(s)
            table[t + hop * m, :3, k] = m, s, t // count
            if s > 0:
                from_to = (placement.stage_of(s - 1), k)
                table[t + hop * m - 1, 3, k] = [from_to in route for route in placement.routes(+1)].index(True)
    return table


@dataclass(frozen=True, eq=False)
class Round:
    """Prompts that go round on a device, and the tokens that are added to them.

    Attributes:
      stage: the device, in a step in which layers take T tokens at a time.
      decoding: how the layers decode. `stage.batch` is (all prompts, their indices `[K, b]`, the temperatures `[K, b]`
        by which tokens are drawn; None takes the likeliest).
      prompts: `[K, b, S]`, those that go round.
      num_tokens: to add to each of them.
      start: the place of their first token in its sequence.
    """

    stage: Stage
    decoding: Decoding
    prompts: jax.Array
    num_tokens: int
    start: int

    def run(self, caches: Buffers) -> tuple[jax.Array, Buffers]:
        """(the tokens that follow prompts, `[K, b, num_tokens]`, on all stages; the caches after them)."""
        stage, step = self.stage, self.stage.step
        place, at_once = step.schedule.placement, step.model.batch.shape[1]
        num_rounds = self.prompts.shape[-1] // at_once + self.num_tokens - 1
        turns = take_row(jnp.moveaxis(jnp.asarray(timetable(place, num_rounds)), -1, 0), stage.device)
        said = jnp.zeros((*self.prompts.shape[:2], self.num_tokens), self.prompts.dtype)
        # The last layer's weights are put into their order once. They may lie transposed, and a compiler would copy
        # them in every tick.
        rows = lambda leaves: [in_order(leaf, tuple(range(leaf.ndim))) for leaf in leaves]
        head = tuple(map(rows, stage.weights(Job(0, {}, g=step.model.last))))
        carry = DecodingCarry(step.activations.empty(), caches, self.prompts[0, :, :at_once], said)

        def tick(carry: DecodingCarry, now: jax.Array) -> tuple[DecodingCarry, None]:
            microbatch, virtual_stage, round_, route = now
            virtual_stage = 0 if place.num_virtual_stages == 1 else virtual_stage
            carry = when(round_ >= 0, (microbatch, virtual_stage, round_), partial(self._work, head), carry)
            return self._passed_on(place, route, carry), None

        with jax.named_scope("ticks"):
            carry = jax.lax.scan(tick, carry, turns)[0]
        return jax.lax.psum(jnp.where(stage.device == place.ends[1], carry.said, 0), AXIS), carry.caches

    def _work(self, head: tuple[list[Leaf], ...], at: tuple[Index, ...], carry: DecodingCarry) -> DecodingCarry:
        """Sends tokens through layers; `at` is (micro-batch, virtual stage, round), `head` the last layer's weights."""
        stage, step, caches, (microbatch, virtual_stage, round_) = self.stage, self.stage.step, self.decoding.caches, at
        prompt_length, at_once, groups = self.prompts.shape[-1], carry.tokens.shape[1], step.model.groups
        begin = round_ * at_once  # of these tokens, counted from the prompt's first
        column = jnp.minimum(begin, prompt_length - at_once)
        of_prompt = take_slice(self.prompts, (microbatch, 0, column), (1, *carry.tokens.shape))[0]
        begins = (virtual_stage == 0) & (begin < prompt_length)
        carry = carry._replace(tokens=jnp.where(begins, of_prompt, carry.tokens))

        def reads(job: Job, carry: DecodingCarry) -> tuple[Leaf, list[Leaf], list[Leaf]]:
            """(the tokens, what the layer takes, its cache)."""
            first = groups[job.g].indices[0]
            x = step.activations.read(carry.activation, first - 1, 0) if first else []
            return carry.tokens, x, caches.read(carry.caches, *job.layer, Row(job.microbatch, stage.device))

        def visit(job: Job, arrays: tuple[Leaf, list[Leaf], list[Leaf]], carry: DecodingCarry) -> DecodingCarry:
            tokens, x, cache = arrays
            params, fixed = head if job.g == step.model.last else stage.weights(job)
            batch = tokens if step.functions[job.g].reads_batch else None
            results, _ = step.forwards[job.g](LayerArguments(params, cache, fixed, None, batch), x)
            if cache:
                row = Row(job.microbatch, stage.device)
                carry = carry._replace(caches=caches.write(carry.caches, *job.layer, results.state, row))
            if job.g != step.model.last:
                buffers = step.activations.write(carry.activation, groups[job.g].indices[0], 0, results.outputs)
                return carry._replace(activation=buffers)
            return self._said(job.microbatch, begin + at_once, results.outputs[self.decoding.logits][:, -1], carry)

        return sweep(step, Job(microbatch, {}, virtual_stage=virtual_stage), "F", reads, visit, carry)

    def _said(self, microbatch: Index, count: Index, logits: jax.Array, carry: DecodingCarry) -> DecodingCarry:
        """Adds to the carry the token `[b]` that follows `count` others, chosen by logits `[b, vocabulary]`."""
        _, rows, temperatures = self.stage.batch
        logits = logits.astype(jnp.promote_types(jnp.float32, logits.dtype))
        if temperatures is None:
            token = jnp.argmax(logits, axis=-1)
        else:
            temperatures = take_row(temperatures, microbatch)[:, None].astype(logits.dtype)
            token = sample(self.stage.key, take_row(rows, microbatch), self.start + count, logits / temperatures)
        token = token.astype(carry.tokens.dtype)[:, None]
        # What is said within the prompt is written to the first place, over which the first new token is written later.
        column = jnp.maximum(count - self.prompts.shape[-1], 0)
        said = put_slice(carry.said, token[None], (microbatch, 0, column))
        return carry._replace(tokens=jnp.broadcast_to(token, carry.tokens.shape), said=said)

    def _passed_on(self, place: Placement, route: Index, carry: DecodingCarry) -> DecodingCarry:
        """Adds to the carry what neighbours sent: activations, and on the first stage the token that was chosen."""
        begins_on, ends_on = place.ends
        if begins_on != ends_on:
            carry = carry._replace(tokens=jax.lax.ppermute(carry.tokens, AXIS, [(ends_on, begins_on)]))
        boundaries = self.stage.step.activations
        sent = boundaries.crossing(carry.activation)
        arrived = [moved(sent, pairs, self.stage.device) for pairs in place.routes(+1)]
        if not arrived:
            return carry
        chosen = lambda first, *others: jax.lax.select_n(route, first, *others) if others else first
        taken = jax.tree.map(chosen, arrived[0], *arrived[1:])
        return carry._replace(activation=boundaries.with_crossed(carry.activation, taken))


def sample(key: jax.Array | None, rows: jax.Array, place: Index, logits: jax.Array) -> jax.Array:
    """Draws a token for each row, `[b]`, from `softmax(logits)` `[b, vocabulary]`, by (key, row, place) alone."""
    assert key is not None
    keys = jax.vmap(lambda row: jax.random.fold_in(jax.random.fold_in(key, row), place))(rows)
    return jax.vmap(jax.random.categorical)(keys, logits)


def as_asked(
    planner: Planner,
    prompts: Leaf,
    num_tokens: int,
    key: jax.Array | None,
    temperature: float,
    prefill: int,
    logits: PickLogits | None,
) -> tuple[str, dict[str, Decoding | int], tuple[jax.Array | None, jax.Array | None]]:
    """Checks the arguments of `Pipeline.generate`, and lays out once how the layers decode such prompts.

    Returns:
      (the numbers in words, by which processes compare what they want; the options of `generate`; the key and the
      temperature by which tokens are drawn, None and None to take the likeliest).

    Raises:
      TypeError, ValueError: prompts are no tokens `[B, S]`, or fewer than stages; nothing is asked for; a temperature
        that is no number from 0 on, or one without a key; prompts aren't fed in equal parts; as `find_logits` and
        `make_decoding`.
    """
    plan, request = planner.known_plan(), planner.request
    stages, shards = request.schedule.num_stages, request.splits.num_shards
    _check_prompts(prompts, stages)
    if isinstance(temperature, Tracer) or isinstance(num_tokens, Tracer):
        raise TypeError("temperature or num_tokens is traced; pass numbers, static arguments of your jax.jit")
    temperature = _as_temperature(temperature, key)
    num_tokens = as_integer("num_tokens", num_tokens, "ask for at least one token")
    count, length = prompts.shape
    sizes = [n for n in range(1, length + 1) if length % n == 0]
    if (fed := integer_or_none(prefill)) not in sizes:
        raise ValueError(f"prefill={prefill!r} is no part of prompts of {length} tokens; feed {sizes} at a time")
    size = -(-count // (stages * shards)) * shards  # of a micro-batch, which data axes split evenly
    layout = plan, size, length + num_tokens - 1, fed, find_logits(plan, logits)
    with planner.tracing(), task(f"tracing {plan.model.num_layers} layers in decode mode"):
        decoding = planner.known.get(layout) or planner.known.setdefault(layout, make_decoding(*layout))
    drawn_by = (as_key(key), jnp.asarray(temperature)) if temperature else (None, None)
    words = f"generate {num_tokens} tokens at {temperature}, prefill {fed}"
    return words, {"decoding": decoding, "num_tokens": num_tokens}, drawn_by


def _check_prompts(prompts: Leaf, stages: int) -> None:
    """Checks that prompts are tokens `[B, S]`, and as many as stages."""
    if not hasattr(prompts, "shape") or not jnp.issubdtype(prompts.dtype, jnp.integer):
        name = describe(prompts) if hasattr(prompts, "shape") else type(prompts).__name__
        raise TypeError(f"prompts is {name}; pass an array of tokens, integers [B, S]")
    shape = prompts.shape
    if len(shape) != 2 or not shape[1]:
        raise ValueError(f"prompts has the shape {shape}; pass tokens [B, S] of at least one place")
    if shape[0] < stages:
        raise ValueError(f"{shape[0]} prompts are fewer than the {stages} stages; repeat some, or use fewer stages")


def _as_temperature(temperature: float, key: jax.Array | None) -> float:
    """A user's temperature as a number that logits can be divided by, or 0."""
    temperature = as_number("temperature", temperature, "one is for all prompts, 0 takes the likeliest", finite=False)
    if temperature != 0 and not np.finfo(np.float32).tiny <= temperature < np.inf:
        raise ValueError(f"temperature={temperature} is no number to divide by in float32; use 0 for the likeliest")
    if temperature and key is None:
        raise ValueError(f"temperature={temperature} draws random numbers, but key=None; pass key=jax.random.key(...)")
    return temperature


def generate(
    variables: dict[str, StageTree],
    prompts: jax.Array,
    key: jax.Array | None,
    temperature: jax.Array | None,
    *,
    decoding: Decoding,
    num_tokens: int,
) -> jax.Array:
    """Prompts `[B, S]` and the tokens that follow them, `[B, S + num_tokens]`; the last is repeated to fill up."""
    step, count = decoding.step, prompts.shape[0]
    size, stages = step.model.batch.shape[0], step.schedule.num_microbatches
    spec = lambda rows: to_spec(step.plan.request.splits.of_examples(rows), step.model.axes, 2)

    prefill = decoding.prefill
    rounds = [(step, num_tokens)] if prefill is None else [(prefill, 1), (step, num_tokens - 1)]

    def fill(asked: tuple[jax.Array, jax.Array | None]) -> Batch:
        """Prompts, their indices and temperatures, `[K * b, ...]` each."""
        prompts, temperature = asked
        filled = jnp.pad(prompts.astype(step.model.batch.dtype), ((0, size * stages - count), (0, 0)), mode="edge")
        temperatures = None if temperature is None else jnp.full(size * stages, temperature)
        return filled, jnp.arange(size * stages, dtype=jnp.int32), temperatures

    def work(stage: Stage) -> jax.Array:
        """The prompts with the tokens that follow, `[K, b, S + num_tokens]`, on any device."""
        caches = {n: jnp.full(a.shape, decoding.starts[n], a.dtype) for n, a in decoding.caches.named_buffers}
        prompts = done = stage.batch[0]
        for one, more in rounds:
            if more:
                start = done.shape[-1] - prompts.shape[-1]
                prompts, caches = Round(replace(stage, step=one), decoding, prompts, more, start).run(caches)
                done = jnp.concatenate([done, prompts], axis=-1)
        return done

    return run_step(
        step,
        work,
        (variables, (prompts, temperature), key, None),
        PartitionSpec(None, *spec(size)),
        fill,
        [one for one, _ in rounds],
        after=lambda sequences: joined(sequences, Shard(0))[:count],
        result_specs=spec(count),
    )
