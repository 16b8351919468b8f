"""Rows of values that wait: the lowest that is free, and with several routes a buffer for each."""

import numpy as np
import pytest

from jpipe.schedules.orders import make_schedule
from jpipe.schedules.schedule import Schedule
from jpipe.schedules.ticks import lower
from jpipe.schedules.waiting import WaitingValues

THERE_AND_BACK = Schedule(
    [
        ["F0", "F1", "F0.1", "F1.1", "B0.1", "B1.1", "B0", "B1"],
        ["F0", "F1", "F0.1", "F1.1", "B1.1", "B0.1", "B0", "B1"],
    ],
    slots=("F", "B"),
    style="v",
)
"""A "v" in which nothing stays in place on the last stage but one cotangent: other actions come between.

    tick       0     1     2     3     4     5     6     7     8     9     10    11
    stage 0    F0    F1                F0.1  F1.1  B0.1  B1.1              B0    B1
    stage 1          F0    F1    F0.1  F1.1              B1.1  B0.1  B0    B1
"""


def values(*spans):
    """Values of one stage, of each (first, last) slot time."""
    first, last = np.array(spans).T
    return WaitingValues(np.zeros_like(first), first, last[:, None], np.zeros_like(first))


def test_a_value_has_the_lowest_row_that_is_free():
    some = values((0, 4), (1, 2), (3, 5), (5, 6))
    assert some.row.tolist() == [0, 1, 1, 0]
    assert some.column((7, 1))[:, 0].tolist() == [-1, -1, 1, -1, 0, 1, 0]
    taken_until = some.free((7, 1), some.first, some.last + 1)[:, 0].tolist()
    assert taken_until == [1, 2, 2, 2, 2, 2, 1], "2: one more row than there are"


def test_routes_have_a_buffer_each_where_values_are_read_once():
    waiting = lambda name, **options: (
        lower(make_schedule(name, num_stages=4, num_microbatches=8, num_chunks=2), **options).waiting
    )
    assert waiting("v") == {"activation": (1, 1, 0), "cotangent": (1, 1, 0)}, "up, down, and what turns is in place"
    assert waiting("v", keep_inputs=True) == {"activation": (8,), "cotangent": (1, 1, 0)}
    assert waiting("v", idle_work=True) == {"activation": (3,), "cotangent": (2,)}
    assert waiting("interleaved") == {"activation": (1,), "cotangent": (1,)}, "one route"


@pytest.mark.parametrize("name", ["v", "zb-v", "v-half", "v-min", "dualpipe-v"])
def test_a_buffer_of_one_row_is_always_written_if_nothing_waits_in_it(name):
    table = lower(make_schedule(name, num_stages=4, num_microbatches=8, num_chunks=2))
    columns = [
        (rows, column)
        for slot in table.slots
        for boundary in ("activation", "cotangent")
        for rows, column in zip(table.waiting[boundary], getattr(slot, f"{boundary}_in"), strict=True)
    ]
    always = [bool((column >= 0).all()) for _, column in columns if (column >= 0).any()]
    assert sum(always) == {"v": 3, "v-min": 3}.get(name, 0), "the other orders have values that wait longer"


def test_what_turns_waits_in_a_buffer_if_other_actions_come_between():
    table = lower(THERE_AND_BACK)
    assert table.waiting == {"activation": (1, 1, 2), "cotangent": (2, 1, 1)}
    forward, backward = table.slots
    assert forward.activation[:, 1].tolist() == [-1, 0, 0, 2, 3, -1, -1, -1, -1, -1, -1, -1]
    assert backward.activation_in[2][:, 1].tolist() == [-1, 2, 3, -1, -1, -1, -1, -1, -1, -1, -1, -1]
    # B0 follows B0.1 on stage 1: its cotangent is there. That of B1 waits.
    assert backward.cotangent[:, 1].tolist() == [-1, -1, -1, -1, -1, -1, -1, 1, 0, -1, 3, -1]
