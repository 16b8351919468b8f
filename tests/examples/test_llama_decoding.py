"""`examples/llama_decoding.py`: google-tunix's Llama 3 in stages, beside its own sampler; see `tunix_decoding`."""

import re

import pytest

from tunix_worker import call as call

HELPER = "tunix_decoding"
QUICK = [((4, 1, 1), False, 6, {}), ((2, 2, 2), True, 8, {"gather": "use"})]
GRID = [
    ((1, 1, 1), False, 3, {}),
    ((2, 1, 1), False, 4, {"num_chunks": 2, "schedule": "interleaved"}),
    ((2, 2, 1), False, 5, {}),
    ((4, 1, 2), True, 4, {"ends": "spread"}),
]


@pytest.mark.parametrize(
    ("shape", "tied", "rows", "chosen"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in GRID)]
)
def test_tokens_are_those_of_tunix_own_sampler(call, shape, tied, rows, chosen):
    assert call("check", shape, tied, rows, chosen) > rows / 2  # few go on alike


@pytest.mark.slow
def test_the_example(call):
    sizes = "--steps", "20", "--layers", "2", "--stages", "2", "--prompts", "4", "--length", "8", "--tokens", "12"
    text = call("printed", *sizes)
    assert len(re.findall(r"^'.+' -> '.+'$", text, re.MULTILINE)) == 4
    assert "48 of the 48 new tokens are those of tunix's own sampler." in text
