"""How processes meet: `jpipe.initialize`, before `jax.distributed.initialize`.

Where processes don't find one another in time, JAX ends them from C++, so that nobody can say why. So they first meet
here, by plain sockets at the coordinator's address, and JAX's service begins there once all have come.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import jax

from jpipe.seam.runtime import finds_no_cluster


def initialize(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout: float = 60.0,
    heartbeat_timeout: float = 60.0,
    local_device_ids: Sequence[int] | None = None,
) -> bool:
    """Joins this process with the others of its program, as `jax.distributed.initialize`; to be called first of all.

    Without arguments the cluster is what JAX finds (TPU pods, SLURM, Open MPI, Kubernetes, or its environment variable
    JAX_COORDINATOR_ADDRESS); where it finds none, the process stays alone.

    Args:
      coordinator: "host:port" of the process 0, which listens there.
      num_processes: how many there are.
      process_id: which this one is, from 0.
      timeout: seconds to wait for the others.
      heartbeat_timeout: seconds without a sign of life after which a process counts as lost, and all others end with an
        error. If process 0 is lost they end at once. A process that an error ends, ends at once too, and is lost then.
      local_device_ids: the devices of this process, if not all of its machine's.

    Returns:
      Whether this process should print: it is the first.

    Raises:
      ValueError: arguments that aren't given together, or are out of range; processes that differ in their number.
      TypeError: a number isn't one.
      RuntimeError: nobody listens at the address, it is taken, or not all processes came within the timeout.
    """
    options: dict[str, Any] = {
        "initialization_timeout": max(1, int(timeout)),
        "heartbeat_timeout_seconds": max(1, int(heartbeat_timeout)),
        "local_device_ids": local_device_ids,
    }
    given = (coordinator, num_processes, process_id)
    if given == (None, None, None):
        try:
            jax.distributed.initialize(**options)
            _end_on_errors()
        except ValueError as error:
            if not finds_no_cluster(error):
                raise
        return not jax.distributed.is_initialized() or jax.process_index() == 0
    host, port = _check(*given)
    assert num_processes is not None and process_id is not None
    if num_processes > 1:
        if process_id == 0:
            _gather(port, num_processes, timeout)
        else:
            _come(host, port, num_processes, process_id, timeout)
    jax.distributed.initialize(coordinator, num_processes, process_id, **options)
    _end_on_errors()
    return process_id == 0


def _end_on_errors() -> None:
    """Makes a process of a cluster end as soon as it has shown the error that ends it.

    JAX would have it wait for the others at its end, for minutes, while they wait for it in a step.
    """
    if jax.process_count() == 1:
        return
    show = sys.excepthook

    def show_and_end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        show(kind, error, trace)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    sys.excepthook = show_and_end


def _check(coordinator: Any, num_processes: Any, process_id: Any) -> tuple[str, int]:
    """The host and the port."""
    given = {"coordinator": coordinator, "num_processes": num_processes, "process_id": process_id}
    missing = [name for name, value in given.items() if value is None]
    if missing:
        raise ValueError(f"{missing[0]} is missing; pass coordinator, num_processes and process_id, or none of them")
    for name in ("num_processes", "process_id"):
        if not isinstance(given[name], int) or isinstance(given[name], bool):
            raise TypeError(f"{name}={given[name]!r} is not an integer; pass one")
    host, _, port = coordinator.rpartition(":") if isinstance(coordinator, str) else ("", "", "")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"coordinator={coordinator!r} is no address; pass 'host:port' of process 0, as 'node0:1234'")
    if not 0 <= process_id < num_processes:
        raise ValueError(
            f"process_id={process_id} is not among num_processes={num_processes}; count processes from 0 to "
            f"{num_processes - 1}"
        )
    return host.strip("[]"), int(port)


def _gather(port: int, num_processes: int, timeout: float) -> None:
    """What process 0 does: waits for the others, and tells them to go on, or why not."""
    deadline, came = time.monotonic() + timeout, dict[int, socket.socket]()
    with _listen(port, num_processes) as listener:
        try:
            while len(came) < num_processes - 1:
                listener.settimeout(max(0.01, deadline - time.monotonic()))
                try:
                    other = listener.accept()[0]
                except TimeoutError:
                    missing = [p for p in range(1, num_processes) if p not in came]
                    raise RuntimeError(
                        f"processes {missing} of {num_processes} did not come to port {port} within {timeout:g} s; "
                        "start them with the same coordinator, or give a longer timeout"
                    ) from None
                _welcome(other, num_processes, came)
        except (RuntimeError, ValueError) as error:
            _tell(came, str(error))
            raise
    _tell(came, "go")


def _listen(port: int, num_processes: int) -> socket.socket:
    """A socket on all addresses of this machine, as JAX's service will be."""
    for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        try:
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            listener.bind((address, port))
            listener.listen(num_processes)
            return listener
        except OSError as error:
            if family == socket.AF_INET:
                raise RuntimeError(f"process 0 can't listen on port {port}: {error}; use another port") from error
    raise AssertionError


def _welcome(other: socket.socket, num_processes: int, came: dict[int, socket.socket]) -> None:
    """Hears who has come; a stranger (a scanner of ports, say) is sent away."""
    other.settimeout(5)
    try:
        index, wanted = json.loads(_line(other))["jpipe"]
    except (OSError, ValueError, KeyError, TypeError):
        other.close()
        return
    before, came[index] = came.get(index), other
    if before is not None:
        came[-1] = before
        raise ValueError(f"two processes came with process_id={index}; give each its own, from 0")
    if wanted != num_processes:
        raise ValueError(
            f"process {index} was given num_processes={wanted}, process 0 {num_processes}; give all the same number"
        )


def _tell(came: dict[int, socket.socket], word: str) -> None:
    """Says a word to all who came, and waits until they have left, so that the port is free for JAX."""
    for other in came.values():
        try:
            other.sendall(json.dumps(word).encode() + b"\n")
            other.recv(1)
        except OSError:
            pass
        other.close()


def _come(host: str, port: int, num_processes: int, process_id: int, timeout: float) -> None:
    """What the other processes do: go to process 0, and wait for its word."""
    begin = time.monotonic()
    left = lambda: max(0.01, begin + timeout - time.monotonic())
    while True:
        try:
            to_first = socket.create_connection((host, port), timeout=min(5, left()))
            break
        except OSError as error:
            if time.monotonic() > begin + timeout - 0.2:
                raise RuntimeError(
                    f"process {process_id} found nobody listening at coordinator={host}:{port} within {timeout:g} s "
                    f"({error}); start process 0 there, or correct the address"
                ) from error
            time.sleep(0.2)
    with to_first:
        try:
            to_first.sendall(json.dumps({"jpipe": [process_id, num_processes]}).encode() + b"\n")
            to_first.settimeout(left() + 5)  # process 0 may have begun to wait later than this one
            word = json.loads(_line(to_first))
        except (OSError, ValueError) as error:
            raise RuntimeError(
                f"process {process_id} got no answer at coordinator={host}:{port} within {timeout:g} s ({error}); is "
                "it process 0 of this program, and did it call jpipe.initialize too?"
            ) from error
    if word != "go":
        raise RuntimeError(f"process 0 gave up: {word}")


def _line(connection: socket.socket) -> bytes:
    """A line of at most 64 kB."""
    with connection.makefile("rb") as file:
        return file.readline(1 << 16)
