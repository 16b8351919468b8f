"""`jpipe.initialize`: joins processes to one program, or raises in each an error that says why it can't."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from functools import partial
from types import TracebackType

import jax

from jpipe.processes.meeting import come, gather
from jpipe.seam.runtime import finds_no_cluster
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
