"""The largest models of `benchmarks/capacity.py`: how they are searched, and what their page of results says."""

import csv
import re
from pathlib import Path

import capacity
import pytest

from tpu_program import needs_tpu_compiler

ROOT = Path(__file__).parents[2]
SECTION = (ROOT / "benchmarks" / "results" / "capacity.md").read_text()
with (ROOT / "tests" / "data" / "capacity.csv").open() as file:
    FOUND = [(what, *map(int, row)) for what, *row in csv.reader(file)]
"""What `--csv` wrote: which model, and `capacity.figures`."""


@pytest.mark.parametrize("row", FOUND, ids=lambda row: f"{row[0]}-{row[1]}")
def test_the_page_has_what_was_compiled_and_more_fits_than_in_the_paper(row):
    assert f"| {' | '.join(map(str, capacity.shown(*row[1:])))} |" in SECTION
    what, stages, count, paper, here, parameters, *_ = row
    if what == "amoebanet-d":
        assert parameters >= 1.5 * paper
    else:
        assert here >= (1.5 if stages == 1 else 1.69) * count


def test_the_page_has_no_other_rows():
    rows = re.findall(r"^\| (\d+) \|", SECTION, re.MULTILINE)
    assert list(map(int, rows)) == [row[1] for row in FOUND]
    places = [(what, place.num_stages) for what, places in capacity.TABLE.items() for place in places]
    assert [row[:2] for row in FOUND] == places


@needs_tpu_compiler
@pytest.mark.slow
@pytest.mark.parametrize("what", capacity.TABLE)
def test_the_documented_model_of_one_core_is_what_the_compiler_accepts(what):
    """The row, within half a percent, and no layer more; a larger AmoebaNet-D is refused once it has code."""
    place = capacity.TABLE[what][0]
    row = next(row for row in FOUND if row[:2] == (what, place.num_stages))
    fit = capacity.compiled(place, row[4], code=False)
    assert fit is not None
    assert [fit.parameters, fit.arguments, fit.temporaries] == pytest.approx(row[5:8], rel=5e-3)
    if what == "transformer-l":
        assert capacity.compiled(place, row[4] + place.step, code=False) is None
