"""Slices that go to the hosts and come from there: together they are the array."""

import numpy as np
import pytest

from jpipe.memory import host_slices
from jpipe.memory.host_slices import Cuts


@pytest.fixture(autouse=True)
def small_slices(monkeypatch):
    monkeypatch.setattr(host_slices, "SLICE_BYTES", 600)


def test_cuts():
    cuts = Cuts.of((1, 4, 96, 50), 4)  # rows of 200 bytes, runs of whole tiles
    assert (cuts.view, cuts.dim, cuts.run) == ((384, 50), 0, 32)
    assert [(count, shape) for count, shape, _ in cuts.parts] == [(12, (32, 50))]
    cuts = Cuts.of((1, 5000), 4)
    assert [(count, shape, at(count - 1)) for count, shape, at in cuts.parts] == [
        (4, (1, 1024), (0, 3072)),
        (1, (1, 904), (0, 4096)),
    ]
    assert Cuts.of((1, 4, 31, 50), 4).run == 1  # rows that fill no tiles aren't merged: an entry at a time


@pytest.mark.parametrize("shape", [(1, 4, 96, 50), (1, 5000), (1, 4, 31, 50), (3, 40), (1, 1, 70, 9), (2, 3, 5, 33, 7)])
def test_slices_are_the_array(shape):
    cuts = Cuts.of(shape, 4)
    array = np.arange(np.prod(shape)).reshape(cuts.view)
    found = np.full_like(array, -1)
    for count, part, at in cuts.parts:
        for i in range(count):
            begin = (*at(i), *(0 for _ in part[len(at(i)) :]))
            where = tuple(slice(start, start + size) for start, size in zip(begin, part, strict=True))
            assert found[where].shape == part
            assert (found[where] == -1).all(), "two slices overlap"
            found[where] = array[where]
    np.testing.assert_array_equal(found, array)
