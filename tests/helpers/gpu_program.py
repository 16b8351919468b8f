"""What tests of programs for GPUs share: how they are compiled, and the bytes that their kernels read and write."""

import importlib.util
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass
from typing import Any

import pytest

from compiled_transfers import is_product
from jpipe.tools.chips import ABSENT
from jpipe.tools.forecaster import Loop, Operation
from tpu_program import ARRAY, BYTES

needs_gpu_compiler = pytest.mark.skipif(
    not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)),
    reason="the GPU compiler isn't installed: pip install 'jax[cuda12-local]'",
)
"""The `test` extra, which `make test` installs, has the compiler where there is one: for Linux on x86-64."""

SLICES = ("dynamic-slice", "slice", "gather")
MOVES = ("copy", "transpose", "broadcast", "bitcast", "reshape", "concatenate", "pad", "reverse", *SLICES)
MOVES += ("parameter", "constant", "tuple", "get-tuple-element", "dynamic-update-slice")
NO_KERNEL = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "after-all")


def compile_with_text(lowered: Any) -> tuple[Any, str]:
    """(compiled, its text) of `jitted.lower(...)` for a GPU that isn't there."""
    compiled = lowered.compile(ABSENT)
    return compiled, compiled.as_text()


@dataclass(frozen=True)
class Kernels:
    """What kernels do together.

    Attributes:
      count: how many there are.
      bytes: that they read and write in the GPU's memory, each array once a kernel.
      copied: those of kernels that only copy, transpose, slice or fill.
      cast: those of kernels that only cast besides.
    """

    count: float = 0
    bytes: float = 0
    copied: float = 0
    cast: float = 0

    def __add__(self, other: "Kernels") -> "Kernels":
        return Kernels(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, times: float) -> "Kernels":
        return Kernels(*(times * a for a in astuple(self)))


def kernels(loops: Iterable[Loop], choose: Callable[[Operation], bool] = lambda operation: True) -> Kernels:
    """The chosen kernels of one trip of each of these loops, without those of loops inside and of collectives."""
    return sum(_each(loops, choose), Kernels())


def largest_copy(program: Loop) -> float:
    """Bytes that the largest kernel in a loop reads and writes among those that only copy, transpose, slice or fill."""
    loops = [loop for loop in program.walk() if loop.scope]
    return max((kernel.copied for kernel in _each(loops, lambda operation: True)), default=0)


def _each(loops: Iterable[Loop], choose: Callable[[Operation], bool]) -> Iterator[Kernels]:
    for loop in loops:
        types = {operation.name: operation.type for operation in loop.operations}
        for operation in filter(choose, loop.operations):
            yield _kernel(operation, types, loop.computations)


def _kernel(operation: Operation, types: dict[str, str], computations: dict[str, list[Operation]]) -> Kernels:
    """One operation, with the types of those that it may read."""
    is_half = operation.opcode.endswith(("-start", "-done")) and not operation.opcode.startswith("copy-start")
    if operation.opcode in NO_KERNEL or is_half or "AllocateBuffer" in operation.line:
        return Kernels()
    called = computations.get(operation.attribute("calls") or "", []) if operation.opcode == "fusion" else []
    if called:
        moved = sum(_read(inner, called) for inner in called if inner.opcode == "parameter") + _written(called)
    else:
        moved = sum(_size(types[name]) for name in operation.operands) + _size(operation.type)
    inside = {inner.opcode for inner in called or [operation] if _length(inner.type) > 1} - {*MOVES}
    computes = is_product(operation, computations) or inside - {"convert"}
    return Kernels(1, moved, 0 if inside or computes else moved, moved if inside and not computes else 0)


def _read(operation: Operation, called: list[Operation]) -> int:
    """Bytes of a fusion's parameter, or of a bitcast of it, that are read: where it is sliced, those of the slices."""
    total = 0
    for user in called:
        if operation.name not in user.operands:
            continue
        is_sliced = user.operands[0] == operation.name
        if user.opcode in ("bitcast", "reshape"):
            total += _read(user, called)
        elif user.opcode in SLICES and is_sliced:
            total += _size(user.type)
        elif user.opcode != "dynamic-update-slice" or not is_sliced:
            total += _size(operation.type)
    return min(total, _size(operation.type))


def _written(called: list[Operation]) -> int:
    """Bytes that a fusion writes; an update of a slice writes the slice alone."""
    by_name = {operation.name: operation for operation in called}
    (root,) = (operation for operation in called if operation.line.lstrip().startswith("ROOT"))
    total = 0
    for result in [by_name[name] for name in root.operands] if root.opcode == "tuple" else [root]:
        while result.opcode == "bitcast":
            result = by_name[result.operands[0]]
        is_update = result.opcode == "dynamic-update-slice"
        total += _size(by_name[result.operands[1]].type if is_update else result.type)
    return total


def _size(kind: str) -> int:
    """The bytes of a type, of all its arrays."""
    return sum(_product(dims) * BYTES.get(dtype, 1) for dtype, dims, _, _ in ARRAY.findall(kind))


def _length(kind: str) -> int:
    """The most elements that an array of a type has."""
    return max((_product(dims) for _, dims, _, _ in ARRAY.findall(kind)), default=0)


def _product(dims: str) -> int:
    return math.prod(int(d or 1) for d in dims.split(","))
