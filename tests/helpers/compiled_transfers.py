"""Reads of compiled programs what runs beside transfers, and how often a GPU's runtime stops the host."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from jpipe.tools.compiled_program import COLLECTIVES, PERMUTE, Loop, Operation, loop_of

FETCH, SEND = "dynamic-slice", "dynamic-update-slice"
HOST_MOVES = (FETCH, SEND)
"""What moves a slice from an array in the host's memory to the device, and back."""
_ON_HOST = "S(5)"
"""The mark of the host's memory in the layout of a type."""
_LIBRARIES = ("__cublas", "__cudnn", "mosaic_gpu", "triton", "tpu_custom_call")
"""How calls of products and attention begin, which compilers don't make themselves."""


def counted(loop: Loop) -> list[tuple[Loop, int | None]]:
    """The loops in a loop's body, each with the number of its turns if the compiler notes it (that for GPUs does)."""
    noted = [re.search(r'"known_trip_count":\{"n":"(\d+)"', o.line) for o in loop.operations if o.opcode == "while"]
    return [(inner, int(number[1]) if number else None) for inner, number in zip(loop.inner, noted, strict=True)]


def branches_of(loop: Loop) -> list[list[Loop]]:
    """For each `conditional` in a loop's body, the branches, which aren't among the inner loops."""
    words, branches = r"branch_computations=\{[^}]*|true_computation=.*false_computation=[^,]*", []
    for operation in loop.operations:
        if operation.opcode == "conditional":
            called = re.search(words, operation.line)
            assert called is not None
            names = re.findall(r"%([\w.\-]+)", called[0])
            branches.append([loop_of(loop.computations, name, operation.op_name) for name in names])
    return branches


def has_products(loop: Loop) -> bool:
    """Whether products are computed in a loop, in a loop inside or in a branch."""
    inside = [*loop.inner, *(branch for branches in branches_of(loop) for branch in branches)]
    return any(map(has_products, inside)) or any(is_product(each, loop.computations) for each in loop.operations)


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
        return bool(self.products) or any(has_products(loop) for loop in self.loops)


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
    stops = sum(1 + max(host_stops(branch, trips) for branch in branches) for branches in branches_of(loop))
    for inner, count in counted(loop):
        turns = trips(inner) if count is None else count
        stops += turns * host_stops(inner, trips) + (turns + 1 if count is None else 0)
    return stops


def _transfer(operation: Operation, computations: dict[str, list[Operation]]) -> str:
    """The transfer that an operation is or starts, also if it starts a computation with one; "" if it isn't one."""
    kinds = (*COLLECTIVES, *(HOST_MOVES if _ON_HOST in operation.line else ()))
    if operation.opcode in ("async-start", "fusion-start"):
        called = computations.get(operation.attribute("calls") or "", [])
        return next((other.opcode for other in called if other.opcode in kinds), "")
    kind = operation.opcode.removesuffix("-start")
    return kind if kind in kinds else ""
