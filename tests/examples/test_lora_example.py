"""`examples/lora.py`: LoRA on google-tunix's Llama 3 in stages equals LoRA on tunix's whole model; see `tunix_lora`."""

import re

import pytest

from tunix_worker import call as call

HELPER = "tunix_lora"
BLOCKS, CHANGES = 6, 7 * 2
"""Of the tiny model, and LoRA's leaves of each."""

QUICK = [((4, 1, 1), "float64", {}), ((2, 2, 2), "float64", {"gather": "use"})]
GRID = [
    ((2, 2, 2), "float32", {}),
    ((3, 1, 1), "float64", {"remat": "none", "schedule": "gpipe"}),
    ((2, 1, 2), "float64", {"schedule": "interleaved", "num_chunks": 2}),
    ((4, 2, 1), "float64", {"schedule": "zero_bubble"}),
    ((1, 2, 2), "float64", {"remat": "full"}),
]


@pytest.mark.parametrize(
    ("shape", "dtype", "chosen"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in GRID)]
)
def test_equals_tunix_whole_model(call, shape, dtype, chosen):
    assert call("check", shape, dtype, chosen) == 1 + BLOCKS * CHANGES


def test_steps_are_those_of_tunix_trainer(call):
    assert call("trained") == 3 + BLOCKS * CHANGES


def test_merged_by_tunix_and_read_back(call):
    assert call("merged") == 1 + BLOCKS * 9 + 1 + 1 + 1  # every weight, and the logits


@pytest.mark.slow
def test_the_example(call, tmp_path):
    sizes = "--layers", "2", "--stages", "2", "--base-steps", "40", "--steps", "30", "--save", str(tmp_path)
    text = call("printed", *sizes)
    before, after = (float(loss) for loss in re.findall(r"LoRA, loss on text held out: .* Python ([\d.]+)", text))
    assert after < before - 0.03
    assert re.search(r"The first 3 losses are those of tunix's trainer within \de-0\d\.", text)
    assert re.search(r"gives the pipeline's logits within \de-0\d\.", text)
    assert sorted(path.parent.name for path in tmp_path.rglob("model.safetensors")) == ["base", "merged"]
