"""Bubbles, memory and times against the formulas, in which f and b are the stages' times and V the chunks."""

import itertools
import re
from collections import defaultdict
from dataclasses import replace
from time import process_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from any_schedule import schedules
from cases import ahead, names, one_slot_from_k
from jpipe.schedules.actions import needs
from jpipe.schedules.orders import zero_bubble
from jpipe.schedules.schedule import Schedule
from jpipe.schedules.simulate import Timeline, Work, in_time, simulate
from jpipe.schedules.ticks import KEEPS
from published import out_of_lockstep
from published import schedule_of as make

CHUNKED = names(chunks=2, split=None)
TIMES = st.integers(1, 9).map(float)  # whole numbers, so that sums are exact


@pytest.mark.parametrize(
    ("num_stages", "num_microbatches", "percent"),
    [(4, 4, 42.9), (4, 8, 27.3), (4, 16, 15.8), (4, 32, 8.6), (8, 32, 17.9), (8, 64, 9.9), (1, 5, 0.0), (4, 1, 75.0)],
)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_bubble_of_gpipe_and_1f1b(name, num_stages, num_microbatches, percent):
    timeline = simulate(make(name, num_stages, num_microbatches))
    assert round(100 * timeline.bubble_fraction, 1) == percent
    assert timeline.bubble_fraction == pytest.approx((num_stages - 1) / (num_microbatches + num_stages - 1))
    assert timeline.makespan == 3 * (num_microbatches + num_stages - 1)
    assert timeline.busy == (3 * num_microbatches,) * num_stages


@pytest.mark.parametrize("num_chunks", [1, 2, 3, 4])
@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 1), (1, 3), (2, 2), (4, 4), (4, 8), (4, 6), (5, 9)])
def test_bubble_of_interleaved(num_stages, num_microbatches, num_chunks):
    timeline = simulate(make("interleaved", num_stages, num_microbatches, num_chunks), forward=1.5, backward=2.5)
    bubble = (num_stages - 1) / (num_chunks * num_microbatches + num_stages - 1)
    assert timeline.bubble_fraction == pytest.approx(bubble)
    assert timeline.busy == pytest.approx((4 * num_microbatches,) * num_stages)


@given(st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=6), st.integers(1, 7))
def test_gpipe_with_unequal_stages(times, num_microbatches):
    f, b = map(list, zip(*times, strict=True))
    timeline = simulate(make("gpipe", len(f), num_microbatches), f, b)
    expected = sum(f) + (num_microbatches - 1) * max(f) + sum(b) + (num_microbatches - 1) * max(b)
    assert timeline.makespan == expected
    assert timeline.busy == tuple(num_microbatches * (x + y) for x, y in times)
    assert timeline.bubble_fraction == pytest.approx(1 - sum(timeline.busy) / (len(f) * expected))


@settings(max_examples=50)
@given(st.sampled_from(names(split=None)), st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=4), st.integers(1, 5))
def test_spans_keep_their_order_and_their_dependencies(name, times, num_microbatches):
    f, b = map(list, zip(*times, strict=True))
    num_chunks = 2 if name in CHUNKED else 1
    schedule = make(name, len(f), num_microbatches, num_chunks)
    timeline = simulate(schedule, f, b)
    end = {(span.stage, span.action): span.end for span in timeline.spans}
    for stage, order in enumerate(schedule.actions):
        spans = [span for span in timeline.spans if span.stage == stage]
        assert tuple(span.action for span in spans) == order
        for before, span in itertools.pairwise(spans):
            assert before.end <= span.start
        for span in spans:
            assert all(end[need] <= span.start for need in needs(schedule, stage, span.action))
    assert timeline.makespan == max(end.values())


@pytest.mark.parametrize(
    ("times", "drawn"),
    [
        # Stage 1 takes three times as long: the start of stage 0's last backward waits for it.
        ({"forward": [1, 3], "backward": [2, 6]},
         ("F0 0-1, F1 1-2, B0 10-12, B1 19-21", "F0 1-4, B0 4-10, F1 10-13, B1 13-19")),
        # A hop of 3 shows where nothing runs beside it: F1 is on its way to stage 1 while B0 runs there.
        ({"forward": 1, "backward": 2, "transfer": 3},
         ("F0 0-1, F1 1-2, B0 10-12, B1 13-15", "F0 4-5, B0 5-7, F1 7-8, B1 8-10")),
        # Micro-batch 1 takes three times as long: B0 of stage 1 waits until F1 of stage 0 has ended, and is sent.
        ({"microbatches": [1, 3]},
         ("F0 0-1, F1 1-4, B0 6-8, B1 15-21", "F0 1-2, B0 4-6, F1 6-9, B1 9-15")),
    ],
)  # fmt: skip
def test_timeline_of_two_stages(times, drawn):
    timeline = simulate(make("1f1b", 2, 2), **times)
    for spans, line in zip(timeline.of_stages, drawn, strict=True):
        assert ", ".join(f"{span.action} {span.start:g}-{span.end:g}" for span in spans) == line


def test_transfers_cross_beside_work():
    """1F1B pays for K-1 hops while it fills and K-1 while it drains; GPipe in every other tick."""
    longer = lambda s: simulate(s, 1, 2, transfer=0.5).makespan - simulate(s, 1, 2).makespan
    for K, M in ((1, 3), (2, 1), (3, 7), (6, 12)):
        assert longer(make("1f1b", K, M)) == 2 * (K - 1) * 0.5
    assert longer(make("gpipe", 2, 8)) == 0.5 * 8


@given(
    st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=5),
    st.integers(1, 6),
    st.integers(0, 20).map(float),
    st.sampled_from(["gpipe", "1f1b", "interleaved", "forward"]),
)
def test_speedup_compares_with_the_naive_order_at_the_same_transfer_time(times, num_microbatches, transfer, name):
    f, b = map(list, zip(*times, strict=True))
    naive = simulate(make("naive", len(f), num_microbatches), f, b, transfer).makespan
    assert naive == num_microbatches * (sum(f) + sum(b) + 2 * (len(f) - 1) * transfer)
    if name == "forward":
        naive = num_microbatches * (sum(f) + (len(f) - 1) * transfer)
    timeline = simulate(make(name, len(f), num_microbatches), f, b, transfer)
    assert timeline.speedup_over_naive == naive / timeline.makespan


def test_speedup_of_eight_stages_and_sixteen_microbatches():
    """128/23, where 4.6 is often said."""
    assert simulate(make("1f1b", 8, 16)).speedup_over_naive == pytest.approx(128 / 23)


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 1), (4, 16), (4, 4), (4, 2), (3, 7)])
def test_peak_in_flight(num_stages, num_microbatches):
    def peak(schedule: Schedule) -> tuple[int, ...]:
        return simulate(schedule).peak_in_flight

    stages, M = range(num_stages), num_microbatches
    assert peak(make("gpipe", num_stages, M)) == (M,) * num_stages
    assert peak(make("naive", num_stages, M)) == (1,) * num_stages
    assert peak(make("forward", num_stages, M)) == (0,) * num_stages
    assert peak(make("1f1b", num_stages, M)) == tuple(min(M, 2 * (num_stages - 1 - k) + 1) for k in stages)
    assert peak(one_slot_from_k(num_stages, M)) == tuple(min(M, num_stages - k) for k in stages)


@pytest.mark.parametrize(
    ("times", "error", "message"),
    [
        ({"forward": 0.0}, ValueError, "forward=0.0 has to be more than 0 and finite; use one number, or one for each"),
        ({"forward": [1.0, float("nan")]}, ValueError, "forward=nan has to be more than 0 and finite"),
        ({"backward": [1.0, 2.0, 3.0]}, ValueError, "has shape (3,); use one number, or one for each of the 2 stages"),
        ({"recompute": -1.0}, ValueError, "recompute=-1.0 has to be at least 0 and finite"),
        ({"weight": [0.5, 3.0]}, ValueError, "weight=[0.5, 3.0] must be no more than backward=2.0, of which it is"),
        ({"transfer": -1}, ValueError, "transfer=-1 has to be at least 0 and finite"),
        ({"transfer": float("inf")}, ValueError, "transfer=inf has to be at least 0 and finite"),
        ({"transfer": [1.0, 2.0]}, TypeError, "transfer=[1.0, 2.0] is no number; give the time of one hop"),
        ({"backward": [True, False]}, TypeError, "backward=True is no number; use one number"),
        ({"microbatches": [1.0]}, ValueError, "microbatches=[1.0] has 1; give 2 numbers, one for each micro-batch"),
        ({"microbatches": [1.0, 0.0]}, ValueError, "microbatches=0.0 has to be more than 0 and finite; give 2 numbers"),
    ],
)
def test_wrong_times_are_named(times, error, message):
    with pytest.raises(error, match=re.escape(message)):
        simulate(make("gpipe", 2, 2), **times)
    with pytest.raises(TypeError, match=r"schedule='gpipe' must be a Schedule; make one with jpipe\.make_schedule"):
        simulate("gpipe")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", names(train=True))
def test_microbatches_of_other_lengths(name):
    """As many times as long, each: alike they scale the times; unlike they take as long as their work, and no longer
    than if each were as long as the longest."""
    schedule, factors = make(name, 3, 6, 2 if name in CHUNKED else 1), [4.0, 1.0, 2.0, 1.0, 1.0, 3.0]
    times = {"forward": 2.0, "backward": 4.0, "recompute": 2.0}
    plain, thrice = simulate(schedule, **times), simulate(schedule, **times, microbatches=[3.0] * 6)
    assert (thrice.makespan, thrice.busy) == (3 * plain.makespan, tuple(3 * busy for busy in plain.busy))
    unlike = simulate(schedule, **times, microbatches=factors)
    assert unlike.busy == (8 * sum(factors),) * 3
    assert max(unlike.busy) < unlike.makespan <= 4 * plain.makespan
    first = next(span for span in unlike.spans if span.action.kind == "F")
    assert first.end - first.start == 4 * 2.0 / schedule.num_chunks


@pytest.mark.parametrize("name", names(train=True, split=None))
def test_recomputation_is_time_of_the_backward(name):
    schedule = make(name, 4, 8, 2 if name in CHUNKED else 1)
    apart = simulate(schedule, 1.0, 2.0, recompute=[1.0, 2.0, 0.0, 1.0])
    together = simulate(schedule, 1.0, [3, 4, 2, 3], weight=1.0)
    assert [span[:4] for span in apart.spans] == [span[:4] for span in together.spans]
    assert replace(apart, spans=()) == replace(together, spans=())
    for span in apart.spans:
        expected = [1.0, 2.0, 0.0, 1.0][span.stage] / schedule.num_chunks if span.action.kind in "BI" else 0.0
        assert span.recompute == expected


def bubble(timeline: Timeline) -> float:
    """The time in which the stage that works longest idles."""
    return timeline.makespan - max(timeline.busy)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
@pytest.mark.parametrize(("f", "i", "w"), [(1.0, 1.0, 1.0), (1.0, 1.25, 0.75), (2.0, 1.0, 0.5), (1.0, 1.0, 0.0)])
def test_bubble_of_zero_bubble(num_stages, f, i, w):
    """In closed form where W takes no longer than F and I, as does every matrix product's."""
    K = num_stages
    times = {"forward": f, "backward": i + w, "weight": w}
    for M in {K, K + 1, 2 * K - 1, 2 * K, 3 * K}:
        one = make("1f1b", K, M)
        assert bubble(simulate(one, **times)) == pytest.approx((K - 1) * (f + i + w))
        found = [bubble(simulate(zero_bubble(one), transfer=hop, **times)) for hop in (0.0, 0.1)]
        if M >= 2 * K - 2:
            assert found == pytest.approx([(K - 1) * (f + i - w + 2 * hop) for hop in (0.0, 0.1)])
        assert found[0] <= (K - 1) * (f + i)
        if M >= 2 * K - 1:
            lean = zero_bubble(one, most_waiting=range(K))
            assert bubble(simulate(lean, **times)) == pytest.approx((K - 1) * (f + i))
        if M >= 2 * K and M % K == 0:
            for V in (2, 3):
                chunked = make("interleaved", K, M, V)
                assert bubble(simulate(zero_bubble(chunked), **times)) == pytest.approx(
                    ((K - 1) * (f + i) + w * (K > 1)) / V
                )
                assert bubble(simulate(make("zero_bubble", K, M, V), **times)) == pytest.approx((K - 1) * (f + i) / V)


@settings(max_examples=50)
@given(schedules(), st.integers(0, 4).map(lambda n: n / 2))
def test_what_is_in_flight_has_its_rows(schedule, transfer):
    timeline = simulate(schedule, 1.0, 3.0, transfer, weight=1.0, recompute=0.5)
    for name, kinds in KEEPS.items():
        peaks = [max(n for _, n in timeline.in_flight(stage, *kinds)) for stage in range(schedule.num_stages)]
        if name != "late_residual" or schedule.splits:
            assert tuple(peaks) == schedule.ticks.rows[name]
        if name == "late_residual":
            assert tuple(peaks) == timeline.peak_in_flight


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 3), (2, 8), (4, 8), (4, 16), (8, 32)])
@pytest.mark.parametrize("recompute", [0.5, 1.0, 1.5])
def test_recomputation_ahead_hides_one_for_each_stage_but_the_last(num_stages, num_microbatches, recompute):
    """And costs the memory of as many micro-batches' residuals, for which "v" need not recompute at all."""
    K, M, times = num_stages, num_microbatches, {"backward": 2.0, "recompute": recompute}
    plain, early = make("1f1b", K, M), ahead(K, M)
    late, soon = simulate(plain, **times), simulate(early, **times)
    assert late.makespan - soon.makespan == pytest.approx((K - 1) * min(1.0, recompute))
    late, free = out_of_lockstep(late), out_of_lockstep(soon)
    assert late.makespan - free.makespan == pytest.approx((K - 1) * recompute)
    assert [max(n for _, n in free.in_flight(k, "R", "B")) for k in range(K)] == list(reversed(range(K)))
    without = simulate(make("v", K, M, 2), backward=2.0)
    assert max(without.peak_in_flight) == 2 * min(K, M) and without.makespan <= free.makespan


def test_a_large_schedule_is_lowered_and_simulated_in_seconds():
    """Of 64 stages and 1,024 micro-batches, in two and a half seconds of a processor."""
    schedule = make("1f1b", 64, 1024)
    before = process_time()
    assert schedule.ticks.num_ticks >= 1024
    assert simulate(schedule).makespan > 3 * 1024
    assert process_time() - before < 2.5


@pytest.mark.parametrize(("name", "num_chunks"), [("interleaved", 2), ("interleaved", 3)])
def test_of_chunks_that_differ_the_slowest_of_each_slot_counts(name, num_chunks):
    """Two stages in a loop wait for each other after every slot, and so for the slowest action of each."""
    schedule = make(name, 2, 4, num_chunks)
    place, numbers = schedule.placement, [3.0, 1.0, 4.0, 1.5, 9.0, 2.0][: 2 * num_chunks]
    work = Work({"F": numbers, "B": [2 * number for number in numbers]}, [0.0] * len(numbers))
    slots = defaultdict(list)
    for (stage, action), time in schedule.slot_times.items():
        slots[time].append(work.times[action.kind][place.virtual_stage(stage, action.chunk)])
    found = in_time(schedule, work)
    assert found.makespan == sum(map(max, slots.values()))
    assert sum(found.busy) == 4 * 3 * sum(numbers)


def test_bars_cover_the_busy_time_and_recomputation_is_a_bar_before_its_backward():
    timeline = simulate(make("interleaved", 3, 6, 2), recompute=0.5)
    for stage, busy in enumerate(timeline.busy):
        bars = [bar for bar in timeline.bars if bar.stage == stage]
        assert sum(bar.end - bar.start for bar in bars) == pytest.approx(busy)
        kinds = [bar.action.kind for bar in bars]
        assert kinds.count("R") == kinds.count("B") == kinds.count("F") == 12
        assert all(kinds[i + 1] == "B" for i, kind in enumerate(kinds) if kind == "R")
