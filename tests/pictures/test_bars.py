"""What of a timeline is drawn: every action once, and all of the busy time."""

import pytest

import jpipe
from jpipe.pictures.bars import HEIGHT, bars, corners


def make(**times):
    schedule = jpipe.make_schedule("interleaved", num_stages=3, num_microbatches=6, num_chunks=2)
    return jpipe.simulate(schedule, **times)


def test_bars_cover_the_busy_time():
    timeline = make(recompute=1.0)
    for stage, busy in enumerate(timeline.busy):
        assert sum(bar.end - bar.start for bar in bars(timeline) if bar.stage == stage) == pytest.approx(busy)


def test_recomputation_is_a_bar_before_its_backward():
    kinds = [bar.action.kind for bar in bars(make(recompute=0.5)) if bar.stage == 0]
    assert kinds.count("R") == kinds.count("B") == kinds.count("F") == 12
    assert all(kinds[i + 1] == "B" for i, kind in enumerate(kinds) if kind == "R")
    assert "R" not in {bar.action.kind for bar in bars(make())}


def test_a_bar_lies_around_its_stage():
    bar = next(bars(make()))
    low, high = bar.stage - HEIGHT / 2, bar.stage + HEIGHT / 2
    assert corners(bar)[::2] == [(bar.start, low), (bar.end, high)]
