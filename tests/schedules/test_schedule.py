"""Orders against pictures, drawn; every fault against its message."""

import itertools
import re

import pytest

from cases import names
from jpipe.schedules.actions import Action
from jpipe.schedules.orders import SCHEDULES, make_schedule
from jpipe.schedules.placing import place
from jpipe.schedules.schedule import Schedule

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
    times = place(schedule)
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


def test_one_slot_1f1b_is_the_papers_picture():
    """F and B in one slot: the order in which stage k starts with K-k forwards."""
    schedule = Schedule(
        [["F0", "F1", "F2", "B0", "F3", "B1", "B2", "B3"],
         ["F0", "F1", "B0", "F2", "B1", "F3", "B2", "B3"],
         ["F0", "B0", "F1", "B1", "F2", "B2", "F3", "B3"]],
        slots=("FB",),
    )  # fmt: skip
    assert str(schedule).splitlines()[1:] == [
        "tick    |0  |1  |2  |3  |4  |5  |6  |7  |8  |9  |10 |11 |",
        "stage 0 |F0 |F1 |F2 |.  |.  |B0 |F3 |B1 |.  |B2 |.  |B3 |",
        "stage 1 |.  |F0 |F1 |.  |B0 |F2 |B1 |F3 |B2 |.  |B3 |.  |",
        "stage 2 |.  |.  |F0 |B0 |F1 |B1 |F2 |B2 |F3 |B3 |.  |.  |",
    ]


@pytest.mark.parametrize("name", ["interleaved", "forward"])
def test_chunked_orders_never_deadlock_and_stall_only_with_fewer_microbatches_than_stages(name):
    for num_stages, num_microbatches, num_chunks in itertools.product(range(1, 6), range(1, 10), range(1, 5)):
        schedule = make_schedule(name, num_stages=num_stages, num_microbatches=num_microbatches, num_chunks=num_chunks)
        forwards = sorted({tau for (_, action), tau in place(schedule).items() if action.kind == "F"})
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


def test_spellings_of_an_action_are_equal():
    spelled = Schedule([["F0", ("F", 1), Action("B", 0), ("B", 1, 0)]])
    assert spelled == Schedule([[Action(kind, m) for kind in "FB" for m in (0, 1)]], name="other")
    assert hash(spelled) == hash(Schedule([["F0.0", "F1", "B0", "B1"]]))
    assert spelled != Schedule([["F0", "B0", "F1", "B1"]])
    assert spelled != Schedule([["F0", "F1", "B0", "B1"]], slots=("FB",))
    assert (str(Action("F", 3)), str(Action("F", 3, 1))) == ("F3", "F3.1")


def test_make_schedule_returns_ones_own_schedule_after_checking_its_sizes():
    own = Schedule([["F0", "B0"]])
    assert make_schedule(own, num_stages=1, num_microbatches=1) is own
    with pytest.raises(ValueError, match="num_microbatches=4, but the schedule 'custom' was made for 1; use num_mic"):
        make_schedule(own, num_stages=1, num_microbatches=4)


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ({"num_stages": 0}, ValueError, "num_stages=0 must be 1 or more"),
        ({"num_microbatches": -2}, ValueError, "num_microbatches=-2 must be 1 or more"),
        ({"num_chunks": 0}, ValueError, "num_chunks=0 must be 1 or more"),
        ({"num_stages": True}, TypeError, "num_stages=True must be an int, got bool"),
        ({"num_microbatches": 2.0}, TypeError, "num_microbatches=2.0 must be an int, got float"),
    ],
)
def test_make_schedule_rejects_sizes(sizes, error, message):
    with pytest.raises(error, match=re.escape(message)):
        make_schedule("1f1b", **{"num_stages": 2, "num_microbatches": 2} | sizes)


@pytest.mark.parametrize("name", names(chunks=False))
def test_schedules_of_one_chunk_say_so(name):
    remedy = f"schedule={name!r} has one chunk a stage, got num_chunks=2; use schedule='interleaved' or num_chunks=1"
    with pytest.raises(ValueError, match=re.escape(remedy)):
        make_schedule(name, num_stages=2, num_microbatches=2, num_chunks=2)


def test_make_schedule_names_the_schedules_it_knows():
    known = ", ".join(map(repr, SCHEDULES))
    with pytest.raises(ValueError, match=f"schedule='zigzag' is unknown; use one of {known}"):
        make_schedule("zigzag", num_stages=2, num_microbatches=2)
    with pytest.raises(TypeError, match=r"schedule=3 must be a name or a jpipe\.Schedule"):
        make_schedule(3, num_stages=2, num_microbatches=2)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("actions", "slots", "message"),
    [
        ([], ("F", "B"), "a schedule of 0 stages has no actions"),
        ([[], []], ("F", "B"), "a schedule of 2 stages has no actions"),
        ([["F0", "X0"]], ("F", "B"), "action X0 on stage 0 has the unknown kind 'X'; use one of F, B"),
        ([["F0", "FW0"]], ("F", "B"), "action FW0 on stage 0 has the unknown kind 'FW'; use one of F, B"),
        ([["F0", "B0"]], ("F",), "action B0 on stage 0: no slot admits B; add it to slots=('F',) or drop the action"),
        ([["F0", "B0", "W0"]], ("F", "BW"), "weight-gradient actions (W) are not executed yet; leave them to B"),
        ([["F0", "B0", "W0"]], ("F", "B"), "action W0 on stage 0: weight-gradient actions (W) are not executed yet"),
        ([["F0", "B0"]], (), "slots=() is empty"),
        ([["F0", "B0"]], ("F", ""), "slot '' of ('F', '') must be a string of different kinds"),
        ([["F0", "B0"]], ("F", "BB"), "slot 'BB' of ('F', 'BB') must be a string of different kinds"),
        ([["F0", "B0"]], ("F", "Q"), "slot 'Q' of slots=('F', 'Q') has the unknown kind 'Q'; use one of F, B"),
        ([["F-1"]], ("F",), "action F-1 on stage 0 is out of range; micro-batches and chunks count from 0"),
        ([["F0", "F1", "F0"]], ("F",), "stage 0 has F0 2 times; keep one of them"),
        ([["F0", "F1"], ["F0"]], ("F",), "stage 1 lacks F1"),
        ([["F0"], ["F0", "F2"]], ("F",), "stage 0 lacks F1: F of every micro-batch and chunk must be on every stage, "
         "here of 3 micro-batches (F2 on stage 1 is the last) and 1 chunks; add F1 to stage 0 or drop it"),
        ([["F0", "F0.1", "F1"]], ("F",), "stage 0 lacks F1.1"),
        ([["F0", "B0"], ["F0"]], ("F", "B"), "stage 1 lacks B0"),
        ([["B0"]], ("F", "B"), "stage 0 lacks F0"),
    ],
)  # fmt: skip
def test_validation_names_the_first_fault(actions, slots, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Schedule(actions, slots=slots)


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        # A backward before its own forward.
        ([["B0", "F0"]], "stage 0 waits forever at B0: it needs F0 of stage 0, which comes after B0 there"),
        # One's own fault, found from another stage that only waits for the culprit.
        ([["F0", "B0"], ["B0", "F0"]], "stage 1 waits forever at B0: it needs F0 of stage 1"),
        # Two stages wait for each other: 1F1B's last stage with a forward too many before its first backward.
        (
            [["F0", "F1", "B0", "F2", "B1", "B2"], ["F0", "F1", "F2", "B0", "B1", "B2"]],
            "stage 1 waits forever at F2: it needs F2 of stage 0, which comes after B0 there, "
            "and B0 cannot run before it; put F2 before B0 on stage 0",
        ),
        # Stages that disagree about the order of the micro-batches, each fine by itself.
        ([["F0", "B0", "F1", "B1"], ["F1", "B1", "F0", "B0"]], "stage 1 waits forever at F1: it needs F1 of stage 0"),
        # A later chunk before the earlier one.
        (
            [["F0.1", "F0"], ["F0", "F0.1"]],
            "stage 1 waits forever at F0: it needs F0 of stage 0, which comes after F0.1",
        ),
    ],
)
def test_deadlock_names_who_waits_for_what(actions, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Schedule(actions)


def test_a_deadlock_is_broken_by_its_remedy():
    actions = [["F0", "F1", "B0", "F2", "B1", "B2"], ["F0", "F1", "F2", "B0", "B1", "B2"]]
    with pytest.raises(ValueError, match="put F2 before B0 on stage 0"):
        Schedule(actions)
    actions[0] = ["F0", "F1", "F2", "B0", "B1", "B2"]
    assert Schedule(actions) == make_schedule("gpipe", num_stages=2, num_microbatches=3)


@pytest.mark.parametrize(
    ("actions", "slots", "message"),
    [
        ([["F0", 3]], ("F",), "stage 0 has the action 3; use Action"),
        ([["F0", "zero"]], ("F",), "stage 0 has the action 'zero'; use Action"),
        ([["F0", ("F", 1.0)]], ("F",), "stage 0 has the action ('F', 1.0); use Action"),
        ([["F0", ("F", True)]], ("F",), "stage 0 has the action ('F', True); use Action"),
        ([["F0"], "F0"], ("F",), "actions of stage 1 must be a sequence, got 'F0'"),
        ("F0", ("F",), "actions must be a sequence, got 'F0'"),
        ([["F0"]], "F", "slots must be a sequence, got 'F'"),
    ],
)
def test_wrong_types_are_named(actions, slots, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        Schedule(actions, slots=slots)
