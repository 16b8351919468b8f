"""Writes timelines as traces of Chrome's format, which ui.perfetto.dev and chrome://tracing open.

A process for each stage, in it a track for each kind of action, and a counter of the micro-batches in flight. The
format is the Trace Event Format, docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

import json
import os
from pathlib import Path

from jpipe.schedules.simulate import Span, Timeline
from jpipe.tools.palette import NAMES
from jpipe.users_numbers import as_number

Json = dict[str, object]


def chrome_trace(timeline: Timeline, path: str | os.PathLike[str] | None = None, unit_in_seconds: float = 1e-3) -> Json:
    """The trace as JSON objects; see `Timeline.to_chrome_trace`."""
    # The format counts in microseconds.
    scale = 1e6 * as_number("unit_in_seconds", unit_in_seconds, "give how long a unit of time is", positive=True)
    drawn = list(timeline.bars)
    tracks = [kind for kind in NAMES if any(bar.action.kind == kind for bar in drawn)]
    events: list[Json] = []
    for stage in range(timeline.schedule.num_stages):
        events += _names(stage, tracks)
        events += [_slice(bar, tracks, scale) for bar in drawn if bar.stage == stage]
        counter = {"ph": "C", "name": "in flight", "pid": stage}
        held = timeline.in_flight(stage)
        events += [{**counter, "ts": time * scale, "args": {"micro-batches": count}} for time, count in held]
    schedule = timeline.schedule
    others = {"schedule": schedule.name, **schedule.sizes, "bubble_fraction": timeline.bubble_fraction}
    trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": others}
    if path is not None:
        Path(path).write_text(json.dumps(trace))
    return trace


def _names(stage: int, tracks: list[str]) -> list[Json]:
    """The names of a stage and its tracks in the viewer, and their order."""
    named = [("process_name", 0, {"name": f"stage {stage}"}), ("process_sort_index", 0, {"sort_index": stage})]
    for thread, kind in enumerate(tracks):
        named += [("thread_name", thread, {"name": NAMES[kind]}), ("thread_sort_index", thread, {"sort_index": thread})]
    return [{"ph": "M", "name": name, "pid": stage, "tid": thread, "args": args} for name, thread, args in named]


def _slice(bar: Span, tracks: list[str], scale: float) -> Json:
    """Makes the event of a bar, on its kind's track; times are scaled to microseconds."""
    action, times = bar.action, {"ts": bar.start * scale, "dur": (bar.end - bar.start) * scale}
    place = {"pid": bar.stage, "tid": tracks.index(action.kind), **times}
    args = {"micro-batch": action.microbatch, "chunk": action.chunk}
    return {"ph": "X", "name": str(action), "cat": NAMES[action.kind], **place, "args": args}
