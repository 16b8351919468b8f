"""One table of what a step takes, whoever says so."""

import pytest

from jpipe.tools.step_cost import Parts, StepCost


def test_a_row_for_each_part_and_its_share():
    cost = StepCost(
        "measured", Parts({"computation": 0.06, "bubble": 0.04}), Parts(other_variables=3 * 2**20, work=2**20)
    )
    assert cost.step == pytest.approx(0.1)
    table = cost._table()
    assert list(table.header) == ["of a device", "measured", "share"]
    assert list(table.rows) == [
        ("ms: computation", "60.0", "60.0%"),
        ("ms: bubble", "40.0", "40.0%"),
        ("ms: step", "100", "100.0%"),
        ("other variables", "3.0 MiB", "75.0%"),
        ("work", "1.0 MiB", "25.0%"),
        ("all", "4.0 MiB", "100.0%"),
    ]
    assert "<table>" in cost._repr_html_() and "computation" in str(cost)


def test_what_is_not_known_has_no_row():
    assert StepCost("predicted", Parts(), Parts(work=5))._table().rows == [
        ("work", "5 bytes", "100.0%"),
        ("all", "5 bytes", "100.0%"),
    ]
    assert StepCost("compiled", Parts(), Parts(work=0))._table().rows[-1] == ("all", "0 bytes", "-")
