"""What docs/time-model.md says of `benchmarks/time_model.py`, and the rows that it keeps."""

import sys
from pathlib import Path

import jax
import pytest

from tpu_program import needs_tpu_compiler

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import time_model

PAGE = (Path(__file__).parents[2] / "docs" / "time-model.md").read_text()
KEPT = {row["step"]: row for row in time_model.kept_rows("tpu")}
FEW = [
    time_model.Setting("v5p"),
    time_model.Setting("v5e", remat="none", schedule="zero_bubble"),
    time_model.Setting("v6e", width=2048, microbatch=4),
]


@pytest.fixture(autouse=True)
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


def test_the_page_says_what_was_kept():
    for line in time_model.page():
        assert line in PAGE


def test_it_covers_the_grid():
    assert len({step.partition(",")[2] for step in KEPT}) >= 12
    assert {step.partition(",")[0] for step in KEPT} == {"v5e", "v5p", "v6e"}
    assert len(time_model.kept_rows("cpu")) >= 12


@needs_tpu_compiler
@pytest.mark.parametrize("setting", FEW, ids=str)
def test_predictions_are_those_kept(setting):
    assert f"{time_model.predicted_ms(setting):.1f}" == KEPT[str(setting)]["predicted, ms"]


@needs_tpu_compiler
@pytest.mark.slow
@pytest.mark.parametrize("setting", FEW, ids=str)
def test_compiled_steps_are_those_kept(setting):
    compiled = float(KEPT[str(setting)]["compiled, ms"])
    assert time_model.compiled_ms(setting) == pytest.approx(compiled, rel=0.02)


def test_pairs_and_errors_are_counted():
    rows = [
        {"step": str(i), "predicted": p, "there": t} for i, (p, t) in enumerate([("1", "2"), ("3", "3"), ("4", "1")])
    ]
    assert time_model.summary(rows) == "3 | 50% | +300% | 1 of 3"
