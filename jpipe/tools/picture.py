"""Draws a profile: what the step's time goes into, what each stage takes, and the timeline that follows."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jpipe.schedules.simulate import Timeline
from jpipe.tools import palette
from jpipe.tools.figures import finish, new_figure
from jpipe.tools.gantt import draw_gantt, label_stages, write_beside
from jpipe.tools.measure import MILLISECONDS, SLICES, StageTimes
from jpipe.tools.palette import RGB

COLOURS: dict[str, RGB] = {
    "computation": palette.COLOURS["F"],
    "recomputation": palette.COLOURS["R"],
    "bubble": palette.BUBBLE,
    "imbalance": (0.62, 0.62, 0.62),
    "transfer and set-up": palette.MEMORY,
    "weight update": palette.COLOURS["W"],
}
NARROWEST = 0.045
"""The share of the step from which on a slice has its number in it."""


def draw(
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
    figure = new_figure(path, (7.0, sum(heights) + 0.55 * len(heights) + 0.3))
    figure.get_layout_engine().set(h_pad=0.05, hspace=0.03)  # pyright: ignore[reportOptionalMemberAccess, reportCallIssue]
    column = figure.subplots(len(heights), squeeze=False, height_ratios=heights)[:, 0]
    _draw_slices(column[0], slices)
    _draw_stages(column[1], stages)
    column[2].set_xlim(0, timeline.makespan)
    draw_gantt(column[2], timeline)
    in_numbers = f"{timeline.makespan:.3g} ms, bubble {timeline.bubble_fraction:.1%}"
    _title(column[2], f"Timeline, predicted from the stages' times: {in_numbers}")
    column[2].set_xlabel("ms", fontsize=palette.TEXT)
    return finish(figure, [timeline], path)


def _title(axes: Axes, text: str) -> None:
    axes.set_title(text, fontsize=palette.TITLE, fontweight="bold", loc="left", pad=4)
    axes.tick_params(labelsize=palette.TEXT)


def _draw_slices(axes: Axes, slices: Mapping[str, float]) -> None:
    """One bar as long as the step, in its slices."""
    left, step = 0.0, sum(slices.values())
    for name in SLICES:
        width, share, colour = slices[name] * MILLISECONDS, slices[name] / step, COLOURS[name]
        label = f"{name} {share:.1%}"
        bar = axes.barh(0, width, left=left, color=colour, edgecolor="white", linewidth=0.6, label=label)
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
