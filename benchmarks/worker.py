"""A process that does timed training steps on request, for benchmarks in which several processes take turns.

`Worker` is the handle. The process reads the name of a variant from its standard input, does one step of it, and
answers with a line of JSON: its times and loss. While the others work it sleeps.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import optax
from common import (
    Size,
    Stepper,
    init_by_hand,
    make_batch,
    make_layers,
    on_cpu,
    pipeline_stepper,
    step_by_hand,
    transformer_pipeline,
)
from jax.sharding import NamedSharding, PartitionSpec


class Worker:
    """Handle of a worker process.

    Args:
      role: "hand" or "jpipe".
      arguments: command-line options of the worker.
    """

    def __init__(self, role: str, *arguments: object):
        command = [sys.executable, str(Path(__file__)), role, *map(str, arguments)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def start(self, variant: str) -> None:
        """Asks for one step."""
        assert self._process.stdin is not None
        self._process.stdin.write(variant + "\n")
        self._process.stdin.flush()

    def finish(self) -> dict[str, float]:
        """What the step asked for took: wall and processor seconds, and its loss.

        Raises:
          SystemExit: the worker died.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker ended with status {self._process.wait()}; its error is above")
        return json.loads(line)

    def close(self) -> None:
        """Tells the process to end, and doesn't wait: those of one cluster leave it together."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def wait(self) -> None:
        self._process.wait()


class Run(NamedTuple):
    """A step that several workers did at once.

    Attributes:
      seconds: of the slowest.
      loss: of the first.
      others: processor seconds that other programs took meanwhile (Linux only, elsewhere 0).
    """

    seconds: float
    loss: float
    others: float


def run_together(workers: list[Worker], variant: str) -> Run:
    """One step of all the workers at once."""
    busy = _busy_seconds()
    for worker in workers:
        worker.start(variant)
    answers = [worker.finish() for worker in workers]
    busy = _busy_seconds() - busy
    own = sum(answer["processor"] for answer in answers)
    return Run(max(answer["seconds"] for answer in answers), answers[0]["loss"], max(0.0, busy - own))


def _busy_seconds() -> float:
    """Processor seconds that all programs of this machine have used."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system = map(int, stat.read_text().split()[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def steppers_by_hand(size: Size, num_microbatches: int) -> dict[str, Stepper]:
    layers, batch, tx = make_layers(size), make_batch(size, num_microbatches), optax.adamw(1e-4)
    trees = init_by_hand(layers, jax.random.key(0), batch)
    steppers = {}
    for remat in ("none", "layer"):
        for scan in (True, False):
            start, step = step_by_hand(layers, tx, num_microbatches, remat=remat, scan=scan)
            steppers[f"{remat}, {'scanned' if scan else 'unrolled'}"] = Stepper(step, start(trees), batch)
    return steppers


def steppers_of_pipeline(size: Size, num_microbatches: int, num_stages: int) -> dict[str, Stepper]:
    layers, batch, tx = make_layers(size), make_batch(size, num_microbatches), optax.adamw(1e-4)
    trees = init_by_hand(layers, jax.random.key(0), batch)
    mesh = jax.make_mesh((num_stages,), ("stage",), axis_types=(jax.sharding.AxisType.Auto,))
    everywhere = NamedSharding(mesh, PartitionSpec())
    batch = {name: jax.make_array_from_process_local_data(everywhere, a, a.shape) for name, a in batch.items()}
    steppers = {}
    made = partial(transformer_pipeline, size, num_stages, num_microbatches, mesh=mesh)
    for remat, schedule in (("none", "1f1b"), ("layer", "1f1b"), ("none", "zero_bubble")):
        pipe = made(remat=remat, schedule=schedule)
        steppers[", ".join([remat, *[schedule] * (schedule != "1f1b")])] = pipeline_stepper(pipe, tx, batch, trees)
    return steppers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("role", choices=("hand", "jpipe"))
    parser.add_argument("--microbatches", type=int, required=True)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--core", type=int, help="the only core to run on")
    parser.add_argument("--processes", type=int, default=1, help="that share the stages out among themselves")
    parser.add_argument("--index", type=int, default=0, help="of this process")
    parser.add_argument("--port", type=int, help="of the coordinator on this machine")
    Size.add_arguments(parser, Size(8, 256, 4, 128, 256, 2))
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # gloo writes to standard output, too
    on_cpu(options.stages // options.processes, core=options.core)
    if options.processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{options.port}", options.processes, options.index)
    size, m = Size.of(options), options.microbatches
    steppers = steppers_by_hand(size, m) if options.role == "hand" else steppers_of_pipeline(size, m, options.stages)
    for line in sys.stdin:
        begin = time.process_time()
        seconds, loss = steppers[line.strip()]()
        answer = {"seconds": seconds, "processor": time.process_time() - begin, "loss": loss}
        print(json.dumps(answer), file=answers, flush=True)
    if options.processes > 1:
        jax.distributed.shutdown()


if __name__ == "__main__":
    main()
