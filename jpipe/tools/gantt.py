"""Draws figures with matplotlib: timelines as rows of bars, one for each stage, over what stages hold; and profiles."""

import os
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

import numpy as np

from jpipe.schedules.actions import Action
from jpipe.schedules.simulate import Span, Timeline
from jpipe.tools import palette
from jpipe.tools.measure import MILLISECONDS, StageTimes

try:
    from matplotlib.axes import Axes
    from matplotlib.backend_bases import RendererBase
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch, Rectangle
    from matplotlib.text import Text
except ImportError as error:
    raise ImportError("pictures of schedules need matplotlib; pip install 'jpipe[plot]'") from error

Target = str | os.PathLike[str] | BytesIO | None
"""Where a picture is saved; None for a figure of pyplot's, which isn't."""
HEIGHT = 0.86
"""The height of a stage's bars; stages are 1 apart."""


def corners(bar: Span) -> list[tuple[float, float]]:
    """The corners of a bar's rectangle, `[4, 2]`."""
    low, high = bar.stage - HEIGHT / 2, bar.stage + HEIGHT / 2
    return [(bar.start, low), (bar.start, high), (bar.end, high), (bar.end, low)]


class Number(Text):
    """The micro-batch of a bar. Drawn only where the widest number of its picture would fit into the bar.

    That is decided whenever it is drawn, so that numbers come and go as a window is resized, those of equal bars
    together.
    """

    def __init__(self, bar: Span, digits: int, colour: str):
        look = {"ha": "center", "va": "center_baseline", "clip_on": True, "color": colour, "fontsize": palette.NUMBER}
        super().__init__((bar.start + bar.end) / 2, bar.stage, str(bar.action.microbatch), **look)
        self.bar = bar
        self._digits = digits
        self.set_in_layout(False)

    def fits(self, renderer: RendererBase) -> bool:
        """Whether the widest number, all digits being equally wide, leaves some of the bar free on all sides."""
        assert self.axes is not None
        (left, low), (right, high) = self.axes.transData.transform(corners(self.bar)[::2])
        extent = self.get_window_extent(renderer)
        width = extent.width * self._digits / len(self.get_text())
        return 1.15 * width <= abs(right - left) and 1.05 * extent.height <= abs(high - low)

    def draw(self, renderer: RendererBase) -> None:
        """Draws it if it fits."""
        if self.fits(renderer):
            super().draw(renderer)
        self.stale = False


def draw_gantt(axes: Axes, timeline: Timeline) -> None:
    """Draws the bars of all stages on grey lines, the first stage on top; what stays grey is the bubble.

    The x limits are the caller's, and set before: gaps between bars follow from them.
    """
    schedule = timeline.schedule
    lines = [corners(Span(stage, Action("", 0), 0.0, timeline.makespan)) for stage in range(schedule.num_stages)]
    axes.add_collection(PolyCollection(lines, facecolors=[palette.BUBBLE], zorder=0.5, label="bubble"))
    drawn = list(timeline.bars)
    narrowest = min(bar.end - bar.start for bar in drawn)
    inches = axes.get_window_extent().width / axes.get_figure(root=True).dpi  # pyright: ignore[reportOptionalMemberAccess]
    gap = float(np.clip(0.08 * 72 * inches * narrowest / axes.get_xlim()[1], 0.1, 0.8))
    digits = len(str(schedule.num_microbatches - 1))
    for kind, chunk in sorted({(bar.action.kind, bar.action.chunk) for bar in drawn}):
        colour = palette.shade(kind, chunk, schedule.num_chunks)
        alike = [bar for bar in drawn if (bar.action.kind, bar.action.chunk) == (kind, chunk)]
        look = {"facecolors": [colour], "edgecolors": "white", "linewidths": gap, "hatch": palette.HATCH.get(kind)}
        label = f"{palette.NAMES[kind]} {chunk}"
        axes.add_collection(PolyCollection(list(map(corners, alike)), label=label, **look))
        for bar in alike if kind != "R" else ():
            axes.add_artist(Number(bar, digits, palette.text_colour(colour)))
    label_stages(axes, schedule.num_stages)


def draw_memory(axes: Axes, timeline: Timeline, *, scale: float) -> None:
    """Draws an area for each stage, the first stage on top; beside it how much its peak is.

    Args:
      axes: where.
      timeline: the timeline of a schedule that trains.
      scale: the number of micro-batches that are as high as the line of a stage.
    """
    num_stages, num_chunks = timeline.schedule.num_stages, timeline.schedule.num_chunks
    for stage in range(num_stages):
        base = stage + HEIGHT / 2
        axes.add_patch(Rectangle((0, base), timeline.makespan, -HEIGHT, facecolor=palette.SCALE))
        times, counts = zip(*timeline.in_flight(stage), strict=True)
        heights = [base - HEIGHT * count / num_chunks / scale for count in counts]
        axes.stairs(heights, [*times, timeline.makespan], baseline=base, fill=True, color=palette.MEMORY, snap=False)
        most = timeline.peak_in_flight[stage] / num_chunks
        write_beside(axes, f"peak {most:g}" if stage == 0 else f"{most:g}", (timeline.makespan, stage))
    label_stages(axes, num_stages)


def label_stages(axes: Axes, num_stages: int) -> None:
    """A tick for each stage, the first on top, and no frame: it would touch the bars."""
    axes.set_yticks(range(num_stages), [f"stage {stage}" for stage in range(num_stages)])
    axes.tick_params(left=False, labelsize=palette.TEXT)
    axes.set_ylim(num_stages - 0.5, -0.5)
    axes.spines[["left", "right", "top"]].set_visible(False)


def write_beside(axes: Axes, text: str, end: tuple[float, float]) -> None:
    """Writes to the right of a bar's end, which may be at the edge of the axes."""
    look = {"va": "center_baseline", "fontsize": palette.TEXT, "annotation_clip": False}
    axes.annotate(text, end, xytext=(4, 0), textcoords="offset points", **look)


def draw_legend(where: Axes | Figure, timelines: Sequence[Timeline], *, memory: bool = False, **look: Any) -> None:
    """Says what is in these timelines: each kind of action, the bubble, and, if they are drawn, what stages hold."""
    num_chunks = max(timeline.schedule.num_chunks for timeline in timelines)
    kinds = {bar.action.kind for timeline in timelines for bar in timeline.bars}
    handles: dict[str, Any] = {}
    drawn = [kind for kind in palette.NAMES if kind in kinds]
    for kind in drawn:
        colours = [palette.shade(kind, chunk, num_chunks) for chunk in range(num_chunks)]
        hatch = palette.HATCH.get(kind)
        label = palette.NAMES[kind] + (" (darker: later chunks)" if num_chunks > 1 and kind == drawn[-1] else "")
        handles[label] = tuple(Patch(facecolor=colour, edgecolor="white", hatch=hatch) for colour in colours)
    handles["bubble: stage waits"] = Patch(facecolor=palette.BUBBLE)
    if memory:
        handles["micro-batches in flight"] = Patch(facecolor=palette.MEMORY)
    look |= {"handler_map": {tuple: HandlerTuple(ndivide=None, pad=0.0)}, "frameon": False, "fontsize": palette.TEXT}
    where.legend(list(handles.values()), list(handles), **look)


# --- figures of timelines ---------------------------------------------------------------------------------------------


def draw_timelines(
    timelines: Sequence[Timeline], path: Target, unit: str | None, *, width: float | None = None, memory: bool = True
) -> Figure:
    """A figure of all timelines, each over its memory, on one axis of time and one scale of memory."""
    panels = []
    for timeline in timelines:
        panels += [("bars", timeline), *[("memory", timeline)] * (memory and timeline.schedule.trains)]
    heights = [_height(draw, timeline, len(timelines)) for draw, timeline in panels]
    size = (width or _width(timelines), sum(heights) + 0.25 * len(timelines) + 0.06 * len(panels) + 0.7)
    figure = _new_figure(path, size, ConstrainedLayoutEngine(h_pad=0.04, w_pad=0.06, hspace=0.0))
    column = figure.subplots(len(panels), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    column[0].set_xlim(0, max(timeline.makespan for timeline in timelines))
    scale = max(1.0, *(max(timeline.peak_in_flight) / timeline.schedule.num_chunks for timeline in timelines))
    for axes, (draw, timeline) in zip(column, panels, strict=True):
        if draw == "bars":
            draw_gantt(axes, timeline)
            _title(axes, f"{timeline.schedule.title}; {timeline.in_numbers}")
        else:
            draw_memory(axes, timeline, scale=scale)
            axes.set_ylabel("memory", fontsize=palette.TEXT)
        axes.spines["bottom"].set_visible(axes is column[-1])
        axes.tick_params(bottom=axes is column[-1])
    column[-1].set_xlabel(_time_label(timelines, unit), fontsize=palette.TEXT)
    return _finish(figure, timelines, path, memory=any(draw == "memory" for draw, _ in panels))


def _title(axes: Axes, text: str) -> None:
    axes.set_title(text, fontsize=palette.TITLE, fontweight="bold", loc="left", pad=4)
    axes.tick_params(labelsize=palette.TEXT)


def draw_alone(axes: Axes, timeline: Timeline, unit: str | None) -> None:
    """Draws a timeline's bars into axes of the caller's, with a legend beside them."""
    axes.set_xlim(0, timeline.makespan)
    draw_gantt(axes, timeline)
    axes.set_title(str(timeline), fontsize=palette.TEXT)
    axes.set_xlabel(_time_label([timeline], unit))
    draw_legend(axes, [timeline], loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _finish(figure: Figure, timelines: Sequence[Timeline], path: Target, *, memory: bool = False) -> Figure:
    """The figure with a legend of its timelines below it; saved, if it has a path."""
    columns = 5 if figure.get_figwidth() > 7.5 else 2
    draw_legend(figure, timelines, memory=memory, loc="outside lower center", ncols=columns)
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


def _new_figure(path: Target, size: tuple[float, float], layout: ConstrainedLayoutEngine) -> Figure:
    """A figure of pyplot's, for a window or a notebook, unless it is to be saved."""
    if path is not None:
        return Figure(figsize=size, layout=layout)
    from matplotlib import pyplot

    return pyplot.figure(figsize=size, layout=layout)


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


# --- figures of profiles ----------------------------------------------------------------------------------------------


SLICE_COLOURS: dict[str, palette.RGB] = {
    "computation": palette.COLOURS["F"],
    "recomputation": palette.COLOURS["R"],
    "bubble": palette.BUBBLE,
    "imbalance": (0.62, 0.62, 0.62),
    "transfer and set-up": palette.MEMORY,
    "weight update": palette.COLOURS["W"],
}
NARROWEST = 0.045
"""The share of the step from which on a slice has its number in it."""


def draw_profile(
    slices: Mapping[str, float], stages: StageTimes, timeline: Timeline, path: str | os.PathLike[str] | None
) -> Figure:
    """Draws a profile; see `Profile.plot`.

    Args:
      slices: seconds of the step by `SLICES`.
      stages: seconds of the stages.
      timeline: the timeline that follows from these.
      path: where to save the picture; None draws into a new pyplot figure.
    """
    num_stages = len(stages.forward)
    line = max(0.16, 0.3 - 0.02 * num_stages)
    heights = [0.85, line * num_stages + 0.25, line * num_stages + 0.25]
    size = (7.0, sum(heights) + 0.55 * len(heights) + 0.3)
    figure = _new_figure(path, size, ConstrainedLayoutEngine(h_pad=0.05, hspace=0.03))
    column = figure.subplots(len(heights), squeeze=False, height_ratios=heights)[:, 0]
    _draw_slices(column[0], slices)
    _draw_stages(column[1], stages)
    column[2].set_xlim(0, timeline.makespan)
    draw_gantt(column[2], timeline)
    in_numbers = f"{timeline.makespan:.3g} ms, bubble {timeline.bubble_fraction:.1%}"
    _title(column[2], f"Timeline, predicted from the stages' times: {in_numbers}")
    column[2].set_xlabel("ms", fontsize=palette.TEXT)
    return _finish(figure, [timeline], path)


def _draw_slices(axes: Axes, slices: Mapping[str, float]) -> None:
    """One bar as long as the step, in its slices."""
    left, step = 0.0, sum(slices.values())
    for name, colour in SLICE_COLOURS.items():
        width, share = slices[name] * MILLISECONDS, slices[name] / step
        bar = axes.barh(0, width, left=left, color=colour, edgecolor="white", lw=0.6, label=f"{name} {share:.1%}")
        if share >= NARROWEST:
            look = {"color": palette.text_colour(colour), "fontsize": palette.TEXT}
            axes.bar_label(bar, [f"{share:.0%}"], label_type="center", **look)
        left += width
    _title(axes, f"A step of {step * MILLISECONDS:.3g} ms, by what its time goes into")
    axes.set_xlim(0, left)
    axes.set_yticks([])
    axes.spines[["left", "right", "top", "bottom"]].set_visible(False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.35), ncols=3, frameon=False, fontsize=palette.TEXT)


def _draw_stages(axes: Axes, stages: StageTimes) -> None:
    """A bar for each stage: forward, what is computed anew, backward; a line at the mean."""
    positions = np.arange(len(stages.forward))
    left = np.zeros(len(positions))
    for kind, times in (("F", stages.forward), ("R", stages.recompute), ("B", stages.backward)):
        widths = np.asarray(times) * MILLISECONDS
        hatch = palette.HATCH.get(kind)
        axes.barh(positions, widths, left=left, color=palette.COLOURS[kind], hatch=hatch, edgecolor="white", lw=0.6)
        left += widths
    mean = float(left.mean())
    axes.axvline(mean, color="black", linewidth=0.8, linestyle=":")
    for stage, end in enumerate(left):
        write_beside(axes, f"{end / mean:.2f} of the mean", (end, stage))
    _title(axes, "Stages alone: ms for one micro-batch (dotted: the mean)")
    axes.set_xlim(0, 1.15 * float(left.max()))
    label_stages(axes, len(positions))
