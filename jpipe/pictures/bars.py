"""Divides a timeline into bars: one for each thing that has a colour, or a track, of its own."""

from collections.abc import Iterator

from jpipe.schedules.simulate import Span, Timeline

HEIGHT = 0.86
"""The height of a stage's bars; stages are 1 apart."""


def bars(timeline: Timeline) -> Iterator[Span]:
    """The bars in the order of the spans; a backward with recomputation is two, first of the kind "R", then of "B"."""
    for stage, action, start, end, recompute in timeline.spans:
        if recompute:
            yield Span(stage, action._replace(kind="R"), start, start + recompute)
        yield Span(stage, action, start + recompute, end)


def corners(bar: Span) -> list[tuple[float, float]]:
    """The corners of a bar's rectangle, `[4, 2]`."""
    low, high = bar.stage - HEIGHT / 2, bar.stage + HEIGHT / 2
    return [(bar.start, low), (bar.start, high), (bar.end, high), (bar.end, low)]
