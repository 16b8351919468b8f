"""Draws timelines: `Timeline.plot`, `Profile.plot`, `jpipe.compare`.

A picture has a row of bars for each stage, over what the stages hold. matplotlib is imported when something is drawn.
Colours are those that people with any colour vision tell apart (Okabe and Ito, jfly.uni-koeln.de/color). They differ in
lightness too, for prints without colour.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jpipe.schedules.actions import ACTION_KINDS
from jpipe.schedules.orders import make_schedule
from jpipe.schedules.schedule import Schedule
from jpipe.schedules.simulate import Span, Timeline, simulate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEIGHT = 0.86
"""The height of a stage's bars; stages are 1 apart."""
TITLE, TEXT, NUMBER = 10.0, 8.5, 6.0
"""Points of what is written: above bars, beside them, and in them. Legible where a picture of 6 inches is as wide as a
telephone."""

# --- colours ----------------------------------------------------------------------------------------------------------

RGB = tuple[float, float, float]

COLOURS: dict[str, RGB] = {
    "F": (0.000, 0.447, 0.698),  # blue
    "R": (0.337, 0.706, 0.914),  # sky blue, hatched: the forward once more
    "B": (0.902, 0.624, 0.000),  # orange
    "I": (0.600, 0.150, 0.000),  # vermillion, darker: its own is near to orange
    "W": (0.000, 0.620, 0.451),  # bluish green
}
"""The colours of kinds of action; "R" is also what a backward computes anew, and "W" what else is done to weights."""
BUBBLE: RGB = (0.90, 0.90, 0.90)
MEMORY: RGB = (0.800, 0.475, 0.655)  # reddish purple
SCALE: RGB = (0.96, 0.94, 0.95)  # behind memory, as high as the scale
HATCH = {"R": "////"}
LATER = "darker: later chunks"
DARKEST = 0.45
"""The part by which the last of many chunks is darker than the first."""


def shade(kind: str, chunk: int, num_chunks: int) -> RGB:
    """The colour of a kind on a chunk: the later the chunk, the darker."""
    darker = DARKEST * chunk / max(1, num_chunks - 1)
    red, green, blue = COLOURS[kind]
    return red * (1 - darker), green * (1 - darker), blue * (1 - darker)


def text_colour(background: RGB) -> str:
    """Black or white, whichever is easier to read on a background (WCAG's contrast of luminances)."""
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in background)
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "white" if (luminance + 0.05) ** 2 < 1.05 * 0.05 else "black"


# --- what users call --------------------------------------------------------------------------------------------------


def plot(timeline: Timeline, path: str | os.PathLike[str] | None = None, *, unit: str | None = None) -> Axes:
    """Draws one timeline; see `Timeline.plot`."""
    return draw_timelines([timeline], path, unit).axes[0]


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
    if isinstance(schedules, str) or not isinstance(schedules, Sequence):
        raise TypeError(f'schedules={schedules!r} is no list; pass names, schedules or timelines, as ["gpipe", "1f1b"]')
    if not schedules:
        raise ValueError('schedules is empty; pass names, schedules or timelines, as ["gpipe", "1f1b"]')

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


# --- panels -----------------------------------------------------------------------------------------------------------


def draw_gantt(axes: Axes, timeline: Timeline, end: float, title: str) -> None:
    """Draws the bars of all stages on grey lines, the first stage on top; what stays grey is the bubble.

    Bars have the numbers of their micro-batches where the longest number fits.

    Args:
      axes: where.
      timeline: what is drawn.
      end: the end of the axis of time.
      title: the text above.
    """
    schedule, alike = timeline.schedule, defaultdict[tuple[str, int], list[Span]](list)
    for bar in timeline.bars:
        alike[bar.action.kind, bar.action.chunk].append(bar)
    axes.set_xlim(0, end)
    points = axes.bbox.width * 72 / axes.figure.dpi / end
    narrowest = min(bar.end - bar.start for bar in timeline.bars)
    needed = 0.75 * NUMBER * len(str(schedule.num_microbatches - 1)) / points
    for kind, chunk in sorted(alike, key=lambda each: [*ACTION_KINDS].index(each[0])):
        bars, colour = alike[kind, chunk], shade(kind, chunk, schedule.num_chunks)
        starts, lengths = [bar.start for bar in bars], [bar.end - bar.start for bar in bars]
        look = {"color": colour, "edgecolor": "white", "linewidth": np.clip(0.08 * points * narrowest, 0.1, 0.8)}
        look |= {"hatch": HATCH.get(kind), "label": LATER if chunk else ACTION_KINDS[kind].name}
        drawn = axes.barh([bar.stage for bar in bars], lengths, HEIGHT, starts, **look)
        numbers = [str(bar.action.microbatch) if bar.end - bar.start > needed else "" for bar in bars]
        for text in axes.bar_label(drawn, numbers, label_type="center", fontsize=NUMBER) if kind != "R" else ():
            text.set(color=text_colour(colour), va="center_baseline", in_layout=False)
    grey = {"color": BUBBLE, "zorder": 0.5, "label": "bubble: stage waits"}
    axes.barh(range(schedule.num_stages), timeline.makespan, HEIGHT, **grey)
    label_stages(axes, schedule.num_stages)
    axes.set_title(title, fontsize=TITLE, fontweight="bold", loc="left", pad=4)


def draw_memory(axes: Axes, timeline: Timeline, end: float, scale: float) -> None:
    """Draws an area for each stage, the first stage on top; beside it how much its peak is.

    Args:
      axes: where.
      timeline: the timeline of a schedule that trains.
      end: the end of the axis of time.
      scale: the number of micro-batches that are as high as the line of a stage.
    """
    num_stages, num_chunks = timeline.schedule.num_stages, timeline.schedule.num_chunks
    axes.set_xlim(0, end)
    axes.barh(range(num_stages), timeline.makespan, HEIGHT, color=SCALE)
    for stage in range(num_stages):
        base = stage + HEIGHT / 2
        times, counts = zip(*timeline.in_flight(stage), strict=True)
        heights = [base - HEIGHT * count / num_chunks / scale for count in counts]
        look = {"fill": True, "color": MEMORY, "snap": False, "label": "micro-batches in flight"}
        axes.stairs(heights, [*times, timeline.makespan], baseline=base, **look)
        most = timeline.peak_in_flight[stage] / num_chunks
        write_beside(axes, f"peak {most:g}" if stage == 0 else f"{most:g}", (timeline.makespan, stage))
    axes.set_ylabel("memory", fontsize=TEXT)
    label_stages(axes, num_stages)


def label_stages(axes: Axes, num_stages: int) -> None:
    """Labels the stages, the first on top, and leaves out the frame, which would touch the bars."""
    axes.set_yticks(range(num_stages), [f"stage {stage}" for stage in range(num_stages)])
    axes.tick_params(left=False, labelsize=TEXT)
    axes.set_ylim(num_stages - 0.5, -0.5)
    axes.spines[["left", "right", "top"]].set_visible(False)


def write_beside(axes: Axes, text: str, end: tuple[float, float]) -> None:
    """Writes to the right of a bar's end, which may be at the edge of the axes."""
    look = {"va": "center_baseline", "fontsize": TEXT, "annotation_clip": False}
    axes.annotate(text, end, xytext=(4, 0), textcoords="offset points", **look)


def draw_legend(figure: Figure, panels: Sequence[Axes]) -> None:
    """Says below a figure what is in these panels, each thing once."""
    handles: dict[str, Any] = {}
    for axes in panels:
        handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    look = {"loc": "outside lower center", "ncols": 5 if figure.get_figwidth() > 7.5 else 2, "fontsize": TEXT}
    figure.legend([*handles.values()], [*handles], frameon=False, **look)


# --- figures of timelines ---------------------------------------------------------------------------------------------


def draw_timelines(
    timelines: Sequence[Timeline],
    path: str | os.PathLike[str] | None,
    unit: str | None,
    *,
    width: float | None = None,
    memory: bool = True,
) -> Figure:
    """A figure of all timelines, each over its memory, on one axis of time and one scale of memory.

    It is one of pyplot's, for a window or a notebook, unless it is saved. Arguments are as `compare` takes them.
    """
    try:
        from matplotlib import pyplot
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise ImportError("pictures of schedules need matplotlib; pip install 'jpipe[plot]'") from error
    end = max(timeline.makespan for timeline in timelines)
    scale = max(1.0, *(max(timeline.peak_in_flight) / timeline.schedule.num_chunks for timeline in timelines))
    panels = [(t, draws) for t in timelines for draws in ("bars", *["memory"] * (memory and t.schedule.trains))]
    heights = [_height(draws, timeline, len(timelines)) for timeline, draws in panels]
    texts = 0.25 * len(timelines) + 0.06 * len(panels) + 0.7  # inches above and below the panels
    layout = ConstrainedLayoutEngine(h_pad=0.04, w_pad=0.06, hspace=0.0)
    figsize = width or _width(timelines), sum(heights) + texts
    figure = (pyplot.figure if path is None else Figure)(figsize=figsize, layout=layout)
    column = figure.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights)[:, 0].tolist()
    for axes, (timeline, draws) in zip(column, panels, strict=True):
        if draws == "bars":
            draw_gantt(axes, timeline, end, f"{timeline.schedule.title}; {timeline.in_numbers}")
        else:
            draw_memory(axes, timeline, end, scale)
        axes.spines["bottom"].set_visible(axes is column[-1])
        axes.tick_params(bottom=axes is column[-1])
    column[-1].set_xlabel(time_label(timelines, unit), fontsize=TEXT)
    draw_legend(figure, column)
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


def _width(timelines: Sequence[Timeline]) -> float:
    """Inches: bars as wide as two digits; at least half a page, and at most a screen (a page, for several)."""
    lengths = [span.end - span.start for timeline in timelines for span in timeline.spans]
    narrowest = min(length for length in lengths if length > 0)  # a W may take no time
    longest = max(timeline.makespan for timeline in timelines)
    return 1.2 + min(8.0 if len(timelines) > 1 else 13.0, max(5.0, 0.11 * longest / narrowest))


def _height(draws: str, timeline: Timeline, num_timelines: int) -> float:
    """Inches of a panel; the more stages and the more timelines, the less for each stage."""
    num_stages = timeline.schedule.num_stages
    most, least = (0.25, 0.165) if draws == "bars" else (0.23, 0.15)
    return num_stages * (least if num_timelines > 2 else max(least, most - 0.01 * max(0, num_stages - 4)))


def time_label(timelines: Sequence[Timeline], unit: str | None) -> str:
    """The label of the axis of time: the user's unit, or a forward where all take 1, or just "time"."""
    forwards = [(s, t.schedule.num_chunks) for t in timelines for s in t.spans if s.action.kind == "F"]
    is_one = all(abs((span.end - span.start) * num_chunks - 1.0) < 1e-9 for span, num_chunks in forwards)
    own = "1 = the forward of one micro-batch on one stage" if is_one else "unit of the simulated times"
    return f"time ({unit or own})"
