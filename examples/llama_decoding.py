"""Text by google-tunix's Llama 3 where it lies, in stages: `python examples/llama_decoding.py`, or `--help`.

Each stage keeps keys and values of its own layers, as tunix's cache holds them. A tiny model learns, continues text
that it hasn't seen, and is compared with tunix's own sampler. Needs `pip install -e '.[llama]'`.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import cluster
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from lm import read_text

import jpipe
import llama

try:
    from tunix.generate.sampler import CacheConfig, Sampler
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}; google-tunix is wanted: pip install -e '.[llama]'") from error

console = llama.console


# --- a block with a cache ---


class Block(llama.Block):
    """`llama.Block`; as it decodes, called with some tokens, it keeps what tunix's sampler keeps of those before."""

    decode = False  # `pipe.generate` sets it, and calls `init_cache`

    def init_cache(self, shape: tuple[int, ...], dtype: Any) -> None:
        """An empty cache for inputs `[b, length, width]`: keys, values and the number of tokens so far."""
        kept = (*shape[:2], self.config.num_kv_heads, self.config.head_dim)
        self.keys, self.values = nnx.Cache(jnp.zeros(kept, dtype)), nnx.Cache(jnp.zeros(kept, dtype))
        self.place = nnx.Cache(jnp.zeros((), jnp.int32))

    def __call__(self, x: Any, batch: Any) -> Any:
        if not self.decode:
            return super().__call__(x, batch)
        (size, count, _), length, place = x.shape, self.keys.shape[1], self.place[...]
        positions = jnp.broadcast_to(place + jnp.arange(count), (size, count))
        mask = jnp.arange(length) <= positions[..., None]  # [b, T, length]: a token sees itself and those before
        cache = {"k": self.keys[...], "v": self.values[...], "end_index": jnp.broadcast_to(place, (size,))}
        cache, x = llama.llama.DecoderLayer.__call__(self, x, positions, cache, mask)
        self.keys[...], self.values[...], self.place[...] = cache["k"], cache["v"], place + count
        return x


# --- what it is compared with ---


class Bytes:
    """A tokenizer of bytes, as tunix's sampler wants one."""

    encode, decode = staticmethod(list), staticmethod(bytes)

    def bos_id(self) -> None:
        return None

    def eos_id(self) -> int:
        return -1  # no byte

    pad_id = eos_id


def by_tunix(model: llama.llama.Llama3, prompts: np.ndarray, num_tokens: int) -> np.ndarray:
    """Prompts and what follows, `[B, S + num_tokens]`, by tunix's sampler, which takes the likeliest token."""
    config, (_, length) = model.config, prompts.shape
    sizes = CacheConfig(length + num_tokens, config.num_layers, config.num_kv_heads, config.head_dim)
    sampler = Sampler(model, Bytes(), sizes)
    found = sampler([bytes(prompt.tolist()) for prompt in prompts], num_tokens, max_prompt_length=length, echo=True)
    return np.stack(found.tokens)


# --- a tiny one ---


def train(options: argparse.Namespace, text: np.ndarray) -> tuple[jpipe.Pipeline, Any, llama.llama.Llama3]:
    """A pipeline of such blocks, what it has learnt, and tunix's model with that."""
    config = replace(llama.TINY, num_layers=options.layers)
    chosen = {"num_stages": options.stages, "num_microbatches": options.microbatches}
    pipe = llama.make_pipeline(config, Block, mesh=cluster.make_mesh(options.stages), **chosen)
    model, example = llama.make_model(config), next(llama.windows_of(text))
    variables = pipe.from_layer_variables(llama.to_layers(nnx.state(model), config), example)
    state = pipe.create_state(jax.random.key(0), example, optax.adamw(3e-3), variables)
    state = llama.fit(pipe, state, llama.windows_of(text, pipe.data_shard), options.steps)
    llama.from_layers(cluster.to_host(pipe.layer_variables(state.variables)), model)
    return pipe, state.variables, model


def run(options: argparse.Namespace) -> None:
    text, end = read_text(None)
    pipe, variables, model = train(options, text)
    starts = np.linspace(0, len(end) - options.length, options.prompts).astype(int)
    prompts = end[starts[:, None] + np.arange(options.length)].astype(np.int32)
    found = cluster.to_host(pipe.generate(variables, prompts, options.tokens, prefill=options.length))
    for row in found:
        begin, end = (bytes(part.tolist()).decode(errors="replace") for part in np.split(row, [options.length]))
        console.print(f"{begin!r} -> {end!r}", markup=False, highlight=False)
    if jax.process_index() == 0:
        same = np.sum((found == by_tunix(model, prompts, options.tokens))[:, options.length :])
        console.print(f"{same} of the {found[:, options.length :].size} new tokens are those of tunix's own sampler.")


OPTIONS = {
    "stages": (4, "K"),
    "microbatches": (8, "M, in training"),
    "layers": (6, "blocks"),
    "steps": (100, "of training"),
    "prompts": (8, "how many are continued"),
    "length": (16, "bytes of a prompt"),
    "tokens": (48, "bytes that are added to each"),
}


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, (default, text) in OPTIONS.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"{text} (default %(default)s)")
    cluster.add_options(parser)
    return parser.parse_args(arguments)


def main() -> None:
    options = parse_options()
    cluster.join(options, console)
    run(options)


if __name__ == "__main__":
    main()
