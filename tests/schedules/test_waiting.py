"""Rows of values that wait: the lowest that is free, and with several routes a buffer for each."""

import numpy as np
import pytest

from jpipe.schedules.actions import Action
from jpipe.schedules.orders import make_schedule
from jpipe.schedules.schedule import Schedule
from jpipe.schedules.ticks import lower
from jpipe.schedules.waiting import WaitingValues
from published import schedule_of

THERE_AND_BACK = Schedule(
    [
        ["F0", "F1", "F2", "F0.1", "F1.1", "F2.1", "B0.1", "B1.1", "B2.1", "B0", "B1", "B2"],
        ["F0", "F1", "F0.1", "F2", "F1.1", "F2.1", "B0.1", "B1.1", "B0", "B2.1", "B1", "B2"],
    ],
    slots=("F", "B"),
    style="v",
)
"""A "v" in which nothing stays in place on the last stage, because other actions come between."""


def values(*spans):
    """Values of one stage, of each (first, last) slot time."""
    first, last = np.array(spans).T
    return WaitingValues(np.zeros_like(first), first, last[:, None], np.zeros_like(first), np.zeros_like(first))


def test_a_value_has_the_lowest_row_that_is_free():
    some = values((0, 4), (1, 2), (3, 5), (5, 6))
    assert some.row.tolist() == [0, 1, 1, 0]
    assert some.column((7, 1))[:, 0].tolist() == [-1, -1, 1, -1, 0, 1, 0]
    taken_until = some.free((7, 1), some.first, some.last + 1)[:, 0].tolist()
    assert taken_until == [1, 2, 2, 2, 2, 2, 1], "2: one more row than there are"


def counts(table):
    return {name: tuple(map(len, buffers)) for name, buffers in table.waiting.items()}


def test_routes_have_a_buffer_each_where_values_are_read_once():
    sizes = {"num_stages": 4, "num_microbatches": 8, "num_chunks": 2}
    waiting = lambda name, **options: counts(lower(make_schedule(name, **sizes), **options))
    assert waiting("v") == {"activation": (1, 1, 0), "cotangent": (1, 1, 0)}, "up, down, and what turns is in place"
    assert waiting("v", keep_inputs=True) == {"activation": (8,), "cotangent": (1, 1, 0)}
    assert waiting("v", idle_work=True) == {"activation": (3,), "cotangent": (2,)}
    assert waiting("interleaved") == {"activation": (1,), "cotangent": (1,)}, "one route"


def test_routes_share_a_buffer_where_that_takes_fewer_rows():
    """All forwards of a chunk, then all of the next: at one time many wait for the first, and then for the second."""
    one = [("F", 0), ("F", 1), ("B", 1), ("B", 0)]
    orders = [[Action(kind, m, chunk) for kind, chunk in one for m in range(8)] for _ in range(4)]
    schedule = Schedule(orders, slots=("F", "B"), style="v")
    assert counts(lower(schedule)) == {"activation": (8,), "cotangent": (8,)}, "ten each, if apart"


@pytest.mark.parametrize("name", ["v", "zb-v", "v-half", "v-min", "dualpipe-v"])
def test_a_buffer_of_one_row_is_always_written_if_its_sender_leaves_nothing_else(name):
    table = lower(schedule_of(name, 4, 8, 2))
    columns = [
        column
        for slot in table.slots
        for boundary in ("activation", "cotangent")
        for column in getattr(slot, f"{boundary}_in")
    ]
    always = [bool((column >= 0).all()) for column in columns if (column >= 0).any()]
    assert sum(always) == {"v": 4, "zb-v": 2, "v-half": 3, "v-min": 4, "dualpipe-v": 2}[name]


def test_what_turns_waits_in_a_buffer_if_other_actions_come_between():
    #   tick      0    1    2    3    4    5    6    7    8    9    10   11   12   13
    #   stage 1        F0   F1   F0.1 F2   F1.1 F2.1      B0.1 B1.1 B0   B2.1 B1   B2
    forward, backward = THERE_AND_BACK.ticks.slots
    assert counts(THERE_AND_BACK.ticks) == {"activation": (1, 1, 2), "cotangent": (1, 1, 2)}
    assert forward.activation[:7, 1].tolist() == [-1, 0, 0, 2, 0, 3, 2]
    assert backward.activation_in[2][:7, 1].tolist() == [-1, 2, 3, -1, 2, -1, -1], "at the end of the tick"
    assert backward.cotangent[8:14, 1].tolist() == [0, 0, 2, 0, 3, 2]
    assert forward.cotangent_in[2][8:14, 1].tolist() == [-1, 2, 3, -1, 2, -1], "while the next tick's forward runs"
