"""The orders of `examples/published_orders.py`: action for action, their figures, their files; any sizes make one."""

import doctest
from pathlib import Path

import published_orders
import pytest

from jpipe.schedules.schedule import Schedule
from jpipe.schedules.simulate import Timeline, simulate
from published import PUBLISHED, out_of_lockstep

FILES = Path(__file__).parents[2] / "examples" / "data" / "orders"


def test_grids_are_as_their_docstrings_show():
    assert doctest.testmod(published_orders) == (0, 6), "(failed, tried)"


def test_files_are_what_the_script_writes(tmp_path):
    published_orders.write(4, 8, tmp_path)
    assert {path.stem for path in FILES.iterdir()} == {*PUBLISHED}
    for name, make in PUBLISHED.items():
        text = (FILES / f"{name}.csv").read_text()
        assert text == (tmp_path / f"{name}.csv").read_text()
        made = make(4, 8)
        assert Schedule.from_csv(text).actions == made.actions
        assert (made.name, made.style) == (name, "v" if made.num_chunks == 2 else "loop")
        for sizes in [(1, 1), (1, 8), (2, 3), (3, 14), (6, 5), (7, 2)]:  # one that isn't valid would raise
            assert (make(*sizes).num_stages, make(*sizes).num_microbatches) == sizes


def bubble(timeline: Timeline) -> float:
    """The time in which the stage that works longest idles."""
    return timeline.makespan - max(timeline.busy)


def bubble_between_steps(timeline: Timeline) -> float:
    """The most that a stage idles from its own first action to its own last, as if steps didn't end together."""
    return max(own[-1].end - own[0].start - busy for own, busy in zip(timeline.of_stages, timeline.busy, strict=True))


@pytest.mark.parametrize(
    ("name", "equal", "unequal", "memory"),
    [
        ("zb-h1", (7, 7), (10.5, 10.5), 8),
        ("zb-h2", (7, 0), (7, 5.25), 15),
        ("zb-v", (3.5, 0), (4.375, 3.5), 8),
        ("v-half", (13, 13), (16.125, 16.125), 5),
        ("v-min", (13.5, 13.5), (38.625, 38.625), 4),
        ("dualpipe-v", (3.5, 3.5), (5.625, 5.625), 8.5),
    ],
)
def test_published_orders_have_their_published_figures(name, equal, unequal, memory):
    """K=8, M=32, not in lockstep: bubbles at F:I:W = 1:1:1 and 1:1.25:0.75, of a step and between steps; memory."""
    schedule = PUBLISHED[name](8, 32)
    for weight, expected in ((1.0, equal), (0.75, unequal)):
        timeline = out_of_lockstep(simulate(schedule, 1.0, 2.0, weight=weight))
        assert (bubble(timeline), bubble_between_steps(timeline)) == pytest.approx(expected)
        assert max(timeline.peak_in_flight) / schedule.num_chunks == memory


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 6, 7])
@pytest.mark.parametrize(("i", "w"), [(1.0, 1.0), (1.25, 0.75), (2.0, 0.5)])
def test_published_formulas(num_stages, i, w):
    """arXiv 2401.10241, table 1, and 2405.15362; memory of stage k in those of F until I and of I until W."""
    K, M = num_stages, 3 * num_stages
    at = lambda name: out_of_lockstep(simulate(PUBLISHED[name](K, M), 1.0, i + w, weight=w))
    assert bubble(at("zb-h1")) == pytest.approx((K - 1) * (1 + i - w))
    assert bubble_between_steps(at("zb-h2")) == pytest.approx((K - 1) * (1 + i - 2 * w))
    assert at("zb-h1").peak_in_flight == (K,) * K
    assert at("zb-h2").peak_in_flight == (2 * K - 1,) * K
    assert set(at("zb-v").peak_in_flight) == {2 * K}
    assert max(at("v-half").peak_in_flight) == 2 * ((K + 2) // 2)
    assert max(at("v-min").peak_in_flight) == 2 * ((K + 4) // 3)
    assert set(at("dualpipe-v").peak_in_flight) == {2 * K + 1}
