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
    ("naive", 1, 1, 1): """
        0  0
    """,
    ("naive", 1, 3, 1): """
        012  012
    """,
    ("naive", 3, 1, 1): """
        0....  ....0
        .0...  ...0.
        ..0..  ..0..
    """,
    ("naive", 3, 3, 1): """
        0....1....2....  ....0....1....2
        .0....1....2...  ...0....1....2.
        ..0....1....2..  ..0....1....2..
    """,
    ("naive", 4, 4, 1): """
        0......1......2......3......  ......0......1......2......3
        .0......1......2......3.....  .....0......1......2......3.
        ..0......1......2......3....  ....0......1......2......3..
        ...0......1......2......3...  ...0......1......2......3...
    """,
    ("naive", 4, 2, 1): """
        0......1......  ......0......1
        .0......1.....  .....0......1.
        ..0......1....  ....0......1..
        ...0......1...  ...0......1...
    """,
    ("gpipe", 1, 1, 1): """
        0  0
    """,
    ("gpipe", 1, 3, 1): """
        012..  ..012
    """,
    ("gpipe", 3, 1, 1): """
        0....  ....0
        .0...  ...0.
        ..0..  ..0..
    """,
    ("gpipe", 3, 3, 1): """
        012......  ......012
        .012.....  .....012.
        ..012....  ....012..
    """,
    ("gpipe", 4, 4, 1): """
        0123.........  .........0123
        .0123........  ........0123.
        ..0123.......  .......0123..
        ...0123......  ......0123...
    """,
    ("gpipe", 4, 2, 1): """
        01.......  .......01
        .01......  ......01.
        ..01.....  .....01..
        ...01....  ....01...
    """,
    ("1f1b", 1, 1, 1): """
        0  0
    """,
    ("1f1b", 1, 3, 1): """
        012  012
    """,
    ("1f1b", 3, 1, 1): """
        0....  ....0
        .0...  ...0.
        ..0..  ..0..
    """,
    ("1f1b", 3, 3, 1): """
        012....  ....012
        .012...  ...012.
        ..012..  ..012..
    """,
    ("1f1b", 4, 4, 1): """
        0123......  ......0123
        .0123.....  .....0123.
        ..0123....  ....0123..
        ...0123...  ...0123...
    """,
    ("1f1b", 4, 2, 1): """
        01......  ......01
        .01.....  .....01.
        ..01....  ....01..
        ...01...  ...01...
    """,
    ("interleaved", 1, 1, 2): """
        0a.  .a0
    """,
    ("interleaved", 1, 3, 2): """
        0a1b2c.  .a0b1c2
    """,
    ("interleaved", 3, 1, 2): """
        0..a.......  .......a..0
        .0..a......  ......a..0.
        ..0..a.....  .....a..0..
    """,
    ("interleaved", 3, 3, 2): """
        012abc.......  .......abc012
        .012abc......  ......abc012.
        ..012abc.....  .....abc012..
    """,
    ("interleaved", 4, 4, 2): """
        0123abcd..........  ..........abcd0123
        .0123abcd.........  .........abcd0123.
        ..0123abcd........  ........abcd0123..
        ...0123abcd.......  .......abcd0123...
    """,
    ("interleaved", 4, 2, 2): """
        01..ab...........  ...........ab..01
        .01..ab..........  ..........ab..01.
        ..01..ab.........  .........ab..01..
        ...01..ab........  ........ab..01...
    """,
    ("forward", 1, 1, 1): """
        0
    """,
    ("forward", 1, 3, 1): """
        012
    """,
    ("forward", 3, 1, 1): """
        0..
        .0.
        ..0
    """,
    ("forward", 3, 3, 1): """
        012..
        .012.
        ..012
    """,
    ("forward", 4, 4, 1): """
        0123...
        .0123..
        ..0123.
        ...0123
    """,
    ("forward", 4, 2, 1): """
        01...
        .01..
        ..01.
        ...01
    """,
    ("1f1b", 2, 6, 1): """
        012345..  ..012345
        .012345.  .012345.
    """,
    ("1f1b", 3, 7, 1): """
        0123456....  ....0123456
        .0123456...  ...0123456.
        ..0123456..  ..0123456..
    """,
    ("interleaved", 2, 4, 2): """
        01ab23cd....  ....ab01cd23
        .01ab23cd...  ...ab01cd23.
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
    assert (schedule.name, schedule.num_stages, schedule.num_microbatches, schedule.num_chunks) == (
        name,
        num_stages,
        num_microbatches,
        num_chunks,
    )


@pytest.mark.parametrize("name", ["interleaved", "forward"])
def test_chunked_orders_never_deadlock_and_stall_only_with_fewer_microbatches_than_stages(name):
    for num_stages, num_microbatches, num_chunks in itertools.product(range(1, 6), range(1, 10), range(1, 5)):
        schedule = make_schedule(name, num_stages=num_stages, num_microbatches=num_microbatches, num_chunks=num_chunks)
        forwards = sorted({tau for (_, action), tau in schedule.slot_times.items() if action.kind == "F"})
        if num_chunks == 1 or num_microbatches >= num_stages:
            assert len(forwards) == num_chunks * num_microbatches + num_stages - 1
        else:  # a wave takes K slots for each chunk, filled or not
            assert forwards[-1] - forwards[0] <= len(schedule.slots) * (num_chunks * num_stages + num_microbatches - 2)


@pytest.mark.parametrize("num_chunks", [1, 2, 3])
@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 3), (3, 3), (4, 8), (4, 2)])
def test_warm_up(num_stages, num_microbatches, num_chunks):
    schedule = make_schedule(
        "interleaved", num_stages=num_stages, num_microbatches=num_microbatches, num_chunks=num_chunks
    )
    for stage, order in enumerate(schedule.actions):
        warm_up = (num_chunks - 1) * num_stages + 2 * (num_stages - 1 - stage) + 1
        kinds = "".join(action.kind for action in order)
        assert kinds.index("B") == min(num_microbatches * num_chunks, warm_up)
        assert re.fullmatch("F+(BF)*B+", kinds)


def test_1f1b_is_interleaved_with_one_chunk():
    one = make_schedule("1f1b", num_stages=3, num_microbatches=5)
    assert one == make_schedule("interleaved", num_stages=3, num_microbatches=5)


def test_make_schedule_returns_ones_own_schedule_after_checking_its_sizes():
    own = Schedule([["F0", "B0"]])
    assert make_schedule(own, num_stages=1, num_microbatches=1) is own
    with pytest.raises(ValueError, match="num_microbatches=4, but the schedule 'custom' was made for 1; use it"):
        make_schedule(own, num_stages=1, num_microbatches=4)


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ({"num_stages": 0}, ValueError, "num_stages=0 is less than 1"),
        ({"num_microbatches": -2}, ValueError, "num_microbatches=-2 is less than 1"),
        ({"num_chunks": 0}, ValueError, "num_chunks=0 is less than 1"),
        ({"num_stages": True}, TypeError, "num_stages=True is no integer"),
        ({"num_microbatches": 2.0}, TypeError, "num_microbatches=2.0 is no integer"),
    ],
)
def test_make_schedule_rejects_sizes(sizes, error, message):
    with pytest.raises(error, match=re.escape(message)):
        make_schedule("1f1b", **{"num_stages": 2, "num_microbatches": 2} | sizes)


@pytest.mark.parametrize("name", sorted({*names(chunks=1, split=None)} - {*names(chunks=2, split=None)}))
def test_schedules_of_one_chunk_say_so(name):
    remedy = f"num_chunks=2 with {name!r}; use schedule='interleaved' or num_chunks=1"
    with pytest.raises(ValueError, match=re.escape(remedy)):
        make_schedule(name, num_stages=2, num_microbatches=2, num_chunks=2)


def test_make_schedule_names_the_schedules_it_knows():
    known = ", ".join(map(repr, SCHEDULES))
    with pytest.raises(ValueError, match=f"schedule='zigzag' is unknown; use one of {known}"):
        make_schedule("zigzag", num_stages=2, num_microbatches=2)
    with pytest.raises(TypeError, match=r"schedule=3 must be a name or a jpipe\.Schedule"):
        make_schedule(3, num_stages=2, num_microbatches=2)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 1), (1, 4), (2, 4), (3, 7), (4, 8), (8, 16)])
def test_there_and_back_has_the_bubble_of_1f1b_and_holds_as_much_on_every_stage(num_stages, num_microbatches):
    sizes = {"num_stages": num_stages, "num_microbatches": num_microbatches}
    found, plain = simulate(make_schedule("v", **sizes, num_chunks=2)), simulate(make_schedule("1f1b", **sizes))
    assert found.makespan == plain.makespan
    assert max(found.peak_in_flight) <= 2 * num_stages, "chunks, of which two are a micro-batch"
    if num_microbatches >= 2 * num_stages:
        assert set(found.peak_in_flight) == {2 * num_stages}


@pytest.mark.parametrize("name", sorted({*names(chunks=2, split=None)} - {*names(chunks=1, split=None)}))
def test_there_and_back_wants_two_chunks(name):
    with pytest.raises(ValueError, match=rf"num_chunks=1 with '{name}'; use .* num_chunks=2"):
        make_schedule(name, num_stages=2, num_microbatches=2)


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


def test_in_a_ring_weight_gradients_have_a_slot_of_their_own():
    split = zero_bubble(make_schedule("interleaved", num_stages=2, num_microbatches=2, num_chunks=2))
    assert lines(split) == [
        "F0 . . |F1 . . |F0.1 . . |F1.1 . . |. I0.1 W0.1 |. I1.1 . |. I0 . |. I1 W1.1 |. . W0 |. . W1 |",
        ". . . |F0 . . |F1 . . |F0.1 I0.1 . |F1.1 I1.1 . |. I0 . |. I1 W0.1 |. . W1.1 |. . W0 |. . W1 |",
    ]
    assert split.slots == ("F", "B", "W")


def test_chunks_there_and_back_and_one_slot_for_all():
    assert lines(zero_bubble(make_schedule("v", num_stages=2, num_microbatches=2, num_chunks=2))) == [
        "F0 . |F1 . |. . |F0.1 I0.1 |W0.1 . |F1.1 B1.1 |. B0 |. . |. I1 |W1 . |",
        ". . |F0 . |F0.1 . |F1 . |F1.1 I0.1 |W0.1 B0 |. B1.1 |. I1 |W1 . |. . |",
    ]
    one_slot = Schedule([["F0", "F1", "B0", "B1"], ["F0", "B0", "F1", "B1"]], slots=("FB",))
    assert lines(zero_bubble(one_slot)) == ["F0 |F1 |. |I0 |W0 |I1 |W1 |", ". |F0 |I0 |F1 |I1 |W0 |W1 |"]


@pytest.mark.parametrize("num_stages", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b", "v"])
def test_it_takes_no_longer_than_the_schedule_did(name, num_stages):
    """Weight gradients that take as long as a forward, or less; with chunks in a ring that isn't so where M < K."""
    num_chunks = 2 if name == "v" else 1
    for num_microbatches in (1, 2, 3, 5, 8, 17):
        sizes = {"num_stages": num_stages, "num_microbatches": num_microbatches, "num_chunks": num_chunks}
        whole = make_schedule(name, **sizes)
        for weight in (1.0, 0.75):
            for transfer in (0.0, 0.3):
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


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(3, 5), (4, 12)])
def test_rows_in_a_ring(num_stages, num_microbatches):
    sizes = {"num_stages": num_stages, "num_microbatches": num_microbatches, "num_chunks": 2}
    rows = make_schedule("zero_bubble", **sizes).ticks.rows
    assert rows["residual"] == make_schedule("interleaved", **sizes).ticks.rows["residual"]
    assert rows["w_input"] == tuple(k + 1 for k in range(num_stages))


def test_only_whole_backwards_are_split():
    for name in ("forward", "zero_bubble", "zb-h1"):
        schedule = schedule_of(name, 2, 2)
        with pytest.raises(ValueError, match=re.escape(f"{schedule!r} has no whole backward; pass one that has")):
            zero_bubble(schedule)
    assert {*names(train=True)}.isdisjoint(names(train=True, split=True))
    with pytest.raises(TypeError, match="schedule='1f1b' must be a Schedule"):
        zero_bubble("1f1b")


@pytest.mark.parametrize("most_waiting", [[1, 2], -1, [0, 1, -1], 0.5, [1, 1, 1.5]])
def test_most_waiting_is_whole_numbers_from_0_on(most_waiting):
    """Negative ones were taken for 0, and fractions too."""
    one = make_schedule("1f1b", num_stages=3, num_microbatches=2)
    said = f"most_waiting={most_waiting!r} must be one or 3 numbers, whole and at least 0"
    with pytest.raises(ValueError, match=re.escape(said)):
        zero_bubble(one, most_waiting=most_waiting)
