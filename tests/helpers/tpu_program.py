"""What tests of programs for TPUs share; what reads them is `jpipe.tools.forecaster`."""

import importlib.util
import math
import os
import re
from typing import Any

import pytest

from collectives import COLLECTIVES
from compiled_transfers import transfers as transfers
from jpipe.tools.forecaster import Loop as Loop
from jpipe.tools.forecaster import Operation as Operation
from jpipe.tools.forecaster import compile_with_text as compile_with_text
from jpipe.tools.forecaster import read as read

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


BYTES = {"f64": 8, "f32": 4, "bf16": 2, "f16": 2, "s64": 8, "u64": 8, "s32": 4, "u32": 4, "s16": 2, "u16": 2, "c64": 8}
ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\](?:\{([\d,]*)[^}]*?(S\(\d+\))?\})?")
MOVES = ("parameter", "constant", "copy", "transpose", "broadcast", "bitcast", "reshape", "tuple", "convert")


def num_bytes(operation: Operation) -> int:
    """The bytes of an operation's largest result."""
    arrays = [(dtype, [int(d or 1) for d in dims.split(",")]) for dtype, dims, _, _ in ARRAY.findall(operation.type)]
    return max((math.prod(shape) * BYTES.get(dtype, 1) for dtype, shape in arrays), default=0)


def only_moves(operation: Operation, computations: dict[str, list[Operation]]) -> bool:
    """Whether an operation only copies, transposes or fills."""
    if operation.opcode in ("copy", "transpose", "broadcast"):
        return True
    if operation.opcode == "copy-start":  # between memories: no layout changes
        return len({layout for _, dims, layout, _ in ARRAY.findall(operation.type) if dims}) > 1
    called = operation.attribute("calls") if operation.opcode == "fusion" else None
    return called is not None and all(inner.opcode in MOVES for inner in computations[called])


def skipped(program: Loop, *, of_data: bool = False) -> list[str]:
    """The collectives in loops whose trips are data, which other devices may skip; `of_data` if it is in one itself.

    The condition of such a loop compares with an element of the carry, and not with a number.
    """
    found = []
    for operation in program.operations if of_data else ():
        called = program.computations.get(operation.attribute("calls") or "", [])
        kinds = {each.opcode.removesuffix("-start") for each in (operation, *called)}
        found += [operation.line.strip()[:200]] if kinds & {*COLLECTIVES} else []
    for loop in program.inner:
        found += skipped(loop, of_data=of_data or loop.trips is None)
    return found


def moves_in_loops(program: Loop) -> list[tuple[Loop, Operation]]:
    """The operations in loops that only copy, transpose or fill, each with its loop; except for fetches ahead."""
    loops = [loop for loop in program.walk() if loop.scope]
    return [(loop, op) for loop in loops for op in loop.operations if only_moves(op, loop.computations)]


def large_moves(program: Loop, limit: int) -> list[str]:
    """The operations in loops that copy, transpose or fill more than `limit` bytes, in words."""
    return [
        f"{op.opcode} of {num_bytes(op):,} bytes in {loop.name}: {op.type[:80]}"
        for loop, op in moves_in_loops(program)
        if num_bytes(op) > limit
    ]


def largest_move(program: Loop) -> int:
    """Bytes of the largest array that is copied, transposed or filled inside of a loop."""
    return max((num_bytes(op) for _, op in moves_in_loops(program)), default=0)
