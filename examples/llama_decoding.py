"""Text by google-tunix's Llama 3 where it lies, in stages: `python examples/llama_decoding.py`, or `--help`.

Here the model is a list of layers, of which the blocks have caches: each stage keeps keys and values of its own blocks,
as tunix's cache holds them. A tiny model learns, continues text that it hasn't seen, and is compared with tunix's own
sampler. Needs `pip install -e '.[llama]'`.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import cluster
import jax
import jax.numpy as jnp
import llama
import numpy as np
import optax
from flax import nnx
from lm import read_text

import jpipe

try:
    from tunix.generate.sampler import CacheConfig, Sampler
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}; google-tunix is wanted: pip install -e '.[llama]'") from error

console = llama.console


# --- tunix's modules as layers, a block with a cache, the weights ---


class Embed(llama.llama.Embedder):
    def __call__(self, tokens: Any) -> Any:
        return self.encode(tokens)


class Block(llama.llama.DecoderLayer):
    """As it decodes, called with some tokens, it keeps what tunix's sampler keeps of those before."""

    decode = False  # `pipe.generate` sets it, and calls `init_cache`

    def init_cache(self, shape: tuple[int, ...], dtype: Any) -> None:
        """An empty cache for inputs `[b, length, width]`: keys, values and the number of tokens so far."""
        kept = (*shape[:2], self.config.num_kv_heads, self.config.head_dim)
        self.keys, self.values = nnx.Cache(jnp.zeros(kept, dtype)), nnx.Cache(jnp.zeros(kept, dtype))
        self.place = nnx.Cache(jnp.zeros((), jnp.int32))

    def __call__(self, x: Any, batch: Any) -> Any:
        if not self.decode:
            return super().__call__(x, batch["positions"], None, batch["attention_mask"])[1]
        (size, count, _), length, place = x.shape, self.keys.shape[1], self.place[...]
        positions = jnp.broadcast_to(place + jnp.arange(count), (size, count))
        mask = jnp.arange(length) <= positions[..., None]  # [b, T, length]: a token sees itself and those before
        cache = {"k": self.keys[...], "v": self.values[...], "end_index": jnp.broadcast_to(place, (size,))}
        cache, x = super().__call__(x, positions, cache, mask)
        self.keys[...], self.values[...], self.place[...] = cache["k"], cache["v"], place + count
        return x


def make_layers(config: llama.llama.ModelConfig, make_block: Callable[..., nnx.Module] = Block) -> list[Any]:
    width, words, split = config.embed_dim, config.vocab_size, config.shd_config
    embed = lambda rngs: Embed(words, width, rngs=rngs, shd_config=split)
    block = jpipe.reads(lambda rngs: make_block(config, rngs=rngs), lambda batch: batch)  # the micro-batch at hand
    norm = lambda rngs: llama.llama.RMSNorm(width, norm_eps=config.norm_eps, rngs=rngs, shd_config=split)
    head = lambda rngs: llama.llama.Einsum("BTD,DV->BTV", (width, words), rngs=rngs, sharding=split.emb_dv)
    table = jpipe.Shared(embed)
    first, last = (table, table.using("decode")) if config.weight_tying else (embed, head)
    return [first, *[block] * config.num_layers, norm, last]


def make_pipeline(config: llama.llama.ModelConfig, make_block: Any = Block, **chosen: Any) -> jpipe.Pipeline:
    """A pipeline of tunix's layers."""
    tokens_of = lambda batch: batch["input_tokens"]
    loss_fn = lambda logits, batch: llama.loss_fn((logits, None), batch)
    return jpipe.Pipeline(make_layers(config, make_block), loss_fn, inputs=tokens_of, **chosen)


def to_layers(tree: Any, config: llama.llama.ModelConfig) -> list[Any]:
    """Each layer's variables, from those of tunix's model (`llama.tree_of`)."""
    parts = tree["params"]
    last = parts["embedder" if config.weight_tying else "lm_head"]
    blocks = [parts["layers"][i] for i in range(config.num_layers)]
    return [{"params": part} for part in (parts["embedder"], *blocks, parts["final_norm"], last)]


def from_layers(trees: list[Any], config: llama.llama.ModelConfig) -> Any:
    """The variables of tunix's model, from each layer's."""
    first, *blocks, norm, last = (tree["params"] for tree in trees)
    head = {} if config.weight_tying else {"lm_head": last}
    return {"params": {"embedder": first, "layers": dict(enumerate(blocks)), "final_norm": norm, **head}}


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
    pipe = make_pipeline(config, mesh=cluster.make_mesh(options.stages), **chosen)
    model, example = llama.make_model(config), next(llama.windows_of(text))
    variables = pipe.from_layer_variables(to_layers(llama.tree_of(model), config), example)
    state = pipe.create_state(jax.random.key(0), example, optax.adamw(3e-3), variables)
    state = llama.fit(pipe, state, llama.windows_of(text, pipe.data_shard), options.steps)
    llama.put_back(from_layers(cluster.to_host(pipe.layer_variables(state.variables)), config), model)
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
