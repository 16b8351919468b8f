"""A step as it ran: who did what when, read from a `jax.profiler` trace.

In a trace every operation of the compiled program is an event with the operation's name, and the program tells which
action's scope it is in. The loop of a kind of action runs once a tick on each device, for no trip where that device
idles, so its n-th event is that of tick n, and the tick table says which action it was. CPUs write such events; devices
that write none for loops have no timeline here.
"""

from __future__ import annotations

import re
import warnings
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.profiler import ProfileData, ProfileOptions
from jax.sharding import Mesh

from jpipe.mesh.axes import AXIS
from jpipe.profiling.measure import Program
from jpipe.schedules.actions import Action
from jpipe.schedules.schedule import Schedule
from jpipe.schedules.simulate import Span, Timeline
from jpipe.terminal.progress import task

NANOSECONDS = 1e6
"""In a millisecond."""

Loop = tuple[int, str]
"""A slot of a tick, and a kind of action: in the compiled program the scope "slot0/F"."""
Times = list[tuple[float, float]]
"""Starts and ends in nanoseconds."""


def record(program: Program, schedule: Schedule, mesh: Mesh, folder: str) -> Timeline | None:
    """Runs all actions of a step once under the profiler; None if the trace has no loops.

    Args:
      program: the step.
      schedule: its schedule.
      mesh: its devices.
      folder: where the trace stays, for TensorBoard and xprof.

    Returns:
      The timeline, in milliseconds from the first action's start. On several devices a stage: of the first of each.
    """
    options = ProfileOptions()
    options.python_tracer_level = 0
    everything = program.everything()
    with task("recording a trace"):
        with jax.profiler.trace(folder, profiler_options=options):
            jax.block_until_ready(program.run(everything))
        newest = max(Path(folder).rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
        with warnings.catch_warnings():
            # Python 3.12 warns of a type of jaxlib's when the first event is read; as an error that ends the process.
            warnings.filterwarnings("ignore", "builtin type .* has no __module__", DeprecationWarning)
            events = _events(newest, _scopes(program.text))
    return _timeline(events, program, schedule, mesh)


def _scopes(text: str) -> dict[str, tuple[Loop, bool]]:
    """Each operation of a compiled program that is part of an action: its name -> (whose, whether it is the loop).

    A compiler takes operations out of an action's loop, and they keep its name: only those that the loop runs are it.
    """
    scope = re.compile(r"op_name=\"[^\"]*/slot(\d+)/(\w)/while(/body/)?([^\"]*)\"")
    loops: dict[str, tuple[Loop, bool]] = {}
    parts: dict[str, tuple[Loop, str]] = {}  # with the computation that each is in
    bodies: dict[Loop, set[str]] = defaultdict(set)
    calls: dict[str, set[str]] = defaultdict(set)
    computation = ""
    for line in text.splitlines():
        if begun := re.match(r"(?:ENTRY )?%?([\w.-]+) .*\{$", line):
            computation = begun[1]
        elif named := re.match(r"\s+(?:ROOT )?%?([\w.-]+) = ", line):
            name, called, found = named[1], _called(line), scope.search(line)
            calls[computation] |= called
            if found:
                loop = int(found[1]), found[2]
                if name.startswith("while") and not found[3] and not found[4]:
                    loops[name] = loop, True
                    bodies[loop] |= called
                elif found[3]:
                    parts[name] = loop, computation
    runs = {loop: _reached(begin, calls) for loop, begin in bodies.items()}
    return loops | {name: (loop, False) for name, (loop, where) in parts.items() if where in runs.get(loop, ())}


def _called(line: str) -> set[str]:
    """The computations that an operation of a compiled program calls."""
    named = re.findall(r"\b(?:body|condition|calls|to_apply|\w+_computations?)=(\{[^}]*\}|%?[\w.-]+)", line)
    return {name for names in named for name in re.findall(r"[\w.-]+", names)}


def _reached(begin: set[str], calls: Mapping[str, set[str]]) -> set[str]:
    """These computations, and those that they call, and so on."""
    reached, new = set(), set(begin)
    while new:
        reached |= new
        new = set().union(*(calls.get(name, set()) for name in new)) - reached
    return reached


def _events(path: Path, scopes: dict[str, tuple[Loop, bool]]) -> dict[tuple[int, Loop], Times]:
    """(device, loop) -> when it ran, in order.

    A loop's own event may end before its operations have: they are run beside it. So it ends with the last of those
    that begin before the loop's next event.
    """
    loops: dict[tuple[int, Loop], list[float]] = defaultdict(list)
    parts: dict[tuple[int, Loop], Times] = defaultdict(list)
    for plane in ProfileData.from_file(str(path)).planes:
        for event in (event for line in plane.lines for event in line.events if event.name in scopes):
            stats: dict[Any, Any] = dict(event.stats)
            if "device_ordinal" in stats:
                loop, is_loop = scopes[event.name]
                key = int(stats["device_ordinal"]), loop
                parts[key].append((event.start_ns, event.end_ns))
                if is_loop:
                    loops[key].append(event.start_ns)
    return {key: _runs(sorted(starts), sorted(parts[key])) for key, starts in loops.items()}


def _runs(starts: list[float], parts: Times) -> Times:
    """For each start the latest end of the parts that begin before the next start; both are sorted."""
    begins = [begin for begin, _ in parts]
    bounds = [bisect_left(begins, start) for start in starts] + [len(parts)]
    ends = [max(end for _, end in parts[low:high]) for low, high in pairwise(bounds)]
    return list(zip(starts, ends, strict=True))


def _timeline(
    events: dict[tuple[int, Loop], Times], program: Program, schedule: Schedule, mesh: Mesh
) -> Timeline | None:
    """The actions of the tick table, at the times of the loops' events; None if events are missing."""
    table = program.table
    devices = np.moveaxis(mesh.devices, mesh.axis_names.index(AXIS), 0).reshape(schedule.num_stages, -1)[:, 0]
    spans = []
    for stage, device in enumerate(devices):
        for index, slot in enumerate(table.slots):
            for code, kind in enumerate(slot.kinds, start=1):
                times = events.get((device.local_hardware_id, (index, kind)), [])
                if len(times) != table.num_ticks:
                    return None
                for tick in np.flatnonzero(slot.kind[:, stage] == code):
                    action = Action(kind, int(slot.microbatch[tick, stage]), int(slot.chunk[tick, stage]))
                    start, end = times[tick]
                    spans.append(Span(stage, action, start / NANOSECONDS, end / NANOSECONDS))
    begin = min(span.start for span in spans)
    spans = [span._replace(start=span.start - begin, end=span.end - begin) for span in spans]
    spans.sort(key=lambda span: span.start)
    return Timeline(
        schedule=schedule,
        spans=tuple(spans),
        makespan=max(span.end for span in spans),
        busy=tuple(sum(span.end - span.start for span in spans if span.stage == k) for k in range(schedule.num_stages)),
    )
