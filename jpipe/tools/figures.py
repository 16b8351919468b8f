"""Draws whole figures: a timeline over its memory (`Timeline.plot`), several schedules (`jpipe.compare`).

matplotlib is imported when something is drawn.
"""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Sequence
from html import escape
from importlib import import_module
from io import BytesIO
from typing import TYPE_CHECKING, Any

from jpipe.schedules.orders import make_schedule
from jpipe.schedules.schedule import Schedule
from jpipe.schedules.simulate import Timeline, simulate
from jpipe.tools import palette

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Target = str | os.PathLike[str] | BytesIO | None
"""Where a picture is saved; None for a figure of pyplot's, which isn't."""

MOST_SPANS = 4096
"""The most actions of a timeline that a notebook draws by itself: some seconds."""


def plot(
    timeline: Timeline, path_or_ax: str | os.PathLike[str] | Axes | None = None, *, unit: str | None = None
) -> Axes:
    """Draws one timeline; see `Timeline.plot`."""
    check_matplotlib()
    from jpipe.tools.gantt import draw_gantt, draw_legend

    if path_or_ax is None or isinstance(path_or_ax, (str, os.PathLike)):
        return _draw([timeline], path_or_ax, unit).axes[0]
    path_or_ax.set_xlim(0, timeline.makespan)
    draw_gantt(path_or_ax, timeline)
    path_or_ax.set_title(str(timeline), fontsize=palette.TEXT)
    path_or_ax.set_xlabel(_time_label([timeline], unit))
    draw_legend(path_or_ax, [timeline], loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return path_or_ax


def to_html(what: Schedule | Timeline) -> str:
    """The HTML for a notebook: the timeline's picture; its text without matplotlib, or if it takes long to draw."""
    timeline, why_not = simulate(what) if isinstance(what, Schedule) else what, ""
    if len(timeline.spans) > MOST_SPANS:
        why_not = f"{len(timeline.spans):,} actions take long to draw; Timeline.plot() does"
    try:
        check_matplotlib()
    except ImportError as error:
        why_not = str(error)
    if why_not:
        return f"<pre>{escape(str(timeline))}\n{escape(str(timeline.schedule))}\n{escape(why_not)}</pre>"
    picture = BytesIO()
    figure = _draw([timeline], picture, None)
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
      **times: `forward`, `backward`, `weight`, `recompute` and `lockstep` of `simulate`, for names and schedules.

    Returns:
      The figure; its axes are bars and memory of each schedule in turn (bars alone where nothing trains).

    Raises:
      ImportError: matplotlib is not installed; `pip install 'jpipe[plot]'`.
      TypeError: `schedules` is no sequence, or something in it neither a name, a schedule nor a timeline.
      ValueError: there are none, or a name without `num_stages` and `num_microbatches`.
    """
    check_matplotlib()
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
            chunks = num_chunks if item == "interleaved" else 2 if "v" in item.split("-") else 1
            item = make_schedule(item, num_stages=num_stages, num_microbatches=num_microbatches, num_chunks=chunks)
        return simulate(item, **times)

    return _draw(list(map(timeline_of, schedules)), path, unit, width=width, memory=memory)


def check_matplotlib() -> None:
    """Raises an ImportError that names the extra if matplotlib is not installed."""
    try:
        import_module("matplotlib.figure")
    except ImportError as error:
        raise ImportError("pictures of schedules need matplotlib; pip install 'jpipe[plot]'") from error


def _draw(
    timelines: Sequence[Timeline], path: Target, unit: str | None, *, width: float | None = None, memory: bool = True
) -> Figure:
    """A figure of all timelines, each over its memory, on one axis of time and one scale of memory."""
    from jpipe.tools.gantt import draw_gantt, draw_memory, peak

    panels = []
    for timeline in timelines:
        panels += [("bars", timeline), *[("memory", timeline)] * (memory and timeline.schedule.trains)]
    heights = [_height(draw, timeline, len(timelines)) for draw, timeline in panels]
    size = (width or _width(timelines), sum(heights) + 0.25 * len(timelines) + 0.06 * len(panels) + 0.7)
    figure = new_figure(path, size)
    figure.get_layout_engine().set(h_pad=0.04, w_pad=0.06, hspace=0.0)  # pyright: ignore[reportOptionalMemberAccess, reportCallIssue]
    column = figure.subplots(len(panels), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    column[0].set_xlim(0, max(timeline.makespan for timeline in timelines))
    scale = max(1.0, *map(peak, timelines))
    for axes, (draw, timeline) in zip(column, panels, strict=True):
        if draw == "bars":
            draw_gantt(axes, timeline)
            title = f"{timeline.schedule.title}; {timeline.in_numbers}"
            axes.set_title(title, fontsize=palette.TITLE, fontweight="bold", loc="left", pad=4)
        else:
            draw_memory(axes, timeline, scale=scale)
            axes.set_ylabel("memory", fontsize=palette.TEXT)
        axes.spines["bottom"].set_visible(axes is column[-1])
        axes.tick_params(bottom=axes is column[-1])
    column[-1].set_xlabel(_time_label(timelines, unit), fontsize=palette.TEXT)
    return finish(figure, timelines, path, memory=any(draw == "memory" for draw, _ in panels))


def finish(figure: Figure, timelines: Sequence[Timeline], path: Target, *, memory: bool = False) -> Figure:
    """The figure with a legend of its timelines below it; saved, if it has a path."""
    from jpipe.tools.gantt import draw_legend

    columns = 5 if figure.get_figwidth() > 7.5 else 2
    draw_legend(figure, timelines, memory=memory, loc="outside lower center", ncols=columns)
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


def new_figure(path: Target, size: tuple[float, float]) -> Figure:
    """A figure of pyplot's, for a window or a notebook, unless it is to be saved."""
    if path is not None:
        from matplotlib.figure import Figure

        return Figure(figsize=size, layout="constrained")
    from matplotlib import pyplot

    return pyplot.figure(figsize=size, layout="constrained")


def _width(timelines: Sequence[Timeline]) -> float:
    """Inches: bars as wide as two digits; at least half a page, and at most a screen (a page, for several)."""
    lengths = [span.end - span.start for timeline in timelines for span in timeline.spans]
    narrowest = min(length for length in lengths if length > 0)  # a W may take no time
    longest = max(timeline.makespan for timeline in timelines)
    return 1.2 + min(8.0 if len(timelines) > 1 else 13.0, max(5.0, 0.11 * longest / narrowest))


def _height(draw: str, timeline: Timeline, num_timelines: int) -> float:
    """Inches of a panel; the more stages and the more timelines, the less for each stage."""
    num_stages = timeline.schedule.num_stages
    most, least = (0.25, 0.165) if draw == "bars" else (0.23, 0.15)
    return num_stages * (least if num_timelines > 2 else max(least, most - 0.01 * max(0, num_stages - 4)))


def _time_label(timelines: Sequence[Timeline], unit: str | None) -> str:
    """The label of the axis of time: the user's unit, or a forward where all take 1, or just "time"."""
    if unit is not None:
        return f"time ({unit})"
    forwards = [(s, t.schedule.num_chunks) for t in timelines for s in t.spans if s.action.kind == "F"]
    if all(abs((span.end - span.start) * num_chunks - 1.0) < 1e-9 for span, num_chunks in forwards):
        return "time (1 = the forward of one micro-batch on one stage)"
    return "time (unit of the simulated times)"
