"""Reads the collectives out of a compiled program: `read(compiled.as_text())`, of CPUs and of TPUs.

Devices are partition numbers: positions in `mesh.devices.flat`, as jax numbers them.
"""

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

PERMUTE, RAGGED = "collective-permute", "ragged-all-to-all"
COLLECTIVES = (PERMUTE, "all-gather", "all-reduce", "all-to-all", RAGGED, "reduce-scatter")
"""Those that jpipe's programs have."""
KINDS = (*COLLECTIVES, "collective-broadcast")
DATA_AXES = ("replica", "data", "fsdp")
_BITS = {"pred": 8, "token": 0, "opaque": 0, "c64": 64, "c128": 128}
_START = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = ")
_CALL = re.compile(r"(\w+)=(?:\{([^{}]*)\}|(%?[\w.-]+))")
_CALLING = ("body", "condition", "calls", "to_apply", "branch_computations", "called_computations")
_CALLING += ("true_computation", "false_computation")
_WORK = r" (?:fusion|convolution|dot|while|custom-call)\("


@dataclass(frozen=True)
class Collective:
    """One collective of a compiled program.

    Attributes:
      kind: one of `KINDS`, without "-start".
      name: the instruction's.
      bytes: the larger of what it takes and what it gives, on one device; of a ragged all-to-all the smaller.
      loops: the names of the `while` instructions around it, outermost first.
      groups: the devices that work together, each a tuple of partition numbers; of a permute (source, target).
      op_name: what it was made from, such as "jit(f)/shard_map/while/body/ppermute"; empty if unknown.
      types: of the arrays that it gives, such as "bf16[1,2048,4096]"; several where the compiler joined some into one.
      scopes: what the loops around it were made from, outermost first.
      beside_work: whether work is scheduled between its start and its end.
    """

    kind: str
    name: str
    bytes: int
    loops: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]
    op_name: str
    types: tuple[str, ...] = ()
    scopes: tuple[str, ...] = ()
    beside_work: bool = False

    def __str__(self) -> str:
        where = f"in {len(self.loops)} loops" if self.loops else "outside of loops"
        return f"{self.kind} of {self.bytes} bytes {where} over {list(self.groups)}: {self.op_name}"


def read(text: str) -> list[Collective]:
    """The collectives of a compiled program, from `compiled.as_text()`; of a pair -start, -done the first.

    A TPU's fusion of an all-reduce with the slice that a device keeps of it is called a reduce-scatter here too. Of a
    gather that a v5e carries out in steps, joined to products, the first step counts.
    """
    computations = _computations(text)
    loops, scopes, beside = _loops(computations), _scopes(computations), _beside_work(computations)
    devices = re.search(r"num_partitions=(\d+)", text)
    everyone = tuple(range(int(devices.group(1)))) if devices else ()
    first_steps = set(re.findall(r"%?async-collective-start[\w.]* = .*? calls=%?([\w.-]+)", text))
    beside.update(first_steps)
    found = []
    for name, lines in computations.items():
        types = _types(lines)
        for line in lines:
            if "chain_id=" in line and name not in first_steps:
                continue
            match = re.search(rf" ({'|'.join(KINDS)})(-start)?\(", line)
            start = _START.match(line)
            if match and start:
                result = _result_type(types[start.group(1)], match)
                operands = _operand_bytes(line[match.end() :], types)
                ragged = match.group(1) == RAGGED  # into a buffer that has room for whatever comes
                size = min(type_bytes(result), operands[0]) if ragged else max(type_bytes(result), sum(operands))
                op_name = re.search(r'op_name="([^"]*)"', line)
                found.append(
                    Collective(
                        kind="reduce-scatter" if name.startswith("all-reduce-scatter") else match.group(1),
                        name=start.group(1),
                        bytes=size,
                        loops=loops(name),
                        groups=groups_of(line) or (everyone,),
                        op_name=op_name.group(1) if op_name else "",
                        types=tuple(re.findall(r"\w+\[[\d,]*\]", result)),
                        scopes=tuple(scopes.get(loop, "") for loop in loops(name)),
                        beside_work=start.group(1) in beside or name in beside,
                    )
                )
    return found


def in_loop(collective: Collective) -> bool:
    """Whether it runs inside of a loop."""
    return bool(collective.loops)


def axes_of(collective: Collective, mesh: Any) -> tuple[str, ...]:
    """The axes of the mesh along which the devices of a group differ.

    Args:
      collective: of a program on that mesh.
      mesh: with `axis_names` and `devices`.
    """
    return axes_along(collective.groups, mesh)


def spans_stages(collective: Collective, mesh: Any) -> bool:
    """Whether a group holds devices of two stages."""
    return "stage" in axes_of(collective, mesh)


def by_the_executor(collective: Collective, mesh: Any) -> bool:
    """Whether it moves boundaries: a permute along `stage` alone that comes from a `ppermute`."""
    along_stages = axes_of(collective, mesh) == ("stage",)
    return collective.kind == "collective-permute" and "ppermute" in collective.op_name and along_stages


def intruders(text: str, mesh: Any) -> list[Collective]:
    """The collectives in loops that could wait for a device that never comes, or that jpipe hasn't asked for.

    In loops, whose trips differ from stage to stage, there may be the executor's permutes along `stage`, and others
    within the devices of one stage; permutes among these are the compiler's own choice, and count as intruders.
    """
    inside = [c for c in read(text) if in_loop(c) and not by_the_executor(c, mesh)]
    return [c for c in inside if spans_stages(c, mesh) or c.kind == "collective-permute"]


def largest_in_loops(text: str, mesh: Any) -> int:
    """Bytes of the largest collective over data axes in a loop; 0 without any.

    Along other axes activations are reduced there, which is what splitting weights over them means.
    """
    over_data = lambda c: any(name in DATA_AXES for name in axes_of(c, mesh))
    return max((c.bytes for c in read(text) if in_loop(c) and over_data(c)), default=0)


# --- device groups ----------------------------------------------------------------------------------------------------


Groups = tuple[tuple[int, ...], ...]
"""The devices that work together in a collective, by their places in the mesh; of a permute (source, target)."""


def axes_along(groups: Groups, mesh: Any) -> tuple[str, ...]:
    """The axes of a mesh along which the devices of a group differ."""
    places = [np.stack(np.unravel_index(list(group), mesh.devices.shape)) for group in groups]
    varies = [any(len(set(place[i])) > 1 for place in places) for i in range(len(mesh.axis_names))]
    return tuple(name for name, does in zip(mesh.axis_names, varies, strict=True) if does)


def groups_of(line: str) -> Groups:
    """The groups of devices, or pairs, that a collective names; empty if it means all.

    Raises:
      ValueError: they are written in another way.
    """
    listed = re.search(r"(?:source_target_pairs|replica_groups)=\{((?:\{[\d,\s]*\},?\s*)*)\}", line)
    if listed:
        return tuple(tuple(_numbers(group)) for group in re.findall(r"\{([\d,\s]*)\}", listed[1]))
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", line)
    if iota:
        return tuple(map(tuple, _in_order(iota[2]).reshape(_numbers(iota[1])).tolist()))
    order = r"(?:, device_ids=\(([^()]*(?:\([\d,]*\))?)\))?"
    named = re.search(rf"replica_groups=mesh\[([^\]]*)\]{order} *\{{([^{{}}]*)\}}", line)
    if named:
        places = _places_by_axes(named[1], named[3])
        return tuple(map(tuple, (_in_order(named[2])[places] if named[2] else places).tolist()))
    if "replica_groups=" in line or "source_target_pairs=" in line:
        raise ValueError(f"groups of devices written in an unknown way: {line.strip()[:300]}")
    return ()


def _in_order(text: str) -> np.ndarray:
    """Devices in the order that a text gives, listed or as those of a mesh whose axes are turned.

    >>> _in_order("[2,2]T(1,0)").tolist(), _in_order("0,2,1,3").tolist()
    ([0, 2, 1, 3], [0, 2, 1, 3])
    """
    if not text.startswith("["):
        return np.asarray(_numbers(text))
    sizes, _, axes = text.partition("T")
    devices = np.arange(np.prod(_numbers(sizes), dtype=int)).reshape(_numbers(sizes))
    return (devices.transpose(_numbers(axes)) if axes else devices).reshape(-1)


def _places_by_axes(axes: str, over: str) -> np.ndarray:
    """`[groups, devices of a group]`: the groups over some axes of a mesh, as places in it.

    Args:
      axes: names and sizes, such as "'a'=2,'b'=4".
      over: names, such as "'b'"; or parts of one, "'b':(2)2" the part of size 2 inside of the first 2.

    >>> _places_by_axes("'a'=2,'b'=4", "'a','b':(2)2").tolist()
    [[0, 1, 4, 5], [2, 3, 6, 7]]
    """
    sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", axes)}
    shape = tuple(sizes.values())
    places = dict(zip(sizes, np.unravel_index(np.arange(np.prod(shape, dtype=int)), shape), strict=True))
    for name, before, part in re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", over):
        size = int(part or sizes[name])
        inside = sizes[name] // (int(before or 1) * size)
        places[name] = places[name] - places[name] // inside % size * inside  # the first of its group along this part
    firsts = np.ravel_multi_index(tuple(places.values()), shape)
    return np.argsort(firsts, kind="stable").reshape(len(np.unique(firsts)), -1)


# --- the text ---------------------------------------------------------------------------------------------------------


def _computations(text: str) -> dict[str, list[str]]:
    """The lines of each computation, by its name."""
    found: dict[str, list[str]] = {}
    lines: list[str] | None = None
    for line in text.splitlines():
        header = re.match(r"(?:ENTRY )?%?([\w.-]+) .*\{\s*$", line)
        if header and not line.startswith((" ", "HloModule")):
            lines = found.setdefault(header.group(1), [])
        elif line.startswith("}"):
            lines = None
        elif lines is not None:
            lines.append(line)
    return found


def _loops(computations: dict[str, list[str]]) -> Any:
    """A function: the loops around a computation; the longest chain, where it is called from several places."""
    callers: dict[str, list[tuple[str, str | None]]] = {}
    for name, lines in computations.items():
        for line in lines:
            for called, loop in _called(line):
                callers.setdefault(called, []).append((name, loop))

    @functools.cache
    def around(name: str) -> tuple[str, ...]:
        chains = [around(caller) + ((loop,) if loop else ()) for caller, loop in callers.get(name, [])]
        return max(chains, key=len, default=())

    return around


def _scopes(computations: dict[str, list[str]]) -> dict[str, str]:
    """The name of each `while` -> what it was made from."""
    loops = [line for lines in computations.values() for line in lines if " while(" in line]
    found = [(_START.match(line), re.search(r'op_name="([^"]*)"', line)) for line in loops]
    return {start.group(1): name.group(1) for start, name in found if start and name}


def _beside_work(computations: dict[str, list[str]]) -> set[str]:
    """The starts between which and their ends work is scheduled, and the computations that such a start calls."""
    found: set[str] = set()
    for lines in computations.values():
        open_starts: dict[str, list[str]] = {}  # a start that hasn't ended -> it and what it calls
        for line in lines:
            start, end = _START.match(line), re.search(r" [\w-]*-done\(%?([\w.-]+)\)", line)
            if re.search(_WORK, line):
                found.update(name for names in open_starts.values() for name in names)
            if end:
                open_starts.pop(end.group(1), None)
            elif start and re.search(rf" (?:{'|'.join(KINDS)}|async)-start\(", line):
                open_starts[start.group(1)] = [start.group(1), *[name for name, _ in _called(line)]]
    return found


def _called(line: str) -> Iterator[tuple[str, str | None]]:
    """(computation that the line calls, the loop's name if it is a loop's)."""
    start = _START.match(line)
    for what, names, name in _CALL.findall(line) if start else ():
        if what in _CALLING:
            loop = start.group(1) if what in ("body", "condition") else None
            for called in (name or names).split(","):
                yield called.strip().lstrip("%"), loop


def _types(lines: list[str]) -> dict[str, str]:
    """The type of each instruction of a computation, by its name."""
    return {match.group(1): _type_at(line[match.end() :]) for line in lines if (match := _START.match(line))}


def _type_at(text: str) -> str:
    """The type that a text begins with: "f32[2,8]{1,0}", or a tuple in parentheses."""
    if not text.startswith("("):
        return text.split(" ", 1)[0]
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return text[: i + 1]
    raise ValueError(f"a type without an end: {text[:80]}")


def _result_type(kind: str, match: re.Match) -> str:
    """The type of what an instruction gives; of a start's tuple of (operand, result, ...) that of its result."""
    if match.group(2) and match.group(1) != "all-reduce":
        elements = _elements(kind)
        kind = elements[1] if len(elements) > 1 else kind
    return kind


def _elements(kind: str) -> list[str]:
    """The types in a tuple."""
    found, depth, last = [], 0, 1
    kind = re.sub(r"/\*.*?\*/", "", kind)
    for i, letter in enumerate(kind):
        depth += (letter in "([{") - (letter in ")]}")
        if (letter == "," and depth == 1) or (letter == ")" and not depth):
            found.append(kind[last:i].strip())
            last = i + 1
    return found if kind.startswith("(") else [kind]


def type_bytes(kind: str) -> int:
    """Bytes of a type.

    >>> type_bytes("(f32[2,8]{1,0:T(8,128)}, bf16[], pred[3])")
    69
    """
    return (
        sum(_bits(name) * int(np.prod(_numbers(dims))) for name, dims in re.findall(r"(\w+)\[([\d,<=]*)\]", kind)) // 8
    )


def _bits(name: str) -> int:
    digits = re.search(r"\d+", name)
    return _BITS[name] if name in _BITS else int(digits.group())  # f8e4m3fn has 8


def _operand_bytes(text: str, types: dict[str, str]) -> list[int]:
    """Bytes of each operand, which the text names up to its closing parenthesis."""
    names = re.findall(r"%?([\w.-]+)", _type_at("(" + text)[1:-1])
    return [type_bytes(types[name]) for name in names if name in types]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
