"""Reads a program compiled for a TPU: its loops, their cycles by the compiler's estimate, the bytes they move.

The TPU compiler notes `estimated_cycles` beside each operation, whether or not the machine exists. A loop's own are
those of one trip without the loops inside; how often each turns is in tables that only the caller knows.
"""

import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from jax.stages import Compiled, Lowered

_BYTES = {"f64": 8, "f32": 4, "bf16": 2, "f16": 2, "s64": 8, "u64": 8, "s32": 4, "u32": 4, "s16": 2, "u16": 2, "c64": 8}
_OPERATION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((.*)")
_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\](?:\{([\d,]*)[^}]*?(S\(\d+\))?\})?")
_MOVES = ("parameter", "constant", "copy", "transpose", "broadcast", "bitcast", "reshape", "tuple", "convert")


@dataclass(frozen=True)
class Operation:
    """One operation of a compiled program.

    Attributes:
      name: the instruction's.
      opcode: such as "fusion".
      type: of what it gives, with its layout.
      operands: the names of what it takes.
      cycles: the compiler's estimate; 0 where it has none.
      op_name: what it was made from, such as "jit(f)/ticks/while/body/F/while".
      line: the whole text.
    """

    name: str
    opcode: str
    type: str
    operands: tuple[str, ...]
    cycles: int
    op_name: str
    line: str

    def attribute(self, name: str) -> str | None:
        """The computation that an attribute such as `body` names."""
        match = re.search(rf"\b{name}=%?([\w.\-]+)", self.line)
        return match.group(1) if match else None

    @property
    def bytes(self) -> int:
        """The bytes of its largest result."""
        return max((num_bytes(dtype, dims) for dtype, dims, _, _ in _ARRAY.findall(self.type)), default=0)


@dataclass(frozen=True)
class Loop:
    """A `while` of the program, or the program itself.

    Attributes:
      scope: the `op_name` of the `while`; empty for the program.
      operations: of its body, in the order in which they are scheduled.
      inner: the loops in its body.
      movers: the operations of its body that only copy, transpose or fill.
      trips: how often it turns, if its condition says so with a number; else None.
    """

    scope: str
    operations: list[Operation]
    inner: list["Loop"]
    movers: list[Operation]
    trips: int | None = None

    @property
    def name(self) -> str:
        """The innermost named scope around it: of ".../F/while/body/Block.1/while" Block.1."""
        return self.scope.removesuffix("/while").rpartition("/")[2]

    @property
    def own(self) -> int:
        """Cycles of one trip, without the loops inside."""
        return sum(operation.cycles for operation in self.operations)

    def walk(self) -> Iterator["Loop"]:
        """This loop and all loops inside."""
        yield self
        for loop in self.inner:
            yield from loop.walk()

    def find(self, *names: str) -> list["Loop"]:
        """The loops inside that lie in loops of these names, the last their own."""
        inside = lambda loop: all(name in loop.scope.split("/") for name in names)
        return [loop for loop in self.walk() if loop.name == names[-1] and inside(loop)]


@dataclass(frozen=True)
class Permute:
    """A `collective-permute` and what is scheduled between its start and its end, in the same loop.

    Attributes:
      operation: the start.
      loops: the loops in between.
      cycles: of the operations in between, loops apart.
    """

    operation: Operation
    loops: list[Loop]
    cycles: int


def num_bytes(dtype: str, dims: str) -> int:
    """Bytes of an array such as ("bf16", "4,1024")."""
    count = 1
    for d in dims.split(","):
        count *= int(d or 1)
    return count * _BYTES.get(dtype, 1)


def compile_with_text(lowered: Lowered) -> tuple[Compiled, str]:
    """(compiled, its text) of `jitted.lower(...)`.

    The text is what the compiler wrote down itself: `compiled.as_text()` reads the program back, and fails on some for
    v4 and v5p ("async-update instruction should have 1 operands").
    """
    with tempfile.TemporaryDirectory() as folder:
        compiled = lowered.compile(compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        (file,) = Path(folder).glob("*.after_codegen.txt")
        return compiled, file.read_text()


def read(text: str) -> Loop:
    """The loops of a compiled program."""
    computations, entry = _computations(text)
    return _loop(computations, entry, "")


def transfers(loop: Loop) -> list[Permute]:
    """The permutes in a loop's body."""
    found, inner = [], {inner.scope: inner for inner in loop.inner}
    for end, operation in enumerate(loop.operations):
        if operation.opcode == "collective-permute-done":
            names = [other.name for other in loop.operations]
            start = names.index(operation.operands[0])
            between = loop.operations[start + 1 : end]
            loops = [inner[other.op_name] for other in between if other.opcode == "while"]
            found.append(Permute(loop.operations[start], loops, sum(other.cycles for other in between)))
        elif operation.opcode == "collective-permute":
            found.append(Permute(operation, [], 0))
    return found


def largest_move(program: Loop) -> int:
    """Bytes of the largest array that is copied, transposed or filled inside of a loop."""
    return max((op.bytes for loop in program.walk() if loop.scope for op in loop.movers), default=0)


def _computations(text: str) -> tuple[dict[str, list[Operation]], str]:
    found: dict[str, list[Operation]] = {}
    name = entry = ""
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" ") and (match := re.match(r"(ENTRY )?%?([\w.\-]+) ", line)):
            name = match.group(2)
            found[name] = []
            entry = name if match.group(1) else entry
        elif name and (match := _OPERATION.match(line)):
            found[name].append(_operation(line, *match.groups()))
    return found, entry


def _operation(line: str, name: str, kind: str, opcode: str, rest: str) -> Operation:
    cycles = re.search(r'"estimated_cycles":"(\d+)"', line)
    op_name = re.search(r'op_name="([^"]*)"', line)
    operands = tuple(re.findall(r"%([\w.\-]+)", rest.partition(")")[0]))
    return Operation(
        name, opcode, kind, operands, int(cycles.group(1)) if cycles else 0, op_name.group(1) if op_name else "", line
    )


def _loop(computations: dict[str, list[Operation]], body: str, scope: str) -> Loop:
    operations = list(_flat(computations, body))
    inner = []
    for operation in operations:
        if operation.opcode == "while":
            name = operation.attribute("body")
            assert name is not None
            condition = computations.get(operation.attribute("condition") or "", [])
            inner.append(replace(_loop(computations, name, operation.op_name), trips=_trips(condition)))
    movers = [operation for operation in operations if _only_moves(computations, operation)]
    return Loop(scope, operations, inner, movers)


def _trips(condition: list[Operation]) -> int | None:
    """The one number that a loop's condition compares with."""
    found = re.findall(r" s32\[\]\S* constant\((\d+)\)", "\n".join(operation.line for operation in condition))
    return int(found[0]) if len(found) == 1 else None


def _flat(computations: dict[str, list[Operation]], name: str) -> Iterator[Operation]:
    """The operations of a computation, with those that it calls in their place."""
    for operation in computations[name]:
        called = operation.attribute("to_apply") if operation.opcode == "call" else None
        if called:
            yield from _flat(computations, called)
        else:
            yield operation


def _only_moves(computations: dict[str, list[Operation]], operation: Operation) -> bool:
    if operation.opcode in ("copy", "transpose", "broadcast"):
        return True
    if operation.opcode == "copy-start":  # between memories: no layout changes
        layouts = {layout for _, dims, layout, _ in _ARRAY.findall(operation.type) if dims}
        return len(layouts) > 1
    if operation.opcode != "fusion":
        return False
    called = operation.attribute("calls")
    return called is not None and all(inner.opcode in _MOVES for inner in computations[called])
