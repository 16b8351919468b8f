"""What tests of programs for TPUs share; what reads them is `jpipe.forecasting.compiled_program`."""

import importlib.util
import os
from typing import Any

import pytest

from jpipe.forecasting.compiled_program import Loop as Loop
from jpipe.forecasting.compiled_program import compile_with_text as compile_with_text
from jpipe.forecasting.compiled_program import largest_move as largest_move
from jpipe.forecasting.compiled_program import read as read
from jpipe.forecasting.compiled_program import transfers as transfers

needs_tpu_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="the TPU compiler isn't installed: pip install libtpu"
)
"""The `test` extra, which `make test` installs, has the compiler where there is one: for Linux on x86-64."""


def tpu_devices(topology: str, **options: Any) -> list[Any]:
    """The devices of a TPU that isn't there, such as "v5e:2x2": programs compile for them and can't run."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    from jax.experimental import topologies

    return list(topologies.get_topology_desc(platform="tpu", topology_name=topology, **options).devices)


def large_moves(program: Loop, limit: int) -> list[str]:
    """The operations in loops that copy, transpose or fill more than `limit` bytes, except for fetches ahead."""
    return [
        f"{op.opcode} of {op.bytes:,} bytes in {loop.name}: {op.type[:80]}"
        for loop in program.walk()
        if loop.scope
        for op in loop.movers
        if op.bytes > limit
    ]
