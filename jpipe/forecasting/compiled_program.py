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

_OPERATION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((.*)")


@dataclass(frozen=True)
class Operation:
    """One operation of a compiled program.

    Attributes:
      name: the instruction's.
      opcode: its kind, such as "fusion".
      type: the type of its result, with its layout.
      operands: the names of its operands.
      cycles: the compiler's estimate; 0 where it has none.
      op_name: the scopes of the code that it was made from, such as "jit(f)/ticks/while/body/F/while".
      line: its whole text.
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
        return match[1] if match else None


@dataclass(frozen=True)
class Loop:
    """A `while` of the program, or the program itself.

    Attributes:
      scope: the `op_name` of the `while`; empty for the program.
      operations: the operations of its body, in the order in which they are scheduled.
      inner: the loops in its body.
      computations: the operations of all of the program's computations, by name.
      trips: the number of its turns, if its condition has it as a number; else None.
    """

    scope: str
    operations: list[Operation]
    inner: list["Loop"]
    computations: dict[str, list[Operation]]
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
        return [loop for loop in self.walk() if loop.name == names[-1] and {*names} <= {*loop.scope.split("/")}]


@dataclass(frozen=True)
class Permute:
    """A `collective-permute` and what is scheduled between its start and its end, in the same loop.

    Attributes:
      operation: the start.
      loops: the loops in between.
      cycles: the cycles of the operations in between, without those of loops.
    """

    operation: Operation
    loops: list[Loop]
    cycles: int


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
    permutes, inner = [], {inner.scope: inner for inner in loop.inner}
    names = [operation.name for operation in loop.operations]
    for end, operation in enumerate(loop.operations):
        if operation.opcode == "collective-permute-done":
            start = names.index(operation.operands[0])
            between = loop.operations[start + 1 : end]
            loops = [inner[other.op_name] for other in between if other.opcode == "while"]
            permutes.append(Permute(loop.operations[start], loops, sum(other.cycles for other in between)))
        elif operation.opcode == "collective-permute":
            permutes.append(Permute(operation, [], 0))
    return permutes


def _computations(text: str) -> tuple[dict[str, list[Operation]], str]:
    """Returns the operations of each computation by its name, and the name of the program's own."""
    computations: dict[str, list[Operation]] = {}
    name = entry = ""
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" ") and (match := re.match(r"(ENTRY )?%?([\w.\-]+) ", line)):
            name = match.group(2)
            computations[name] = []
            entry = name if match.group(1) else entry
        elif name and (match := _OPERATION.match(line)):
            computations[name].append(_operation(line, *match.groups()))
    return computations, entry


def _operation(line: str, name: str, kind: str, opcode: str, rest: str) -> Operation:
    """Makes an operation of its line, and of the parts of it that `_OPERATION` matches."""
    cycles = re.search(r'"estimated_cycles":"(\d+)"', line)
    op_name = re.search(r'op_name="([^"]*)"', line)
    operands = tuple(re.findall(r"%([\w.\-]+)", rest.partition(")")[0]))
    return Operation(name, opcode, kind, operands, int(cycles[1]) if cycles else 0, op_name[1] if op_name else "", line)


def _loop(computations: dict[str, list[Operation]], body: str, scope: str) -> Loop:
    operations = list(_flat(computations, body))
    inner = []
    for operation in operations:
        if operation.opcode == "while":
            name = operation.attribute("body")
            assert name is not None
            condition = computations.get(operation.attribute("condition") or "", [])
            inner.append(replace(_loop(computations, name, operation.op_name), trips=_trips(condition)))
    return Loop(scope, operations, inner, computations)


def _trips(condition: list[Operation]) -> int | None:
    """The one number that a loop's condition compares with."""
    numbers = re.findall(r" s32\[\]\S* constant\((\d+)\)", "\n".join(operation.line for operation in condition))
    return int(numbers[0]) if len(numbers) == 1 else None


def _flat(computations: dict[str, list[Operation]], name: str) -> Iterator[Operation]:
    """The operations of a computation, with those that it calls in their place."""
    for operation in computations[name]:
        called = operation.attribute("to_apply") if operation.opcode == "call" else None
        if called:
            yield from _flat(computations, called)
        else:
            yield operation
