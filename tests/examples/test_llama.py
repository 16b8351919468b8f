"""A Llama with Tunix's partitioning over (stage, fsdp, tp) equals plain Flax, in Linen and in NNX; see `llama`."""

import itertools

import pytest

from timed import Worker

SHAPES = [(2, 2, 2), (4, 2, 1), (2, 1, 2), (1, 2, 2)]
QUICK = ("nnx", (2, 2, 2), True, "none")
GRID = itertools.product(["linen", "nnx"], SHAPES, [False, True], ["layer", "none", "full"])


@pytest.fixture(scope="module")
def worker():
    with Worker() as worker:
        yield worker


def check(worker, library, shape, explicit, **options):
    assert worker.value("llama", "check", library, shape, explicit, options) >= 1 + 4 * 9 + 3  # the loss, and each leaf


@pytest.mark.parametrize(
    ("library", "shape", "explicit", "remat"),
    [QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in GRID if case != QUICK)],
)
def test_equals_plain_flax(worker, library, shape, explicit, remat):
    check(worker, library, shape, explicit, remat=remat)


@pytest.mark.slow
@pytest.mark.parametrize("library", ["linen", "nnx"])
@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("interleaved", 2), ("naive", 1)])
def test_equals_plain_flax_in_every_order(worker, library, schedule, chunks):
    check(worker, library, (2, 2, 2), False, schedule=schedule, num_chunks=chunks)
