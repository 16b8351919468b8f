"""A profile's picture: one bar of slices, a bar for each stage, the timeline."""

import pytest

import jpipe
from jpipe.tools.measure import SLICES, StageTimes
from jpipe.tools.picture import draw


def test_bars_are_as_long_as_times(tmp_path):
    stages = StageTimes((1e-3, 2e-3), (2e-3, 4e-3), (0.0, 3e-3))
    timeline = stages.timeline(jpipe.make_schedule("1f1b", num_stages=2, num_microbatches=4))
    slices = dict(zip(SLICES, (0.05, 0.02, 0.02, 0.005, 0.003, 0.002), strict=True))
    figure = draw(slices, stages, timeline, tmp_path / "profile.png")
    assert (tmp_path / "profile.png").stat().st_size > 10_000
    step, alone, gantt = figure.axes
    assert [bar.get_width() for bar in step.patches] == pytest.approx([50, 20, 20, 5, 3, 2])
    assert [text.get_text() for text in step.texts] == ["50%", "20%", "20%", "5%"], "no numbers in narrow slices"
    assert [bar.get_width() for bar in alone.patches] == pytest.approx([1, 2, 0, 3, 2, 4])
    assert [text.get_text() for text in alone.texts] == ["0.50 of the mean", "1.50 of the mean"]
    assert gantt.get_title(loc="left").startswith(
        f"Timeline, predicted from the stages' times: {timeline.makespan:.3g} ms"
    )
