"""What benchmarks/results/time_model.md says of `benchmarks/time_model.py`, and the rows that it keeps."""

from pathlib import Path

import jax
import pytest
import time_model

from tpu_program import needs_tpu_compiler

PAGE = (Path(__file__).parents[2] / "benchmarks" / "results" / "time_model.md").read_text()
KEPT = {row["step"]: row for name in ("tpu", "gpu") for row in time_model.kept_rows(name)}
FEW = [
    time_model.Setting("v5p"),
    time_model.Setting("v5e", remat="none", schedule="zero_bubble"),
    time_model.Setting("v6e", width=2048, microbatch=4),
]

ON_GPUS = [time_model.OnGpus("h100", remat="none"), time_model.OnGpus("b200", remat="layer")]  # need no compiler
ON_TPUS = [pytest.param(s, marks=[needs_tpu_compiler, *[pytest.mark.slow] * (s == FEW[1])]) for s in FEW]


@pytest.fixture(autouse=True)
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


def test_the_page_says_what_was_kept():
    for line in time_model.page():
        assert line in PAGE


def test_it_covers_the_grid():
    assert len({step.partition(",")[2] for step in KEPT}) >= 12
    assert {step.partition(",")[0] for step in KEPT} == {"v5e", "v5p", "v6e", "h100", "b200"}
    assert len(time_model.kept_rows("cpu")) >= 12


@pytest.mark.parametrize("setting", [*ON_TPUS, *ON_GPUS], ids=str)
def test_predictions_are_those_kept(setting):
    assert f"{time_model.predicted_ms(setting):.1f}" == KEPT[str(setting)]["predicted, ms"]


@needs_tpu_compiler
@pytest.mark.slow
@pytest.mark.parametrize("setting", FEW, ids=str)
def test_compiled_steps_are_those_kept(setting):
    compiled = float(KEPT[str(setting)]["compiled, ms"])
    assert time_model.compiled_ms(setting) == pytest.approx(compiled, rel=0.02)
