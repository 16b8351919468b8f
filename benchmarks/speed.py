"""Two stages on two cores against the best single-device step of the same model.

A single device is one process on one core, and the model is written by hand, with and without remat, blocks scanned
or unrolled: the fastest is the baseline. The pipeline runs in two processes of one device each (gloo on loopback),
and in one process of two simulated devices. Both cores doing the baseline's step at once, with nothing to say to each
other, show what the machine can give.
"""

import argparse
import os
import socket
from dataclasses import fields

import jax
from common import Size, check_losses, show
from worker import Run, Worker, run_together

SIZE = Size(layers=8, width=128, heads=4, seq=128, vocab=256, microbatch=8)
BY_HAND = [f"{remat}, {style}" for remat in ("none", "layer") for style in ("scanned", "unrolled")]
BY_JPIPE = ["none", "layer", "none, zero_bubble"]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--microbatches", type=int, default=16, help="M (default %(default)s)")
    parser.add_argument("--repetitions", type=int, default=6, help="with the machine at rest (default %(default)s)")
    parser.add_argument("--most", type=int, default=18, help="repetitions, at rest or not (default %(default)s)")
    Size.add_arguments(parser, SIZE)
    options = parser.parse_args()
    size, m, stages = Size.of(options), options.microbatches, 2
    common = [f"--{field.name}={getattr(size, field.name)}" for field in fields(Size)] + [f"--microbatches={m}"]
    cores = sorted(os.sched_getaffinity(0))[:stages]
    if len(cores) < stages:
        raise SystemExit(f"this machine has {len(cores)} core; two are needed")

    hands = [Worker("hand", *common, f"--core={core}") for core in cores]
    port, split = free_port(), [*common, f"--stages={stages}"]
    pair = [
        Worker("jpipe", *split, f"--core={core}", f"--processes={stages}", f"--index={i}", f"--port={port}")
        for i, core in enumerate(cores)
    ]
    single = [Worker("jpipe", *split)]

    variants = {("by hand, one core", name): (hands[:1], name) for name in BY_HAND}
    variants |= {("two processes", remat): (pair, remat) for remat in BY_JPIPE}
    variants |= {("one process", remat): (single, remat) for remat in BY_JPIPE}
    check_losses({str(name): run_together(*variant).loss for name, variant in variants.items()})
    variants |= {("both cores at once", name): (hands, name) for name in BY_HAND[:2]}
    runs = {name: [] for name in variants}
    for _ in range(options.most):
        for name, variant in variants.items():
            if len(quiet(runs[name])) < options.repetitions:
                runs[name].append(run_together(*variant))
    for end in (Worker.close, Worker.wait):
        for worker in (*hands, *pair, *single):
            end(worker)
    report(runs, size, m, stages)


def quiet(runs: list[Run]) -> list[Run]:
    """The runs that had the machine to themselves, but for a twentieth of a core."""
    return [run for run in runs if run.others < 0.05 * run.seconds]


def report(runs: dict[tuple[str, str], list[Run]], size: Size, m: int, stages: int) -> None:
    best = {name: min(quiet(found) or found, key=lambda run: run.seconds) for name, found in runs.items()}
    base = min(run.seconds for (where, _), run in best.items() if where == "by hand, one core")
    ideal, rows = stages * m / (m + stages - 1), []
    for (where, name), run in best.items():
        speedup = base / run.seconds
        gain = (f"{speedup:.3f}", f"{speedup / ideal:.3f}") if where in ("two processes", "one process") else ("-", "-")
        count = f"{len(quiet(runs[where, name]))} of {len(runs[where, name])}"
        rows.append((where, name, f"{run.seconds:.3f}", f"{run.seconds / base:.3f}", *gain, count))
    caption = f"jax {jax.__version__}, CPU, {size}, K={stages}, M={m}: ideal speed-up {ideal:.3f}. Shortest, in turns."
    columns = ("where", "remat", "seconds", "of the best by hand", "speed-up", "of the ideal", "quiet runs")
    show("Two stages on two cores", columns, rows, caption)


if __name__ == "__main__":
    main()
