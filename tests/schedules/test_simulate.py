"""Bubbles, memory and times against the formulas, in which f and b are the stages' times and V the chunks."""

import itertools
import re
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import names, one_slot_from_k
from jpipe.schedules.orders import make_schedule
from jpipe.schedules.schedule import Schedule
from jpipe.schedules.simulate import simulate

CHUNKED = names(chunks=2)
TIMES = st.integers(1, 9).map(float)  # whole numbers, so that sums are exact


def make(name: str, num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    return make_schedule(name, num_stages=num_stages, num_microbatches=num_microbatches, num_chunks=num_chunks)


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


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(4, 4), (4, 32), (8, 16), (1, 3), (3, 1)])
def test_speedup_over_naive(num_stages, num_microbatches):
    ratio = num_stages * num_microbatches / (num_microbatches + num_stages - 1)
    assert simulate(make("gpipe", num_stages, num_microbatches)).speedup_over_naive == pytest.approx(ratio)
    assert simulate(make("naive", num_stages, num_microbatches)).speedup_over_naive == 1.0


def test_speedup_of_eight_stages_and_sixteen_microbatches():
    """128/23, where 4.6 is often said."""
    assert simulate(make("1f1b", 8, 16)).speedup_over_naive == pytest.approx(float(Fraction(128, 23)))


@given(
    st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=5),
    st.integers(1, 6),
    st.sampled_from(["gpipe", "1f1b", "forward"]),
)
def test_speedup_compares_with_the_naive_order_at_the_same_times(times, num_microbatches, name):
    f, b = map(list, zip(*times, strict=True))
    timeline = simulate(make(name, len(f), num_microbatches), f, b)
    naive = simulate(make("naive", len(f), num_microbatches), f, b).makespan
    assert naive == num_microbatches * (sum(f) + sum(b))
    if name == "forward":
        naive = num_microbatches * sum(f)
    assert timeline.speedup_over_naive == naive / timeline.makespan


@given(st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=6), st.integers(1, 7))
def test_gpipe_with_unequal_stages(times, num_microbatches):
    f, b = map(list, zip(*times, strict=True))
    timeline = simulate(make("gpipe", len(f), num_microbatches), f, b)
    expected = sum(f) + (num_microbatches - 1) * max(f) + sum(b) + (num_microbatches - 1) * max(b)
    assert timeline.makespan == expected
    assert timeline.busy == tuple(num_microbatches * (x + y) for x, y in times)
    assert timeline.bubble_fraction == pytest.approx(1 - sum(timeline.busy) / (len(f) * expected))


@settings(max_examples=50)
@given(
    st.sampled_from(names()),
    st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=4),
    st.integers(1, 5),
)
def test_spans_keep_their_order_and_their_dependencies(name, times, num_microbatches):
    f, b = map(list, zip(*times, strict=True))
    num_chunks = 2 if name in CHUNKED else 1
    schedule = make(name, len(f), num_microbatches, num_chunks)
    timeline, placement = simulate(schedule, f, b), schedule.placement
    end = {(span.stage, span.action): span.end for span in timeline.spans}
    for stage, order in enumerate(schedule.actions):
        spans = [span for span in timeline.spans if span.stage == stage]
        assert tuple(span.action for span in spans) == order
        for before, span in itertools.pairwise(spans):
            assert before.end <= span.start
        for span in spans:
            virtual_stage = placement.virtual_stage(stage, span.action.chunk)
            sender = placement.neighbour(virtual_stage, -1 if span.action.kind == "F" else +1)
            if sender is not None:
                source = replace(span.action, chunk=placement.chunk_of(sender))
                assert end[placement.stage_of(sender), source] <= span.start
    assert timeline.makespan == max(end.values())


def rows(timeline):
    """Stage, action, start and end of each span."""
    return [(span.stage, str(span.action), span.start, span.end) for span in timeline.spans]


def test_timeline_of_two_unequal_stages():
    """Stage 1 takes three times as long: the start of stage 0's last backward waits for it."""
    timeline = simulate(make("1f1b", 2, 2), forward=[1, 3], backward=[2, 6])
    assert rows(timeline) == [
        (0, "F0", 0.0, 1.0),
        (0, "F1", 1.0, 2.0),
        (1, "F0", 1.0, 4.0),
        (1, "B0", 4.0, 10.0),
        (1, "F1", 10.0, 13.0),
        (0, "B0", 10.0, 12.0),
        (1, "B1", 13.0, 19.0),
        (0, "B1", 19.0, 21.0),
    ]


def test_timeline_with_transfers():
    """A hop of 3 shows where nothing runs beside it: F1 is on its way to stage 1 while B0 runs there."""
    timeline = simulate(make("1f1b", 2, 2), forward=1, backward=2, transfer=3)
    assert rows(timeline) == [
        (0, "F0", 0.0, 1.0),
        (0, "F1", 1.0, 2.0),
        (1, "F0", 4.0, 5.0),
        (1, "B0", 5.0, 7.0),
        (1, "F1", 7.0, 8.0),
        (0, "B0", 10.0, 12.0),
        (1, "B1", 8.0, 10.0),
        (0, "B1", 13.0, 15.0),
    ]
    assert timeline.speedup_over_naive == (2 * 2 * 3 + 4 * 3) / 15


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


@given(st.integers(1, 6), st.integers(1, 12))
def test_short_transfers_of_1f1b_show_once_each_way(num_stages, num_microbatches):
    """Those no longer than a forward cross beside work, but for K-1 hops while it fills and K-1 while it drains."""
    schedule = make("1f1b", num_stages, num_microbatches)
    shown = simulate(schedule, 1, 2, transfer=0.5).makespan - simulate(schedule, 1, 2).makespan
    assert shown == 2 * (num_stages - 1) * 0.5


def test_transfers_of_gpipe_show_in_every_other_tick():
    """A tick of forwards alone has nothing beside which they, and the empty hops back, could cross."""
    schedule = make("gpipe", 2, 8)
    assert simulate(schedule, 1, 2, transfer=0.5).makespan - simulate(schedule, 1, 2).makespan == 0.5 * 8


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


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(2, 8), (4, 16)])
def test_one_slot_pays_for_unequal_actions(num_stages, num_microbatches):
    """With F and B equally long the papers' order has the ideal bubble; with B longer, F waits for it in lockstep."""
    schedule = one_slot_from_k(num_stages, num_microbatches)
    bubble = (num_stages - 1) / (num_microbatches + num_stages - 1)
    assert simulate(schedule, 1.0, 1.0).bubble_fraction == pytest.approx(bubble)
    assert simulate(schedule, 1.0, 3.0).bubble_fraction > bubble


@pytest.mark.parametrize(
    ("times", "error", "message"),
    [
        ({"forward": 0.0}, ValueError, "forward=0.0 must be positive and finite"),
        ({"backward": -1}, ValueError, "backward=-1 must be positive and finite"),
        ({"forward": [1.0, float("nan")]}, ValueError, "must be positive and finite"),
        ({"backward": [1.0, 2.0, 3.0]}, ValueError, "has shape (3,); use one number, or one for each of the 2 stages"),
        ({"recompute": -1.0}, ValueError, "recompute=-1.0 must be at least 0 and finite"),
        ({"transfer": -1}, ValueError, "transfer=-1 must be finite and not negative"),
        ({"transfer": float("inf")}, ValueError, "transfer=inf must be finite"),
        ({"transfer": [1.0, 2.0]}, TypeError, "transfer=[1.0, 2.0] must be a number, the time of one hop"),
        ({"forward": "fast"}, TypeError, "forward='fast' must be a number or a sequence of 2 numbers"),
    ],
)
def test_wrong_times_are_named(times, error, message):
    with pytest.raises(error, match=re.escape(message)):
        simulate(make("gpipe", 2, 2), **times)


def test_only_a_schedule_is_simulated():
    with pytest.raises(TypeError, match=r"schedule='gpipe' must be a Schedule; make one with jpipe\.make_schedule"):
        simulate("gpipe")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", names(train=True))
def test_recomputation_is_time_of_the_backward(name):
    schedule = make(name, 4, 8, 2 if name in CHUNKED else 1)
    apart, together = (
        simulate(schedule, 1.0, 2.0, recompute=[1.0, 2.0, 0.0, 1.0]),
        simulate(schedule, 1.0, [3, 4, 2, 3]),
    )
    assert [span[:4] for span in apart.spans] == [span[:4] for span in together.spans]
    assert replace(apart, spans=()) == replace(together, spans=())
    for span in apart.spans:
        expected = [1.0, 2.0, 0.0, 1.0][span.stage] / schedule.num_chunks if span.action.kind == "B" else 0.0
        assert span.recompute == expected


@settings(max_examples=50)
@given(
    st.sampled_from(names()),
    st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=4),
    st.integers(1, 6),
)
def test_in_flight_is_what_peak_in_flight_is_the_most_of(name, times, num_microbatches):
    f, b = map(list, zip(*times, strict=True))
    timeline = simulate(make(name, len(f), num_microbatches, 2 if name in CHUNKED else 1), f, b)
    for stage in range(len(f)):
        steps = timeline.in_flight(stage)
        assert max(count for _, count in steps) == timeline.peak_in_flight[stage]
        assert steps[0][0] == 0.0 and steps[-1][1] == 0
        for (before, count), (after, other) in itertools.pairwise(steps):
            assert before < after and count != other
        for time, count in steps:  # between the start of its F and the end of its B
            started, ended = (
                sum(s.stage == stage and s.action.kind == kind and moment <= time for s, moment in moments)
                for kind, moments in (
                    ("F", [(s, s.start) for s in timeline.spans]),
                    ("B", [(s, s.end) for s in timeline.spans]),
                )
            )
            assert name == "forward" or count == started - ended


def test_a_timeline_in_words_counts_micro_batches_and_no_pairs_with_chunks():
    """A regression: of 8 micro-batches 11 were said to be in flight, as each of two chunks counted for itself."""
    timeline = simulate(make_schedule("interleaved", num_stages=4, num_microbatches=8, num_chunks=2))
    assert str(timeline) == ("interleaved: K=4, M=8, V=2; time 28.5, bubble 15.8 %, peak in flight 5.5, 4.5, 3.5, 2.5")


def test_a_timeline_in_short():
    for num_stages, num_microbatches in ((4, 8), (64, 512)):
        timeline = simulate(make_schedule("1f1b", num_stages=num_stages, num_microbatches=num_microbatches))
        assert repr(timeline) == f"<Timeline {timeline}>" and len(repr(timeline)) <= 120
