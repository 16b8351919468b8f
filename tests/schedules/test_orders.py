"""Orders against pictures, drawn; wrong names and sizes against their messages."""

import itertools
import re

import pytest
from hypothesis import given

from any_schedule import schedules
from cases import names
from jpipe.schedules.orders import SCHEDULES, make_schedule, zero_bubble
from jpipe.schedules.schedule import Schedule
from jpipe.schedules.simulate import simulate
from published import schedule_of

# A line a stage, a character a tick: the forwards on the left, the backwards on the right. A digit is the micro-batch
# in chunk 0, a letter the micro-batch in chunk 1 (a = 0).
PICTURES = {
    ("naive", 3, 3, 1): """
        0....1....2....  ....0....1....2
        .0....1....2...  ...0....1....2.
        ..0....1....2..  ..0....1....2..
    """,
    ("gpipe", 3, 3, 1): """
        012......  ......012
        .012.....  .....012.
        ..012....  ....012..
    """,
    ("1f1b", 4, 2, 1): """
        01......  ......01
        .01.....  .....01.
        ..01....  ....01..
        ...01...  ...01...
    """,
    ("interleaved", 4, 2, 2): """
        01..ab...........  ...........ab..01
        .01..ab..........  ..........ab..01.
        ..01..ab.........  .........ab..01..
        ...01..ab........  ........ab..01...
    """,
    ("forward", 4, 4, 1): """
        0123...
        .0123..
        ..0123.
        ...0123
    """,
    ("1f1b", 3, 7, 1): """
        0123456....  ....0123456
        .0123456...  ...0123456.
        ..0123456..  ..0123456..
    """,
    ("interleaved", 2, 5, 2): """
        01ab234cde.....  .....ab01cde234
        .01ab234cde....  ....ab01cde234.
    """,
    ("forward", 2, 3, 2): """
        012abc.
        .012abc
    """,
}


def picture(schedule: Schedule) -> list[str]:
    """A line for each stage, as in `PICTURES`."""
    times = schedule.slot_times
    width = len(schedule.slots)
    num_ticks = max(times.values()) // width + 1
    marks = [[["."] * num_ticks for _ in schedule.slots] for _ in schedule.actions]
    for (stage, action), tau in times.items():
        marks[stage][tau % width][tau // width] = ("0123456789", "abcdefghij")[action.chunk][action.microbatch]
    return ["  ".join("".join(slot) for slot in slots) for slots in marks]


@pytest.mark.parametrize(("name", "num_stages", "num_microbatches", "num_chunks"), PICTURES)
def test_order_is_as_drawn(name, num_stages, num_microbatches, num_chunks):
    schedule = make_schedule(name, num_stages=num_stages, num_microbatches=num_microbatches, num_chunks=num_chunks)
    drawn = PICTURES[name, num_stages, num_microbatches, num_chunks]
    assert picture(schedule) == [line.strip() for line in drawn.strip().splitlines()]


@pytest.mark.parametrize("name", ["interleaved", "forward"])
def test_chunked_orders_never_deadlock_and_stall_only_with_fewer_microbatches_than_stages(name):
    for num_stages, num_microbatches, num_chunks in itertools.product(range(1, 6), range(1, 10), range(1, 5)):
        schedule = make_schedule(name, num_stages=num_stages, num_microbatches=num_microbatches, num_chunks=num_chunks)
        forwards = sorted({tau for (_, action), tau in schedule.slot_times.items() if action.kind == "F"})
        if num_chunks == 1 or num_microbatches >= num_stages:
            assert len(forwards) == num_chunks * num_microbatches + num_stages - 1
        else:  # a wave takes K slots for each chunk, filled or not
            assert forwards[-1] - forwards[0] <= len(schedule.slots) * (num_chunks * num_stages + num_microbatches - 2)


OWN = Schedule([["F0", "B0"]])
ONE_CHUNK, TWO_CHUNKS = ({*names(chunks=count, split=None)} for count in (1, 2))


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("1f1b", {"num_chunks": 0}, "num_chunks=0 is less than 1"),
        (OWN, {"num_microbatches": 4}, "num_microbatches=4, but the schedule 'custom' was made for 1; use it"),
        ("zigzag", {}, f"schedule='zigzag' is unknown; use one of {', '.join(map(repr, SCHEDULES))}"),
        (3, {}, "schedule=3 must be a name or a jpipe.Schedule"),
        *[
            (name, {"num_chunks": 2}, f"num_chunks=2 with {name!r}; use schedule='interleaved' or num_chunks=1")
            for name in sorted(ONE_CHUNK - TWO_CHUNKS)
        ],
        *[(name, {}, f"num_chunks=1 with {name!r}; use ") for name in sorted(TWO_CHUNKS - ONE_CHUNK)],
    ],
)
def test_make_schedule_names_what_is_wrong_and_the_remedy(name, sizes, message):
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        make_schedule(name, **{"num_stages": 1, "num_microbatches": 1} | sizes)


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 1), (1, 4), (2, 4), (3, 7), (4, 8), (8, 16)])
def test_there_and_back_has_the_bubble_of_1f1b_and_holds_as_much_on_every_stage(num_stages, num_microbatches):
    sizes = {"num_stages": num_stages, "num_microbatches": num_microbatches}
    found, plain = simulate(make_schedule("v", **sizes, num_chunks=2)), simulate(make_schedule("1f1b", **sizes))
    assert found.makespan == plain.makespan
    assert max(found.peak_in_flight) <= 2 * num_stages, "chunks, of which two are a micro-batch"
    if num_microbatches >= 2 * num_stages:
        assert set(found.peak_in_flight) == {2 * num_stages}


# --- zero bubble ------------------------------------------------------------------------------------------------------


def lines(schedule: Schedule) -> list[str]:
    """The grid's stages, without the blanks in idle slots' ends."""
    return [re.sub(r" +", " ", line.split("|", 1)[1]).strip() for line in schedule.grid().splitlines()[2:]]


def test_weight_gradients_run_where_a_stage_lacks_an_action_and_where_none_does():
    split = zero_bubble(make_schedule("1f1b", num_stages=3, num_microbatches=5))
    assert lines(split) == [
        "F0 . |F1 . |F2 . |F3 . |F4 B0 |. B1 |. B2 |. B3 |. B4 |",
        ". . |F0 . |F1 . |F2 I0 |F3 B1 |F4 I2 |. B3 |. B4 |W0 W2 |",
        ". . |. . |F0 I0 |F1 I1 |F2 B2 |F3 I3 |F4 I4 |W0 W1 |W3 W4 |",
    ]
    assert (split.name, split.slots, split.splits) == ("zero_bubble of 1f1b", ("FW", "BW"), True)


def test_no_more_wait_than_may():
    split = zero_bubble(make_schedule("1f1b", num_stages=3, num_microbatches=5), most_waiting=range(3))
    assert lines(split) == [
        "F0 . |F1 . |F2 . |F3 . |F4 B0 |. B1 |. B2 |. B3 |. B4 |",
        ". . |F0 . |F1 . |F2 I0 |F3 B1 |F4 B2 |. B3 |. B4 |W0 . |",
        ". . |. . |F0 I0 |F1 I1 |F2 B2 |F3 B3 |F4 B4 |W0 W1 |. . |",
    ]


def test_chunks_there_and_back_and_one_slot_for_all():
    assert lines(zero_bubble(make_schedule("v", num_stages=2, num_microbatches=2, num_chunks=2))) == [
        "F0 . |F1 . |. . |F0.1 I0.1 |W0.1 . |F1.1 B1.1 |. B0 |. . |. I1 |W1 . |",
        ". . |F0 . |F0.1 . |F1 . |F1.1 I0.1 |W0.1 B0 |. B1.1 |. I1 |W1 . |. . |",
    ]
    one_slot = Schedule([["F0", "F1", "B0", "B1"], ["F0", "B0", "F1", "B1"]], slots=("FB",))
    assert lines(zero_bubble(one_slot)) == ["F0 |F1 |. |I0 |W0 |I1 |W1 |", ". |F0 |I0 |F1 |I1 |W0 |W1 |"]


@pytest.mark.parametrize("num_stages", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b", "v", "interleaved"])
def test_it_takes_no_longer_than_the_schedule_did(name, num_stages):
    """Weight gradients that take as long as a forward, or less; with chunks in a ring that isn't so where M < K."""
    num_chunks = 2 if name in ("v", "interleaved") else 1
    for num_microbatches in (1, 2, 3, 5, 8, 17):
        if name == "interleaved" and num_microbatches < num_stages:
            continue
        sizes = {"num_stages": num_stages, "num_microbatches": num_microbatches, "num_chunks": num_chunks}
        whole = make_schedule(name, **sizes)
        for weight in (1.0, 0.75):
            for transfer in (0.0, 0.3) if name != "interleaved" else (0.0,):
                split = simulate(zero_bubble(whole), 1.0, 2.0, transfer, weight=weight)
                assert split.makespan <= simulate(whole, 1.0, 2.0, transfer).makespan + 1e-9, (sizes, weight, transfer)


@given(schedules())
def test_a_split_schedule_does_what_the_whole_one_does(schedule):
    """Each micro-batch has a B, or an I and a W; forwards and input gradients are in the order in which they were."""
    if not schedule.trains or not schedule.kinds <= {*"FB"}:
        return
    split = zero_bubble(schedule)
    for before, after in zip(schedule.actions, split.actions, strict=True):
        without = [action._replace(kind="B") if action.kind == "I" else action for action in after]
        assert [action for action in without if action.kind != "W"] == [*before]
        parts = {kind: sorted(action[1:] for action in after if action.kind == kind) for kind in "IW"}
        assert parts["I"] == parts["W"]


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 1), (1, 4), (3, 1), (3, 5), (4, 12)])
def test_rows_of_1f1b_split(num_stages, num_microbatches):
    K, M = num_stages, num_microbatches
    rows = make_schedule("zero_bubble", num_stages=K, num_microbatches=M).ticks.rows
    whole = make_schedule("1f1b", num_stages=K, num_microbatches=M)
    assert rows["residual"] == whole.ticks.rows["residual"]
    if K > 1 and M >= 2 * K:
        assert rows["late_residual"] == (2 * K - 1, *[2 * K - 2] * (K - 1))
        assert rows["w_input"] == tuple(2 * k for k in range(K))
        lean = zero_bubble(whole, most_waiting=range(K)).ticks.rows
        assert lean["late_residual"] == tuple(2 * K - 1 - k for k in range(K))
        assert lean["w_input"] == tuple(range(K))


ONE_F_ONE_B = make_schedule("1f1b", num_stages=3, num_microbatches=2)


@pytest.mark.parametrize(
    ("schedule", "most_waiting", "message"),
    [
        *[
            (schedule_of(name, 2, 2), None, f"{schedule_of(name, 2, 2)!r} has no whole backward; pass one that has")
            for name in ("forward", "zero_bubble", "zb-h1")
        ],
        ("1f1b", None, "schedule='1f1b' must be a Schedule"),
        *[
            (ONE_F_ONE_B, most, f"most_waiting={most!r} must be one or 3 numbers, whole and at least 0")
            for most in ([1, 2], -1, [0, 1, -1], 0.5, [1, 1, 1.5])
        ],
    ],
)
def test_zero_bubble_names_what_it_cannot_split(schedule, most_waiting, message):
    """Negative numbers were taken for 0, and fractions too."""
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        zero_bubble(schedule, most_waiting=most_waiting)
