"""google-tunix's models as the modules that they are, with its shardings, equal themselves in one piece."""

import importlib.util

import pytest

from timed import Worker

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tunix") is None, reason="google-tunix isn't installed: pip install -e '.[llama]'"
)
LEAVES = {"qwen3": 52, "gemma": 43, "gemma3": 87}
QUICK = [("qwen3", (2, 2, 2), {"gather": "use"}), ("gemma", (2, 2, 2), {"schedule": "interleaved", "num_chunks": 2})]
GRID = [
    (name, shape, chosen)
    for name in LEAVES
    for shape, chosen in (
        ((4, 1, 1), {}),
        ((2, 2, 2), {"schedule": "gpipe", "gather": "use"}),
        ((2, 2, 2), {"schedule": "interleaved", "num_chunks": 2}),
        ((2, 1, 2), {"schedule": "zero_bubble", "remat": "none"}),
    )
]


@pytest.fixture(scope="module")
def worker():
    with Worker(limit=300) as worker:
        yield worker


@pytest.mark.parametrize(
    ("name", "shape", "chosen"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in GRID)]
)
def test_equals_tunix_own_model(worker, name, shape, chosen):
    assert worker.value("tunix_models", "check", name, shape, chosen) == LEAVES[name]
