"""All stages on one core: the total work of a pipelined step against plain gradient accumulation.

Simulated devices that share one core can't gain from one another, so a step's processor time is the sum of all stages'
work, and the ratio is what pipelining adds: tables, boundaries, collectives, idle ticks.
"""

import argparse
import time

import jax
import optax
from common import (
    Size,
    Stepper,
    in_turns,
    init_by_hand,
    make_batch,
    make_layers,
    on_cpu,
    pipeline_stepper,
    settings,
    show,
    step_by_hand,
    transformer_pipeline,
)

SIZE = Size(layers=8, width=256, heads=4, seq=128, vocab=256, microbatch=4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--stages", type=int, default=4, help="K (default %(default)s)")
    parser.add_argument("--microbatches", type=int, default=8, help="M (default %(default)s)")
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "gpipe"], help="(default %(default)s)")
    parser.add_argument(
        "--remat", nargs="+", choices=("layer", "none"), default=["layer", "none"], help="(default %(default)s)"
    )
    parser.add_argument("--repetitions", type=int, default=6, help="(default %(default)s)")
    parser.add_argument("--core", type=int, default=0, help="(default %(default)s)")
    Size.add_arguments(parser, SIZE)
    options = parser.parse_args()
    on_cpu(options.stages, core=options.core)

    size, tx = Size.of(options), optax.adamw(1e-4)
    layers, batch, clock = make_layers(size), make_batch(size, options.microbatches), time.process_time
    trees = init_by_hand(layers, jax.random.key(0), batch)
    variants = {}
    for remat in options.remat:
        start, step = step_by_hand(layers, tx, options.microbatches, remat=remat)
        variants[f"by hand, {remat}"] = Stepper(step, start(trees), batch, clock)
        for schedule in options.schedules:
            pipe = transformer_pipeline(size, options.stages, options.microbatches, schedule=schedule, remat=remat)
            variants[f"jpipe {schedule}, {remat}"] = pipeline_stepper(pipe, tx, batch, trees, clock)
    times = in_turns(variants, options.repetitions)
    rows = [
        (name, f"{seconds:.3f}", f"{seconds / times['by hand, ' + name.rpartition(', ')[2]]:.3f}")
        for name, seconds in times.items()
    ]
    caption = settings(jax.devices()[0], "one core", size, f"K={options.stages}", f"M={options.microbatches}")
    show("Work of all stages on one core", ("step", "processor seconds", "ratio"), rows, caption)


if __name__ == "__main__":
    main()
