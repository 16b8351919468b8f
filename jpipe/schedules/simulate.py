"""`simulate`: computes how long a schedule takes, its bubble and its memory, without running it.

It goes through the slots of the executor's ticks, so it times what will run, and not an idealised pipeline.
"""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from jpipe.schedules.actions import ACTION_KINDS, Action, Placed, crosses_beside
from jpipe.schedules.schedule import Schedule
from jpipe.users_numbers import as_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Times: TypeAlias = float | Sequence[float]
"""A time of all stages, or K times."""


class Span(NamedTuple):
    """One action in time: it runs on `stage` from `start` to `end`, in the unit of `simulate`'s times.

    A backward computes its forward once more in the first `recompute` of this time.
    """

    stage: int
    action: Action
    start: float
    end: float
    recompute: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """A schedule in time. Times are in the unit of the `forward` and `backward` that `simulate` was called with.

    Attributes:
      schedule: the schedule that was simulated.
      spans: every action with its start and end, in slot order.
      makespan: the time from the first action's start to the last one's end.
      busy: K numbers, the time for which each stage works.
      transfer: the time of a hop, as `simulate` was called with.
    """

    schedule: Schedule
    spans: tuple[Span, ...]
    makespan: float
    busy: tuple[float, ...]
    transfer: float = 0.0

    def __str__(self) -> str:
        """Its time, bubble and, if it trains, the most micro-batches in flight by stage, a chunk as a V-th of one.

        >>> from jpipe.schedules.orders import make_schedule
        >>> print(simulate(make_schedule("1f1b", num_stages=4, num_microbatches=8)))
        1f1b: K=4, M=8, V=1; time 33, bubble 27.3 %, peak in flight 7, 5, 3, 1
        """
        peaks = [f"{peak / self.schedule.num_chunks:g}" for peak in self.peak_in_flight]
        if len(peaks) > 8:
            peaks[4:-2] = ["..."]
        held = f", peak in flight {', '.join(peaks)}" if self.schedule.trains else ""
        return f"{self.schedule.title}; {self.in_numbers}{held}"

    def __repr__(self) -> str:
        return f"<Timeline {self}>"

    @property
    def in_numbers(self) -> str:
        """Its time and bubble."""
        return f"time {self.makespan:g}, bubble {100 * self.bubble_fraction:.1f} %"

    @property
    def bubble_fraction(self) -> float:
        """The share of the stages' time in which they idle (GPipe, section 2.3)."""
        return 1.0 - sum(self.busy) / (len(self.busy) * self.makespan) if self.makespan else 0.0

    @property
    def speedup_over_naive(self) -> float:
        """How many times as fast as naive model parallelism with the same K, M and times.

        The naive order does one action at a time, so its makespan is the work of all stages together, and every hop of
        every micro-batch through one chunk a stage.
        """
        passes = self.schedule.num_microbatches * (2 if self.schedule.trains else 1)
        return (sum(self.busy) + passes * (len(self.busy) - 1) * self.transfer) / self.makespan

    @property
    def bars(self) -> Iterator[Span]:
        """The spans in order, a backward with recomputation as two: first of the kind "R", then of its own."""
        for stage, action, start, end, recompute in self.spans:
            if recompute:
                yield Span(stage, action._replace(kind="R"), start, start + recompute)
            yield Span(stage, action, start + recompute, end)

    @cached_property
    def of_stages(self) -> tuple[tuple[Span, ...], ...]:
        """K times the spans of a stage, in its order."""
        spans: list[list[Span]] = [[] for _ in range(self.schedule.num_stages)]
        for span in self.spans:
            spans[span.stage].append(span)
        return tuple(map(tuple, spans))

    @cached_property
    def peak_in_flight(self) -> tuple[int, ...]:
        """K numbers, the most (micro-batch, chunk) pairs that a stage holds at once (see `in_flight`)."""
        return tuple(max(n for _, n in self.in_flight(stage)) for stage in range(self.schedule.num_stages))

    def in_flight(self, stage: int, start: str = "F", end: str = "BW") -> list[tuple[float, int]]:
        """How many micro-batches a stage holds over time: pairs (time, the number from then on), the first at 0.0.

        It counts the (micro-batch, chunk) pairs between the start of their F and the end of their B, or of their W
        where the backward is split; none in a forward-only schedule, which keeps nothing for a backward. With `start`
        and `end` it counts those between other kinds: `("F", "BI")`, `("F", "BIW")` and `("I", "W")` are the rows
        "residual", "late_residual" and "w_input" of `jpipe.schedules.ticks`.

        >>> from jpipe.schedules.orders import make_schedule
        >>> simulate(make_schedule("gpipe", num_stages=2, num_microbatches=2)).in_flight(1)
        [(0.0, 0), (1.0, 1), (2.0, 2), (5.0, 1), (7.0, 0)]
        """
        spans = self.of_stages[stage]
        since = {span.action[1:]: span.start for span in spans if span.action.kind in start}
        until = {span.action[1:]: span.end for span in spans if span.action.kind in end and span.action[1:] in since}
        changes = Counter({0.0: 0})
        changes.update(since[pair] for pair in until)
        changes.subtract(until.values())
        times = [time for time in sorted(changes) if changes[time] or time == 0.0]
        return list(zip(times, accumulate(changes[time] for time in times), strict=True))

    def plot(self, path: "str | os.PathLike[str] | None" = None, *, unit: str | None = None) -> "Axes":
        """Draws the timeline: a line of bars for each stage, and below it what each stage holds over time.

        Each kind of action has a colour, each chunk a shade, each bar the number of its micro-batch where it fits.

        Args:
          path: where to save the picture; None draws into a new pyplot figure.
          unit: the unit of the times, such as "ms".

        Returns:
          The axes with the bars; `.figure.axes[1]` are those with the memory.

        Raises:
          ImportError: matplotlib is not installed; `pip install 'jpipe[plot]'`.
        """
        from jpipe.tools.figures import plot

        return plot(self, path, unit=unit)


def simulate(
    schedule: Schedule,
    forward: float | Sequence[float] = 1.0,
    backward: float | Sequence[float] = 2.0,
    transfer: float = 0.0,
    *,
    weight: float | Sequence[float] | None = None,
    recompute: float | Sequence[float] = 0.0,
    microbatches: Sequence[float] | None = None,
) -> Timeline:
    """Times a schedule as the executor runs it, in lockstep.

    A stage runs its slots in order; an idle slot takes no time. After a slot come the `ppermute`s of the kinds that it
    admits, on all stages and in all ticks, so a stage starts its next slot when the slot just past has ended on itself,
    on the stage before (if that slot admits F) and on the stage after (if it admits B or I). The last stage counts as
    the one before the first where V > 1. What is sent is there `transfer` later. It crosses while the receiver works in
    its next slot and is waited for after it; or before that slot, where it admits the same kind
    (`crosses_beside`). A sender does not wait for its receiver, and what a stage sends to itself (K=1) takes no
    time.

    Without transfer times GPipe takes sum f + (M-1) max f + sum b + (M-1) max b, whatever the stages' times f and b.

    Args:
      schedule: the schedule to simulate.
      forward: time of one micro-batch's forward on one whole stage, one number or K of them. With V chunks an action
        takes a V-th of it.
      backward: the same for its backward, with any recomputation that `recompute` doesn't give apart.
      transfer: time of a hop, from the end of a slot until what it sent is there.
      weight: the same as `backward` for that part of it which W takes where the backward is split, and I doesn't;
        default: half of it.
      recompute: the same as `forward` for what a backward action computes anew before that (remat); 0 if that is
        nothing, or within `backward`. An R takes it from the B or I of its micro-batch.
      microbatches: M numbers, how many times as long each micro-batch takes; default: all as long as the times say.

    Raises:
      TypeError: the schedule is not a `Schedule`, or a time is not a number.
      ValueError: a time is not positive (`transfer`, `weight`, `recompute`: negative) or not finite, there are not K of
        them (M `microbatches`), or `weight` is more than `backward`.

    >>> from jpipe.schedules.orders import make_schedule
    >>> timeline = simulate(make_schedule("1f1b", num_stages=4, num_microbatches=8))
    >>> timeline.makespan, timeline.peak_in_flight, round(timeline.bubble_fraction, 3)
    (33.0, (7, 5, 3, 1), 0.273)
    >>> simulate(make_schedule("zero_bubble", num_stages=4, num_microbatches=8), weight=1.0).makespan
    27.0
    """
    if not isinstance(schedule, Schedule):
        raise TypeError(f"schedule={schedule!r} must be a Schedule; make one with jpipe.make_schedule")
    hop = as_number("transfer", transfer, "give the time of one hop, 0 for hops that take none")
    work = Work.of(schedule, forward, backward, weight, recompute)
    if microbatches is not None:
        remedy = f"give {schedule.num_microbatches} numbers, one for each micro-batch"
        if len(microbatches) != schedule.num_microbatches:
            raise ValueError(f"microbatches={microbatches!r:.60} has {len(microbatches)}; {remedy}")
        work = replace(work, factors=[as_number("microbatches", n, remedy, positive=True) for n in microbatches])
    return in_time(schedule, work, hop)


@dataclass(frozen=True)
class Work:
    """The times of a schedule's actions, by kind: a row for each virtual stage, or for each layer.

    Attributes:
      times: by kind, the time on each virtual stage `[K*V]`, or of each layer `[N]`, without what B and I compute anew.
        W may take no time, and I as long as B.
      anew: the same of what B and I compute anew of the forward, where no R does it for them.
      factors: `[M]`, how many times as long each micro-batch takes; empty if all take as long.
    """

    times: Mapping[str, Sequence[float]]
    anew: Sequence[float]
    factors: Sequence[float] = ()

    def summed(self, bounds: Sequence[tuple[int, int]]) -> "Work":
        """The work of virtual stages, from that of layers; `bounds` has the first layer and the end of each."""
        sums = lambda times: [float(np.sum(times[start:stop])) for start, stop in bounds]
        return replace(self, times={kind: sums(times) for kind, times in self.times.items()}, anew=sums(self.anew))

    @staticmethod
    def of(schedule: Schedule, forward: Times, backward: Times, weight: Times | None, recompute: Times) -> "Work":
        """Makes it from the times of whole stages, as `simulate` is given them."""
        place, count = schedule.placement, schedule.num_stages
        stages = [place.stage_of(s) for s in range(place.num_virtual_stages)]

        def of_chunks(label: str, times: Times, *, positive: bool = True) -> np.ndarray:
            array, remedy = np.asarray(times, object), f"use one number, or one for each of the {count} stages"
            if array.shape not in ((), (count,)):
                raise ValueError(f"{label}={times!r} has shape {array.shape}; {remedy}")
            number = lambda time: as_number(label, time, f"{remedy}, for one micro-batch", positive=positive)
            return np.broadcast_to(np.array(list(map(number, array.flat))), (count,))[stages] / schedule.num_chunks

        anew, both = of_chunks("recompute", recompute, positive=False), of_chunks("backward", backward)
        part = both / 2 if weight is None else of_chunks("weight", weight, positive=False)
        if (part > both).any():
            raise ValueError(f"weight={weight!r} must be no more than backward={backward!r}, of which it is a part")
        times = {"F": of_chunks("forward", forward), "R": anew, "B": both, "I": both - part, "W": part}
        return Work({kind: time.tolist() for kind, time in times.items()}, anew.tolist())

    def takes(self, schedule: Schedule, stage: int, action: Action) -> tuple[float, float]:
        """The time in which an action of virtual stages computes things anew, and its time without that."""
        s = schedule.placement.virtual_stage(stage, action.chunk)
        is_ahead = "R" in schedule.kinds and (stage, action._replace(kind="R")) in schedule.placed
        factor = self.factors[action.microbatch] if self.factors else 1.0
        anew = self.anew[s] if action.kind in "BI" and not is_ahead else 0.0
        return factor * anew, factor * self.times[action.kind][s]


def in_time(schedule: Schedule, work: Work, hop: float = 0.0, moves: Sequence[float] = ()) -> Timeline:
    """Places the actions of a schedule in time, slot by slot; `simulate` says how stages wait for each other.

    Args:
      schedule, work, hop: what is timed.
      moves: `[slots + 1]`, how long all devices move rows to and from the hosts in every tick: beside each slot, whose
        end waits for it, and after the last slot; empty if they move none.
    """
    spans: list[Span] = []
    width = len(schedule.slots)
    *beside, after = moves or [0.0] * (1 + width)
    crossings = [crossings_of(schedule, index) for index in range(width)]
    clocks = np.zeros(schedule.num_stages)  # when each stage can go on
    arriving = np.zeros(schedule.num_stages)  # when it has what crosses to it beside its next slot
    by_time: dict[int, list[Placed]] = {}
    for placed, tau in schedule.slot_times.items():
        by_time.setdefault(tau, []).append(placed)
    for tau in range(-(-(max(by_time) + 1) // width) * width):  # up to the end of the last tick
        index, actions = tau % width, by_time.get(tau, [])
        ends = clocks.tolist()
        for stage, action in actions:
            start, (anew, rest) = ends[stage], work.takes(schedule, stage, action)
            ends[stage] += anew + rest
            spans.append(Span(stage, action, start, ends[stage], anew))
        ended = np.maximum(ends, clocks + beside[index]) + (after if index == width - 1 else 0.0)
        crossed, clocks, arriving = arriving, ended.copy(), np.zeros_like(ended)
        # A stage goes on when it and all stages that send to it have ended the slot. The executor carries out all of a
        # slot's crossings in every tick, except a turn on one stage. If it left out those along which no stage sends,
        # they would have to be left out here too.
        for senders, receivers, is_beside in crossings[index]:
            clocks[receivers] = np.maximum(clocks[receivers], ended[senders])
            waits = arriving if is_beside else clocks
            waits[receivers] = np.maximum(waits[receivers], ended[senders] + np.where(senders == receivers, 0.0, hop))
        clocks = np.maximum(clocks, crossed)
    return Timeline(schedule, tuple(spans), max(span.end for span in spans), busy_times(schedule, work), transfer=hop)


def busy_times(schedule: Schedule, work: Work) -> tuple[float, ...]:
    """K numbers, the time for which each stage works."""
    takes = partial(work.takes, schedule)
    return tuple(sum(sum(takes(stage, action)) for action in order) for stage, order in enumerate(schedule.actions))


Crossing: TypeAlias = tuple[np.ndarray, np.ndarray, bool]
"""A crossing along one route: the stages that send, those that receive, and whether the next slot runs beside it."""


def crossings_of(schedule: Schedule, index: int) -> list[Crossing]:
    """The crossings after the slot of that index, whatever stages did in it: `ppermute`s are collective."""
    flows = {ACTION_KINDS[kind].flow for kind in schedule.slots[index]} - {0}
    routes = [(np.array(route).T, flow) for flow in flows for route in schedule.placement.routes(flow)]
    return [(*route, crosses_beside(schedule.slots, flow, index)) for route, flow in routes]
