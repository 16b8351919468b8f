"""`Generator`: checks what `Pipeline.generate` is asked for, and keeps what was traced and compiled for it."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec

from jpipe.batches.outputs import join_microbatches
from jpipe.execution.programs import run_step
from jpipe.execution.stage import Stage
from jpipe.generation.decoding import Decoding, PickLogits, make_decoding
from jpipe.generation.token_ring import Round, run_decoding
from jpipe.layers.base import describe
from jpipe.layers.fingerprint import fingerprint
from jpipe.memory.layout import StageTree
from jpipe.model.random_keys import as_key
from jpipe.partitioner.shardings import to_spec
from jpipe.planning.planner import Planner
from jpipe.terminal.progress import task
from jpipe.types import Batch, Leaf
from jpipe.users_numbers import as_integer, as_number, integer_or_none


class Asked(NamedTuple):
    """The arguments of `Pipeline.generate`, checked.

    Attributes:
      words: the numbers in words, by which processes compare what they want.
      drawn_by: the key and the temperature by which tokens are drawn; (None, None) takes the likeliest.
      static: the keyword arguments of `generate`.
    """

    words: str
    drawn_by: tuple[jax.Array | None, jax.Array | None]
    static: dict[str, Decoding | int]


class Generator:
    """Continues prompts by the layers of a pipeline; keeps what it traced and compiled.

    Args:
      planner: the pipeline's.

    Attributes:
      decoding: b, the longest sequence, tokens of a prompt at a time, which outputs are the logits -> how the layers
        decode; each is laid out once.
      program: `generate`, jitted.
    """

    def __init__(self, planner: Planner):
        self._planner = planner
        self._logits: dict[Hashable, PickLogits] = {}
        self.decoding = cache(self._decoding)
        self.program = jax.jit(partial(generate), static_argnames=("decoding", "num_tokens"))

    def clear_cache(self) -> None:
        """Forgets what was traced, laid out and compiled."""
        self.decoding.cache_clear()
        self.program.clear_cache()  # pyright: ignore[reportAttributeAccessIssue]

    def asked(
        self,
        prompts: Leaf,
        num_tokens: int,
        key: jax.Array | None,
        temperature: float,
        prefill: int,
        logits: PickLogits | None,
    ) -> Asked:
        """Checks the arguments of `Pipeline.generate`, and lays out how the layers decode such prompts.

        Raises:
          TypeError, ValueError: prompts are no tokens `[B, S]`, or fewer than stages; nothing is asked for; a
            temperature that is no number from 0 on, or one without a key; prompts aren't fed in equal parts; as
            `make_decoding`.
        """
        request = self._planner.request
        stages, shards = request.schedule.num_stages, request.splits.num_shards
        _check_prompts(prompts, stages)
        if isinstance(temperature, Tracer) or isinstance(num_tokens, Tracer):
            raise TypeError("temperature or num_tokens is traced; pass numbers, static arguments of your jax.jit")
        temperature = _as_temperature(temperature, key)
        num_tokens = as_integer("num_tokens", num_tokens, "ask for at least one token")
        count, length = prompts.shape
        sizes = [n for n in range(1, length + 1) if length % n == 0]
        if (fed := integer_or_none(prefill)) not in sizes:
            raise ValueError(
                f"prefill={prefill!r} is no part of prompts of {length} tokens; feed {sizes} of them at a time"
            )
        if logits is not None:  # one made anew runs the program that was compiled for the first
            logits = self._logits.setdefault(fingerprint(logits), logits)
        size = -(-count // (stages * shards)) * shards  # of a micro-batch, which data axes split evenly
        decoding = self.decoding(size, length + num_tokens - 1, fed, logits)
        words = f"generate {num_tokens} tokens at {temperature}, prefill {fed}"
        drawn_by = (as_key(key), jnp.asarray(temperature)) if temperature else (None, None)
        return Asked(words, drawn_by, {"decoding": decoding, "num_tokens": num_tokens})

    def _decoding(self, size: int, length: int, prefill: int, logits: PickLogits | None = None) -> Decoding:
        planner = self._planner
        with planner.tracing(), task(f"tracing {len(planner.request.layers)} layers in decode mode"):
            return make_decoding(planner.known_plan(), planner.cut, size, length, prefill, logits)


def _check_prompts(prompts: Leaf, stages: int) -> None:
    """Checks that prompts are tokens `[B, S]`, and as many as stages."""
    if not hasattr(prompts, "shape") or not jnp.issubdtype(prompts.dtype, jnp.integer):
        name = describe(prompts) if hasattr(prompts, "shape") else type(prompts).__name__
        raise TypeError(f"prompts is {name}; pass an array of tokens, integers [B, S]")
    shape = prompts.shape
    if len(shape) != 2 or not shape[1]:
        raise ValueError(f"prompts has the shape {shape}; pass tokens [B, S] of at least one place")
    if shape[0] < stages:
        raise ValueError(
            f"{shape[0]} prompts are fewer than the {stages} stages, which would wait for one another; pass at least "
            f"{stages} (repeat some), or generate with a pipeline of fewer stages"
        )


def _as_temperature(temperature: float, key: jax.Array | None) -> float:
    """A user's temperature as a number that logits can be divided by, or 0."""
    temperature = as_number("temperature", temperature, "one is for all prompts, 0 takes the likeliest", finite=False)
    if temperature != 0 and not np.finfo(np.float32).tiny <= temperature < np.inf:
        raise ValueError(
            f"temperature={temperature} is no number to divide logits by in float32; use 0 for the likeliest token, or "
            "more to sample"
        )
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

    def fill(asked: tuple[jax.Array, jax.Array | None]) -> Batch:
        """Prompts, their indices and temperatures, `[K * b, ...]` each."""
        prompts, temperature = asked
        filled = jnp.pad(prompts.astype(step.model.batch.dtype), ((0, size * stages - count), (0, 0)), mode="edge")
        temperatures = None if temperature is None else jnp.full(size * stages, temperature)
        return filled, jnp.arange(size * stages, dtype=jnp.int32), temperatures

    def work(stage: Stage) -> jax.Array:
        own_prompts, rows, temperatures = stage.batch
        return run_decoding(stage, decoding, Round(own_prompts, rows, temperatures, num_tokens))

    return run_step(
        step,
        work,
        (variables, (prompts, temperature), key, None),
        PartitionSpec(None, *spec(size)),
        fill,
        [] if decoding.prefill is None else [decoding.prefill],
        after=lambda sequences: join_microbatches(sequences)[:count],
        result_specs=spec(count),
    )
