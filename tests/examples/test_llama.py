"""A Llama with Tunix's partitioning over (stage, fsdp, tp) equals plain Flax; see `llama`."""

import itertools

import pytest

from timed import Worker

SHAPES = [(2, 2, 2), (4, 2, 1), (2, 1, 2), (1, 2, 2)]
QUICK = ((2, 2, 2), True, "none")
GRID = itertools.product(SHAPES, [False, True], ["layer", "none", "full"])


@pytest.fixture(scope="module")
def worker():
    with Worker() as worker:
        yield worker


def check(worker, shape, explicit, **options):
    assert worker.value("llama", "check", shape, explicit, options) >= 1 + 4 * 9 + 3  # the loss, and each leaf


@pytest.mark.parametrize(
    ("shape", "explicit", "remat"),
    [QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in GRID if case != QUICK)],
)
def test_equals_plain_flax(worker, shape, explicit, remat):
    check(worker, shape, explicit, remat=remat)


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("interleaved", 2), ("naive", 1)])
def test_equals_plain_flax_in_every_order(worker, schedule, chunks):
    check(worker, (2, 2, 2), False, schedule=schedule, num_chunks=chunks)
