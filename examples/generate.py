"""A language model that speaks while it learns, trained and decoded in pipeline stages: `python examples/generate.py`.

A byte-level Transformer of Flax's own attention learns CPython's documentation. Every few steps it goes on with prompts
from text held out, by `pipe.generate`: the share of bytes that it guesses right is a figure that no loss shows. At the
end prompts of one's own are continued, and generation with caches stands beside the plain way: the whole window through
`pipe.apply` for each byte. It runs as it is on TPUs and GPUs; on a CPU devices are simulated.
"""

import argparse
import time
from collections.abc import Callable, Sequence

import cluster
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from lm import VOCABULARY, batches, loss_fn, make_optimizer, read_text, split
from rich.console import Console
from rich.table import Table

import jpipe

console = Console()


class Embed(nn.Module):
    """Bytes `[B, T]` to hidden states `[B, T, width]`. In decode mode the cache counts the places."""

    width: int
    longest: int
    decode: bool = False

    @nn.compact
    def __call__(self, tokens):
        first = 0
        if self.decode:
            ready = self.has_variable("cache", "place")  # not yet where it is initialised
            place = self.variable("cache", "place", lambda: jnp.zeros((), jnp.int32))
            if ready:
                first, place.value = place.value, place.value + tokens.shape[1]
        table = self.param("positions", nn.initializers.normal(0.5), (self.longest, self.width))
        hidden = nn.Embed(VOCABULARY, self.width, embedding_init=nn.initializers.normal(1.0))(tokens)
        return hidden + jax.lax.dynamic_slice_in_dim(table, first, tokens.shape[1])


class Block(nn.Module):
    """A pre-norm Transformer block, `[B, T, width]` to the same. Flax's attention keeps its keys and values.

    An axis `model` splits the heads and the inside of the feed-forward network.
    """

    heads: int
    decode: bool = False

    @nn.compact
    def __call__(self, x):
        mask = None if self.decode else nn.make_causal_mask(x[..., 0])  # with a cache, Flax's attention masks itself
        init = {"kernel_init": split(None, "model", None), "out_kernel_init": split("model", None, None)}
        attention = nn.MultiHeadDotProductAttention(self.heads, decode=self.decode, **init)
        x = x + attention(nn.LayerNorm()(x), mask=mask)
        h = nn.gelu(nn.Dense(4 * x.shape[-1], kernel_init=split(None, "model"))(nn.LayerNorm()(x)))
        return x + nn.Dense(x.shape[-1], kernel_init=split("model", None))(h)


def make_pipeline(options: argparse.Namespace, mesh: Mesh | None = None) -> jpipe.Pipeline:
    blocks = [Block(options.heads) for _ in range(options.layers)]
    layers = [Embed(options.width, options.seq), *blocks, nn.Sequential([nn.LayerNorm(), nn.Dense(VOCABULARY)])]
    return jpipe.Pipeline(layers, loss_fn, num_stages=options.stages, num_microbatches=options.microbatches, mesh=mesh)


def guessed(pipe: jpipe.Pipeline, variables: dict, windows: np.ndarray, length: int) -> float:
    """The share of the last `length` bytes of windows `[B, T]` that follow by greedy generation from those before."""
    found = pipe.generate(variables, windows[:, :-length], length)
    return float(np.mean(cluster.to_host(found)[:, -length:] == windows[:, -length:]))


def without_cache(pipe: jpipe.Pipeline, longest: int) -> Callable[..., np.ndarray]:
    """The plain way to the same bytes: the whole window through the pipeline for each of them."""
    forward = jax.jit(pipe.apply)

    def run(variables: dict, prompts: np.ndarray, length: int) -> np.ndarray:
        start = prompts.shape[1]
        window = np.pad(prompts, ((0, 0), (0, longest - start)))  # what follows isn't looked at
        for place in range(start, start + length):
            window[:, place] = cluster.to_host(forward(variables, window))[:, place - 1].argmax(-1)
        return window[:, : start + length]

    return run


def compare(pipe: jpipe.Pipeline, variables: dict, windows: np.ndarray, length: int) -> Table:
    """Generation beside the plain way, by the number of prompts in flight; both give the same bytes."""
    table = Table(title=f"{length} bytes after prompts of {windows.shape[1] - length}, greedy")
    for name in ("prompts", "with caches, bytes/s", "whole windows, bytes/s", "equal"):
        table.add_column(name, justify="right")
    ways = {"cached": pipe.generate, "plain": without_cache(pipe, windows.shape[1])}
    count = pipe.schedule.num_stages
    while count <= len(windows):
        prompts, found, speed = windows[:count, :-length], {}, {}
        for name, way in ways.items():
            jax.block_until_ready(way(variables, prompts, length))  # compiles
            begin = time.perf_counter()
            found[name] = cluster.to_host(way(variables, prompts, length))
            speed[name] = f"{count * length / (time.perf_counter() - begin):,.0f}"
        equal = np.mean(found["cached"] == found["plain"])
        table.add_row(str(count), speed["cached"], speed["plain"], f"{equal:.1%}")
        count *= 4
    return table


def train(pipe: jpipe.Pipeline, text: np.ndarray, held_out: np.ndarray, options: argparse.Namespace):
    """Trains, and every `options.every` steps prints the loss and what is guessed of text held out `[B, T]`."""
    stream = batches(text, options, options.seed, pipe.data_shard)
    tx = make_optimizer(options)
    state, losses = pipe.create_state(jax.random.key(options.seed), pipe.place(next(stream)), tx), []
    for step in range(1, options.steps + 1):
        state, metrics = pipe.train_step(state, pipe.place(next(stream)))
        losses.append(float(metrics["loss"]))
        if step % options.every == 0 or step == options.steps:
            right = guessed(pipe, state.variables, held_out, options.length)
            console.print(f"step {step:4d}: {np.mean(losses[-20:]):.3f} nats a byte, {right:.1%} guessed right")
    return state


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default, text in (
        ("stages", 4, "K"),
        ("microbatches", 8, "M, of training; generation has K in flight"),
        ("layers", 8, "Transformer blocks"),
        ("width", 128, "of the hidden states"),
        ("heads", 4, "of attention"),
        ("seq", 64, "bytes in a window, prompt and what follows together"),
        ("batch", 32, "windows a step"),
        ("steps", 240, "of training"),
        ("every", 60, "steps from one evaluation by generation to the next"),
        ("length", 16, "bytes to generate"),
        ("seed", 0, "of weights, windows and samples"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default %(default)s)")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate (default %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.7, help="of samples (default %(default)s)")
    parser.add_argument("--prompt", nargs="+", default=["The statement ", "If the object "], help="what to continue")
    cluster.add_options(parser)
    options = parser.parse_args(arguments)
    if not 0 < options.length < options.seq:
        parser.error(f"--length {options.length} is to be at least 1 and less than --seq {options.seq}")
    if len({len(prompt.encode()) for prompt in options.prompt}) > 1:
        parser.error("--prompt: prompts of one length are wanted; pad the shorter ones")
    if (size := len(options.prompt[0].encode())) >= options.seq:
        parser.error(f"--prompt has {size} bytes, and --seq {options.seq} leaves no place for more")
    return options


def main() -> None:
    options = parse_options()
    cluster.join(options, console)
    text, end = read_text(None)
    starts = np.linspace(0, len(end) - options.seq, options.batch).astype(int)
    held_out = end[starts[:, None] + np.arange(options.seq)].astype(np.int32)

    pipe = make_pipeline(options, cluster.make_mesh(options.stages))
    state = train(pipe, text, held_out, options)
    console.print(compare(pipe, state.variables, held_out, options.length))

    rows = [np.frombuffer(prompt.encode(), np.uint8) for prompt in options.prompt]
    prompts = np.tile(np.stack(rows).astype(np.int32), (-(-options.stages // len(rows)), 1))  # at least K
    key, length = jax.random.key(options.seed), options.seq - prompts.shape[1]
    for row in cluster.to_host(pipe.generate(state.variables, prompts, length, key, options.temperature)):
        console.rule()
        console.print(bytes(row.astype(np.uint8)).decode(errors="replace"), markup=False, highlight=False)


if __name__ == "__main__":
    main()
