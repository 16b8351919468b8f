"""Partitions against brute force, the paper's objective against the default, and what is refused."""

import re
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jpipe.planning.partition import Partition, cut_layers, partition, unit_of, unmeasured_costs
from jpipe.schedules.orders import make_schedule

OBJECTIVES = ("max", "variance")


def brute_force(costs, num_stages, objective):
    """The best cuts by trying them all, the last cut as early as it can be, then the one before it."""

    def rank(cuts):
        stages = [sum(costs[start:stop]) for start, stop in pairwise((0, *cuts, len(costs)))]
        squares = sum((num_stages * stage - sum(costs)) ** 2 for stage in stages)
        return (max(stages) if objective == "max" else 0, squares, cuts[::-1])

    return min(combinations(range(1, len(costs)), num_stages - 1), key=rank)


@st.composite
def problems(draw, elements):
    costs = draw(st.lists(elements, min_size=1, max_size=10).filter(any))
    return costs, draw(st.integers(1, len(costs)))


@pytest.mark.parametrize("objective", OBJECTIVES)
@given(problem=problems(st.integers(0, 6)), chunks=st.integers(1, 3))
@example(problem=([1] * 10, 4), chunks=1)
@example(problem=([0, 0, 0, 1, 0, 0], 3), chunks=1)
def test_equals_brute_force_on_integers(objective, problem, chunks):
    costs, num_stages = problem
    num_stages = max(1, num_stages // chunks)
    chunks = min(chunks, len(costs) // num_stages)
    found = partition(costs, num_stages, objective, num_chunks=chunks)
    assert found.cuts == brute_force(costs, num_stages * chunks, objective)
    assert (found.num_stages, found.num_chunks) == (num_stages, chunks)


@pytest.mark.parametrize("objective", OBJECTIVES)
@given(problem=problems(st.floats(0, 1e300, allow_subnormal=False)))
def test_is_as_good_as_brute_force_on_floats(objective, problem):
    costs, num_stages = problem
    scaled = [cost / max(costs) for cost in costs]
    found = partition(costs, num_stages, objective)
    expected = Partition(brute_force(scaled, num_stages, objective), tuple(scaled), objective)
    found = Partition(found.cuts, tuple(scaled), objective)
    if objective == "max":
        assert max(found.costs) == pytest.approx(max(expected.costs), rel=1e-12)
    assert np.var(found.costs) == pytest.approx(np.var(expected.costs), rel=1e-9, abs=1e-12)


def test_the_two_objectives_differ():
    costs = [3, 4, 8, 6, 5, 6, 3]
    assert partition(costs, 3).costs == (7, 14, 14)
    assert partition(costs, 3, "variance").costs == (15, 11, 9)


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "counts"), [(16, 8, (2,) * 8), (10, 4, (2, 2, 3, 3)), (5, 5, (1,) * 5), (7, 1, (7,))]
)
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("cost", [0.0, 0.1, 1.0])
def test_equal_layers_are_spread_evenly(num_layers, num_stages, counts, objective, cost):
    assert partition([cost] * num_layers, num_stages, objective).counts == counts


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_thousands_of_layers(objective):
    costs = np.random.default_rng(0).random(3_000)
    found = partition(costs, 16, objective)
    assert sum(found.counts) == 3_000
    assert found.imbalance < 1.01


def test_pictures():
    found = partition([9, *[1] * 9], 4)
    assert str(found).splitlines() == [
        "stage  layers  count  cost  share",
        "    0       0      1     9  50.0%  <- slowest",
        "    1     1-3      3     3  16.7%",
        "    2     4-6      3     3  16.7%",
        "    3     7-9      3     3  16.7%",
        "slowest/mean 2.000; cut into even counts the slowest stage would cost 10 (2.222)",
    ]
    assert repr(found) == "<Partition of 10 layers into (1, 3, 3, 3); slowest/mean 2.000>"
    assert str(partition([1, 1, 1, 1, 2], 2, num_chunks=2)).splitlines()[:4] == [
        "stage  chunk  layers  count  cost  share",
        "    0      0       0      1     1  16.7%",
        "    1      0       1      1     1  16.7%",
        "    0      1     2-3      2     2  33.3%  <- slowest",
    ]


NEEDS = "give one number for each layer"


@pytest.mark.parametrize(
    ("arguments", "chunks", "message"),
    [
        (([], 1), 1, f"costs is empty; {NEEDS}"),
        (([1, -2], 1), 1, f"costs[1]=-2 has to be at least 0 and finite; {NEEDS}"),
        (([1, "x"], 1), 1, f"costs[1]='x' is no number; {NEEDS}"),
        (([1, 2, 3], 5), 1, "num_stages=5 is more than the 3 layers; use 1 to 3"),
        (([1, 2], 1, "mean"), 1, "objective='mean' is unknown; use one of 'max', 'variance'"),
        (([1] * 5, 2), 0, "num_chunks=0 is less than 1; use 1 or more"),
        (([1] * 5, 2), 3, "num_chunks=3 with num_stages=2 and 5 layers; use 1 to 2"),
    ],
)
def test_bad_arguments(arguments, chunks, message):
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        partition(*arguments, num_chunks=chunks)


@pytest.mark.parametrize(
    ("balance", "unit", "counts"),
    [
        ("even", None, (3, 3)),
        ("flops", "flops", (5, 1)),
        ((1, 5), "flops", (1, 5)),
        ((9.0, 1.0, 1.0, 1.0, 1.0, 5.0), None, (1, 5)),
    ],
)
def test_what_is_measured_and_where_is_cut(balance, unit, counts):
    assert unit_of(balance) == unit
    costs = (1.0, 1.0, 1.0, 1.0, 1.0, 5.0) if balance == "flops" else unmeasured_costs(balance, 6)
    assert cut_layers(balance, costs, make_schedule("1f1b", num_stages=2, num_microbatches=2)).counts == counts
