"""The schedules of papers, as `examples/published_orders.py` makes them, and timed as the papers do."""

import sys
from dataclasses import replace
from pathlib import Path

from jpipe.schedules.actions import Placed, needs
from jpipe.schedules.orders import make_schedule
from jpipe.schedules.schedule import Schedule
from jpipe.schedules.simulate import Span, Timeline

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from published_orders import PUBLISHED as PUBLISHED

TWO_CHUNKS = ("zb-v", "v-half", "v-min", "dualpipe-v")


def schedule_of(name: str, num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """The schedule of that name, jpipe's or a paper's."""
    if name in PUBLISHED:
        return PUBLISHED[name](num_stages, num_microbatches)
    return make_schedule(name, num_stages=num_stages, num_microbatches=num_microbatches, num_chunks=num_chunks)


def published_of(num_chunks: int) -> list[str]:
    """The names of those of papers that have so many chunks a stage."""
    return [name for name in PUBLISHED if num_chunks == 1 + (name in TWO_CHUNKS)]


def out_of_lockstep(timeline: Timeline) -> Timeline:
    """The same actions, each as soon as the one before it on its stage, and those that it needs, have ended.

    So papers time schedules, for stages that are programs of their own. Hops take no time here. A timeline lists an
    action after those that it needs.
    """
    ends: dict[Placed, float] = {}
    clocks = [0.0] * timeline.schedule.num_stages
    spans: list[Span] = []
    for stage, action, *times, recompute in timeline.spans:
        start = max([clocks[stage], *(ends[need] for need in needs(timeline.schedule, stage, action))])
        ends[stage, action] = clocks[stage] = start + times[1] - times[0]
        spans.append(Span(stage, action, start, clocks[stage], recompute))
    return replace(timeline, spans=tuple(spans), makespan=max(clocks))
