"""A model of 405 billion parameters on chips that aren't there, 1,024 or fewer: the bytes of a chip, the time to plan.

Llama 3.1 405B by its sizes (arXiv 2407.21783, table 3; the blocks are those of `axes_models.py`): 126 blocks of width
16,384, 128 heads, 8 of keys and values, 53,248 between, a vocabulary of 128,256, float32 parameters, bfloat16
activations, Adam; on a v5p:8x8x16 as stage 16, fsdp 8, model 8, weights gathered at each use. The batch stays as it is
on fewer chips: a micro-batch has eight sequences. Needs `pip install libtpu`, and some minutes.

    python benchmarks/pod.py --split none sequence
    python benchmarks/pod.py --topology v5p:8x8x4 --fsdp 2 --offload optimizer
"""

import argparse
import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from axes_models import Row, Sizes, as_computed, dense, dense_specs, rms, shard
from axes_programs import loss_fn
from common import console, lowered_step, on_cpu, settings, show, tpu_devices

import jpipe
from jpipe.tools.memory_model import held_by_stages
from tpu_program import compile_with_text

SEQUENCES = 8
"""Of a micro-batch, on all chips of a stage."""
SPLITS = {"none": ("fsdp", None), "sequence": ("fsdp", "model")}
"""How activations `[b, t, width]` lie between blocks."""
COLUMNS = (
    "between blocks",
    "offload",
    "room, of parameters",
    "arguments, GiB",
    "temporaries, GiB",
    "on the host, GiB",
    "plan, s",
    "lower, s",
    "compile, s",
)


class Embedding(nn.Module):
    """Tokens to vectors."""

    sizes: Sizes
    between: tuple[str | None, ...]

    @nn.compact
    def __call__(self, tokens):
        table = parameter(self, "table", ("model", "fsdp"), self.sizes.vocab, self.sizes.width)
        return shard(jnp.asarray(table, self.sizes.dtype)[tokens], *self.between)


class Head(nn.Module):
    """A norm, and the logits."""

    sizes: Sizes

    @nn.compact
    def __call__(self, x):
        scale = parameter(self, "scale", (None,), self.sizes.width)
        table = parameter(self, "table", ("fsdp", "model"), self.sizes.width, self.sizes.vocab)
        w = as_computed(self.sizes, {"scale": scale, "table": table})
        return rms(x, w["scale"]) @ w["table"]


def parameter(module: nn.Module, name: str, names: tuple[str | None, ...], *shape: int) -> Any:
    """A parameter whose dimensions are split so."""
    init = nn.with_partitioning(jax.nn.initializers.normal(0.02), names)
    return module.param(name, init, shape, module.sizes.param_dtype)


def make_pipeline(
    mesh: Any, sizes: Sizes, blocks: int, microbatches: int, between: tuple, **chosen: Any
) -> jpipe.Pipeline:
    row = Row("405B", dense, partial(dense_specs, fsdp="fsdp"), {}, between=(*between, None))
    layers = [Embedding(sizes, between), *[row.layer(sizes) for _ in range(blocks)], Head(sizes)]
    options = {"num_stages": mesh.shape["stage"], "num_microbatches": microbatches, "gather": "use"}
    return jpipe.Pipeline(layers, loss_fn, mesh=mesh, **options, **chosen)


def room(pipe: jpipe.Pipeline) -> str:
    """What all stages have room for, as a multiple of the model's parameters."""
    own = sum(amount.elements for amount in held_by_stages(pipe.plan, "params"))
    return f"{sum(a.size for a in jax.tree.leaves(pipe.plan.shapes['params'])) / own:.3f}"


def clocked(function: Callable, *arguments: Any) -> tuple[Any, str]:
    """(what it gives, the seconds that it took)."""
    begin = time.perf_counter()
    return function(*arguments), f"{time.perf_counter() - begin:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--topology", default="v5p:8x8x16", help="(default %(default)s)")
    parser.add_argument("--blocks", type=int, default=126, help="(default %(default)s)")
    parser.add_argument("--microbatches", type=int, default=32, help="(default %(default)s)")
    parser.add_argument("--seq", type=int, default=4096, help="(default %(default)s)")
    parser.add_argument("--split", nargs="+", choices=SPLITS, default=["sequence"], help="between blocks")
    parser.add_argument("--ends", default="own", help="(default %(default)s)")
    parser.add_argument("--offload", nargs="+", default=["none"], help="such as optimizer+residuals")
    for axis, size in {"stage": 16, "fsdp": 8, "model": 8}.items():
        parser.add_argument(f"--{axis}", type=int, default=size, help="devices along the axis (default %(default)s)")
    parser.add_argument("--dump", help="a folder for the compiled programs' texts")
    options = parser.parse_args()
    on_cpu()
    axes = {axis: getattr(options, axis) for axis in ("stage", "fsdp", "model")}
    mesh = jpipe.make_mesh(devices=tpu_devices(options.topology), **axes)
    sizes, rows = Sizes(width=16384, heads=128, kv_heads=8, hidden=53248, seq=options.seq, vocab=128256), []
    tokens = jax.ShapeDtypeStruct((SEQUENCES * options.microbatches, options.seq), "int32")
    batch = {"inputs": tokens, "targets": tokens}
    for split, offload in itertools.product(options.split, options.offload):
        chosen = {"ends": options.ends, "offload": [] if offload == "none" else offload.split("+")}
        pipe = make_pipeline(mesh, sizes, options.blocks, options.microbatches, SPLITS[split], **chosen)
        tx = optax.adam(1e-4)
        _, planned = clocked(pipe.abstract_state, batch, tx)
        console.print(f"room for {room(pipe)} of the parameters")
        lowered, lowering = clocked(lowered_step, pipe, tx, batch)
        (compiled, text), compiling = clocked(compile_with_text, lowered)
        if options.dump:
            with open(f"{options.dump}/{split}_{offload}.txt", "w") as file:
                file.write(text)
        memory = compiled.memory_analysis()
        hosted = memory.host_argument_size_in_bytes + memory.host_temp_size_in_bytes
        held = [f"{b / 2**30:.1f}" for b in (memory.argument_size_in_bytes, memory.temp_size_in_bytes, hosted)]
        rows.append((split, offload, room(pipe), *held, planned, lowering, compiling))
    modes = f"{axes}, ends {options.ends}, M={options.microbatches}, micro-batch {SEQUENCES}x{options.seq}"
    show("405B parameters, a chip", COLUMNS, rows, settings(mesh.devices.flat[0], options.topology, modes))
    console.print(str(pipe.partition), highlight=False)


if __name__ == "__main__":
    main()
