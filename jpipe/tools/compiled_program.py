"""Reads a program compiled for a TPU or a GPU: its loops, their cycles, what runs beside transfers, stops of the host.

The TPU compiler notes `estimated_cycles` beside each operation, whether or not the machine exists; the GPU compiler
notes none. A loop's own are those of one trip without the loops inside; how often each turns is in tables that only the
caller knows.
"""

import itertools
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from jax.stages import Compiled, Lowered

PERMUTE, RAGGED = "collective-permute", "ragged-all-to-all"
COLLECTIVES = (PERMUTE, "all-gather", "all-reduce", "all-to-all", RAGGED, "reduce-scatter")
FETCH, SEND = "dynamic-slice", "dynamic-update-slice"
HOST_MOVES = (FETCH, SEND)
"""What moves a slice from an array in the host's memory to the device, and back."""
_ON_HOST = "S(5)"
"""The mark of the host's memory in the layout of a type."""
_LIBRARIES = ("__cublas", "__cudnn", "mosaic_gpu", "triton", "tpu_custom_call")
"""How calls of products and attention begin, which compilers don't make themselves."""
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
    """A `while` of the program, or the program itself, or a branch of a `conditional`.

    Attributes:
      scope: the `op_name` of the `while`; empty for the program.
      operations: the operations of its body, in the order in which they are scheduled.
      inner: the loops in its body.
      computations: the operations of all of the program's computations, by name.
      trips: the number of its turns, if the compiler notes it or its condition has it as a number; else None.
      counted: the number of its turns, if the compiler notes it, as that for GPUs does; else None.
      branches: for each `conditional` in its body, the branches, which aren't among the inner loops.
    """

    scope: str
    operations: list[Operation]
    inner: list["Loop"]
    computations: dict[str, list[Operation]]
    trips: int | None = None
    counted: int | None = None
    branches: list[list["Loop"]] = field(default_factory=list)

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

    @property
    def has_products(self) -> bool:
        """Whether products are computed in it, in a loop inside or in a branch."""
        inner = any(loop.has_products for loop in itertools.chain(self.inner, *self.branches))
        return inner or any(is_product(each, self.computations) for each in self.operations)


@dataclass(frozen=True)
class CompiledTransfer:
    """A collective, or a move to the host or back, and what is scheduled between its start and its end, in its loop.

    Attributes:
      operation: the start.
      loops: the loops in between.
      products: the products in between, outside of loops.
      cycles: the cycles of the operations in between, without those of loops.
    """

    operation: Operation
    loops: list[Loop]
    products: list[Operation]
    cycles: int

    @property
    def beside_products(self) -> bool:
        """Whether products are computed meanwhile; an update of a slice hides no transfer."""
        return bool(self.products) or any(loop.has_products for loop in self.loops)


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


def transfers(loop: Loop, kinds: tuple[str, ...] = (PERMUTE,)) -> list[CompiledTransfer]:
    """The transfers of these kinds (`COLLECTIVES`, `HOST_MOVES`) in a loop's body, in the order in which they end."""
    found, operations = [], loop.operations
    places = {operation.name: i for i, operation in enumerate(operations)}
    inner = dict(zip((each.name for each in operations if each.opcode == "while"), loop.inner, strict=True))
    for end, operation in enumerate(operations):
        is_end = operation.opcode.endswith("-done")
        start = places[operation.operands[0]] if is_end else end
        if _transfer(operations[start], loop.computations) in kinds and (is_end or "-start" not in operation.opcode):
            between = operations[start + 1 : end]
            loops = [inner[each.name] for each in between if each.opcode == "while"]
            products = [each for each in between if is_product(each, loop.computations)]
            found.append(CompiledTransfer(operations[start], loops, products, sum(each.cycles for each in between)))
    return found


def is_product(operation: Operation, computations: dict[str, list[Operation]]) -> bool:
    """Whether an operation is a product of matrices, a convolution or attention, by itself or fused with others."""
    if operation.opcode == "custom-call":
        target = re.search(r'custom_call_target="([^"]*)"', operation.line)
        return target is not None and target[1].startswith(_LIBRARIES)
    if operation.opcode == "fusion":
        called = computations.get(operation.attribute("calls") or "", [])
        return any(is_product(inner, computations) for inner in called)
    return operation.opcode in ("dot", "convolution")


def host_stops(loop: Loop, trips: Callable[[Loop], int]) -> int:
    """How often a GPU's runtime stops the host in one trip of a loop: it waits until the GPU has done all before.

    Of a `while` of known count the runtime launches all trips; before each trip of any other, and once more at its end,
    it copies the condition to the host (`xla/backends/gpu/runtime/while_thunk.cc`). A `conditional` copies the branch's
    index, once (`conditional_thunk.cc`). That is the most there may be: of a `conditional` without loops and
    collectives, XLA may make a part of a CUDA graph, which stops nobody.

    Args:
      loop: the loop.
      trips: how often a loop turns that the compiler doesn't count.
    """
    stops = sum(1 + max(host_stops(branch, trips) for branch in branches) for branches in loop.branches)
    for inner in loop.inner:
        turns = trips(inner) if inner.counted is None else inner.counted
        stops += turns * host_stops(inner, trips) + (turns + 1 if inner.counted is None else 0)
    return stops


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
    inner, branches = [], []
    for operation in operations:
        if operation.opcode == "while":
            name = operation.attribute("body")
            assert name is not None
            condition = computations.get(operation.attribute("condition") or "", [])
            noted = re.search(r'"known_trip_count":\{"n":"(\d+)"', operation.line)
            counted = int(noted[1]) if noted else None
            trips = _trips(condition) if counted is None else counted
            inner.append(replace(_loop(computations, name, operation.op_name), trips=trips, counted=counted))
        elif operation.opcode == "conditional":
            words = r"branch_computations=\{[^}]*|true_computation=.*false_computation=[^,]*"
            called = re.search(words, operation.line)
            assert called is not None
            names = re.findall(r"%([\w.\-]+)", called[0])
            branches.append([_loop(computations, name, operation.op_name) for name in names])
    return Loop(scope, operations, inner, computations, branches=branches)


def _transfer(operation: Operation, computations: dict[str, list[Operation]]) -> str:
    """The transfer that an operation is or starts, also if it starts a computation with one; "" if it isn't one."""
    kinds = (*COLLECTIVES, *(HOST_MOVES if _ON_HOST in operation.line else ()))
    if operation.opcode in ("async-start", "fusion-start"):
        called = computations.get(operation.attribute("calls") or "", [])
        return next((other.opcode for other in called if other.opcode in kinds), "")
    kind = operation.opcode.removesuffix("-start")
    return kind if kind in kinds else ""


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
