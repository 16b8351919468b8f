"""Where micro-batches go, and when each action runs; who waits for what in an order that never ends."""

import itertools
import re

import pytest
from hypothesis import given

from any_schedule import schedules
from jpipe.schedules.actions import Placement, admitted, needs
from jpipe.schedules.schedule import Schedule

# --- placement --------------------------------------------------------------------------------------------------------


PLACEMENTS = [*itertools.product((1, 2, 3, 5), (1, 2, 3), ["loop"]), *itertools.product((1, 2, 3, 5), [2], ["v"])]


@pytest.mark.parametrize(("num_stages", "num_chunks", "style"), PLACEMENTS)
def test_placement_follows_the_walk_of_a_microbatch(num_stages, num_chunks, style):
    """Virtual stages are counted as they are visited; each hop is on one route, and a route has one sender a stage.

    In a loop each chunk begins on the first stage; in a "v" a micro-batch turns on the last stage and comes back.
    """
    placement = Placement(num_stages, num_chunks, style)
    up = range(num_stages)
    visits = [(k, v) for v in range(num_chunks) for k in (reversed(up) if style == "v" and v == 1 else up)]
    assert placement.num_virtual_stages == len(visits)
    for s, (stage, chunk) in enumerate(visits):
        assert placement.virtual_stage(stage, chunk) == s
        assert (placement.stage_of(s), placement.chunk_of(s)) == (stage, chunk)
    for flow, walked in ((+1, visits), (-1, visits[::-1])):
        sources = {at[1:]: source for at, source in placement.sources.items() if at[0] == flow}
        assert sources == {receiver: sender for sender, receiver in itertools.pairwise(walked)}
        hops = sorted({(a[0], b[0]) for a, b in itertools.pairwise(walked)})
        routes = placement.routes(flow)
        assert sorted(itertools.chain(*routes)) == hops
        assert style == "v" or len(routes) <= 1, "a line or a ring is one route"
        for route in routes:
            assert len({receiver for _, receiver in route}) == len(route), "a stage hears from one by each route"
            senders = [sender for sender, receiver in route if sender != receiver]
            assert len(set(senders)) == len(senders), "and sends to one other"


# --- timing -----------------------------------------------------------------------------------------------------------


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
