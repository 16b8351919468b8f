"""Faults: a training run in two processes, killed at random moments, against one that nobody disturbed.

`examples/train.py` runs over and over with one process a stage. After a random time one of the processes is ended by
`kill -9`; the other has to end by itself. Both are started again, until the run is done. At each start the run has to
go on from the newest checkpoint that was finished when it was killed. At the end every array of the last checkpoint and
every figure shown has to be the undisturbed run's, to the bit.
"""

import argparse
import csv
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from common import on_cpu, show
from etils import epath

from jpipe.checkpoints import files

TRAIN = Path(__file__).parents[1] / "examples" / "train.py"
PROCESSES = 2


def start(run: Path, options: argparse.Namespace) -> list[subprocess.Popen]:
    """The processes of a run, which print into files beside it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    sizes = {"stages": PROCESSES, "layers": 2, "width": 32, "seq": 32, "batch": 8, "microbatches": 4}
    every = {"log-every": 1, "evaluate-every": 10**9, "save-every": options.save_every, "steps": options.steps}
    cluster = {"coordinator": f"127.0.0.1:{port}", "processes": PROCESSES, "heartbeat": options.heartbeat}
    settings = [f"--{name}={value}" for name, value in (sizes | every | cluster | {"run": run}).items()]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(run.parent / "compiled"),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    started = []
    for index in range(PROCESSES):
        with (run.parent / f"{run.name}.{index}.txt").open("a") as output:
            command = [sys.executable, str(TRAIN), *settings, f"--process={index}"]
            started.append(subprocess.Popen(command, stdout=output, stderr=output, env=environment))
    return started


def finished(run: Path) -> int:
    """The step of the newest finished checkpoint; 0 if there is none."""
    folder = run / "checkpoints"
    return max((int(path.name) for path in folder.glob("*") if path.name.isdigit()), default=0)


def shown(run: Path) -> dict[int, dict[str, str]]:
    """The figures of each step."""
    path = run / "figures.csv"
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        found = [row for row in csv.DictReader(file) if row["step"] and row["grad_norm"]]
    return {int(row["step"]): {name: row[name] for name in ("loss", "grad_norm")} for row in found}


def wait_for_a_step(run: Path, starts: int, processes: list[subprocess.Popen], limit: float = 300) -> None:
    """Waits until the run, at its start number `starts`, shows a step, or its processes have ended."""
    begin = time.monotonic()
    while all(process.poll() is None for process in processes):
        begun = went_on_at(run)
        if len(begun) == starts and max(shown(run), default=0) > begun[-1]:
            return
        if time.monotonic() > begin + limit:
            raise SystemExit(f"no step within {limit:.0f} s; see {run.parent}")
        time.sleep(0.02)


def disturb(run: Path, options: argparse.Namespace, chance: random.Random, starts: int) -> dict[str, float] | None:
    """Start number `starts` of the run, and one kill; None if the run was done before."""
    processes = start(run, options)
    wait_for_a_step(run, starts, processes)
    time.sleep(chance.uniform(0, options.longest))
    victim = chance.randrange(PROCESSES)
    if any(process.poll() is not None for process in processes):
        codes = [process.wait() for process in processes]
        if codes == [0] * PROCESSES:
            return None
        raise SystemExit(f"the run ended by itself with {codes}; see {run.parent}")
    in_save = any((run / "checkpoints").glob("*tmp*"))
    processes[victim].send_signal(signal.SIGKILL)
    begin = time.monotonic()
    codes = [process.wait(timeout=options.heartbeat * 2 + 60) for process in processes]
    ended, newest, reached = time.monotonic() - begin, finished(run), max(shown(run), default=0)
    assert codes[1 - victim] != 0, "the other process has to end with an error"
    return {"victim": victim, "in a save": in_save, "ended": ended, "step": reached, "newest": newest}


def went_on_at(run: Path) -> list[int]:
    """The steps after which the run went on, start by start."""
    path = run.parent / f"{run.name}.0.txt"
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return [int(line.split("after step ")[1].split()[0]) for line in lines if "after step " in line]


def differing(one: Path, other: Path) -> tuple[int, int]:
    """(arrays that differ in any bit, all arrays) of the newest checkpoints of two runs."""
    found = []
    for run in (one, other):
        folder = epath.Path(run) / "checkpoints" / str(finished(run))
        shapes = files.shapes_in(files.read_about(folder))
        found.append(files.read_arrays(folder, shapes))
    return sum(found[0][name].tobytes() != found[1][name].tobytes() for name in found[1]), len(found[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=30, help="(default %(default)s)")
    parser.add_argument("--steps", type=int, default=2000, help="of the run (default %(default)s)")
    parser.add_argument("--save-every", type=int, default=5, help="steps (default %(default)s)")
    parser.add_argument("--longest", type=float, default=2, help="s from a start's first step to a kill")
    parser.add_argument("--heartbeat", type=float, default=10, help="s until a lost process ends others")
    parser.add_argument("--seed", type=int, default=0, help="(default %(default)s)")
    options = parser.parse_args()
    on_cpu(1)
    folder = Path(tempfile.mkdtemp(prefix="jpipe-faults-"))
    disturbed, calm, chance = folder / "disturbed", folder / "calm", random.Random(options.seed)
    kills = []
    while len(kills) < options.kills:
        found = disturb(disturbed, options, chance, len(kills) + 1)
        if found is None:
            raise SystemExit(f"the run was done after {len(kills)} kills; give it more --steps")
        kills.append(found)
    for run in (disturbed, calm):
        codes = [process.wait(timeout=3600) for process in start(run, options)]
        assert codes == [0] * PROCESSES, f"a run that nobody disturbs ended with {codes}; see {folder}"
    report(kills, disturbed, calm, options)
    shutil.rmtree(folder)


def report(kills: list[dict[str, float]], disturbed: Path, calm: Path, options: argparse.Namespace) -> None:
    """The table; an AssertionError if anything was lost."""
    starts = went_on_at(disturbed)[1 : len(kills) + 1]
    lost = sum(abs(kill["newest"] - step) for kill, step in zip(kills, starts, strict=True))
    again = [kill["step"] - step for kill, step in zip(kills, starts, strict=True)]
    (differ, count), figures = differing(disturbed, calm), [shown(run) for run in (disturbed, calm)]
    other = [step for step in figures[1] if figures[0].get(step) != figures[1][step]]
    of = lambda victim: [kill for kill in kills if kill["victim"] == victim]
    longest = lambda victim: f"{max((kill['ended'] for kill in of(victim)), default=0):.1f} s"
    rows = [
        ["kills of process 0, of process 1", f"{len(of(0))}, {len(of(1))}"],
        ["of these within a save", sum(kill["in a save"] for kill in kills)],
        ["steps lost beyond the last finished save", lost],
        ["steps done again, mean and most", f"{np.mean(again):.1f}, {max(again)}"],
        ["arrays of the last checkpoint that differ", f"{differ} of {count}"],
        ["steps whose loss or gradient norm differs", len(other)],
        ["until process 1 ended, most, when 0 was killed", longest(0)],
        ["until process 0 ended, most, when 1 was killed", longest(1)],
    ]
    title = f"{len(kills)} kills in a run of {options.steps} steps, saved every {options.save_every}"
    show(title, ["", "figure"], rows, f"A process counts as lost after {options.heartbeat:g} s without a sign of life.")
    assert lost == 0 and differ == 0 and not other


if __name__ == "__main__":
    main()
