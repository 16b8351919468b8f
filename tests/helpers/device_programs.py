"""Which program a case of a large table runs: that for CPUs, that for TPUs, or that for GPUs.

On CPUs gradients of weights are computed otherwise (`jpipe.jax.rewrites`), on GPUs idle stages compute along
(`jpipe.planning.layer_loops`), and a mesh of simulated devices would run the first alone. A third of cases run each.
Which one follows from a case's words, so that a new case changes nothing for the others.
"""

import contextlib
import zlib
from typing import Any
from unittest import mock

import jax.numpy as jnp

from jpipe.partitioner.splits import Splits

DEVICES = ("cpu", "tpu", "gpu")


def devices_of(case: str) -> str:
    """The kind of devices whose program a case runs."""
    return DEVICES[zlib.adler32(case.encode()) % 3]


@contextlib.contextmanager
def programs_for(devices: str):
    """The context in which pipelines on simulated devices are traced for devices of a kind."""
    with contextlib.ExitStack() as patches:
        for name in ("on_cpu", "on_gpu"):
            patches.enter_context(mock.patch.object(Splits, name, name == f"on_{devices}"))
        yield


def programs_of(case: str) -> contextlib.AbstractContextManager[None]:
    """The context in which pipelines are traced for the devices of a case."""
    return programs_for(devices_of(case))


def anything(shape: Any, dtype: Any = None, **_: Any) -> Any:
    """What an empty array may hold, in place of `jax.lax.empty`."""
    return jnp.full(shape, jnp.nan if jnp.issubdtype(dtype, jnp.inexact) else 1, dtype)
