"""A schedule of one's own: spelled in several ways, printed as a grid, every fault against its message."""

import re

import pytest

from jpipe.schedules.actions import Action
from jpipe.schedules.orders import make_schedule
from jpipe.schedules.schedule import Schedule


def test_spellings_of_an_action_are_equal():
    spelled = Schedule([["F0", ("F", 1), Action("B", 0), ("B", 1, 0)]])
    assert spelled == Schedule([[Action(kind, m) for kind in "FB" for m in (0, 1)]], name="other")
    assert hash(spelled) == hash(Schedule([["F0.0", "F1", "B0", "B1"]]))
    assert spelled != Schedule([["F0", "B0", "F1", "B1"]])
    assert spelled != Schedule([["F0", "F1", "B0", "B1"]], slots=("FB",))
    assert (str(Action("F", 3)), str(Action("F", 3, 1))) == ("F3", "F3.1")


@pytest.mark.parametrize(
    ("actions", "slots", "message"),
    [
        ([], ("F", "B"), "a schedule of 0 stages has no actions"),
        ([[], []], ("F", "B"), "a schedule of 2 stages has no actions"),
        ([["F0", "X0"]], ("F", "B"), "action X0 on stage 0 has the unknown kind 'X'; use one of F, R, B, I, W"),
        ([["F0", "FW0"]], ("F", "B"), "action FW0 on stage 0 has the unknown kind 'FW'; use one of F, R, B, I, W"),
        ([["F0", "B0"]], ("F",), "action B0 on stage 0: no slot admits B; add it to slots=('F',) or drop the action"),
        ([["F0", "B0", "W0"]], ("F", "BW"), "stage 0 has B0 and W0: the backward of a micro-batch and chunk is"),
        ([["F0", "I0", "B0", "W0"]], ("F", "BW"), "stage 0 has B0 and I0: the backward of a micro-batch and chunk is"),
        ([["F0", "I0"]], ("F", "B", "W"), "stage 0 lacks W0: W of every micro-batch and chunk must be on every stage"),
        ([["F0", "I0", "W0"], ["F0", "W0"]], ("F", "BW"), "stage 1 lacks I0"),
        ([["F0", "W0", "I0"]], ("F", "B", "W"), "stage 0 waits forever at W0: it needs I0 of stage 0"),
        ([["F0", "B0", "R0"]], ("FR", "B"), "stage 0 waits forever at B0: it needs R0 of stage 0"),
        ([["F0", "I0", "W0"]], ("F", "B"), "action W0 on stage 0: no slot admits W; add it to slots=('F', 'B')"),
        ([["F0", "B0"]], (), "slots=() is empty"),
        ([["F0", "B0"]], ("F", ""), "slot '' of ('F', '') must be a string of different kinds"),
        ([["F0", "B0"]], ("F", "BB"), "slot 'BB' of ('F', 'BB') must be a string of different kinds"),
        ([["F0", "B0"]], ("F", "Q"), "slot 'Q' of slots=('F', 'Q') has the unknown kind 'Q'; use one of F, R, B, I, W"),
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


@pytest.mark.parametrize("width", [20, 60, 120, 10_000])
@pytest.mark.parametrize("name", ["1f1b", "interleaved", "forward"])
def test_a_wide_grid_is_the_ends_of_the_whole_one(name, width):
    """Of each line some first ticks and some last ones, as many as there is room for; how many are missing."""
    schedule = make_schedule(name, num_stages=12, num_microbatches=120, num_chunks=2 if name == "interleaved" else 1)
    whole, lines = schedule.grid().splitlines(), schedule.grid(width).splitlines()
    assert len(whole) == 14 and "left out" not in whole[-1]
    if width == 10_000:
        assert lines == whole
        return
    *lines, note = lines
    assert lines[0] == whole[0]
    for line, all_ticks in zip(lines[1:], whole[1:], strict=True):
        first, last = line.split(" ... |")
        assert all_ticks.startswith(first) and all_ticks.endswith(last) and first.endswith("|") and last
        ticks = line.count("|") - 2
        assert len(line) <= width < len(line) + (len(last) // (ticks // 2)) or ticks == 2
        assert note == f"{all_ticks.count('|') - 1 - ticks} of {all_ticks.count('|') - 1} ticks are left out; " + (
            "schedule.grid() has all"
        )
    if width == 120:
        assert str(schedule).splitlines() == [*lines, note]


def test_in_short():
    assert repr(make_schedule("1f1b", num_stages=16, num_microbatches=64)) == "<Schedule 1f1b: K=16, M=64, V=1>"


def test_a_style_is_known_and_fits_the_chunks():
    with pytest.raises(ValueError, match="style='w' is unknown; use one of 'loop', 'v'"):
        Schedule([["F0", "B0"]], style="w")
    with pytest.raises(ValueError, match='style="v" takes two chunks a stage, there and back; the actions have 1'):
        Schedule([["F0", "B0"]], style="v")
    assert Schedule([["F0", "F0.1", "B0.1", "B0"]], style="v") != Schedule([["F0", "F0.1", "B0.1", "B0"]])
