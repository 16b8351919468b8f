"""What is to be equal on all stages: names, counts and costs."""

import numpy as np
import pytest

from jpipe.planning.balance import MEASURES, as_balance, cut_layers, measure_of, unmeasured_costs
from jpipe.planning.costs import Cost


@pytest.mark.parametrize(
    ("balance", "expected"),
    [
        ("even", "even"),
        ("size", "size"),
        ([1, 3], (1, 3)),
        (np.asarray([1, 3]), (1, 3)),
        ([1.0, 2, 3.0, 4.0], (1.0, 2.0, 3.0, 4.0)),
        ((np.float32(1), 2.0, 3.0, 4.0), (1.0, 2.0, 3.0, 4.0)),
    ],
)
def test_what_users_pass(balance, expected):
    found = as_balance(balance, 4, 2)
    assert found == expected and type(found) is type(expected)
    assert [type(a) for a in found] == [type(a) for a in expected]


@pytest.mark.parametrize(
    ("balance", "measure", "counts"),
    [
        ("even", None, (3, 3)),
        ("flops", MEASURES["flops"], (5, 1)),
        ((1, 5), MEASURES["flops"], (1, 5)),
        ((9.0, 1.0, 1.0, 1.0, 1.0, 5.0), None, (1, 5)),
    ],
)
def test_what_is_measured_and_where_is_cut(balance, measure, counts):
    assert measure_of(balance) == measure
    costs = (1.0, 1.0, 1.0, 1.0, 1.0, 5.0) if balance == "flops" else unmeasured_costs(balance, 6)
    assert cut_layers(balance, costs, 2, 1).counts == counts


def test_what_a_measure_makes_equal():
    cost = Cost(1.0, 5.0, parameter_bytes=10, state_bytes=5, residual_bytes=7)
    found = {name: measure.of(cost) for name, measure in MEASURES.items()}
    assert found == {"flops": 6.0, "time": 6.0, "size": 4 * 10 + 5 + 7}
