"""Draws the parts of a figure: a row of bars for each stage, what stages hold, and the legend."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backend_bases import RendererBase
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.patches import Patch, Rectangle
from matplotlib.text import Text

from jpipe.schedules.actions import Action
from jpipe.schedules.simulate import Span, Timeline
from jpipe.tools import palette

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


def peak(timeline: Timeline) -> float:
    """The most that any stage holds, in micro-batches: a chunk of V holds a V-th of one."""
    return max(timeline.peak_in_flight) / timeline.schedule.num_chunks


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
