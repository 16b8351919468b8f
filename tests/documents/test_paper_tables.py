"""The GPipe paper's tables, what `benchmarks/paper_tables.py` predicts beside them, what its page of results says."""

import re
from pathlib import Path

import numpy as np
import paper_tables as tables
import pytest

from jpipe.tools.measure import StageTimes

PAGE = (Path(__file__).parents[2] / "benchmarks" / "results" / "paper_tables.md").read_text()
TRANSFORMERS = ("Transformer-48",)


def test_the_papers_figures():
    assert tables.TABLE_2 == {
        "AmoebaNet-D (18, 256)": {1: (1, 1.13, 1.38), 4: (1.07, 1.26, 1.72), 32: (1.21, 1.84, 3.48)},
        "Transformer-48": {1: (1, 1.07, 1.3), 4: (1.7, 3.2, 4.8), 32: (1.8, 3.4, 6.3)},
    }
    assert tables.TABLE_3 == {"AmoebaNet-D (18, 128)": (1, 1.7, 2.7), "Transformer-24": (1, 1.8, 3.3)}
    assert list(tables.BREAKDOWN.values()) == [65.6, 22.5, 4.1, 3.2, 2.9, 1.7]
    assert sum(tables.BREAKDOWN.values()) == pytest.approx(100)
    again = tables.BREAKDOWN["recomputation"]
    assert again / (100 - again) == pytest.approx(0.29, abs=0.001)  # of the rest of the step
    assert again / tables.BREAKDOWN["computation"] == pytest.approx(0.343, abs=0.001)  # F / (F + B)


@pytest.mark.parametrize("work", [[1.0] * 2, [1.0] * 4, [1.0] * 8, [3.0, 1.0, 2.0, 2.0]], ids=str)
@pytest.mark.parametrize("m", [1, 4, 32])
@pytest.mark.parametrize("backward", [1.0, 2.0])
def test_stages_follow_the_formula(work, m, backward):
    """M sum(w) / (sum(w) + (M-1) max(w)) times one stage; with equal ones K M / (M+K-1)."""
    k, total, most = len(work), sum(work), max(work)
    stages = StageTimes(*np.outer((1.0, backward, 1.0, 0.0), work))
    assert tables.throughput(stages, m) == pytest.approx(m * total / (total + (m - 1) * most))
    share = tables.slices(stages, m)
    assert sum(share.values()) == pytest.approx(100)
    assert share["load imbalance"] == pytest.approx(
        100 * (m - 1) * (most - total / k) / (total + (m - 1) * most), abs=1e-9
    )
    assert share["recomputation"] / share["computation"] == pytest.approx(1 / (1 + backward))
    if most * k == total:
        assert tables.throughput(stages, m) == pytest.approx(tables.balanced(k, m))
        assert share["bubble"] == pytest.approx(100 * (k - 1) / (m + k - 1))
    elif m > 1:
        assert tables.imbalance_for(k, m, tables.throughput(stages, m)) == pytest.approx(most * k / total)


def test_the_page_shows_what_is_predicted_for_transformers():
    shown = PAGE.splitlines()
    for make in (tables.table_2, tables.own_table, tables.breakdown):
        assert set(make(TRANSFORMERS).markdown()) <= set(shown)
    assert set(tables.table_3(("Transformer-24",)).markdown()) <= set(shown)


def test_the_pages_figures_follow_from_its_imbalances():
    """For all models, AmoebaNet among them, whose tracing takes longer."""
    rows = re.findall(
        r"^\| ([^|]+), K=(\d) \| [\d ]+ \| ([\d.]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|", PAGE, re.MULTILINE
    )
    assert len(rows) == 6
    for model, k, imbalance, *cells in rows:
        for cell, (m, paper) in zip(cells, tables.TABLE_2[model].items(), strict=True):
            predicted, given, residual = map(float, re.fullmatch(r"(.*) / (.*) = ([\d.]+)\*?", cell).groups())
            assert given == paper[tables.STAGES.index(int(k))]
            assert predicted == pytest.approx(int(k) * m / (int(k) + (m - 1) * float(imbalance)), abs=0.0065)
            assert residual == pytest.approx(predicted / given, abs=0.0101)


@pytest.mark.slow
def test_the_page_shows_what_the_script_prints(capsys, monkeypatch):
    monkeypatch.setattr(tables, "on_cpu", lambda: None)  # it is one already
    tables.main(["--markdown"])
    *printed, cuts = capsys.readouterr().out.strip().splitlines()
    assert [line for line in printed if line not in ("", *PAGE.splitlines())] == []
    assert cuts.endswith("the same stages")
