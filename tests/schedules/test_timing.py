"""When actions run: as soon as they can; and orders that never end, by what they wait for."""

import re

import pytest
from hypothesis import given

from any_schedule import schedules
from jpipe.schedules.actions import admitted
from jpipe.schedules.orders import make_schedule
from jpipe.schedules.schedule import Schedule
from jpipe.schedules.timing import needs


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


@given(schedules())
def test_every_action_runs_as_soon_as_possible(schedule):
    times = schedule.slot_times
    for stage, order in enumerate(schedule.actions):
        for before, action in zip([None, *order], order, strict=False):
            tau = times[stage, action]
            held_up = [times[need] for need in needs(schedule, stage, action)]
            held_up += [] if before is None else [times[stage, before]]
            admits = [admitted(slot) for slot in schedule.slots]
            assert action.kind in admits[tau % len(admits)]
            assert all(before < tau for before in held_up)
            between = range(max(held_up, default=-1) + 1, tau)
            assert not any(action.kind in admits[slot % len(admits)] for slot in between)


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
