"""The notebooks run in fresh kernels, without a warning, and are what they should be: short, with pictures."""

import re
import tempfile
from pathlib import Path

import nbformat
import pytest

from run_notebook import run
from tpu_program import needs_tpu_compiler

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def marks(path):
    needed = [needs_tpu_compiler] if path.stem.startswith("7") else []
    return [*needed, pytest.mark.slow]  # `make test-notebooks` runs all


def outputs(notebook):
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def num_pictures(notebook):
    return sum("image/png" in output.get("data", {}) for output in outputs(notebook))


def shown(notebook):
    """All outputs but the pictures."""
    texts = [{**output.get("data", {}), "stream": output.get("text", "")} for output in outputs(notebook)]
    return "".join(text for data in texts for kind, text in data.items() if kind != "image/png")


def written(notebook):
    """What was printed, by stream."""
    streams = [output for output in outputs(notebook) if output.output_type == "stream"]
    return {name: "".join(output.text for output in streams if output.name == name) for name in ("stdout", "stderr")}


@pytest.mark.parametrize("path", [pytest.param(path, marks=marks(path), id=path.stem) for path in NOTEBOOKS])
def test_runs_without_a_warning(path):
    stored, executed = nbformat.read(path, as_version=4), run(path)
    assert written(executed)["stderr"] == ""
    assert num_pictures(executed) == num_pictures(stored)


@each
def test_the_outputs_of_a_whole_run_are_stored(path):
    notebook = nbformat.read(path, as_version=4)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1)), "run `make notebooks`"
    assert num_pictures(notebook)
    assert written(notebook)["stderr"] == ""
    assert not [output for output in outputs(notebook) if output.output_type == "error"]
    assert path.stat().st_size < 400_000
    for place in (str(ROOT), str(Path.home()), tempfile.gettempdir(), "site-packages"):
        assert place not in shown(notebook)


@each
def test_is_short_asserts_its_claims_says_what_is_simulated_and_ends_in_further_reading(path):
    cells = nbformat.read(path, as_version=4).cells
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    assert len([line for line in code.splitlines() if line.strip()]) <= 110
    assert len(re.findall(r"^ *(?:assert |np\.testing\.assert)", code, re.MULTILINE)) >= 2
    assert cells[0].source.startswith("# ")
    assert "What is real here and what isn't" in cells[0].source
    assert cells[-1].cell_type == "markdown"
    heading, _, reading = cells[-1].source.rpartition("## ")[2].partition("\n")
    assert heading == "Further reading"
    assert "](../docs/" in reading and "](https://" in reading


def test_the_page_of_the_notebooks_lists_them_all():
    listed = re.findall(r"\(\.\./notebooks/([\w.]+)\)", (ROOT / "docs" / "notebooks.md").read_text())
    assert listed == [path.name for path in NOTEBOOKS]
