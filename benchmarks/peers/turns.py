"""The two ends of a pipe: a peer's process that does one step when asked, and the handle that asks it.

A peer is a script with an interpreter of its own. It reads lines from its standard input, does one training step for
each, and answers with a line of JSON. While others work it sleeps. It imports no framework.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

from same_model import Sizes

HERE = Path(__file__).parent
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
_KEEP = ("arena_max=1", "mmap_max=0", f"trim_threshold={2**40}")
MEMORY = {
    "kept": {"GLIBC_TUNABLES": ":".join(f"glibc.malloc.{setting}" for setting in _KEEP)},
    "usual": {},
    "large": {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
}
"""How processes are given memory. XLA's CPU client gives a program's temporaries back after every call. As the C
library has it by default ("usual"), much of that goes to the system, and is given anew in the next step page by page,
each filled with zeros. It may be told to keep memory for the process, or to ask for pages of 2 MiB ("large")."""


def parse_variant(doc: str) -> tuple[argparse.Namespace, Sizes, list[str]]:
    """What a peer's process is told by its command line: all options, the sizes, and the variant's words.

    Args:
      doc: the script's docstring.
    """
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("variant", help="words joined by commas")
    parser.add_argument("--index", type=int, default=0, help="of this process")
    parser.add_argument("--port", type=int, help="of the first process on this machine")
    Sizes.add_arguments(parser)
    options = parser.parse_args()
    return options, Sizes.of(options), options.variant.split(",")


def take_standard_output() -> IO[str]:
    """What answers are written to; from now on everything else that is printed goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def serve(step: Callable[[], float | None], answers: IO[str]) -> None:
    """Does a step for each line of standard input.

    Args:
      step: trains once, and returns the loss before that, or None where this process hasn't got it. It returns when
        all has been computed.
      answers: from `take_standard_output`.
    """
    used = lambda: resource.getrusage(resource.RUSAGE_SELF)
    for _ in sys.stdin:
        wall, before = time.perf_counter(), used()
        loss = step()
        wall, after = time.perf_counter() - wall, used()
        system = after.ru_stime - before.ru_stime
        answer = {"seconds": wall, "processor": after.ru_utime - before.ru_utime + system, "system": system}
        answer |= {"faults": after.ru_minflt - before.ru_minflt, "peak": after.ru_maxrss / 1024, "loss": loss}
        print(json.dumps(answer), file=answers, flush=True)


class Step(NamedTuple):
    """A step of one variant.

    Attributes:
      seconds: wall time of the slowest of its processes.
      processor: processor seconds of all of them.
      loss: of the mini-batch, before the update.
      peak: MiB that its largest process has held so far.
      others: processor seconds that other programs took meanwhile.
      system: how many of the processor seconds went into the kernel.
      faults: pages of memory that they were given.
    """

    seconds: float
    processor: float
    loss: float
    peak: float
    others: float = 0.0
    system: float = 0.0
    faults: int = 0

    @property
    def quiet(self) -> bool:
        """Whether it had the machine to itself, but for a twentieth of a core or what the kernel's clock can't tell."""
        return self.others < 0.05 * self.seconds + 2 / os.sysconf("SC_CLK_TCK")


def busy_seconds() -> float:
    """Processor seconds that all programs of this machine have used."""
    user, nice, system = map(int, Path("/proc/stat").read_text().split()[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


class Variant:
    """Handle of the processes that do one variant's steps.

    Args:
      command: interpreter, script and options.
      cores: one process's cores an item.
      memory: which of `MEMORY`, for all of them.
    """

    def __init__(self, command: Iterable[str], cores: list[set[int]], *, memory: str = "kept"):
        environment = os.environ | ONE_THREAD | MEMORY[memory]
        before = os.sched_getaffinity(0)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
        self._processes = []
        try:
            for index, mine in enumerate(cores):
                os.sched_setaffinity(0, mine)  # a process begins where its parent is
                self._processes.append(subprocess.Popen([*command, f"--index={index}"], **pipes))
        finally:
            os.sched_setaffinity(0, before)

    def step(self) -> Step:
        """One step, of all processes at once.

        Raises:
          RuntimeError: a process died.
        """
        busy = busy_seconds()
        for process in self._processes:
            with suppress(BrokenPipeError):  # it ended: so will its answers
                process.stdin.write("step\n")
                process.stdin.flush()
        lines = [process.stdout.readline() for process in self._processes]
        if not all(lines):
            self.close()
            raise RuntimeError(f"a peer's process ended; its error is above: {self._processes[0].args}")
        answers = [json.loads(line) for line in lines]
        loss = next(answer["loss"] for answer in answers if answer["loss"] is not None)
        most = lambda name: max(answer[name] for answer in answers)
        total = lambda name: sum(answer[name] for answer in answers)
        own, busy = total("processor"), busy_seconds() - busy
        others = max(0.0, busy - own)
        return Step(most("seconds"), own, loss, most("peak"), others, total("system"), total("faults"))

    def close(self) -> None:
        """Ends all processes; those of one cluster leave it together."""
        for process in self._processes:
            with suppress(BrokenPipeError):  # what it was told before it ended goes nowhere
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
