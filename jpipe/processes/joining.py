"""`jpipe.initialize`: joins processes to one program, or raises in each an error that says why it can't.

If a process doesn't come in time, or comes twice, JAX ends the others from C++, in its client's `Connect`, so that no
process can say why (jax 0.10 and 0.12; in 0.12 a port that is taken even causes a segmentation fault). So processes
first meet here, by plain sockets, and JAX's service begins once all have come:

    process 0      listens     ............ all have come: "go" to all ... closes, JAX's service begins
    process k      connects, says "process k of n" ... waits ........ goes on to JAX's client

Meanwhile the port is open to anybody, so no message there is trusted. A message is read once, at most `LONGEST` bytes.
It has to be the greeting to the letter. And no sender can keep process 0 from hearing the others.
"""

from __future__ import annotations

import math
import os
import re
import selectors
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from types import TracebackType
from typing import cast

import jax

from jpipe.processes.runtime import finds_no_cluster
from jpipe.users_numbers import as_integer, as_number

SECONDS = "give seconds, such as 60"


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
        error. If process 0 is lost they end at once. A process that raises an error ends at once, and is lost then.
      local_device_ids: the devices of this process, if not all of its machine's.

    Returns:
      Whether this process should print: it is the first.

    Raises:
      ValueError: arguments that aren't given together, or are out of range; processes that differ in their number.
      TypeError: a number isn't one.
      RuntimeError: nobody listens at the address, it is taken, or not all processes came within the timeout.
    """
    timeout = as_number("timeout", timeout, SECONDS, positive=True)
    heartbeat_timeout = as_number("heartbeat_timeout", heartbeat_timeout, SECONDS, positive=True)
    join = partial(
        jax.distributed.initialize,
        initialization_timeout=math.ceil(timeout),
        heartbeat_timeout_seconds=math.ceil(heartbeat_timeout),
        local_device_ids=local_device_ids,
    )
    address = (coordinator, num_processes, process_id)
    if address == (None, None, None):
        try:
            join()
        except ValueError as error:
            if not finds_no_cluster(error):
                raise
            return True
    else:
        host, port, index, count = _check(*address)
        if index == 0:
            gather(port, count, timeout)
        else:
            come(host, port, count, index, timeout)
        join(coordinator, count, index)
    _end_on_errors()
    return jax.process_index() == 0


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


def _check(coordinator: object, num_processes: object, process_id: object) -> tuple[str, int, int, int]:
    """Checks the arguments that describe the cluster: (host, port, index of this process, number of processes)."""
    arguments = {"coordinator": coordinator, "num_processes": num_processes, "process_id": process_id}
    if missing := [name for name, value in arguments.items() if value is None]:
        raise ValueError(f"{missing[0]} is missing; pass coordinator, num_processes and process_id, or none of them")
    index = as_integer("process_id", process_id, "count processes from 0", least=0)
    count = as_integer("num_processes", num_processes, "pass how many processes there are")
    host, _, port = coordinator.rpartition(":") if isinstance(coordinator, str) else ("", "", "")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"coordinator={coordinator!r} is no address; pass 'host:port' of process 0, as 'node0:1234'")
    if index >= count:
        raise ValueError(f"process_id={index} is not among num_processes={count}; count from 0 to {count - 1}")
    return host.strip("[]"), int(port), index, count


# --- processes meet ---------------------------------------------------------------------------------------------------


GREETING = re.compile(rb"jpipe: process (\d{1,9}) of (\d{1,9})\n")
ANSWER = b"jpipe: "
GO = "go"
LONGEST = 1024
"""Bytes of a greeting or an answer at most."""


def gather(port: int, num_processes: int, timeout: float) -> None:
    """Does process 0's part: waits for the others, and tells them to go on, or why they can't.

    Raises:
      ValueError: two processes came with one index, or one that was given another number of processes.
      RuntimeError: the port is taken, or not all processes came within the timeout.
    """
    came, word, deadline = dict[socket.socket, int](), "it was interrupted", time.monotonic() + timeout
    with ExitStack() as opened, selectors.DefaultSelector() as selector:
        listener = opened.enter_context(_listen(port))
        selector.register(listener, selectors.EVENT_READ)
        try:
            while len(came) < num_processes - 1:
                if time.monotonic() > deadline:
                    missing = sorted(set(range(1, num_processes)) - set(came.values()))
                    raise RuntimeError(
                        f"processes {missing} of {num_processes} did not come to port {port} within {timeout:g} s; "
                        "start them with the same coordinator, or give a longer timeout"
                    )
                for key, _ in selector.select(deadline - time.monotonic()):  # each connection that has sent something
                    if (other := cast("socket.socket", key.fileobj)) is listener:
                        with suppress(OSError):  # the other side has gone again
                            new = opened.enter_context(listener.accept()[0])
                            new.setblocking(False)
                            selector.register(new, selectors.EVENT_READ)
                    elif other in came or not _welcome(other, num_processes, came):
                        # A stranger (a scanner of ports, say), or one that came and has left since.
                        came.pop(other, None)
                        selector.unregister(other)
                        other.close()
            word = GO
        except (RuntimeError, ValueError) as error:
            word = str(error)
            raise
        finally:
            for other in came:
                with suppress(OSError):
                    other.send(ANSWER + word.encode()[: LONGEST - len(ANSWER)])


def _listen(port: int) -> socket.socket:
    """Opens a socket on all addresses of this machine, as JAX's service will."""
    has_both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if has_both else socket.AF_INET
    try:
        listener = socket.create_server(("", port), family=family, dualstack_ipv6=has_both)
    except OSError as error:
        raise RuntimeError(f"process 0 can't listen on port {port}: {error}; use another port") from error
    listener.setblocking(False)
    return listener


def _welcome(other: socket.socket, num_processes: int, came: dict[socket.socket, int]) -> bool:
    """Reads a greeting, and returns whether a process of this program sent it; notes it in `came` then."""
    with suppress(OSError):
        if greeting := GREETING.fullmatch(other.recv(LONGEST)):
            index, wanted = map(int, greeting.groups())
            is_twice = index in came.values()
            came[other] = index
            if wanted != num_processes:
                raise ValueError(f"process {index} has num_processes={wanted}, not {num_processes}; give all the same")
            if is_twice:
                raise ValueError(f"two processes came with process_id={index}; give each its own, from 0")
            return 0 < index < num_processes  # `initialize` lets no process of the program come with another one
    return False


def come(host: str, port: int, num_processes: int, process_id: int, timeout: float) -> None:
    """Does the other processes' part: greets process 0, and waits for its word.

    Raises:
      RuntimeError: nobody listens there within the timeout, another program answers, or process 0 gave up.
    """
    deadline, answer, trouble = time.monotonic() + timeout, b"", ""
    while not answer:
        if (left := deadline - time.monotonic()) < 0:
            raise RuntimeError(
                f"process {process_id} found nobody listening at coordinator={host}:{port} within {timeout:g} s "
                f"({trouble}); start process 0 there, or correct the address"
            )
        try:
            with socket.create_connection((host, port), timeout=min(5.0, left + 0.01)) as first:
                first.sendall(f"jpipe: process {process_id} of {num_processes}\n".encode())
                first.settimeout(left + 5)  # process 0 may have begun to wait later than this one
                answer, trouble = first.recv(LONGEST), "it hung up"
        except OSError as error:
            trouble = str(error)
        if not answer:
            time.sleep(0.2)
    if not answer.startswith(ANSWER):
        raise RuntimeError(f"coordinator={host}:{port} answers {answer[:40]!r}; pass the address of process 0")
    word = answer.removeprefix(ANSWER).decode(errors="replace")
    if word != GO:
        raise RuntimeError(f"process 0 gave up: {word}")
