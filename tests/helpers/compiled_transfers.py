"""Reads of compiled programs what runs beside transfers, what chips wait for, how often a GPU's host is stopped.

Each collective takes the time that its bytes take on the links along its mesh axes. Those that the compiler starts and
ends apart are under way meanwhile; what the operations in between leave of their time is waited for.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from jax.sharding import Mesh

from collectives import COLLECTIVES, PERMUTE, RAGGED, axes_along, groups_of, type_bytes
from jpipe.tools.chips import Chip, Network
from jpipe.tools.forecaster import Loop, Operation, loop_of

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


# --- waits ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TransferInTime:
    """A collective in time.

    Attributes:
      name: the collective's.
      begin, end: in seconds, from when it is on its way to when it has arrived.
      waited: how many of them the chip waits for its end.
      at: the operation at which it waits.
    """

    name: str
    begin: float
    end: float
    waited: float
    at: str


def transfer_seconds(program: Loop, network: Network, mesh: Mesh) -> dict[str, float]:
    """The seconds that each collective of a program takes by itself, by its name.

    A permute goes over one link, others over all that there are along their axes. Of a ragged all-to-all, whose rows
    follow from the data, every device is taken to send as much to each.

    Args:
      program: as compiled for a TPU.
      network: the links.
      mesh: the devices that it runs on.
    """
    found = {}
    for computation, operations in program.computations.items():
        types = {operation.name: operation.type for operation in operations}
        for operation in operations:
            kind = operation.opcode.removesuffix("-start")
            if kind not in COLLECTIVES:
                continue
            if computation.startswith("all-reduce-scatter"):  # a fusion with the slice that a device keeps
                kind = "reduce-scatter"
            groups = tuple(filter(None, groups_of(operation.line))) or (tuple(range(mesh.size)),)
            axes, p = axes_along(groups, mesh), max(map(len, groups))
            sizes = [type_bytes(types.get(name, "")) for name in operation.operands]
            taken, given = sum(sizes), type_bytes(operation.type)
            if operation.opcode.endswith("-start") and kind != "all-reduce":
                given -= taken  # the operands are in the tuple too
            share = 1.0 if kind == PERMUTE else (p - 1) / p * (2 if kind == "all-reduce" else 1)
            moved = taken if kind == PERMUTE else min(sizes[0], given) if kind == RAGGED else max(taken, given)
            if axes:
                links = network.chip.link_bandwidth if kind == PERMUTE else network.bandwidth(axes)
                found[operation.name] = share * moved / links
    return found


def turn_in_time(
    loop: Loop, takes: dict[str, float], chip: Chip
) -> tuple[list[tuple[float, Operation]], list[TransferInTime]]:
    """When the operations of one turn of a loop begin, and its transfers.

    The operations follow each other in time, by the compiler's cycles. A transfer begins with its start, when the one
    before it that goes the same way has ended; one that has no start is waited for in full. A loop within the loop
    hides what is under way. A v5e's compiler cuts a gather into steps that it joins to products: it begins with the
    first of them, and ends with the last.

    Args:
      loop: of a compiled program.
      takes: by collective, its seconds; those without are left out.
      chip: whose clock counts the cycles.
    """
    now, free, under_way = 0.0, dict[str, float](), dict[str, TransferInTime]()
    begun, found, clock = list[tuple[float, Operation]](), list[TransferInTime](), chip.clock or 1.0
    for operation in loop.operations:
        collective = _collective(operation, loop, takes)
        name, key = (collective.name, _gather_of(collective, operation)) if collective else ("", "")
        begins, ends = (operation.name.startswith(f"async-collective-{word}") for word in ("start", "done"))
        if collective and (operation.opcode.endswith("-start") or begins):
            way = re.search(r"source_target_pairs=({{\d+,\d+)", operation.line)
            begin = max(free.get(way[1] if way else "", 0.0), now)
            end = free[way[1] if way else ""] = begin + takes[name]
            under_way[key or operation.name] = TransferInTime(name, begin, end, 0.0, "")
        elif collective and key not in under_way and (ends or not key):
            found.append(TransferInTime(name, now, now + takes[name], takes[name], operation.name))
            now += takes[name]
        elif operation.opcode == "async-update" and operation.operands[0] in under_way:
            under_way[operation.name] = under_way[operation.operands[0]]
        elif (ends or operation.opcode.endswith("-done")) and (key or operation.operands[0]) in under_way:
            one = under_way[key or operation.operands[0]]
            found.append(replace(one, waited=max(0.0, one.end - now), at=operation.name))
            now = max(now, one.end)
        elif operation.opcode == "while":
            now = max(now, *free.values(), 0.0)
        begun.append((now, operation))
        now += operation.cycles / clock
    return begun, found


def _gather_of(step: Operation, holder: Operation) -> str:
    """Which gather a step belongs to that a fusion holds; empty for what isn't a step of one."""
    match = re.search(r"channel_id=\d+(?=.*chain_id)", step.line) if holder.opcode == "fusion" else None
    return match[0] if match else ""


def _collective(operation: Operation, loop: Loop, takes: dict[str, float]) -> Operation | None:
    """Which collective an operation is, or holds, as a fusion does; None for none."""
    called = loop.computations.get(operation.attribute("calls") or "", ())
    return next((one for one in (operation, *called) if one.name in takes), None)
