"""What of a timeline has a colour, or a track, of its own."""

from collections.abc import Iterator
from typing import NamedTuple

from jpipe.schedules.simulate import Timeline

HEIGHT = 0.86
"""Of a stage's bars; stages are 1 apart."""


class Bar(NamedTuple):
    """An action, or of a backward that computes anew one of its two parts: `kind` is one of `palette.NAMES`."""

    kind: str
    chunk: int
    microbatch: int
    stage: int
    start: float
    end: float

    @property
    def corners(self) -> list[tuple[float, float]]:
        """The corners of its rectangle, `[4, 2]`."""
        low, high = self.stage - HEIGHT / 2, self.stage + HEIGHT / 2
        return [(self.start, low), (self.start, high), (self.end, high), (self.end, low)]


def bars(timeline: Timeline) -> Iterator[Bar]:
    """In the order of the spans; a backward with recomputation is two bars, first "R", then "B"."""
    for stage, action, start, end, recompute in timeline.spans:
        if recompute:
            yield Bar("R", action.chunk, action.microbatch, stage, start, start + recompute)
        yield Bar(action.kind, action.chunk, action.microbatch, stage, start + recompute, end)
