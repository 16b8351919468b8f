"""Computing for real, at once and on this host, whatever is being traced and whatever the mesh."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

from jpipe.jax_tools.tracing import no_mesh


@contextmanager
def on_this_host() -> Iterator[None]:
    """A context in which operations run at once on one device of this process, of the CPU if there is one."""
    with no_mesh(), jax.ensure_compile_time_eval(), jax.transfer_guard("allow"), jax.default_device(_device()):
        yield


def _device() -> Any:
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # there are accelerators only
        return jax.local_devices()[0]
