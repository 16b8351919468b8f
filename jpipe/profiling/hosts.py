"""Finds the slow process: each times the same layers on a device of its own, and waits for no other.

The times of stages can't tell that. A step ends in all processes at once, and a stage may lie on several hosts.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jpipe.mesh.axes import AXIS

_LONGEST_NAME = 64


@dataclass(frozen=True)
class ProcessTime:
    """The time that one process of several takes for the layers of the whole model.

    Attributes:
      process: its index.
      host: the name of its machine.
      stages: the stages that have devices of this process.
      seconds: the time of all layers, forward and backward, for one micro-batch, alone on one of its devices.
      of_median: `seconds` over the median of all processes; of an even number of processes the lower median.
    """

    process: int
    host: str
    stages: tuple[int, ...]
    seconds: float
    of_median: float

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}"


def process_times(seconds: Sequence[float], hosts: Sequence[str], mesh: Mesh) -> tuple[ProcessTime, ...]:
    """The time of each process; empty if there is one process.

    Args:
      seconds: the time of each process, `[P]`.
      hosts: the names of their machines, `[P]`.
      mesh: the pipeline's.
    """
    if len(seconds) < 2:
        return ()
    stages = np.moveaxis(mesh.devices, mesh.axis_names.index(AXIS), 0)
    processes_of = [{device.process_index for device in devices.flat} for devices in stages]
    times = []
    for p, (host, alone) in enumerate(zip(hosts, seconds, strict=True)):
        stages_of_p = tuple(k for k, processes in enumerate(processes_of) if p in processes)
        times.append(ProcessTime(p, host, stages_of_p, alone, alone / median_low(seconds)))
    return tuple(times)


def host_names() -> list[str]:
    """The name of each process's machine, `[P]`; all processes call it."""
    padded = socket.gethostname().encode()[:_LONGEST_NAME].ljust(_LONGEST_NAME, b"\0")
    names = np.asarray(multihost_utils.process_allgather(np.frombuffer(padded, np.uint8)))
    return [name.tobytes().rstrip(b"\0").decode(errors="replace") for name in names]
