"""`examples/llama.py`: google-tunix's Llama 3 in stages equals tunix's own model; see `tunix_llama`."""

import re

import pytest

from tpu_program import needs_tpu_compiler
from tunix_worker import call as call

HELPER = "tunix_llama"
LEAVES = 1 + 1 + 6 * 9 + 1 + 1
"""The loss, and the parameters of embedding, six blocks, norm and head; a tied model has no head of its own."""

QUICK = [
    ((4, 1, 1), "float64", False, {}),
    ((2, 2, 2), "float64", True, {"gather": "use"}),
    ((2, 2, 2), "float32", False, {}),
]
GRID = [
    ((3, 1, 1), "float64", True, {"remat": "none", "schedule": "gpipe"}),
    ((2, 2, 2), "float64", False, {"schedule": "interleaved", "num_chunks": 2}),
    ((2, 1, 2), "float64", False, {"remat": "full"}),
    ((4, 2, 1), "float64", False, {}),
    ((4, 2, 1), "float32", True, {}),
    ((1, 2, 2), "float64", True, {}),
]


@pytest.mark.parametrize(
    ("shape", "dtype", "tied", "chosen"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in GRID)]
)
def test_equals_tunix_own_model(call, shape, dtype, tied, chosen):
    assert call("check", shape, dtype, tied, chosen) == LEAVES - tied


def test_trains_and_gives_the_weights_back(call):
    text = call("printed", "--steps", "20", "--layers", "2", "--stages", "2")
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", text)]
    assert len(losses) == 2
    assert losses[1] < 0.7 * losses[0]
    before, of_tunix = re.search(r"Loss ([\d.]+), of tunix's own model ([\d.]+)\.", text).groups()
    assert float(before) == pytest.approx(float(of_tunix), abs=2e-6)
    reached, put_back = re.search(r"held out: loss ([\d.]+); tunix's .*: ([\d.]+)\.", text).groups()
    assert float(reached) == pytest.approx(float(put_back), abs=2e-4)
    assert float(reached) < 0.7 * float(before)


def test_the_8b_is_lowered_split_over_all_axes(call):
    stages, held = call("lowered", "--layers", "4")
    assert stages == "8, 3"  # the last feed-forward, norm and head
    attention, forward = 2 * 4096 * 4096 + 2 * 4096 * 1024, 3 * 4096 * 14336
    # Every stage has room for the table or the head, as arrays have one shape on all stages; norms are pooled.
    assert held == 4 * ((128256 * 4096 + 4 * attention + 3 * forward) // 4 + 7 * 4096 // 2)


@pytest.mark.slow
@needs_tpu_compiler
def test_the_8b_compiles_for_a_v5p(call):
    text = call("printed", "--compile", "v5p:2x2x2", "--mesh", "2,2,2")
    assert re.search(r"│ +36, 31 +│", text)
    row = re.search(r"([\d.]+)% +│ +([\d.]+) │ +([\d.]+) │ +([\d.]+) │", text)
    bubble, state, temporaries, both = map(float, row.groups())
    assert 100 / 9 <= bubble < 15
    needed = 8_030_261_248 * 3 * 4 / 8 / 2**30  # parameters and two moments
    assert needed <= state < 1.25 * needed
    assert state + temporaries == pytest.approx(both, abs=0.11)
    assert both < 95  # of a v5p
