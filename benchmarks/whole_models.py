"""A model that is one module beside the list of its layers: work, time to plan and compile, and a TPU's program.

The same Transformer as a list of layers, as one module with a loop over its blocks, and with `nn.scan` over them. By
itself jpipe cuts a module between attention and feed-forward too, so each is also marked by `jpipe.cut` behind its
blocks, where the list is cut. Work is the processor time of all stages on one core. `--tpu` compiles each for a
v5e:2x2 that need not be there (`pip install libtpu`).
"""

import argparse
import itertools
import re
import time
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from common import (
    Block,
    Head,
    Size,
    Stepper,
    batch_shapes,
    compiled_step,
    in_turns,
    init_by_hand,
    loss_fn,
    make_batch,
    make_layers,
    mib,
    on_cpu,
    settings,
    show,
    stage_mesh,
    tpu_devices,
)

import jpipe

SIZE = Size(layers=12, width=256, heads=4, seq=128, vocab=256, microbatch=4)


class InScan(nn.Module):
    """A block as `nn.scan` calls it."""

    block: Block
    marked: bool

    @nn.compact
    def __call__(self, x, _):
        x = self.block(x)
        return jpipe.cut(x) if self.marked else x, None


class Whole(nn.Module):
    """The layers of `make_layers` as one module.

    Attributes:
      size: of the model.
      scanned: whether `nn.scan` goes over the blocks.
      marked: whether stages may only begin behind blocks.
    """

    size: Size
    scanned: bool = False
    marked: bool = False

    @nn.compact
    def __call__(self, tokens):
        size, dtype = self.size, jnp.dtype(self.size.dtype)
        mark = jpipe.cut if self.marked else lambda x: x
        x = mark(nn.Embed(size.vocab, size.width, dtype=dtype)(tokens))
        if self.scanned:
            stack = nn.scan(InScan, {"params": 0}, split_rngs={"params": True}, length=size.layers)
            x, _ = stack(Block(size.heads, dtype), self.marked)(x, None)
        else:
            for _ in range(size.layers):
                x = mark(Block(size.heads, dtype)(x))
        return Head(size.vocab, dtype)(x)


def models(size: Size) -> dict[str, Any]:
    """The model by the way in which it is written."""
    return {
        "list of layers": make_layers(size),
        "loop, cut behind blocks": Whole(size, marked=True),
        "scan, cut behind blocks": Whole(size, scanned=True, marked=True),
        "loop": Whole(size),
        "scan": Whole(size, scanned=True),
    }


def pipeline(model: Any, options: argparse.Namespace, **more: Any) -> jpipe.Pipeline:
    """A pipeline of K stages and M micro-batches."""
    return jpipe.Pipeline(
        model, loss_fn, num_stages=options.stages, num_microbatches=options.microbatches, remat=options.remat, **more
    )


def variables_of(model: Any, pipe: jpipe.Pipeline, trees: list[Any], batch: Any) -> Any:
    """The variables of the list's layers in a pipeline of any of the models."""
    if not isinstance(model, Whole):
        return pipe.from_layer_variables(trees, batch)
    first, *blocks, last = (tree["params"] for tree in trees)
    own = {f"Block_{i}": block for i, block in enumerate(blocks)}
    if model.scanned:
        own = {"Block_0": jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)}
    return pipe.from_model_variables({"params": {"Embed_0": first, **own, "Head_0": last}}, batch)


def seconds_of(model: Any, size: Size, options: argparse.Namespace) -> tuple[float, float, float]:
    """Processor seconds to plan, to trace and lower, and to compile a step, with all caches empty."""
    jax.clear_caches()
    batch, tx, times = batch_shapes(size, options.microbatches), optax.adamw(1e-4), [time.process_time()]
    pipe = pipeline(model, options)
    state = pipe.abstract_state(batch, tx)
    times.append(time.process_time())
    lowered = jax.jit(pipe.train_step, donate_argnums=0).lower(state, batch)
    times.append(time.process_time())
    lowered.compile()
    times.append(time.process_time())
    return tuple(after - before for before, after in itertools.pairwise(times))


def show_planning(size: Size, options: argparse.Namespace) -> None:
    """Seconds by the number of blocks, the shortest of some repetitions."""
    sizes = [Size(**{**vars(size), "layers": depth}) for depth in options.depths]
    names = ("list of layers", "loop", "scan")
    seconds_of(models(sizes[0])["loop"], sizes[0], options)  # imports, and whatever else is done once
    rows = []
    for name in names:
        first = 0.0
        for of_depth in sizes:
            found = [seconds_of(models(of_depth)[name], of_depth, options) for _ in range(options.repetitions)]
            plan, trace, compiled = map(min, zip(*found, strict=True))
            first = first or trace + compiled
            row = f"{plan:.2f}", f"{trace:.2f}", f"{compiled:.2f}", f"{(trace + compiled) / first:.3f}"
            rows.append((f"{name}, {of_depth.layers} blocks", *row))
    columns = ("model", "plan, s", "trace, s", "compile, s", "trace and compile, of the first row's")
    show("Time to plan and to compile a step", columns, rows, settings(jax.devices()[0], size, f"K={options.stages}"))


def show_work(size: Size, options: argparse.Namespace) -> None:
    """Processor seconds of a step, all stages on one core."""
    batch, tx, variants = make_batch(size, options.microbatches), optax.adamw(1e-4), {}
    trees = init_by_hand(make_layers(size), jax.random.key(0), batch)
    for name, model in models(size).items():
        pipe = pipeline(model, options)

        def step(state: Any, batch: Any, pipe: jpipe.Pipeline = pipe) -> tuple[Any, Any]:
            state, metrics = pipe.train_step(state, batch)
            return state, metrics["loss"]

        variables = variables_of(model, pipe, trees, batch)
        state = pipe.create_state(jax.random.key(0), batch, tx, variables)
        variants[name] = Stepper(step, state, batch, time.process_time)
    times = in_turns(variants, options.repetitions)
    base = times["list of layers"]
    rows = [(name, f"{seconds:.3f}", f"{seconds / base:.3f}") for name, seconds in times.items()]
    caption = settings(jax.devices()[0], "one core", size, f"K={options.stages}", f"M={options.microbatches}")
    show("Work of all stages on one core", ("model", "processor seconds", "ratio"), rows, caption)


def show_tpu(size: Size, options: argparse.Namespace) -> None:
    """The program that the compiler makes for a TPU."""
    batch, tx, rows = batch_shapes(size, options.microbatches), optax.adamw(1e-4), []
    devices = tpu_devices("v5e:2x2")
    for name, model in models(size).items():
        compiled = compiled_step(pipeline(model, options, mesh=stage_mesh(devices, options.stages)), tx, batch)
        text, memory = compiled.as_text(), compiled.memory_analysis()
        cycles = sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', text)))
        copies, permutes = len(re.findall(r" copy\(", text)), text.count("collective-permute-start(")
        sizes = mib(memory.argument_size_in_bytes), mib(memory.temp_size_in_bytes)
        rows.append((name, *sizes, f"{cycles / 1000:,.0f}", copies, permutes))
    columns = ("model", "arguments, MiB", "temporaries, MiB", "kcycles, each operation once", "copies", "permutes")
    caption = settings(devices[0], size, f"K={options.stages}", f"M={options.microbatches}")
    show("The step as compiled for v5e:2x2", columns, rows, caption)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--stages", type=int, default=4, help="K (default %(default)s)")
    parser.add_argument("--microbatches", type=int, default=8, help="M (default %(default)s)")
    parser.add_argument("--remat", default="layer", help="(default %(default)s)")
    parser.add_argument("--depths", type=int, nargs="+", default=[12, 96], help="blocks (default 12 96)")
    parser.add_argument("--repetitions", type=int, default=3, help="(default %(default)s)")
    parser.add_argument("--core", type=int, default=0, help="(default %(default)s)")
    parser.add_argument("--tpu", action="store_true", help="compile for a TPU, and nothing else")
    Size.add_arguments(parser, SIZE)
    options = parser.parse_args()
    on_cpu(options.stages, core=options.core)
    size = Size.of(options)
    if options.tpu:
        show_tpu(size, options)
        return
    show_work(size, options)
    show_planning(size, options)


if __name__ == "__main__":
    main()
