"""The examples that make a pipeline of a loop: the difference shown is that of the files, and losses are the same."""

import difflib
import runpy
from pathlib import Path

import jax
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def difference(name: str) -> str:
    """What changes from the plain loop to the pipeline, with a line around it."""
    before, after = ((EXAMPLES / folder / name).read_text().splitlines() for folder in ("plain", ""))
    return "\n".join(difflib.unified_diff(before, after, f"plain/{name}", name, lineterm="", n=1))


@pytest.mark.parametrize("name", ["linen_loop.py", "nnx_loop.py"])
def test_the_difference_shown_is_that_of_the_files(name):
    shown = (EXAMPLES / "README.md").read_text()
    assert f"```diff\n{difference(name)}\n```" in shown, f"show this:\n{difference(name)}"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linen_loop.py", "nnx_loop.py"])
def test_a_pipeline_prints_the_losses_of_the_plain_loop(name, monkeypatch, capsys):
    monkeypatch.setattr(jax.config, "update", lambda name, _: {"jax_num_cpu_devices": None}[name])  # they are there
    printed = []
    for folder in ("plain", ""):
        with jax.numpy_dtype_promotion("standard"):
            runpy.run_path(str(EXAMPLES / folder / name))
        printed.append(capsys.readouterr().out.splitlines())
    assert [len(lines) for lines in printed] == [6, 6]
    for want, got in zip(*printed, strict=True):
        (words, number), (same_words, same_number) = (line.rsplit(" ", 1) for line in (want, got))
        assert words == same_words
        assert float(same_number.strip("%")) == pytest.approx(float(number.strip("%")), abs=2e-3), (want, got)
