"""What `jpipe.plan` chooses beside the default settings: predicted, and by the TPU compiler; measured on two cores.

    python benchmarks/plans.py gpt           # a vocabulary of 128k words, v5e:2x4
    python benchmarks/plans.py llama         # Llama's blocks over stage, data, fsdp and model axes, v5e:4x4
    python benchmarks/plans.py amoebanet     # AmoebaNet-D (3, 128) in four stages, v5e:2x2
    python benchmarks/plans.py cpu           # K=2, both cores

The default is `Pipeline(layers, loss_fn, num_stages=K, num_microbatches=4 * K)` with all devices as stages, or with as
many as there are micro-batches and layers for.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import optax
from axes_models import ROWS, LinenBlock, Sizes
from axes_programs import loss_fn as mean_square
from common import (
    Size,
    batch_shapes,
    console,
    in_turns,
    init_by_hand,
    loss_fn,
    make_batch,
    make_layers,
    on_cpu,
    pipeline_stepper,
    show,
    versions,
)

import jpipe
from jpipe.tools.chips import mesh_of_nowhere, parse_topology
from jpipe.tools.forecaster import Forecast
from jpipe.tools.memory_model import predict_memory
from jpipe.tools.search import Choice
from jpipe.tools.time_model import predict_time

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from models import amoebanet

COLUMNS = ("settings", "predicted ms", "predicted MiB", "compiled ms", "compiled MiB")
TX = optax.sgd(1e-2, momentum=0.9)


@dataclass(frozen=True)
class Model:
    """A model for a slice of TPUs.

    Attributes:
      make: its layers.
      loss_fn: its loss.
      batch: the shapes of a batch.
      topology: the slice.
      options: of `jpipe.plan` and, but for `axes`, of `jpipe.Pipeline`.
      default: the sizes of the mesh axes by default.
    """

    make: Callable[[], list]
    loss_fn: Callable
    batch: Any
    topology: str
    options: dict[str, Any]
    default: dict[str, int]


def words_of(choice: Choice) -> str:
    """Its settings in a line."""
    return ", ".join(f"{name}={word}" for name, word in choice.setting.in_words.items())


def images(count: int, size: int) -> dict[str, Any]:
    shapes = jax.ShapeDtypeStruct((count, size, size, 3), "float32"), jax.ShapeDtypeStruct((count,), "int32")
    return dict(zip(("inputs", "targets"), shapes, strict=True))


LLAMA = Sizes(width=2048, heads=16, kv_heads=8, hidden=7168, seq=1024)
BLOCK = next(row for row in ROWS if row.name == "fsdp-model")
GPT = Size(16, 1024, 16, 512, 128_256, 32, "bfloat16")
MODELS = {
    "gpt": Model(lambda: make_layers(GPT), loss_fn, batch_shapes(GPT, 1), "v5e:2x4", {}, {"stage": 8}),
    "llama": Model(
        lambda: [LinenBlock(BLOCK, LLAMA) for _ in range(16)],
        mean_square,
        {"inputs": jax.ShapeDtypeStruct((32, LLAMA.seq, LLAMA.width), LLAMA.dtype)},
        "v5e:4x4",
        {"axes": ("data", "fsdp", "model")},
        {"stage": 2, "data": 2, "fsdp": 2, "model": 2},
    ),
    "amoebanet": Model(
        lambda: amoebanet.amoebanet(3, 128, dtype="bfloat16"),
        amoebanet.loss_fn,
        images(128, 224),
        "v5e:2x2",
        {"num_stages": 4},  # of unlike layers every further mesh takes minutes to partition
        {"stage": 4},
    ),
}


def compare(model: Model) -> list[tuple[str, ...]]:
    """The default and the first choice, each predicted and compiled."""
    found = jpipe.plan(model.make(), model.loss_fn, model.batch, TX, topology=model.topology, **model.options)
    console.print(str(found), highlight=False)
    own = {name: value for name, value in model.options.items() if name != "axes"}
    size = jax.tree.leaves(model.batch)[0].shape[0]
    count = max(m for m in range(1, 4 * model.default["stage"] + 1) if size % m == 0)
    sizes = {"num_stages": model.default["stage"], "num_microbatches": count}
    chosen = {name: value for name, value in found[0].options.items() if name != "mesh"}
    rows = []
    for name, options, axes in (
        (f"default: {', '.join(f'{a}={n}' for a, n in model.default.items())}, M={count}", own | sizes, model.default),
        (f"plan: {words_of(found[0])}", chosen, dict(found[0].setting.axes)),
    ):
        pipe = jpipe.Pipeline(model.make(), model.loss_fn, mesh=mesh_of_nowhere(axes), **options)
        rows.append((name, *row(pipe, model)))
        console.print(*rows[-1], sep=" | ", highlight=False)
    return rows


def row(pipe: jpipe.Pipeline, model: Model) -> tuple[str, ...]:
    """What the models predict, and what the compiler says."""
    chip = parse_topology(model.topology).chip
    time, memory = (
        predict_time(pipe.planner, model.batch, chip, tx=TX),
        predict_memory(pipe.planner, model.batch, TX, chip)[0],
    )
    compiled: Forecast = jpipe.forecast(pipe, model.batch, TX, topology=model.topology)
    ms = "-" if compiled.seconds is None else f"{1e3 * compiled.seconds:,.1f}"
    fits = f"{compiled.total_bytes / 2**20:,.0f}" + " (too large)" * (not compiled.fits)
    return f"{1e3 * time.step:,.1f}", f"{memory.total / 2**20:,.0f}", ms, fits


def measure(repetitions: int) -> list[tuple[str, ...]]:
    """Default and first choice for two devices, one core each, their steps in turns."""
    size = Size(6, 256, 4, 128, 2048, 16)
    tx, batch, layers = optax.sgd(1e-3), make_batch(size, 1), make_layers(size)
    found = jpipe.plan(layers, loss_fn, batch, tx, devices=jax.devices()[:2], num_stages=2)
    console.print(str(found), highlight=False)
    trees = init_by_hand(layers, jax.random.key(0), batch)
    pipes = {
        "default: K=2, M=8": jpipe.Pipeline(layers, loss_fn, num_stages=2, num_microbatches=8),
        f"plan: {words_of(found[0])}": jpipe.Pipeline(layers, loss_fn, **found[0].options),
    }
    steppers = {name: pipeline_stepper(pipe, tx, batch, trees) for name, pipe in pipes.items()}
    seconds = in_turns(steppers, repetitions)
    base = next(iter(seconds.values()))
    return [(name, f"{1e3 * taken:,.1f}", f"{taken / base:.2f}") for name, taken in seconds.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=[*MODELS, "cpu"])
    parser.add_argument("--repetitions", type=int, default=10, help="steps measured (default %(default)s)")
    options = parser.parse_args()
    on_cpu(2)
    if options.what == "cpu":
        columns = ("settings", "ms a step, the shortest", "of the default's")
        show("Measured on two cores", columns, measure(options.repetitions), versions(tpu=False))
    else:
        model = MODELS[options.what]
        show(f"{options.what} on {model.topology}", COLUMNS, compare(model), versions(tpu=True))


if __name__ == "__main__":
    main()
