"""Layer ranges, walked through as a stage does: each virtual stage runs its own layers, in order."""

import random
from types import SimpleNamespace

import numpy as np
import pytest

from jpipe.planning.layer_ranges import make_ranges


def model_of(group_of):
    groups = [
        SimpleNamespace(indices=tuple(i for i, g in enumerate(group_of) if g == c)) for c in range(max(group_of) + 1)
    ]
    return SimpleNamespace(groups=groups, group_of=group_of)


def walk(model, ranges, virtual_stage):
    """The indices of the layers that a virtual stage runs."""
    found = []
    for p in range(ranges.passes_of[virtual_stage]):
        for g, group in enumerate(model.groups):
            found += group.indices[ranges.start[virtual_stage, p, g] : ranges.stop[virtual_stage, p, g]]
    return found


def test_a_run_of_equal_layers_is_one_range():
    model = model_of([0, 1, 1, 1, 1, 2])
    ranges = make_ranges(model, [(0, 3), (3, 6)])
    assert ranges.start.tolist() == [[[0, 0, 0]], [[0, 2, 0]]]
    assert ranges.stop.tolist() == [[[1, 2, 0]], [[0, 4, 1]]]
    assert ranges.always_one.tolist() == [[False, False, False]]
    assert (ranges.start.shape[0], ranges.passes_of.tolist(), ranges.most.tolist()) == (2, [1, 1], [1, 2, 1])


def test_a_group_that_comes_back_takes_another_pass():
    model = model_of([0, 1, 2, 1, 2, 1, 3])
    ranges = make_ranges(model, [(0, 6), (6, 7)])
    assert (ranges.passes_of.tolist(), ranges.most.tolist()) == ([3, 1], [1, 3, 2, 1])
    assert walk(model, ranges, 0) == [0, 1, 2, 3, 4, 5]


def test_one_of_each_on_all_virtual_stages():
    assert make_ranges(model_of([0, 1, 0, 1]), [(0, 2), (2, 4)]).always_one.tolist() == [[True, True]]


@pytest.mark.parametrize("seed", range(30))
def test_any_model_and_cuts(seed):
    draw = random.Random(seed)
    count = draw.randint(1, 12)
    group_of, most = [], -1
    for _ in range(count):  # groups are numbered in the order of their first layers
        group_of.append(draw.randint(0, most + 1))
        most = max(most, group_of[-1])
    cuts = sorted(draw.sample(range(1, count), min(draw.randint(0, 4), count - 1)))
    bounds = list(zip([0, *cuts], [*cuts, count], strict=True))
    model = model_of(group_of)
    ranges = make_ranges(model, bounds)
    assert ranges.start.dtype == ranges.stop.dtype == np.int32
    for s, (first, last) in enumerate(bounds):
        assert walk(model, ranges, s) == list(range(first, last))
