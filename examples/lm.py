"""A byte-level Transformer language model, trained in pipeline stages: `make demo`, or `python examples/lm.py --help`.

It runs as it is on TPUs and GPUs, of one host or of many. On a machine without them the CPU is split into as many
simulated devices as there are stages, which shows that everything works and says nothing about speed.
"""

import argparse
import pydoc_data.topics
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import cluster
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import jpipe

VOCABULARY = 256
CHECKED_STEPS = 3

console = Console()


class Embed(nn.Module):
    """Bytes `[B, T]` to hidden states `[B, T, width]`: an embedding each for the byte and for its position."""

    width: int
    seq: int
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, tokens):
        positions = self.param("positions", nn.initializers.normal(0.5), (self.seq, self.width))
        hidden = nn.Embed(VOCABULARY, self.width, dtype=self.dtype, embedding_init=nn.initializers.normal(1.0))(tokens)
        return hidden + positions[: tokens.shape[1]].astype(self.dtype)


def split(*axes: str | None) -> nn.initializers.Initializer:
    """Of a kernel: which mesh axis each of its dimensions is split over, on a mesh that has it."""
    return nn.with_partitioning(nn.initializers.lecun_normal(), axes)


class Block(nn.Module):
    """A pre-norm Transformer block, `[B, T, width]` to the same: causal attention, then a feed-forward network.

    An axis `model` splits the heads and the inside of the feed-forward network.
    """

    heads: int
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x):
        width = x.shape[-1]
        h = nn.LayerNorm(dtype=self.dtype)(x)
        into, out = split(None, None, "model", None), split("model", None, None)
        sizes = 3, self.heads, width // self.heads
        qkv = nn.DenseGeneral(sizes, kernel_init=into, dtype=self.dtype, name="qkv")(h)
        query, key, value = (qkv[:, :, i] for i in range(3))
        h = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        x = x + nn.DenseGeneral(width, axis=(-2, -1), kernel_init=out, dtype=self.dtype, name="out")(h)
        h = nn.LayerNorm(dtype=self.dtype)(x)
        h = nn.gelu(nn.Dense(4 * width, kernel_init=split(None, "model"), dtype=self.dtype, name="up")(h))
        return x + nn.Dense(width, kernel_init=split("model", None), dtype=self.dtype, name="down")(h)


class Head(nn.Module):
    """Hidden states to logits `[B, T, 256]`."""

    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x):
        return nn.Dense(VOCABULARY, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))


class Transformer(nn.Module):
    """Bytes `[B, T]` to logits `[B, T, 256]`."""

    layers: int
    width: int
    heads: int
    seq: int
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, tokens):
        x = Embed(self.width, self.seq, self.dtype)(tokens)
        for _ in range(self.layers):
            x = Block(self.heads, self.dtype)(x)
        return Head(self.dtype)(x)


def make_model(options: argparse.Namespace) -> Transformer:
    return Transformer(options.layers, options.width, options.heads, options.seq, jnp.dtype(options.dtype))


def loss_fn(logits: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
    """Nats a byte, the mean over the batch."""
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def make_pipeline(model: nn.Module, options: argparse.Namespace, mesh: Mesh | None = None) -> jpipe.Pipeline:
    return jpipe.Pipeline(
        model,
        loss_fn,
        num_stages=options.stages,
        num_microbatches=options.microbatches,
        num_chunks=options.chunks,
        schedule=options.schedule,
        remat=options.remat,
        mesh=mesh,
    )


def make_optimizer(options: argparse.Namespace) -> optax.GradientTransformation:
    peak, warmup = options.lr, min(20, options.steps // 10)
    rate = optax.warmup_cosine_decay_schedule(peak / 20, peak, warmup, options.steps, end_value=peak / 10)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.98))


def hold_out(text: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Bytes to learn from, and the last twentieth, which is held out."""
    end = len(text) * 19 // 20
    return np.frombuffer(text[:end], np.uint8), np.frombuffer(text[end:], np.uint8)


def read_text(path: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """`hold_out` of a file, or of the English documentation that comes with CPython."""
    if path is not None:
        return hold_out(path.read_bytes())
    paragraphs = "\n\n".join(pydoc_data.topics.topics.values()).split("\n\n")
    once = dict.fromkeys(paragraphs)  # topics quote one another, and text held out must not have been learnt
    return hold_out("\n\n".join(once).encode())


def batches(
    data: np.ndarray, options: argparse.Namespace, seed: int, part: tuple[int, int] = cluster.WHOLE
) -> Iterator[dict[str, np.ndarray]]:
    """Windows of the text that begin anywhere: `inputs` and, one byte on, `targets`, both `[B, T]`; or a part of B."""
    random = np.random.default_rng(seed)
    while True:
        starts = random.integers(0, len(data) - options.seq, options.batch)[cluster.rows(options.batch, part)]
        windows = data[starts[:, None] + np.arange(options.seq + 1)].astype(np.int32)
        yield {"inputs": windows[:, :-1], "targets": windows[:, 1:]}


def sequential_steps(model, variables, tx, checked) -> list[tuple[float, float]]:
    """Loss and gradient norm by step of the plain Flax model on one device, with the same optimiser and batches."""

    @jax.jit
    def step(variables, opt_state, batch):
        loss_of = lambda variables: loss_fn(model.apply(variables, batch["inputs"]), batch)
        loss, grads = jax.value_and_grad(loss_of)(variables)
        updates, opt_state = tx.update(grads, opt_state, variables)
        return optax.apply_updates(variables, updates), opt_state, (loss, optax.global_norm(grads))

    opt_state, figures = tx.init(variables), []
    for batch in checked:
        variables, opt_state, (loss, norm) = step(variables, opt_state, batch)
        figures.append((float(loss), float(norm)))
    return figures


def check(figures: list[tuple[float, float]], expected: list[tuple[float, float]], dtype: str) -> None:
    """Compares the first losses and gradient norms with the sequential model's; ends the program if they differ."""
    tolerance = 1e-4 if dtype == "float32" else 1e-2
    errors = np.max(np.abs(np.array(figures) / np.array(expected) - 1), axis=0)
    if not np.all(errors <= tolerance):
        raise SystemExit(
            f"the first steps' (loss, gradient norm) {figures} are not the sequential model's {expected}: "
            f"relative differences {errors}, at most {tolerance} expected"
        )
    console.print(
        f"The first {len(figures)} steps equal the sequential Flax model's; largest relative differences: "
        f"loss {errors[0]:.1e}, gradient norm {errors[1]:.1e}."
    )


def show_pipeline(pipe: jpipe.Pipeline, options: argparse.Namespace) -> None:
    """The table of stages, the schedule and its bubble."""
    console.print(str(pipe), markup=False, highlight=False, soft_wrap=True)
    console.print(pipe.schedule.grid(width=max(console.width, 120)), markup=False, highlight=False, soft_wrap=True)
    timeline = jpipe.simulate(pipe.schedule)
    console.print(
        f"{options.schedule}, {options.microbatches} micro-batches: bubble {timeline.bubble_fraction:.1%}, "
        f"{timeline.speedup_over_naive:.2f} times naive model parallelism (backward = 2 forward)."
    )


def train(pipe, state, stream, losses: list[float], options: argparse.Namespace):
    """Trains from the step that `losses` has got to; appends to it. The speed shown leaves out the first step."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    figures = TextColumn("loss {task.fields[loss]:.3f}  {task.fields[speed]:,.0f} tokens/s")
    with Progress(*columns, figures, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress:
        done = len(losses)
        task = progress.add_task("training", total=options.steps, completed=done, loss=losses[-1], speed=0.0)
        begin = time.perf_counter()
        for step in range(done, options.steps):
            state, metrics = pipe.train_step(state, pipe.place(next(stream)))
            losses.append(float(metrics["loss"]))
            speed = (step + 1 - done) * options.batch * options.seq / (time.perf_counter() - begin)
            progress.update(task, advance=1, loss=np.mean(losses[-20:]), speed=speed)
    return state


def continue_prompts(pipe, variables, options: argparse.Namespace) -> list[bytes]:
    """Samples `options.length` bytes after each prompt; one row a micro-batch, which repeat the prompts in turn.

    The window has a fixed length, so that one program is compiled. Attention is causal: what fills it on the right
    doesn't matter.
    """
    random = np.random.default_rng(options.seed)
    forward = jax.jit(pipe.apply)
    num_rows = -(-len(options.prompt) // options.microbatches) * options.microbatches
    rows = [bytearray(options.prompt[i % len(options.prompt)].encode()) for i in range(num_rows)]
    for _ in range(options.length):
        windows = np.zeros((num_rows, options.seq), np.int32)
        ends = []
        for row, window in zip(rows, windows, strict=True):
            tail = row[-options.seq :]
            window[: len(tail)] = tail
            ends.append(len(tail) - 1)
        logits = cluster.to_host(forward(variables, windows)).astype(np.float32)[np.arange(num_rows), ends]
        # The largest of logits/temperature + Gumbel noise is a sample of the softmax.
        samples = np.argmax(logits / options.temperature + random.gumbel(size=logits.shape), axis=-1)
        for row, sample in zip(rows, samples, strict=True):
            row.append(sample)
    return [bytes(row) for row in rows[: len(options.prompt)]]


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    pipeline = parser.add_argument_group("pipeline")
    pipeline.add_argument("--stages", type=int, default=4, help="K (default %(default)s)")
    pipeline.add_argument("--microbatches", type=int, default=8, help="M (default %(default)s)")
    pipeline.add_argument("--chunks", type=int, default=1, help="V, for interleaved schedules (default %(default)s)")
    pipeline.add_argument("--schedule", default="1f1b", help="naive, gpipe, 1f1b or interleaved (default %(default)s)")
    pipeline.add_argument("--remat", default="layer", help="none, layer, stage or full (default %(default)s)")
    model = parser.add_argument_group("model")
    model.add_argument("--layers", type=int, default=8, help="Transformer blocks (default %(default)s)")
    model.add_argument("--width", type=int, default=128, help="of the hidden states (default %(default)s)")
    model.add_argument("--heads", type=int, default=4, help="of attention (default %(default)s)")
    model.add_argument("--seq", type=int, default=64, help="bytes in a window (default %(default)s)")
    model.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="to compute in")
    training = parser.add_argument_group("training")
    training.add_argument("--text", type=Path, help="a file to learn from (default: CPython's documentation)")
    training.add_argument("--batch", type=int, default=32, help="windows a step (default %(default)s)")
    training.add_argument("--steps", type=int, default=240, help="(default %(default)s)")
    training.add_argument("--lr", type=float, default=3e-3, help="peak learning rate (default %(default)s)")
    training.add_argument("--seed", type=int, default=0, help="(default %(default)s)")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--prompt", nargs="+", default=["The statement "], help="what to continue")
    sampling.add_argument("--length", type=int, default=160, help="bytes to add (default %(default)s)")
    sampling.add_argument("--temperature", type=float, default=0.7, help="(default %(default)s)")
    cluster.add_options(parser)
    options = parser.parse_args(arguments)
    if options.width % options.heads:
        parser.error(f"--heads {options.heads} does not divide --width {options.width}")
    if options.steps < CHECKED_STEPS:
        parser.error(f"--steps {options.steps} is less than the {CHECKED_STEPS} that are checked")
    return options


def main() -> None:
    options = parse_options()
    cluster.join(options, console)
    text, end = read_text(options.text)
    if len(end) <= options.seq:
        size = len(text) + len(end)
        raise SystemExit(f"the text has {size} bytes, too few for --seq {options.seq}: give a longer one")
    model, tx = make_model(options), make_optimizer(options)
    pipe = make_pipeline(model, options, cluster.make_mesh(options.stages))
    stream = batches(text, options, options.seed, pipe.data_shard)
    checked = list(islice(batches(text, options, options.seed), CHECKED_STEPS))
    state = pipe.create_state(jax.random.key(options.seed), checked[0], tx)
    variables = cluster.to_host(pipe.model_variables(state.variables))
    show_pipeline(pipe, options)

    figures = []
    for batch in islice(stream, CHECKED_STEPS):
        state, metrics = pipe.train_step(state, pipe.place(batch))
        figures.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    check(figures, sequential_steps(model, variables, tx, checked), options.dtype)
    del variables

    losses = [loss for loss, _ in figures]
    state = train(pipe, state, stream, losses, options)
    held_out = pipe.place(next(batches(end, options, options.seed, pipe.data_shard)))
    console.print(
        f"Nats a byte: {np.mean(losses[-20:]):.3f} in the last 20 steps, "
        f"{float(pipe.evaluate(state.variables, held_out)):.3f} on text held out."
    )
    for continued in continue_prompts(pipe, state.variables, options):
        console.rule()
        console.print(continued.decode(errors="replace"), markup=False, highlight=False)


if __name__ == "__main__":
    main()
