"""Checkpoints: what they cost a run, in time and in memory; and what placing the next batch early saves.

The time of a save and of the steps beside which it is written, against as many steps without, in turns. Bytes are
those of all arrays alive on the devices, sampled while a state is saved and restored, over those of the state.
"""

import argparse
import contextlib
import math
import shutil
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from common import Size, make_batch, mib, on_cpu, settings, show, transformer_pipeline

import jpipe

SIZE = Size(layers=8, width=256, heads=4, seq=128, vocab=256, microbatch=2)


def num_bytes(arrays: Iterable[jax.Array]) -> int:
    """Bytes of arrays that are on all devices or split over them, on all devices together.

    The parts of an array are arrays too, each on one device, and aren't counted again.
    """
    split = [a for a in arrays if len(a.sharding.device_set) == jax.device_count()]
    part = lambda a: math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize
    return jax.device_count() * sum(map(part, split))


def on_devices() -> int:
    """Bytes of all arrays in the devices' own memory."""
    return num_bytes(a for a in jax.live_arrays() if a.sharding.memory_kind == "device")


def peak_during(work: Callable[[], object]) -> float:
    """The most bytes on the devices while some work is done."""
    peak, done = [on_devices()], threading.Event()

    def watch() -> None:
        while not done.is_set():
            with contextlib.suppress(RuntimeError):  # an array was deleted while it was looked at
                peak.append(on_devices())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        work()
    finally:
        done.set()
        watcher.join()
    return max(peak)


def run(pipe: jpipe.Pipeline, state: Any, data: Iterator[Any], steps: int, ahead: bool) -> tuple[Any, float]:
    """The state after some steps, and their seconds; `ahead`: the next batch is made and placed while a step runs."""
    batch, begin = pipe.place(next(data)), time.perf_counter()
    for _ in range(steps):
        state, metrics = pipe.train_step(state, batch)
        if not ahead:
            jax.block_until_ready(metrics)
        batch = pipe.place(next(data))
        jax.block_until_ready(metrics)
    return state, time.perf_counter() - begin


def batches(size: Size, num_microbatches: int, seconds: float) -> Iterator[dict[str, np.ndarray]]:
    """The same batch again and again, each after waiting for as long as reading it may take."""
    batch = make_batch(size, num_microbatches)
    while True:
        time.sleep(seconds)
        yield batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--stages", type=int, default=2, help="K (default %(default)s)")
    parser.add_argument("--microbatches", type=int, default=4, help="M (default %(default)s)")
    parser.add_argument("--every", type=int, default=100, help="steps from save to save (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(default %(default)s)")
    parser.add_argument("--reading", type=float, default=0.02, help="s to read a batch (default %(default)s)")
    Size.add_arguments(parser, SIZE)
    options = parser.parse_args()
    on_cpu(options.stages)
    size, tx, m = Size.of(options), optax.adamw(1e-4), options.microbatches
    pipe, data = transformer_pipeline(size, options.stages, m), batches(size, m, 0)
    state = pipe.create_state(jax.random.key(0), next(data), tx)
    folder = Path(tempfile.mkdtemp(prefix="jpipe-checkpoints-"))
    figures: dict[str, list[float]] = defaultdict(list)
    with jpipe.Checkpointer(folder) as saved:
        state, _ = run(pipe, state, data, 2, True)
        saved.save(pipe, state)  # compiles what the others use
        saved.wait()
        for _ in range(options.rounds):
            processor = time.process_time()
            state, seconds = run(pipe, state, data, options.every, True)
            figures["alone"].append(seconds)
            figures["work alone"].append(time.process_time() - processor)
            begin, processor = time.perf_counter(), time.process_time()
            saved.save(pipe, state)
            figures["blocked"].append(time.perf_counter() - begin)
            state, seconds = run(pipe, state, data, options.every, True)  # while it is written
            saved.wait()
            figures["work saved"].append(time.process_time() - processor)
            figures["saved"].append(figures["blocked"][-1] + seconds)
            for name in ("after", "ahead"):
                slow = batches(size, m, options.reading)
                state, seconds = run(pipe, state, slow, options.every // 4, name == "ahead")
                figures[name].append(seconds / (options.every // 4))
        state_bytes = num_bytes(leaf for leaf in jax.tree.leaves(state) if jax.numpy.issubdtype(leaf.dtype, np.number))
        most = {"saved": peak_during(lambda state=state: saved.save(pipe, state))}
        saved.wait()
        del state
        most["restored"] = peak_during(lambda: saved.restore(pipe, next(data), tx))
    shutil.rmtree(folder)
    median = {name: float(np.median(found)) for name, found in figures.items()}
    time_row = lambda text, name, base: [text, f"{median[name]:.3f} s", f"{median[name] / median[base]:.3f}"]
    bytes_row = lambda text, found: [text, f"{mib(found)} MiB", f"{found / state_bytes:.2f}"]
    rows = [
        time_row(f"{options.every} steps (baseline)", "alone", "alone"),
        time_row("the same after a save, which is written beside them", "saved", "alone"),
        time_row("of this, within save()", "blocked", "alone"),
        time_row(f"processor time of {options.every} steps (baseline)", "work alone", "work alone"),
        time_row("the same with a save", "work saved", "work alone"),
        bytes_row("bytes on the devices, the state alone (baseline)", state_bytes),
        bytes_row("most while it is saved", most["saved"]),
        bytes_row("most while it is restored", most["restored"]),
        time_row(f"a step, the next batch read ({options.reading:g} s) after it (baseline)", "after", "after"),
        time_row("a step, the next batch read and placed while it runs", "ahead", "after"),
    ]
    show(
        f"Checkpoints and batches, K={options.stages}", ["", "figure", "ratio"], rows, settings(jax.devices()[0], size)
    )


if __name__ == "__main__":
    main()
