"""Published orders, action for action; and that any sizes make one."""

import re

import pytest
from hypothesis import given

from any_schedule import schedules
from cases import names
from jpipe.schedules.orders import SCHEDULES, make_schedule
from jpipe.schedules.orders import zero_bubble
from jpipe.schedules.schedule import Schedule
from jpipe.schedules.simulate import simulate

PUBLISHED = {name: SCHEDULES[name] for name in ("zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipe-v")}

ORDERS = {
    "zb-h1": """
        F0 F1 F2 I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4
        F0 F1 I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
        F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4
    """,
    "zb-h2": """
        F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4
        F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4
        F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4
    """,
    "v-half": """
        F0 F1 F0.1 I0.1 W0.1 F2 F1.1 I1.1 W1.1 I0 W0 F2.1 I2.1 W2.1 I1 W1 I2 W2
        F0 F0.1 F1 I0.1 W0.1 F1.1 F2 I0 I1.1 W1.1 F2.1 W0 I1 I2.1 W2.1 W1 I2 W2
        F0 F0.1 F1 F1.1 I0.1 W0.1 I0 W0 F2 F2.1 I1.1 W1.1 I1 W1 I2.1 W2.1 I2 W2
    """,
    "v-min": """
        F0 F0.1 F1 I0.1 W0.1 F1.1 F2 I0 I1.1 W1.1 W0 F2.1 I1 I2.1 W2.1 W1 I2 W2
        F0 F0.1 F1 I0.1 F1.1 W0.1 I0 F2 W0 I1.1 F2.1 W1.1 I1 W1 I2.1 W2.1 I2 W2
        F0 F0.1 F1 F1.1 I0.1 I0 W0.1 W0 F2 F2.1 I1.1 I1 W1.1 W1 I2.1 I2 W2.1 W2
    """,
}
"""Three stages; of five micro-batches there, of three here and back."""


@pytest.mark.parametrize("name", ORDERS)
def test_order_is_as_drawn(name):
    drawn = [line.split() for line in ORDERS[name].strip().splitlines()]
    made = PUBLISHED[name](3, 3 if name.startswith("v") else 5, 2)
    assert [list(map(str, order)) for order in made.actions] == drawn
    assert (made.name, made.slots, made.style) == (name, ("FBW",), "v" if made.num_chunks == 2 else "loop")


@pytest.mark.parametrize("name", PUBLISHED)
def test_any_sizes_make_an_order(name):
    """One that isn't valid would raise."""
    for num_stages in (1, 2, 3, 4, 6, 7):
        for num_microbatches in (1, 2, 3, 5, 8, 14):
            made = PUBLISHED[name](num_stages, num_microbatches, 2)
            assert isinstance(made, Schedule)
            assert (made.num_stages, made.num_microbatches) == (num_stages, num_microbatches)


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
        assert rows["kept"] == (2 * K - 1, *[2 * K - 2] * (K - 1))
        assert rows["stash"] == tuple(2 * k for k in range(K))
        lean = zero_bubble(whole, most_waiting=range(K)).ticks.rows
        assert lean["kept"] == tuple(2 * K - 1 - k for k in range(K))
        assert lean["stash"] == tuple(range(K))


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(3, 5), (4, 12)])
def test_rows_in_a_ring(num_stages, num_microbatches):
    sizes = {"num_stages": num_stages, "num_microbatches": num_microbatches, "num_chunks": 2}
    rows = make_schedule("zero_bubble", **sizes).ticks.rows
    assert rows["residual"] == make_schedule("interleaved", **sizes).ticks.rows["residual"]
    assert rows["stash"] == tuple(k + 1 for k in range(num_stages))


def test_only_whole_backwards_are_split():
    for name in ("forward", "zero_bubble", "zb-h1"):
        schedule = make_schedule(name, num_stages=2, num_microbatches=2)
        with pytest.raises(
            ValueError, match=re.escape(f"{schedule!r} has no backward that is whole; pass one that has")
        ):
            zero_bubble(schedule)
    assert {*names(train=True)}.isdisjoint(names(train=True, split=True))
    with pytest.raises(TypeError, match="schedule='1f1b' must be a Schedule"):
        zero_bubble("1f1b")


@pytest.mark.parametrize("most_waiting", [[1, 2], -1, [0, 1, -1], 0.5, [1, 1, 1.5]])
def test_most_waiting_is_whole_numbers_from_0_on(most_waiting):
    """Negative ones were taken for 0, and fractions too."""
    one = make_schedule("1f1b", num_stages=3, num_microbatches=2)
    said = f"most_waiting={most_waiting!r} must be one number, or one for each of 3 stages, whole and at least 0"
    with pytest.raises(ValueError, match=re.escape(said)):
        zero_bubble(one, most_waiting=most_waiting)
