"""Random models on random meshes equal plain Flax, and end: see `fuzz`. Each case has a limit of time."""

import os

import pytest

import fuzz
from fuzz_layers import CHANGES, LAYOUTS, OF_LAYOUT
from timed import Worker

FIRST = int(os.environ.get("JPIPE_FUZZ_FIRST", "1"))
COUNT = int(os.environ.get("JPIPE_FUZZ_COUNT", "61"))
SLOW = range(FIRST, FIRST + COUNT)
"""The seeds of `make test-all`, more than three rounds of `fuzz.MESHES`. JPIPE_FUZZ_FIRST and JPIPE_FUZZ_COUNT choose
others, for a longer search."""


@pytest.fixture(scope="module")
def worker():
    with Worker() as worker:
        yield worker


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in SLOW)])
def test_random_case(worker, seed):
    result = worker.call("fuzz", "check", seed)
    if result.outcome != "ok":
        pytest.fail(f"{result.outcome}: {fuzz.describe(seed)}\n{result.detail}", pytrace=False)
    assert result.value >= 4  # the loss, its evaluation, the outputs, and the gradient of at least one leaf


def test_a_case_follows_from_its_seed():
    assert fuzz.describe(5) == fuzz.describe(5)
    assert fuzz.describe(5) != fuzz.describe(5 + len(fuzz.MESHES))


def test_every_layout_has_layers():
    assert set(CHANGES) == set(OF_LAYOUT) == set(LAYOUTS)


@pytest.mark.slow
def test_a_call_that_hangs_dies_or_raises_is_a_result():
    with Worker(limit=8) as worker:
        assert worker.call("time", "sleep", 0).outcome == "ok"
        assert worker.call("math", "sqrt", 4) == ("ok", 2.0, "")
        assert worker.call("time", "sleep", 100).outcome == "hung"
        assert worker.call("os", "abort").outcome == "died"
        raised = worker.call("math", "sqrt", -1)
        assert raised.outcome == "raised"
        assert "ValueError" in raised.detail
