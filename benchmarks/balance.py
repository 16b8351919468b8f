"""Balance: what the stages of AmoebaNet-D and a Transformer take when cut by count, by FLOPs and by measured time.

Layers are timed on one core, forward and backward, and every cut is judged by these times: the slowest stage over the
mean, and the speed-up of GPipe with M micro-batches over K=2, M=1 as in the paper's table 2, which had AmoebaNet-D(18,
256) at 3.48 and Transformer-48 at 6.3 for K=8, M=32 on TPUs. Predicted by the schedule alone, without communication.
"""

import argparse
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from common import on_cpu, settings, show

import jpipe
from jpipe.planning.partition import partition_from_counts

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from models import amoebanet, transformer_l

PAPER = {  # table 2, M=32, relative to K=2, M=1
    "AmoebaNet-D": {2: 1.21, 4: 1.84, 8: 3.48},
    "Transformer": {2: 1.8, 4: 3.4, 8: 6.3},
}


def partition_of(layers: list[Any], loss_fn: Callable, batch: Any, k: int, m: int, balance: str) -> jpipe.Partition:
    """How a pipeline cuts the layers; nothing is allocated or run but for measuring."""
    pipe = jpipe.Pipeline(layers, loss_fn, num_stages=k, num_microbatches=m, balance=balance)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of layers over their share: the table says it
        jax.eval_shape(pipe.init, jax.random.key(0), batch)
    return pipe.partition


def speed_up(times: tuple[float, ...], m: int) -> float:
    """Of a step with M micro-batches over one with K=2, M=1 (as long as all the work), a third of the time forward."""
    k = len(times)
    schedule = jpipe.make_schedule("gpipe", num_stages=k, num_microbatches=m)
    timeline = jpipe.simulate(schedule, forward=[t / 3 for t in times], backward=[2 * t / 3 for t in times])
    return m * sum(times) / timeline.makespan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4, 8], help="K (default 2 4 8)")
    parser.add_argument("--microbatches", type=int, default=32, help="M (default %(default)s)")
    parser.add_argument("--filters", type=int, default=64, help="D of AmoebaNet-D(18, D) (default %(default)s)")
    parser.add_argument("--image", type=int, default=96, help="pixels a side (default %(default)s)")
    parser.add_argument("--width", type=int, default=256, help="of the Transformer of 48 layers (default %(default)s)")
    options = parser.parse_args()
    on_cpu(max(options.stages), core=0)
    m, shape = options.microbatches, jax.ShapeDtypeStruct
    images = {
        "inputs": shape((2 * m, options.image, options.image, 3), jnp.float32),
        "targets": shape((2 * m,), jnp.int32),
    }
    text = {name: shape((2 * m, 128), jnp.int32) for name in ("inputs", "targets")}
    width = options.width
    models = {
        "AmoebaNet-D": (amoebanet.amoebanet(18, options.filters), amoebanet.loss_fn, images),
        "Transformer": (
            transformer_l.transformer_l(48, width, 4 * width, width // 64, 8 * width),
            transformer_l.loss_fn,
            text,
        ),
    }
    rows = []
    for name, (layers, loss_fn, batch) in models.items():
        seconds = partition_of(layers, loss_fn, batch, 1, m, "time").layer_costs
        for k in options.stages:
            for balance in ("even", "flops", "time"):
                if balance == "time":
                    cuts = jpipe.partition(seconds, k)
                else:
                    counts = partition_of(layers, loss_fn, batch, k, m, balance).counts
                    cuts = partition_from_counts(counts, seconds)
                paper = f"{PAPER[name][k]:.2f}" if k in PAPER[name] else "-"
                rows.append(
                    (
                        f"{name}, K={k}, {balance}",
                        " ".join(map(str, cuts.counts)),
                        f"{cuts.imbalance:.3f}",
                        f"{speed_up(cuts.costs, m):.2f}",
                        f"{m * k / (m + k - 1):.2f}",
                        paper,
                    )
                )
    caption = settings(
        jax.devices()[0],
        f"M={m}",
        f"AmoebaNet-D(18, {options.filters}) at {options.image}x{options.image}",
        f"48 layers of width {width}, sequence 128, micro-batch 2",
    )
    columns = ("model, stages, balance", "layers a stage", "slowest / mean", "speed-up", "if balanced", "paper")
    show("Stages cut by count, FLOPs and time", columns, rows, caption)


if __name__ == "__main__":
    main()
