"""Kinds of action, and what a table of orders is known by."""

import pytest

from jpipe.schedules.actions import ACTION_KINDS, Action
from jpipe.schedules.placement import Placement
from jpipe.schedules.timing import Orders


def test_kinds_depend_on_known_ones_and_flow_one_way_or_none():
    for name, kind in ACTION_KINDS.items():
        assert kind.flow in (-1, 0, 1)
        assert set(kind.after) <= set(ACTION_KINDS) - {name}
    assert list(ACTION_KINDS) == ["F", "R", "B", "I", "W"]


@pytest.mark.parametrize(("chunk", "text"), [(0, "F3"), (2, "F3.2")])
def test_an_action_is_spelled_without_its_only_chunk(chunk, text):
    assert str(Action("F", 3, chunk)) == text


def test_sizes_are_the_highest_of_any_stage():
    orders = Orders(((Action("F", 0), Action("F", 2)), (Action("F", 1, 1),)), ("F",))
    assert (orders.num_stages, orders.num_microbatches, orders.num_chunks) == (2, 3, 2)
    assert orders.placement == Placement(2, 2)
