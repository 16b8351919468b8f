"""google-tunix's models as the modules that they are, with its shardings, equal themselves in one piece."""

import pytest

from tunix_worker import call as call

HELPER = "tunix_models"
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


@pytest.mark.parametrize(
    ("name", "shape", "chosen"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in GRID)]
)
def test_equals_tunix_own_model(call, name, shape, chosen):
    assert call("check", name, shape, chosen) == LEAVES[name]
