"""Work with a time limit: functions run in another process, which is killed when it is silent for too long.

A collective that waits for a device that never comes can't be interrupted from Python, and a failed check in XLA ends
the process; here both are results like others. One process runs many calls, so that each costs little.
"""

import contextlib
import importlib
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import quick

LIMIT = float(os.environ.get("JPIPE_CASE_SECONDS", "90"))
"""Seconds without a sign of life (see `alive`) after which a call is given up."""
CALLS_PER_PROCESS = 40  # what it has compiled stays in memory
STUCK = 30
"""Seconds that a device waits for others in a collective before XLA ends the process."""
_FLAGS = f"--xla_force_host_platform_device_count=8 --xla_cpu_collective_call_terminate_timeout_seconds={STUCK}"
FAST = f"{_FLAGS} {quick.in_words(quick.CODE | quick.READ_ONCE)}"
"""Compiles in less time what then runs in more; the partitioning and the collectives are the same."""


class Result(NamedTuple):
    """What became of a call.

    Attributes:
      outcome: "ok", "raised", "hung" (no sign of life within the limit, or a collective that waited too long), or
        "died" (a failed check in XLA).
      value: what the function returned, if it did; made of lists, dicts, strings and numbers.
      detail: the traceback, or the end of what the process wrote, and what it was doing last.
    """

    outcome: str
    value: Any
    detail: str


class Worker:
    """A process that runs functions of modules in `tests/`; started when needed, and anew after it was killed.

    `with Worker() as worker: worker.call("fuzz", "check", 3)` imports fuzz and runs `fuzz.check(3)`.

    Args:
      limit: seconds without a sign of life after which a call has hung.
      flags: XLA_FLAGS of the process.
    """

    def __init__(self, limit: float = LIMIT, flags: str = FAST):
        self.limit, self.flags = limit, flags
        self._process: subprocess.Popen | None = None
        self._open = contextlib.ExitStack()  # what is closed with the process
        self._calls = 0

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def call(self, module: str, function: str, *arguments: Any) -> Result:
        """Runs `module.function(*arguments)`; the arguments are what JSON can hold."""
        if self._process is None or self._calls >= CALLS_PER_PROCESS:
            self._start()
        self._calls += 1
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps([module, function, arguments]).encode() + b"\n")
        self._process.stdin.flush()
        return self._wait()

    def value(self, module: str, function: str, *arguments: Any) -> Any:
        """What `module.function(*arguments)` gives; fails the test if it hung, died or raised."""
        import pytest  # which a worker has no use for

        result = self.call(module, function, *arguments)
        if result.outcome != "ok":
            pytest.fail(f"{result.outcome}: {result.detail}", pytrace=False)
        return result.value

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                with contextlib.suppress(OSError):  # what the process didn't read any more
                    pipe.close()
            self._open.close()
        self._process = None

    def _start(self) -> None:
        self.close()
        with contextlib.ExitStack() as opened:
            self._errors = opened.enter_context(tempfile.TemporaryFile())
            self._open = opened.pop_all()
        self._calls, self._rest = 0, b""
        environment = os.environ | {"XLA_FLAGS": self.flags, "JAX_PLATFORMS": "cpu", "PYTHONFAULTHANDLER": "0"}
        here = Path(__file__).resolve()
        environment["PYTHONPATH"] = os.pathsep.join([str(here.parent), str(here.parents[2])])
        self._process = subprocess.Popen(
            [sys.executable, str(here)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            start_new_session=True,
        )

    def _wait(self) -> Result:
        last = "start"
        while True:
            line = self._line()
            if not line:
                written = self._written()
                self.close()
                hung = line is None or "rendezvous" in written.lower()
                return Result("hung" if hung else "died", None, f"during: {last}\n{written}")
            message = json.loads(line)
            if "alive" not in message:
                return Result(**message)
            last = message["alive"]

    def _line(self) -> bytes | None:
        """The next line; empty when the process has ended, None when it was silent for too long."""
        assert self._process is not None and self._process.stdout is not None
        end = time.monotonic() + self.limit
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(max(0.0, end - time.monotonic())):
                    return None
                chunk = os.read(self._process.stdout.fileno(), 1 << 16)
                if not chunk:
                    return b""
                self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _written(self) -> str:
        """The end of what the process wrote, and its fatal errors, without the stacks after them."""
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - 40_000))
        lines = self._errors.read().decode(errors="replace").splitlines()
        fatal = [line for line in lines if re.match(r"F\d{4} |.*(Termination timeout|Check fail)", line)]
        return "\n".join([*lines[-3:], *fatal[-3:]])[-4000:]


_channel: Any = None


def alive(doing: str) -> None:
    """Says, in a worker, that the call goes on, and what comes next; elsewhere does nothing."""
    if _channel is not None:
        print(json.dumps({"alive": doing}), file=_channel, flush=True)


def serve() -> None:
    """What the process does: a call a line, a result a line. What functions print goes to stderr."""
    global _channel
    _channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        module, function, arguments = json.loads(line)
        try:
            value = getattr(importlib.import_module(module), function)(*arguments)
            result = Result("ok", value, "")
        except Exception:
            result = Result("raised", None, traceback.format_exc()[-6000:])
        print(json.dumps(result._asdict()), file=_channel, flush=True)


if __name__ == "__main__":
    sys.modules["timed"] = sys.modules["__main__"]
    serve()
