"""Computes how long a chip waits for its collectives, from the order in which a compiled program has them.

Each collective takes the time that its bytes take on the links along its mesh axes. Those that the compiler starts and
ends apart are under way meanwhile; what the operations in between leave of their time is waited for.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from jax.sharding import Mesh

from jpipe.costs.chips import Chip
from jpipe.costs.time_model import Network
from jpipe.forecasting.compiled_program import COLLECTIVES, PERMUTE, RAGGED, Loop, Operation
from jpipe.forecasting.device_groups import axes_along, groups_of

_BITS = {"pred": 8, "token": 0, "opaque": 0, "c64": 64, "c128": 128}


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


def with_waits(program: Loop, network: Network, mesh: Mesh) -> Loop:
    """The same program, in which an operation that waits for a collective takes as many cycles more.

    Args:
      program: as compiled for a TPU.
      network: the links.
      mesh: the devices that it runs on.
    """
    takes, clock = transfer_seconds(program, network, mesh), network.chip.clock or 0.0
    waits = {one.at: one.waited for loop in program.walk() for one in turn_in_time(loop, takes, network.chip)[1]}

    def later(loop: Loop) -> Loop:
        operations = [replace(o, cycles=o.cycles + round(waits.get(o.name, 0.0) * clock)) for o in loop.operations]
        return replace(loop, operations=operations, inner=[later(inner) for inner in loop.inner])

    return later(program)


def transfer_seconds(program: Loop, network: Network, mesh: Mesh, *, beside: tuple[str, ...] = ()) -> dict[str, float]:
    """The seconds that each collective of a program takes by itself, by its name.

    A permute goes over one link, others over all that there are along their axes. Of a ragged all-to-all, whose rows
    follow from the data, every device is taken to send as much to each.

    Args:
      program: as compiled for a TPU.
      network: the links.
      mesh: the devices that it runs on.
      beside: those along just these axes are left out.
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
            if axes and axes != beside:
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


def type_bytes(text: str) -> int:
    """Bytes of a type, or of a tuple of them.

    >>> type_bytes("(f32[2,8]{1,0:T(8,128)}, bf16[], pred[3])")
    69
    """
    found = re.findall(r"(\w+)\[([\d,<=]*)\]", text)
    return sum(_bits(name) * math.prod(map(int, re.findall(r"\d+", dims))) for name, dims in found) // 8


def _bits(name: str) -> int:
    digits = re.search(r"\d+", name)  # f8e4m3fn has 8
    return _BITS[name] if name in _BITS else int(digits[0]) if digits else 0
