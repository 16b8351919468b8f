"""What the benchmarks share: a Transformer, its training step by hand in JAX, a clock and the tables.

Import this before any backend starts: `on_cpu` decides what a CPU looks like.
"""

import argparse
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

import jpipe

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))  # what reads compiled programs
from tpu_program import tpu_devices as tpu_devices

console = Console(width=None if os.environ.get("COLUMNS") else 120)


# --- machines ---


def on_cpu(num_devices: int = 1, core: int | None = None) -> None:
    """Makes this process's CPU look like `num_devices` devices of one thread each, on one core if that is given."""
    if core is not None:
        os.sched_setaffinity(0, {core})
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_multi_thread_eigen=false".strip()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)


def stage_mesh(devices: Sequence[Any], num_stages: int) -> Mesh:
    """The first K of the devices as stages."""
    return Mesh(np.asarray(devices[:num_stages]), ("stage",))


def versions(*, tpu: bool) -> str:
    """The version of jax, and that of libtpu, the TPU's compiler, if programs were compiled by it."""
    return f"jax {jax.__version__}" + (f", libtpu {metadata.version('libtpu')}" if tpu else "")


def settings(device: Any, *parts: Any) -> str:
    """What was measured, for a table's caption."""
    return ", ".join([versions(tpu=device.platform == "tpu"), str(device.device_kind), *map(str, parts)])


# --- the model ---


@dataclass(frozen=True)
class Size:
    """Sizes of a decoder-only Transformer and its micro-batches."""

    layers: int
    width: int
    heads: int
    seq: int
    vocab: int
    microbatch: int
    dtype: str = "float32"

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser, default: "Size") -> None:
        group = parser.add_argument_group("model")
        for field in fields(cls):
            value = getattr(default, field.name)
            group.add_argument(f"--{field.name}", type=type(value), default=value, help="(default %(default)s)")

    @classmethod
    def of(cls, options: argparse.Namespace) -> "Size":
        return cls(**{field.name: getattr(options, field.name) for field in fields(cls)})

    @property
    def parameters(self) -> int:
        """Parameters of all matrices and biases."""
        block = 12 * self.width**2 + 13 * self.width
        return self.layers * block + 2 * self.vocab * self.width + self.vocab + 2 * self.width

    @property
    def flops(self) -> float:
        """FLOPs of one micro-batch, forward and backward, nothing computed twice and attention not halved."""
        tokens = self.microbatch * self.seq
        matrices = 12 * self.layers * self.width**2 + self.vocab * self.width
        return 6.0 * tokens * matrices + 12.0 * tokens * self.layers * self.seq * self.width

    def __str__(self) -> str:
        return (
            f"{self.layers} blocks of width {self.width}, {self.heads} heads, vocabulary {self.vocab}, "
            f"micro-batch {self.microbatch}x{self.seq}, {self.dtype}"
        )


def feed_forward(x: Any, dtype: Any, axis: str | None = None) -> Any:
    """The second half of a block; to be called in its `__call__`."""
    width = x.shape[-1]
    h = nn.LayerNorm(dtype=dtype)(x)
    h = nn.gelu(nn.Dense(4 * width, dtype=dtype, kernel_init=split_kernel(None, axis))(h))
    return x + nn.Dense(width, dtype=dtype, kernel_init=split_kernel(axis, None))(h)


def split_kernel(*axes: str | None) -> Any:
    """An initialiser of a kernel that is split over these mesh axes, one for each of its dimensions."""
    init = nn.initializers.lecun_normal()
    return nn.with_partitioning(init, axes) if any(axes) else init


class Block(nn.Module):
    """A pre-norm Transformer block, `[B, T, width]` to the same.

    Attributes:
      attention: the `implementation` of `jax.nn.dot_product_attention`.
      axis: the mesh axis that heads and hidden units are split over, if any.
    """

    heads: int
    dtype: Any
    attention: str | None = None
    axis: str | None = None

    @nn.compact
    def __call__(self, x):
        width, init, axis = x.shape[-1], split_kernel, self.axis
        h = nn.LayerNorm(dtype=self.dtype)(x)
        shape = (3, self.heads, width // self.heads)
        qkv = nn.DenseGeneral(shape, dtype=self.dtype, kernel_init=init(None, None, axis, None))(h)
        heads = (qkv[:, :, i] for i in range(3))
        h = jax.nn.dot_product_attention(*heads, is_causal=True, implementation=self.attention)
        x = x + nn.DenseGeneral(width, axis=(-2, -1), dtype=self.dtype, kernel_init=init(axis, None, None))(h)
        return feed_forward(x, self.dtype, axis)


class Head(nn.Module):
    """Hidden states to logits."""

    vocab: int
    dtype: Any

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.vocab, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))


def make_layers(size: Size, **options: Any) -> list[nn.Module]:
    """Embedding, blocks and head; `options` are those of `Block`."""
    dtype = jnp.dtype(size.dtype)
    blocks = [Block(size.heads, dtype, **options) for _ in range(size.layers)]
    return [nn.Embed(size.vocab, size.width, dtype=dtype), *blocks, Head(size.vocab, dtype)]


def loss_fn(logits: Any, batch: Any) -> Any:
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def make_batch(size: Size, num_microbatches: int) -> dict[str, np.ndarray]:
    random, shape = np.random.default_rng(0), (num_microbatches * size.microbatch, size.seq)
    return {name: random.integers(0, size.vocab, shape).astype(np.int32) for name in ("inputs", "targets")}


def batch_shapes(size: Size, num_microbatches: int) -> dict[str, jax.ShapeDtypeStruct]:
    shape = (num_microbatches * size.microbatch, size.seq)
    return {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in ("inputs", "targets")}


def balanced(size: Size, num_parts: int) -> list[int]:
    """Layer counts with the blocks shared out evenly, embedding and head (small here) at the ends."""
    counts = [size.layers // num_parts + (i < size.layers % num_parts) for i in range(num_parts)]
    counts[0] += 1
    counts[-1] += 1
    return counts


def transformer_pipeline(
    size: Size, num_stages: int, num_microbatches: int, layers: list[nn.Module] | None = None, **options: Any
) -> jpipe.Pipeline:
    """The model in K stages, its blocks shared out evenly; `options` are those of `jpipe.Pipeline`."""
    return jpipe.Pipeline(
        layers or make_layers(size),
        loss_fn,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        balance=balanced(size, num_stages * options.get("num_chunks", 1)),
        **options,
    )


# --- the same training step by hand ---


def init_by_hand(layers: list[nn.Module], key: Any, batch: Any) -> list[Any]:
    """Each layer's variables, on the host."""
    x, trees = batch["inputs"][:1], []
    for i, layer in enumerate(layers):
        x, tree = jax.jit(layer.init_with_output)(jax.random.fold_in(key, i), x)
        trees.append(tree)
    return jax.device_get(trees)


def step_by_hand(
    layers: list[nn.Module], tx: Any, num_microbatches: int, *, remat: str = "none", scan: bool = True
) -> tuple[Callable, Callable]:
    """Gradient accumulation over micro-batches on one device, as one would write it in JAX.

    Args:
      layers: embedding, equal blocks, head.
      tx: the optimiser.
      num_microbatches: M.
      remat: "none"; "layer": each layer, the head with its loss among them, under `jax.checkpoint`; or "blocks": those
        alone.
      scan: over stacked blocks, or one after the other.

    Returns:
      (start, step): `start(trees)` is a state of each layer's variables; `step(state, batch)` is (state, loss), jitted.
    """
    embed, block, head = layers[0], layers[1], layers[-1]
    wrap = lambda function: jax.checkpoint(function, prevent_cse=not scan)
    enter, leave, run = embed.apply, lambda p, x, batch: loss_fn(head.apply(p, x), batch), block.apply
    if remat == "layer":
        enter, leave = wrap(enter), wrap(leave)
    if remat != "none":
        run = wrap(run)

    def loss_of(params, batch):
        first, blocks, last = params
        x = enter(first, batch["inputs"])
        if scan:
            x, _ = jax.lax.scan(lambda x, p: (run(p, x), None), x, blocks)
        else:
            for p in blocks:
                x = run(p, x)
        return leave(last, x, batch)

    def start(trees):
        blocks = jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees[1:-1]) if scan else list(trees[1:-1])
        params = jax.tree.map(jnp.array, (trees[0], blocks, trees[-1]))
        return params, tx.init(params)

    def step(state, batch):
        params, opt_state = state
        parts = jax.tree.map(lambda a: a.reshape(num_microbatches, -1, *a.shape[1:]), batch)

        def accumulate(carry, part):
            return jax.tree.map(jnp.add, carry, jax.value_and_grad(loss_of)(params, part)), None

        zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        loss, grads = jax.tree.map(lambda a: a / num_microbatches, jax.lax.scan(accumulate, zeros, parts)[0])
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return start, jax.jit(step, donate_argnums=0)


# --- the clock ---


class Stepper:
    """A training step that is called again and again, and timed.

    Args:
      step: (state, batch) -> (state, loss).
      state: the first state.
      batch: the batch of every step.
      clock: `time.perf_counter`, or `time.process_time` for work on one core, which other programs don't change.
    """

    def __init__(self, step: Callable, state: Any, batch: Any, clock: Callable[[], float] = time.perf_counter):
        self._step, self.state, self._batch, self._clock = step, state, batch, clock

    def __call__(self) -> tuple[float, float]:
        """(seconds, loss) of one step."""
        begin = self._clock()
        self.state, loss = self._step(self.state, self._batch)
        jax.block_until_ready((self.state, loss))
        return self._clock() - begin, float(loss)


def pipeline_stepper(
    pipe: Any, tx: Any, batch: Any, trees: list[Any], clock: Callable[[], float] = time.perf_counter
) -> Stepper:
    """A pipeline's own training step, from the layers' given variables."""

    def step(state, batch):
        state, metrics = pipe.train_step(state, batch)
        return state, metrics["loss"]

    state = pipe.create_state(jax.random.key(0), batch, tx)
    return Stepper(step, state.replace(variables=pipe.from_layer_variables(trees)), batch, clock)


def in_turns(variants: dict[str, Callable[[], tuple[float, float]]], repetitions: int) -> dict[str, float]:
    """The shortest seconds of each variant, all taken in turns after one call that doesn't count.

    Raises:
      SystemExit: the variants' first losses differ, so that they don't compute the same.
    """
    losses = {name: variant()[1] for name, variant in variants.items()}
    check_losses(losses)
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repetitions):
        for name, variant in variants.items():
            times[name].append(variant()[0])
    return {name: min(seconds) for name, seconds in times.items()}


def check_losses(losses: dict[str, float], tolerance: float = 2e-3) -> None:
    values = list(losses.values())
    if not np.allclose(values, values[0], rtol=tolerance):
        raise SystemExit(f"the variants don't compute the same: their first losses are {losses}")


# --- settings ---


def chosen_settings(parser: argparse.ArgumentParser, kind: type, table: Sequence[Any]) -> tuple[list[Any], Any]:
    """(the settings that the command line asks for, its options): all combinations of what is given, else `table`."""
    parser.epilog = "All combinations of what is given are compiled; if nothing is, the table in benchmarks/results."
    for field in fields(kind):
        parser.add_argument(f"--{field.name}", nargs="+", type=type(field.default), help=f"(default {field.default})")
    options = parser.parse_args()
    names = [field.name for field in fields(kind)]
    chosen = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    combinations = itertools.product(*chosen.values())
    return [kind(**dict(zip(chosen, values, strict=True))) for values in combinations] if chosen else [*table], options


# --- memory and tables ---


def lowered_step(pipe: Any, tx: Any, batch: Any) -> Any:
    """A pipeline's training step, lowered from shapes alone."""
    return jax.jit(pipe.train_step, donate_argnums=0).lower(pipe.abstract_state(batch, tx), batch)


def compiled_step(pipe: Any, tx: Any, batch: Any) -> Any:
    """The same, compiled."""
    return lowered_step(pipe, tx, batch).compile()


def mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.1f}" if num_bytes < 100 * 2**20 else f"{num_bytes / 2**20:,.0f}"


def show(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], caption: str) -> None:
    """Prints a table; its first column is text, the others are figures."""
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i else "left")
    for row in rows:
        table.add_row(*map(str, row))
    console.print(table)
