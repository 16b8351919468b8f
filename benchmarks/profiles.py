"""What `jpipe.profile` promises, and what comes of it: each change that it names for an unbalanced pipeline is tried.

The devices are threads of this machine, so K is at most the number of its cores. Steps with and without the change
alternate, and the median of their ratios counts.
"""

import argparse
import os
import statistics
import time
from typing import Any

import jax
import optax
from common import Size, console, loss_fn, make_batch, make_layers, on_cpu, settings, show

import jpipe


def make(options: argparse.Namespace, batch: Any, **changes: Any) -> tuple[jpipe.Pipeline, Any]:
    """The pipeline, with some of its arguments changed, and a state."""
    layers = make_layers(Size.of(options))
    ones = options.stages - 1
    arguments = {
        "num_stages": options.stages,
        "num_microbatches": options.microbatches,
        "balance": [*[options.first] * ones, len(layers) - options.first * ones],
    }
    pipe = jpipe.Pipeline(layers, loss_fn, **arguments | changes)
    return pipe, pipe.create_state(jax.random.key(0), batch, optax.adamw(1e-3))


def ratio(options: argparse.Namespace, batch: Any, change: dict[str, Any]) -> float:
    """Seconds of a step with the change over those of one without, steps of both by turns."""
    (old, old_state), (new, new_state) = make(options, batch), make(options, batch, **change)
    ratios = []
    for _ in range(1 + options.rounds):
        start = time.perf_counter()
        old_state, _ = jax.block_until_ready(old.train_step(old_state, batch))
        middle = time.perf_counter()
        new_state, _ = jax.block_until_ready(new.train_step(new_state, batch))
        ratios.append((time.perf_counter() - middle) / (middle - start))
    return statistics.median(ratios[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    Size.add_arguments(parser, Size(layers=6, width=256, heads=4, seq=64, vocab=256, microbatch=4))
    parser.add_argument("--stages", type=int, default=2, help="K (default %(default)s)")
    parser.add_argument("--microbatches", type=int, default=4, help="M (default %(default)s)")
    parser.add_argument("--first", type=int, default=2, help="layers of all stages but the last (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="(default %(default)s)")
    parser.add_argument("--picture", help="where to save the profile's picture")
    options = parser.parse_args()
    on_cpu(options.stages)
    batch = make_batch(Size.of(options), options.microbatches)
    pipe, state = make(options, batch)
    profile = jpipe.profile(pipe, state, batch, rounds=options.rounds)
    console.print(str(profile), highlight=False, markup=False)
    if options.picture:
        profile.plot(options.picture)
    changes = [(finding.change, finding.promise) for finding in profile.findings if finding.change]
    rows = [
        (change, f"{promise:.2f}", f"{ratio(options, batch, change):.2f}") for change, promise in [({}, 1.0), *changes]
    ]
    caption = settings(jax.devices()[0], Size.of(options), f"{os.cpu_count()} cores", f"{options.rounds} rounds")
    show("A step with a change over one without", ["change", "promised", "measured"], rows, caption)


if __name__ == "__main__":
    main()
