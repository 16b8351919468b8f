"""jpipe on a GPU that is there: one stage, at most eight minutes, one table as docs/numbers.md has it.

A step beside the same in plain JAX, and layers beside the time model; bytes of a step beside its compiler's and the
memory model's, also with `offload=`; attention by cuDNN; loss and gradients beside the CPU's. Each part is a process of
its own, as the peak of a device's memory never falls. One that fails is a row that says why, and one that may not fit
into the time that is left isn't begun. Needs jax for CUDA, flax, optax, orbax-checkpoint, rich and pytest; jpipe need
not be installed. From the root of the repository:

    PYTHONPATH=. python3 benchmarks/on_gpu.py --out on_gpu.md
    PYTHONPATH=. JAX_PLATFORMS=cpu python3 benchmarks/on_gpu.py --sizes small --seconds 3600  # all of it, on a CPU

On a CPU attention is by XLA, and what `offload=` moves goes to `pinned_host`, which jpipe else doesn't use there.
"""

import argparse
import json
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import axes_models
import common
import flax.linen as nn
import jax
import numpy as np
import optax
from axes_models import LinenBlock, Row, Sizes
from common import Size, Stepper, batch_shapes, loss_fn, make_batch, make_layers, transformer_pipeline
from offload import FLAGS

import jpipe
from jpipe import checks
from jpipe.jax import in_place
from jpipe.memory import layout
from jpipe.planning import kept
from jpipe.tools.chips import Chip, chip_of, measure_chip
from jpipe.tools.memory_model import predict_memory
from jpipe.tools.time_model import layer_seconds, predict_time

M = 8
COLUMNS = ("part", "what, beside its baseline", "baseline", "here", "here / baseline")
LINEAR = optax.adam(0.1, eps=1.0)
"""Its updates are about linear in the gradients, so that rounding isn't blown up."""
Rows = list[tuple[str, ...]]


# --- rows -------------------------------------------------------------------------------------------------------------


def row(what: str, baseline: float | None, here: float | None, shown: Callable[[float], str]) -> tuple[str, ...]:
    """A row behind its part; None is what isn't known."""
    ratio = f"{here / baseline:.3f}" if baseline and here is not None else "-"
    return what, *("-" if number is None else shown(number) for number in (baseline, here)), ratio


def words(text: str) -> Rows:
    """A row of words, of their first line."""
    return [(text.partition("\n")[0][:200].replace("|", "/"), "-", "-", "-")]


ms: Callable[[float], str] = lambda seconds: f"{1e3 * seconds:,.{0 if seconds > 0.1 else 3}f} ms"
mib: Callable[[float], str] = lambda size: f"{common.mib(size)} MiB"
difference, loss_of_step = "{:.1e}".format, "{:.7f}".format


def worst(leaves: list[Any], others: list[Any]) -> float:
    """The largest difference of a leaf from its other, over the other's largest number."""
    return max(float(np.abs(a - b).max() / (np.abs(b).max() or 1)) for a, b in zip(leaves, others, strict=True))


def by_layer(pipe: jpipe.Pipeline, variables: Any) -> list[np.ndarray]:
    return jax.tree.leaves(jax.device_get(pipe.layer_variables(variables)))


def chip() -> Chip:
    return chip_of(jax.devices()[0]) or measure_chip(jax.devices()[:1])


def peak() -> int | None:
    """The most bytes of the device that were in use so far."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


# --- parts ------------------------------------------------------------------------------------------------------------


def step(remat: str, size: Size, folder: Path) -> Rows:
    """A step beside a scan over micro-batches of a scan over blocks, by turns; and what the time model says of it."""
    tx, layers, batch = optax.adamw(1e-4), make_layers(size), jax.device_put(make_batch(size, M))
    trees = common.init_by_hand(layers, jax.random.key(0), batch)
    start, by_hand = common.step_by_hand(layers, tx, M, remat=remat)
    pipe = transformer_pipeline(size, 1, M, layers, remat=remat)
    ours = common.pipeline_stepper(pipe, tx, batch, trees)
    seconds = common.in_turns({"plain": Stepper(by_hand, start(trees), batch), "jpipe": ours}, 8)
    predicted = predict_time(pipe.planner, batch_shapes(size, M), chip(), tx=tx).step
    return [
        row("jpipe, beside JAX by hand", seconds["plain"], seconds["jpipe"], ms),
        row("the time model, beside jpipe", seconds["jpipe"], predicted, ms),
    ]


class FeedForward(nn.Module):
    dtype: Any

    @nn.compact
    def __call__(self, x):
        return common.feed_forward(x, self.dtype)


class Convolution(nn.Module):
    """Three by three, of a sequence taken for a square image."""

    dtype: Any

    @nn.compact
    def __call__(self, x):
        side, width = round(x.shape[1] ** 0.5), x.shape[-1]
        image = nn.Conv(width, (3, 3), dtype=self.dtype)(x.reshape(-1, side, side, width))
        return nn.relu(image).reshape(x.shape)


def layers(size: Size, folder: Path) -> Rows:
    """Layers of several kinds, forward and backward of a micro-batch: as `balance="time"` takes them, and predicted."""
    embedding, block, *_, head = make_layers(size)
    few, hidden = size.heads // 4, 4 * size.width
    sizes = Sizes(size.width, size.heads, few, hidden, size.seq, size.microbatch, dtype=size.dtype)
    llama = Row("dense", axes_models.dense, partial(axes_models.dense_specs, many=None), {})
    experts = Row("experts", axes_models.experts_by_einsum, lambda sizes: axes_models.expert_specs(sizes, None), {})
    kinds = {
        "embedding": embedding,
        "block, attention by XLA": block,
        "feed-forward": FeedForward(block.dtype),
        "Llama's block": LinenBlock(llama, sizes),
        "experts by einsum": LinenBlock(experts, sizes),
        "convolution": Convolution(block.dtype),
        "layer norm": nn.LayerNorm(dtype=block.dtype),
        "head and loss": head,
    }
    pipe = jpipe.Pipeline([*kinds.values()], loss_fn, num_stages=1, num_microbatches=M, remat="none", balance="time")
    batch = batch_shapes(size, M)
    jax.eval_shape(pipe.init, jax.random.key(0), batch)
    times = zip(kinds, pipe.partition.layer_costs, layer_seconds(pipe.planner, batch, chip()), strict=True)
    return [row(f"{name}: the time model, beside the clock", clock, model, ms) for name, clock, model in times]


def held(options: dict[str, Any], flags: dict[str, Any], size: Size, folder: Path) -> Rows:
    """Bytes of a step, by the device, by its compiler and by the memory model; with `offload=` beside one without."""
    pipe = transformer_pipeline(size, 1, M, **{"schedule": "gpipe", "remat": "none"} | options)
    batch, without = jax.device_put(make_batch(size, M)), folder / "without.pickle"
    state = pipe.create_state(jax.random.key(0), batch, LINEAR)
    start, compiled = by_layer(pipe, state.variables), common.lowered_step(pipe, LINEAR, batch).compile(flags)
    before = peak()
    stepper = Stepper(lambda state, batch: ((made := compiled(state, batch))[0], made[1]["loss"]), state, batch)
    losses = [stepper()[1] for _ in range(2)]
    highest = peak()  # of two steps: then parameters are copied
    change = [b - a for a, b in zip(start, by_layer(pipe, stepper.state.variables), strict=True)]
    seconds, _ = min(stepper() for _ in range(4))
    memory, model = compiled.memory_analysis(), (pipe.planner, batch_shapes(size, M), LINEAR, chip())
    left = memory.output_size_in_bytes - memory.alias_size_in_bytes
    analysed = memory.argument_size_in_bytes + memory.temp_size_in_bytes + left
    raised = ", which the step did not raise" if highest and highest == before else ""
    rows = [
        row(f"memory_analysis, beside the device's peak{raised}", highest, analysed, mib),
        row(f"predict_memory, beside the device's peak{raised}", highest, predict_memory(*model)[0].total, mib),
    ]
    if "offload" not in options:
        if not options:
            without.write_bytes(pickle.dumps((highest, seconds, losses, change)))
        return [*rows, row("seconds of the step", None, seconds, ms)]
    pinned = [a for a in jax.tree.leaves(stepper.state) if a.sharding.memory_kind == in_place.HOST]
    on_host = sum(a.nbytes for a in pinned) + memory.host_temp_size_in_bytes
    peak_without, seconds_without, losses_without, change_without = pickle.loads(without.read_bytes())
    return [
        *rows,
        row("the device's peak, beside the step without", peak_without, highest, mib),
        row("predict_memory of the host, beside what is pinned", on_host, predict_memory(*model)[1].total, mib),
        row("seconds of the step, beside the step without", seconds_without, seconds, ms),
        row("loss of the second step, beside the step without", losses_without[1], losses[1], loss_of_step),
        row("two steps' change of parameters, worst leaf", None, worst(change, change_without), difference),
    ]


def attention(size: Size, folder: Path) -> Rows:
    """Training with cuDNN's attention beside XLA's; a step's change by SGD is the gradient."""
    batch, cudnn = jax.device_put(make_batch(size, M)), "cudnn" if jax.devices()[0].platform == "gpu" else "xla"
    trees = common.init_by_hand(make_layers(size), jax.random.key(0), batch)
    steppers, losses, changes = {}, [], []
    for implementation in ("xla", cudnn):
        pipe = transformer_pipeline(size, 1, M, make_layers(size, attention=implementation), remat="layer")
        steppers[len(losses)] = stepper = common.pipeline_stepper(pipe, optax.sgd(1.0), batch, trees)
        losses.append(stepper()[1])
        after = by_layer(pipe, stepper.state.variables)
        changes.append([a - b for a, b in zip(after, jax.tree.leaves(trees), strict=True)])
    return [
        row("loss, beside XLA's attention", *losses, loss_of_step),
        row("gradients, worst leaf", None, worst(changes[1], changes[0]), difference),
        row("seconds of the step, beside XLA's attention", *common.in_turns(steppers, 8).values(), ms),
    ]


def beside_cpu(size: Size, folder: Path) -> Rows:
    """Loss and each leaf of the gradients in float32: jpipe's and plain JAX's here, and plain JAX's on the CPU."""
    layers, batch = make_layers(size), make_batch(size, M)
    trees = common.init_by_hand(layers, jax.random.key(0), batch)

    def plain_loss(trees: Any, batch: Any) -> Any:
        x = batch["inputs"]
        for layer, tree in zip(layers, trees, strict=True):
            x = layer.apply(tree, x)
        return loss_fn(x, batch)

    def plain(device: Any) -> tuple[Any, list[Any]]:
        given = jax.device_put((trees, batch), device)
        loss, gradients = jax.device_get(jax.jit(jax.value_and_grad(plain_loss))(*given))
        return loss, jax.tree.leaves(gradients)

    pipe = transformer_pipeline(size, 1, M, layers)
    with jax.default_matmul_precision("highest"):
        (loss_on_cpu, on_cpu), (loss_of_plain, of_plain) = plain(jax.devices("cpu")[0]), plain(jax.devices()[0])
        (loss, _), gradients = pipe.value_and_grad(pipe.from_layer_variables(trees, batch), batch)
    leaves = by_layer(pipe, {"params": gradients})
    what, off = f"worst of {len(leaves)} leaves of gradients, off the CPU's", worst(of_plain, on_cpu)
    return [
        row("loss of plain JAX, beside the CPU's", loss_on_cpu, loss_of_plain, loss_of_step),
        row("loss of jpipe, beside the CPU's", loss_on_cpu, loss, loss_of_step),
        row(f"{what}: jpipe, beside plain JAX", off, worst(leaves, on_cpu), difference),
    ]


SMALL, GPU = Size(2, 64, 4, 16, 64, 2), "bfloat16"
LARGE, LITTLE = Size(12, 2048, 16, 1024, 32000, 8, GPU), Size(4, 1024, 16, 1024, 8192, 2, GPU)
RESIDUALS = {"offload": "residuals"}
PARTS: dict[str, tuple[Callable[[Size, Path], Rows], Size, float]] = {
    'a step, remat "layer"': (partial(step, "layer"), LARGE, 90),
    "float32": (beside_cpu, Size(4, 512, 8, 256, 4096, 4), 40),
    'remat "none"': (partial(held, {}, {}), LITTLE, 35),
    'offload "residuals"': (partial(held, RESIDUALS, {}), LITTLE, 35),
    'offload "optimizer"': (partial(held, {"offload": "optimizer"}, {}), LITTLE, 35),
    "a layer": (layers, LARGE, 50),
    "attention by cuDNN": (attention, Size(8, 1024, 16, 2048, 8192, 4, GPU), 60),
    'remat "layer"': (partial(held, {"remat": "layer"}, {}), LITTLE, 35),
    'a step, remat "none"': (partial(step, "none"), LARGE, 90),
    'offload "residuals", 16 moves at a time': (partial(held, RESIDUALS, FLAGS), LITTLE, 35),
}
"""The parts in order, the size of each on a GPU, and the seconds that it may need there."""


# --- processes --------------------------------------------------------------------------------------------------------


def run(name: str, sizes: str, folder: Path) -> None:
    """Runs a part in this process, and leaves its rows in the folder, or why there are none."""
    function, size, _ = PARTS[name]
    if jax.devices()[0].platform == "cpu":
        for module in (checks, in_place, kept, layout):
            module.is_apart = lambda mesh: True
    try:
        rows = function(size if sizes == "gpu" else SMALL, folder)
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        rows = words(f"failed: {type(error).__name__}: {error}")
    (folder / "rows.json").write_text(json.dumps([common.settings(jax.devices()[0]), rows]))


def in_process(name: str, sizes: str, folder: Path, seconds: float) -> tuple[str, Rows]:
    """(device, rows) of a part, run in a process of its own for at most so many seconds."""
    told = folder / "rows.json"
    told.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--sizes", sizes, "--part", name, "--folder", str(folder)]
    try:
        ended = subprocess.run(command, timeout=seconds)
    except subprocess.TimeoutExpired:
        return "", words(f"failed: not done after {seconds:.0f} s")
    return json.loads(told.read_text()) if told.exists() else ("", words(f"failed: exit status {ended.returncode}"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", choices=("gpu", "small"), default="gpu", help="(default %(default)s)")
    parser.add_argument("--seconds", type=float, default=480, help="of all parts together (default %(default)s)")
    parser.add_argument("--out", type=Path, help="a file for the table, written anew after each part")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        run(options.part, options.sizes, options.folder)
        return
    end, where, lines = time.monotonic() + options.seconds, "", [COLUMNS, ("---",) * len(COLUMNS)]
    with tempfile.TemporaryDirectory() as folder:
        for name, (_, _, needs) in PARTS.items():
            left = end - time.monotonic()
            device, rows = "", words(f"not begun: {left:.0f} s are left, and it may need {needs:.0f}")
            if left >= needs:
                device, rows = in_process(name, options.sizes, Path(folder), left)
            where = where or device
            lines += [(name, *of_part) for of_part in rows]
            table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
            print("\n".join(table.splitlines()[-len(rows) :]), flush=True)
            if options.out:
                options.out.write_text(f"{where}, K=1, M={M}, sizes {options.sizes}:\n\n{table}\n")
    print(f"\n{where}, K=1, M={M}, sizes {options.sizes}:\n\n{table}")


if __name__ == "__main__":
    main()
