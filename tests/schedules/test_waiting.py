"""Rows of values that wait: the lowest that is free, and with several routes a buffer for each."""

from jpipe.schedules.actions import Action
from jpipe.schedules.orders import make_schedule
from jpipe.schedules.schedule import Schedule
from jpipe.schedules.ticks import lower
from jpipe.schedules.waiting import Rows, Value


def test_a_value_has_the_lowest_row_that_is_free():
    some = Rows([Value(0, *span) for span in ((0, 4), (1, 2), (3, 5), (5, 6))], (7, 1))
    assert some.row == [0, 1, 1, 0]
    assert some.column(lambda value: [value.last])[:, 0].tolist() == [-1, -1, 1, -1, 0, 1, 0]
    assert some.free[:, 0].tolist() == [1, 2, 2, 2, 2, 2, 1, 0], "2: one more row than there are"


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
