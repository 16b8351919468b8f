"""Shows timelines: as a picture (`Timeline.plot`, `jpipe.compare`), as HTML, as a trace of Chrome's format.

matplotlib is imported when something is drawn.
"""

from __future__ import annotations

import json
import os
from base64 import b64encode
from collections.abc import Sequence
from html import escape
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jpipe.schedules.orders import make_schedule
from jpipe.schedules.schedule import Schedule
from jpipe.schedules.simulate import Span, Timeline, simulate
from jpipe.tools.palette import NAMES
from jpipe.users_numbers import as_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_SPANS = 4096
"""The most actions of a timeline that a notebook draws by itself: some seconds."""


def plot(
    timeline: Timeline, path_or_ax: str | os.PathLike[str] | Axes | None = None, *, unit: str | None = None
) -> Axes:
    """Draws one timeline; see `Timeline.plot`."""
    from jpipe.tools.gantt import draw_alone, draw_timelines

    if path_or_ax is None or isinstance(path_or_ax, (str, os.PathLike)):
        return draw_timelines([timeline], path_or_ax, unit).axes[0]
    draw_alone(path_or_ax, timeline, unit)
    return path_or_ax


def to_html(what: Schedule | Timeline) -> str:
    """The HTML for a notebook: the timeline's picture; its text without matplotlib, or if it takes long to draw."""
    timeline = simulate(what) if isinstance(what, Schedule) else what
    try:
        from jpipe.tools.gantt import draw_timelines

        if len(timeline.spans) > MOST_SPANS:
            raise ValueError(f"{len(timeline.spans):,} actions take long to draw; Timeline.plot() does")
    except (ImportError, ValueError) as why_not:
        return f"<pre>{escape(str(timeline))}\n{escape(str(timeline.schedule))}\n{escape(str(why_not))}</pre>"
    picture = BytesIO()
    figure = draw_timelines([timeline], picture, None)
    style = f"width: {100 * figure.get_figwidth():.0f}px; max-width: 100%"
    source = b64encode(picture.getvalue()).decode()
    return f'<img alt="{escape(str(timeline))}" style="{style}" src="data:image/png;base64,{source}">'


def compare(
    schedules: Sequence[str | Schedule | Timeline],
    path: str | os.PathLike[str] | None = None,
    *,
    num_stages: int | None = None,
    num_microbatches: int | None = None,
    num_chunks: int = 2,
    unit: str | None = None,
    width: float | None = None,
    memory: bool = True,
    **times: Any,
) -> Figure:
    """Draws schedules below each other on one time axis, each over what its stages hold, all on the same scale.

        jpipe.compare(["gpipe", "1f1b", "interleaved"], num_stages=4, num_microbatches=8)

    Args:
      schedules: names (as for `make_schedule`), schedules or timelines.
      path: where to save the picture; None draws into a new pyplot figure.
      num_stages: K, for names.
      num_microbatches: M, for names.
      num_chunks: V, for the name "interleaved".
      unit: the unit of the times, such as "ms".
      width: the picture's width in inches; default: as its bars need. With 6 its texts can be read on a telephone.
      memory: whether what stages hold is drawn.
      **times: `forward`, `backward`, `weight` and `recompute` of `simulate`, for names and schedules.

    Returns:
      The figure; its axes are bars and memory of each schedule in turn (bars alone where nothing trains).

    Raises:
      ImportError: matplotlib is not installed; `pip install 'jpipe[plot]'`.
      TypeError: `schedules` is no sequence, or something in it neither a name, a schedule nor a timeline.
      ValueError: there are none, or a name without `num_stages` and `num_microbatches`.
    """
    from jpipe.tools.gantt import draw_timelines

    remedy = 'pass names, schedules or timelines, as ["gpipe", "1f1b"]'
    if isinstance(schedules, str) or not isinstance(schedules, Sequence):
        raise TypeError(f"schedules={schedules!r} is no list; {remedy}")
    if not schedules:
        raise ValueError(f"schedules is empty; {remedy}")

    def timeline_of(item: str | Schedule | Timeline) -> Timeline:
        if isinstance(item, Timeline):
            return item
        if isinstance(item, str):
            if num_stages is None or num_microbatches is None:
                raise ValueError(f"schedule {item!r} is a name: pass num_stages and num_microbatches too")
            chunks = num_chunks if item == "interleaved" else 2 if item == "v" else 1
            item = make_schedule(item, num_stages=num_stages, num_microbatches=num_microbatches, num_chunks=chunks)
        return simulate(item, **times)

    return draw_timelines(list(map(timeline_of, schedules)), path, unit, width=width, memory=memory)


# --- traces that ui.perfetto.dev and chrome://tracing open ------------------------------------------------------------


Json = dict[str, object]


def chrome_trace(timeline: Timeline, path: str | os.PathLike[str] | None, unit_in_seconds: float) -> Json:
    """The trace as JSON objects; see `Timeline.to_chrome_trace`.

    A process for each stage, in it a track for each kind of action, and a counter of the micro-batches in flight. The
    format is the Trace Event Format, docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
    """
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
