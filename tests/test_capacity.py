"""The largest models of `benchmarks/capacity.py`: how they are searched, and what docs/numbers.md says of them."""

import re
import sys
from pathlib import Path

import jax
import pytest

from tpu_program import needs_tpu_compiler

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import capacity

PAGE = (Path(__file__).parents[1] / "docs" / "numbers.md").read_text()


def documented(section: str, num_stages: int) -> list[int]:
    """The numbers of a row of docs/numbers.md, by its K."""
    rows = PAGE.partition(f"### {section}")[2].partition("\n###")[0]
    (cells,) = re.findall(rf"^\| {num_stages} \|(.*)\|$", rows, re.MULTILINE)
    return [int(cell.replace(",", "")) for cell in re.findall(r"(?<![\d.])[\d,]+(?![\d.B])", cells)]


@pytest.mark.parametrize("most", range(12, 30))
def test_the_largest_is_found_by_bisection(most):
    tried = []
    fits = lambda n: tried.append(n) or n <= most
    assert capacity.largest(fits, 13, 28) == min(most, 28)
    assert len(tried) == len(set(tried)) <= 5


def test_twelve_bytes_a_parameter_alone_limit_the_layers():
    millions = {1: 786, 8: 5318, 32: 21030, 128: 83880}
    limits = [place.limit(millions[place.num_stages] * 10**6) for place in capacity.TABLE["transformer-l"]]
    assert limits == [25, 224, 907, 3636]


@needs_tpu_compiler
@pytest.mark.slow
def test_the_documented_transformer_is_what_the_compiler_accepts(num_stages=8):
    """The page's row, within half a percent; a layer more on each stage doesn't fit."""
    places = {place.num_stages: place for place in capacity.TABLE["transformer-l"]}
    _, count, arguments, temporaries, limit, _ = documented("The largest models", num_stages)
    with jax.numpy_dtype_promotion("standard"):
        fit = capacity.compiled(places[num_stages], count)
        assert fit is not None
        assert [fit.arguments / 2**20, fit.temporaries / 2**20] == pytest.approx([arguments, temporaries], rel=5e-3)
        assert capacity.compiled(places[num_stages], count + num_stages) is None
    assert limit == places[num_stages].limit(fit.parameters)
