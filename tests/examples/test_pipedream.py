"""PipeDream's asynchronous pipeline as `examples/pipedream.py` simulates it, against formulas and jpipe's own 1F1B."""

from pathlib import Path

import pipedream
import pytest

import jpipe

PAGE = (Path(__file__).parents[2] / "benchmarks" / "results" / "pipedream.md").read_text()


@pytest.mark.parametrize("k", [1, 2, 4, 8])
@pytest.mark.parametrize("backward", [1.0, 2.0])
def test_weights_of_pipedream(k, backward, monkeypatch):
    """Stage s of K holds K-s versions, and its gradients come K-1-s updates late; at the start there are fewer."""
    monkeypatch.setitem(pipedream.TIMES, "B", backward)
    m = 4 * k
    run = pipedream.pipedream(k, m)
    for stage in range(k):
        assert max(count for _, count in run.held[stage]) == k - stage
        assert run.late[stage] == tuple(min(i, k - 1 - stage) for i in range(m))
    for i in range(m):
        assert run.versions(i) == [max(0, i - (k - 1 - stage)) for stage in range(k)]
    assert run.busy(*run.full()) == pytest.approx([1.0] * k)
    assert run.makespan == (m + k - 1) * (1 + backward)  # one bubble for the whole training


@pytest.mark.parametrize("k", [1, 2, 4, 8])
@pytest.mark.parametrize("m", [1, 3, 8])
def test_a_flush_leaves_one_version_and_the_bubble(k, m):
    run = pipedream.with_flush(k, m, 3)
    timeline = jpipe.simulate(jpipe.make_schedule("1f1b", num_stages=k, num_microbatches=m))
    assert run.makespan == 3 * timeline.makespan
    assert run.busy(0, run.makespan) == pytest.approx([1 - timeline.bubble_fraction] * k) == [m / (m + k - 1)] * k
    assert {count for held in run.held for _, count in held} == {1}
    assert {late for stage in run.late for late in stage} == {0}
    assert [run.versions(i) for i in range(3 * m)] == [[i // m] * k for i in range(3 * m)]


def test_the_picture_shows_jpipes_own_steps():
    run, alike = pipedream.by_jpipe(4, 6, 2), pipedream.with_flush(4, 6, 2)
    assert run.makespan == alike.makespan
    key = lambda work: (work.stage, work.kind, work.microbatch, work.version)
    assert sorted(map(key, run.works)) == sorted(map(key, alike.works))


def markdown(lines):
    return [f"| {' | '.join(cells)} |" for cells in lines]


def test_the_page_shows_what_is_simulated():
    shown = PAGE.splitlines()
    assert set(markdown(pipedream.rows(4, 8))) <= set(shown)
    assert set(markdown(pipedream.training_rows())) <= set(shown)
