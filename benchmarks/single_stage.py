"""One stage against hand-written JAX: what jpipe itself costs, with nothing to pipeline.

On a CPU both run on one core, and seconds are processor time. The baseline accumulates gradients in a scan over
micro-batches and scans over the blocks, with the same remat and optimiser. On an accelerator: `python
benchmarks/single_stage.py --preset h200`.
"""

import argparse
import time
from dataclasses import asdict

import jax
import optax
from common import (
    Size,
    Stepper,
    console,
    in_turns,
    init_by_hand,
    loss_fn,
    make_batch,
    make_layers,
    on_cpu,
    pipeline_stepper,
    settings,
    show,
    step_by_hand,
)

import jpipe

PRESETS = {
    "cpu": Size(layers=8, width=256, heads=4, seq=128, vocab=256, microbatch=4),
    "h200": Size(layers=12, width=2048, heads=16, seq=1024, vocab=32000, microbatch=8, dtype="bfloat16"),
}
PEAKS = {"cpu": 0.0, "h200": 989e12}  # dense bf16


def main() -> None:
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("--preset", choices=PRESETS, default="cpu", help="sizes to start from (default %(default)s)")
    preset = first.parse_known_args()[0].preset
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], parents=[first])
    parser.add_argument("--microbatches", type=int, default=8, help="M (default %(default)s)")
    parser.add_argument(
        "--remat", nargs="+", choices=("layer", "none"), default=["layer", "none"], help="(default %(default)s)"
    )
    parser.add_argument("--repetitions", type=int, default=6, help="(default %(default)s)")
    parser.add_argument("--peak", type=float, default=PEAKS[preset], help="FLOP/s of the device, for the MFU")
    Size.add_arguments(parser, PRESETS[preset])
    options = parser.parse_args()
    clock = time.perf_counter
    if preset == "cpu":
        on_cpu(core=0)
        clock = time.process_time
    size, tx = Size.of(options), optax.adamw(1e-4)
    layers, batch = make_layers(size), jax.device_put(make_batch(size, options.microbatches))

    def measure(remat: str) -> dict[str, float]:
        """Seconds a step. Each remat by itself: at a size that fills the device there is no room for more."""
        trees = init_by_hand(layers, jax.random.key(0), batch)
        variants = {}
        for mode in (remat, "blocks") if remat == "layer" else (remat,):
            start, step = step_by_hand(layers, tx, options.microbatches, remat=mode)
            variants[f"by hand, {mode}"] = Stepper(step, start(trees), batch, clock)
        pipe = jpipe.Pipeline(
            layers, loss_fn, num_stages=1, num_microbatches=options.microbatches, remat=remat, balance="even"
        )
        variants[f"jpipe, {remat}"] = pipeline_stepper(pipe, tx, batch, trees, clock)
        return in_turns(variants, options.repetitions)

    rows, flops = [], size.flops * options.microbatches
    for remat in options.remat:
        times = measure(remat)
        for name, seconds in times.items():
            mfu = f"{flops / seconds / options.peak:.1%}" if options.peak else "-"
            rate = f"{flops / seconds / 1e9:,.0f}"
            rows.append((name, f"{seconds:.4f}", f"{seconds / times[f'by hand, {remat}']:.3f}", rate, mfu))
    caption = settings(jax.devices()[0], size, f"M={options.microbatches}", f"{size.parameters:,} parameters")
    show("One stage against hand-written JAX", ("step", "seconds", "ratio", "GFLOP/s", "MFU"), rows, caption)
    console.print(f"sizes: {asdict(size)}", highlight=False)


if __name__ == "__main__":
    main()
