"""`jpipe.watch`: ends a program whose steps have stopped ending, and says where each process stands.

A process that hangs holds up all others, and from outside all look alike: each waits in a collective (JAX issue
38503). The main thread can say nothing, as it waits in native code. So another thread looks on. It watches the clock,
and tells the processes of a cluster, by the key-value store of `jax.distributed`, how many steps each has entered;
steps themselves don't get slower. Here process 1 sleeps before step 812:

    process 0, main   | 811 | 812 ...................................
               clock   ended  not ended, not ended, seconds are over -> tells all -> stacks, who is missing -> exit
    process 1, main   | 811 | sleeps ................................
               clock   ended  not ended, not ended,          is told -> tells all -> stacks, who is missing -> exit

No process ends before all have told: the first one that is gone would have JAX end the others, which say nothing then.
"""

from __future__ import annotations

import faulthandler
import functools
import itertools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TypeVar

import jax

from jpipe.processes.progress import Call, followed, followers
from jpipe.processes.runtime import is_computed, shared_store
from jpipe.types import PyTree
from jpipe.users_numbers import as_number

EXIT_CODE = 75
"""The exit code of a process whose steps have stopped: `os.EX_TEMPFAIL`, "try again later"."""
LONGEST_PAUSE = 5.0
"""Seconds between two looks at the clock, and at the other processes, at most."""
GRACE = 5.0
"""Seconds that a process waits for others, or for whoever reads its output, before it ends."""
_SHOWN = 16
_STDERR = 2  # `sys.stderr` may be locked by the thread that hangs
_blocks = itertools.count()

Result = TypeVar("Result")


def watch(seconds: float) -> Watch:
    """Ends the program, and says where it stood, if no step ends for this long: a context around a training loop.

        with jpipe.watch(seconds=600):
            for batch in batches:
                state, metrics = pipe.train_step(state, pipe.place(batch))

    A step is a call of any pipeline (`train_step`, `value_and_grad`, `apply`, `evaluate`, `generate`, `init`). It ends
    when the devices have computed its results; nobody waits for them. Under a `jax.jit` of one's own a pipeline is only
    traced: pass such a function through `Watch.steps_of`.

    Once the seconds are over each process prints the stacks of its threads to stderr (by `faulthandler`) and how many
    steps every process has entered, and ends at once with exit code 75 (`jpipe.processes.watching.EXIT_CODE`), as if
    killed. In a cluster all processes enter the same watches, and all end together.

    While a pipeline compiles, the clock stands, in all processes. All other work between two steps counts: planning, a
    save, the next file, compiling functions of one's own. A process whose native code keeps Python's lock can say
    nothing; the others name it and end.

    Args:
      seconds: how long no step may end; more than the longest step takes together with the work before it.

    Raises:
      TypeError: `seconds` is no number.
      ValueError: it isn't positive and finite.
    """
    return Watch(as_number("seconds", seconds, "give the seconds that no step may take, such as 600", positive=True))


@dataclass(frozen=True)
class Standing:
    """How far a process has come in a block that is watched.

    Attributes:
      host: the name of its machine.
      entered: how many steps it has entered.
      ended: how many of them have ended.
      last: the name of the last step's work, in words.
      is_compiling: whether it compiles now.
    """

    host: str
    entered: int
    ended: int
    last: str
    is_compiling: bool


class Watch:
    """The result of `jpipe.watch`: a context for one block."""

    def __init__(self, seconds: float):
        self._seconds, self._pause = seconds, min(seconds / 20, LONGEST_PAUSE)
        self._lock, self._over = threading.Lock(), threading.Event()
        self._host, self._running = socket.gethostname(), list[Call]()
        self._entered, self._last, self._progress = 0, "", 0.0
        self._thread = threading.Thread(target=self._look_on, daemon=True)

    def __enter__(self) -> Watch:
        if self._progress:
            raise RuntimeError("this watch was entered before; call jpipe.watch again for another block")
        self._store, self._folder = shared_store(), f"jpipe/watch/{next(_blocks)}"
        self._process, self._count = (0, 1) if self._store is None else (jax.process_index(), jax.process_count())
        self._progress = time.monotonic()
        followers.append(self._follow)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        followers.remove(self._follow)
        self._over.set()
        self._thread.join()  # for ever, if it is ending the process: the error that leads here may be another one's end

    def steps_of(self, function: Callable[..., PyTree]) -> Callable[..., PyTree]:
        """Makes each call of a function a step: for functions under a `jax.jit` of one's own.

            with jpipe.watch(seconds=600) as watched:
                step = watched.steps_of(jax.jit(my_step, donate_argnums=0))
                for batch in batches:
                    state, metrics = step(state, batch)

        The first call is taken to compile until it returns; others that compile have to do so within the seconds.

        Args:
          function: any function; a step ends when the smallest array that it returns is computed.

        Raises:
          TypeError: it can't be called.
        """
        if not callable(function):
            raise TypeError(f"function={function!r} can't be called; pass the step itself: watched.steps_of(step)")
        name, calls = getattr(function, "__name__", type(function).__name__), itertools.count()

        @functools.wraps(function)
        def step(*arguments: PyTree, **options: PyTree) -> PyTree:
            with followed(name, (arguments, options)) as call:
                if call is None:
                    return function(*arguments, **options)
                call.is_compiling = next(calls) == 0
                return call.gives(function(*arguments, **options))

        return step

    # --- in the calling thread ---

    def _follow(self, call: Call) -> None:
        """Notes that a step begins."""
        self._standing()  # so that results of steps that have ended are let go of
        with self._lock:
            self._running.append(call)
            self._entered, self._last = self._entered + 1, call.what

    def _standing(self) -> Standing:
        """How far this process has come; notes when a step has ended since the last look."""
        with self._lock:
            has_ended = lambda call: call.has_returned and (call.result is None or is_computed(call.result))
            running = [call for call in self._running if not has_ended(call)]
            is_compiling = any(call.is_compiling for call in running)
            if is_compiling or len(running) < len(self._running):
                self._progress = time.monotonic()
            self._running = running
            return Standing(self._host, self._entered, self._entered - len(running), self._last, is_compiling)

    # --- in a thread of its own ---

    def _look_on(self) -> None:
        """Ends the process once no step has ended for too long, or another process says so."""
        while not self._over.wait(self._pause):
            standing, is_told = self._standing(), False
            if self._count > 1:
                is_told = _within(GRACE, lambda own=standing: self._exchange(own)) or False
            if is_told or time.monotonic() - self._progress > self._seconds:
                self._end(is_told)
        if self._count > 1:
            _within(GRACE, lambda: self._store.key_value_delete(f"{self._folder}/steps/{self._process}"))

    def _exchange(self, standing: Standing) -> bool:
        """Tells the other processes how far this one has come; returns whether one of them ends."""
        self._store.key_value_set(f"{self._folder}/steps/{self._process}", json.dumps(asdict(standing)), True)
        return bool(self._read("told"))

    def _end(self, is_told: bool) -> None:
        """Ends the process; returns only if another one compiles, and none has told this one to end."""
        standings = _within(GRACE, self._standings) or {self._process: self._standing()}
        if not is_told and any(standing.is_compiling for standing in standings.values()):
            self._progress = time.monotonic()
            return
        _within(GRACE, lambda: self._tell(standings))
        if self._count > 1:
            _within(2 * (self._pause + GRACE), self._wait_for_others)
        os._exit(EXIT_CODE)

    def _standings(self) -> dict[int, Standing]:
        """How far each process has come that is in this block."""
        others = {p: Standing(**json.loads(text)) for p, text in self._read("steps").items()}
        return others | {self._process: self._standing()}

    def _tell(self, standings: Mapping[int, Standing]) -> None:
        """Prints the report and the stacks of this process."""
        os.write(_STDERR, report(self._process, self._count, self._seconds, standings).encode())
        faulthandler.dump_traceback(_STDERR, all_threads=True)
        sys.stdout.flush()  # last, as the thread that hangs may have locked it

    def _wait_for_others(self) -> None:
        """Waits until all processes of this block have printed their stacks, too."""
        with suppress(jax.errors.JaxRuntimeError):
            self._store.key_value_set(f"{self._folder}/told/{self._process}", "", True)
            while not self._read("steps").keys() <= self._read("told").keys():
                time.sleep(0.1)
        if self._process == 0:  # the store ends with it, and JAX ends the processes that have it open
            time.sleep(1)

    def _read(self, what: str) -> dict[int, str]:
        """The values that processes have put under this word, by their indices."""
        if self._count == 1:
            return {}
        entries = self._store.key_value_dir_get(f"{self._folder}/{what}/")
        return {int(key.rpartition("/")[2]): text for key, text in entries}


def report(process: int, count: int, seconds: float, standings: Mapping[int, Standing]) -> str:
    """The text that a process prints before its stacks: it names those that had not entered the step that doesn't end.

    Args:
      process: the index of the process that prints it.
      count: the number of processes.
      seconds: for how long no step has ended.
      standings: by process, how far it has come; only of processes that are in the block.

    >>> at = lambda entered: Standing("node7", entered, 811, "the training step", False)
    >>> print(report(0, 3, 600.0, {0: at(812), 1: at(811), 2: at(814)}))
    jpipe.watch: no step has ended for 600 s; process 0 of 3 ends with exit code 75.
    Process 1 had not entered step 812.
      process 1 (node7) had entered 811 steps (the last: the training step), of which 811 ended
      process 0 (node7) had entered 812 steps (the last: the training step), of which 811 ended
      process 2 (node7) had entered 814 steps (the last: the training step), of which 811 ended
    The stacks of process 0:
    <BLANKLINE>
    """
    step = 1 + max(standing.ended for standing in standings.values())
    ends = f"process {process} of {count} ends with exit code {EXIT_CODE}"
    lines = [f"jpipe.watch: no step has ended for {seconds:g} s; {ends}."]
    if missing := [p for p, standing in standings.items() if standing.entered < step]:
        lines.append(f"Process {_listed(missing)} had not entered step {step}.")
    if not any(standing.entered for standing in standings.values()):
        lines.append("A step of one's own under jax.jit is seen only if the loop calls watched.steps_of(step).")
    for p, at in sorted(standings.items(), key=lambda item: (item[1].entered, item[0]))[:_SHOWN]:
        last, now = f" (the last: {at.last})" * bool(at.last), ", it compiles" * at.is_compiling
        lines.append(f"  process {p} ({at.host}) had entered {at.entered} steps{last}, of which {at.ended} ended{now}")
    if elsewhere := sorted(set(range(count)) - set(standings)):
        lines.append(f"Not in this block, or not reached: process {_listed(elsewhere)}.")
    return "\n".join([*lines, f"The stacks of process {process}:", ""])


def _listed(processes: list[int]) -> str:
    """The indices of the first processes, and how many more there are."""
    more = f" and {len(processes) - _SHOWN} more" if len(processes) > _SHOWN else ""
    return ", ".join(map(str, processes[:_SHOWN])) + more


def _within(seconds: float, function: Callable[[], Result]) -> Result | None:
    """The result of a function that runs in a thread; None if it fails, or takes longer, and is left behind."""
    results: list[Result] = []

    def run() -> None:
        with suppress(jax.errors.JaxRuntimeError, OSError):
            results.append(function())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None
