"""The bars of stages, which are the timeline's (`test_figures.py`); and the picture of a profile."""

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import jpipe
from jpipe.tools.gantt import HEIGHT, corners, draw_legend, draw_memory, draw_profile
from jpipe.tools.measure import SLICES, StageTimes


def make(name, num_chunks=1, **times):
    schedule = jpipe.make_schedule(name, num_stages=4, num_microbatches=8, num_chunks=num_chunks)
    return jpipe.simulate(schedule, **times)


def test_numbers_come_and_go_with_the_size():
    axes = make("1f1b").plot(Figure().subplots())
    counts = []
    for width in (1.0, 2.0, 9.0):
        axes.figure.set_size_inches(width, 3.0)
        canvas = FigureCanvasAgg(axes.figure)
        canvas.draw()
        renderer = canvas.get_renderer()
        counts.append(sum(text.fits(renderer) for text in axes.texts))
    assert counts == [0, 32, 64]  # none, the backwards' (which are wider), all
    assert len({text.get_color() for text in axes.texts}) == 2


@pytest.mark.parametrize(
    "timeline, memory, labels",
    [
        (make("1f1b"), False, ["forward", "backward", "bubble: stage waits"]),
        (make("gpipe", recompute=1.0), True, ["forward", "recomputation", "backward", "bubble: stage waits"]),
        (make("interleaved", 2), False, ["forward", "backward (darker: later chunks)", "bubble: stage waits"]),
    ],
    ids=["plain", "recomputation and memory", "chunks"],
)
def test_the_legend_names_what_is_drawn_and_nothing_else(timeline, memory, labels):
    figure = Figure()
    draw_legend(figure, [timeline], memory=memory)
    found = [text.get_text() for text in figure.legends[0].get_texts()]
    assert found == labels + ["micro-batches in flight"] * memory


@pytest.mark.parametrize("name, num_chunks, most", [("gpipe", 1, 8), ("1f1b", 1, 7), ("interleaved", 2, None)])
def test_peaks_are_in_micro_batches(name, num_chunks, most):
    schedule = jpipe.make_schedule(name, num_stages=4, num_microbatches=8, num_chunks=num_chunks)
    timeline = jpipe.simulate(schedule)
    peaks = [count / num_chunks for count in timeline.peak_in_flight]
    assert max(peaks) == (most or max(peaks))
    axes = Figure().subplots()
    draw_memory(axes, timeline, scale=max(peaks))
    texts = [text.get_text() for text in axes.texts]
    assert texts == [f"peak {peaks[0]:g}", *(f"{number:g}" for number in peaks[1:])]


def test_a_bar_lies_around_its_stage():
    bar = next(make("interleaved", 2).bars)
    low, high = bar.stage - HEIGHT / 2, bar.stage + HEIGHT / 2
    assert corners(bar)[::2] == [(bar.start, low), (bar.end, high)]


def test_bars_of_a_profile_are_as_long_as_its_times(tmp_path):
    stages = StageTimes((1e-3, 2e-3), (2e-3, 4e-3), (0.0, 3e-3))
    timeline = stages.timeline(jpipe.make_schedule("1f1b", num_stages=2, num_microbatches=4))
    slices = dict(zip(SLICES, (0.05, 0.02, 0.02, 0.005, 0.003, 0.002), strict=True))
    figure = draw_profile(slices, stages, timeline, tmp_path / "profile.png")
    assert (tmp_path / "profile.png").stat().st_size > 10_000
    step, alone, gantt = figure.axes
    assert [bar.get_width() for bar in step.patches] == pytest.approx([50, 20, 20, 5, 3, 2])
    assert [text.get_text() for text in step.texts] == ["50%", "20%", "20%", "5%"], "no numbers in narrow slices"
    assert [bar.get_width() for bar in alone.patches] == pytest.approx([1, 2, 0, 3, 2, 4])
    assert [text.get_text() for text in alone.texts] == ["0.50 of the mean", "1.50 of the mean"]
    assert gantt.get_title(loc="left").startswith(
        f"Timeline, predicted from the stages' times: {timeline.makespan:.3g} ms"
    )
