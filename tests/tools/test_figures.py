"""What is drawn is what the timeline says; its colours can be told apart with any colour vision."""

import itertools
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib import pyplot
from matplotlib.colors import to_rgb
from matplotlib.patches import StepPatch

import jpipe
from jpipe.schedules.actions import ACTION_KINDS
from jpipe.schedules.simulate import Timeline, simulate
from jpipe.tools import figures
from published import schedule_of

ROOT = Path(__file__).parents[2]
NAMES = ["naive", "gpipe", "1f1b", "interleaved"]


@pytest.fixture(autouse=True)
def agg():
    pyplot.switch_backend("Agg")
    yield
    pyplot.close("all")


def make(name: str, num_stages: int, num_microbatches: int, num_chunks: int = 1, **times) -> Timeline:
    return simulate(schedule_of(name, num_stages, num_microbatches, num_chunks), **times)


def drawn_bars(axes) -> dict[str, list[tuple[float, ...]]]:
    """(stage, start, end) of all bars, by the label of what they are of."""
    found: dict[str, list[tuple[float, ...]]] = {}
    for container in axes.containers:
        places = [(round(b.get_y() + b.get_height() / 2), b.get_x(), b.get_x() + b.get_width()) for b in container]
        found.setdefault(container.get_label(), []).extend(places)
    return {label: sorted(places) for label, places in found.items()}


def numbers_of(axes) -> list[str]:
    return [text.get_text() for text in axes.texts if text.get_text()]


def drawn_memory(axes, timeline, scale) -> list[tuple[list[float], list[float]]]:
    """The edges and the counts of each stage's area."""
    areas = [patch.get_data() for patch in axes.patches if isinstance(patch, StepPatch)]
    assert [area.baseline for area in areas] == [stage + 0.43 for stage in range(timeline.schedule.num_stages)]
    return [(list(area.edges), list((area.baseline - area.values) * scale / 0.86)) for area in areas]


def check_drawn(gantt, memory, timeline: Timeline, scale: float) -> None:
    lines = [(k, 0.0, timeline.makespan) for k in range(timeline.schedule.num_stages)]
    expected: dict[str, list] = {"bubble: stage waits": lines}
    for bar in timeline.bars:
        label = figures.LATER if bar.action.chunk else ACTION_KINDS[bar.action.kind].name
        expected.setdefault(label, []).append((bar.stage, bar.start, bar.end))
    found = drawn_bars(gantt)
    assert found.keys() == expected.keys()
    for label, bars in expected.items():
        np.testing.assert_allclose(found[label], sorted(bars), atol=1e-9)
    is_numbered = lambda bars: not bars.patches[0].get_hatch() and "bubble" not in bars.get_label()
    begins = {(bar.stage, round(bar.start, 6)): bar.action.microbatch for bar in timeline.bars if bar.start < bar.end}
    for bar, text in zip(itertools.chain(*filter(is_numbered, gantt.containers)), gantt.texts, strict=True):
        assert text.xy == (0.5, 0.5), "in the middle of its bar"
        assert text.get_text() in ("", str(begins[round(bar.get_y()), round(bar.get_x(), 6)]))
    for stage, (edges, heights) in enumerate(drawn_memory(memory, timeline, scale)):
        times, counts = zip(*timeline.in_flight(stage), strict=True)
        assert edges == [*times, timeline.makespan]
        np.testing.assert_allclose(heights, np.divide(counts, timeline.schedule.num_chunks), atol=1e-9)
    peaks = [text.get_text() for text in memory.texts]
    shown = [f"{peak / timeline.schedule.num_chunks:g}" for peak in timeline.peak_in_flight]
    assert peaks == [f"peak {shown[0]}", *shown[1:]]


@pytest.mark.parametrize(
    ("size", "recompute"),
    [
        (("1f1b", 4, 8, 1), 0.0),
        (("1f1b", 16, 64, 1), 1.0),
        (("interleaved", 4, 8, 2), 1.0),
        (("zero_bubble", 4, 8), 0.0),
        (("dualpipe-v", 3, 6, 2), 0.0),
    ],
    ids=str,
)
def test_plot_shows_the_timeline(size, recompute):
    timeline = make(*size, recompute=recompute)
    gantt = timeline.plot()
    axes = gantt.figure.axes
    assert axes[0] is gantt and len(axes) == 2
    check_drawn(*axes, timeline, max(timeline.peak_in_flight) / timeline.schedule.num_chunks)
    assert gantt.get_xlim() == axes[1].get_xlim() == (0, timeline.makespan)
    labels = [text.get_text() for text in gantt.figure.legends[0].get_texts()]
    kinds = timeline.schedule.kinds | {"R"} if recompute else timeline.schedule.kinds
    wanted = {ACTION_KINDS[kind].name for kind in kinds} | {"bubble: stage waits", "micro-batches in flight"}
    assert sorted(labels) == sorted(wanted | ({figures.LATER} if timeline.schedule.num_chunks > 1 else set()))


def test_compare_shows_all_on_one_axis_and_one_scale():
    sizes = {"num_stages": 4, "num_microbatches": 8}
    figure = jpipe.compare(NAMES, **sizes, recompute=0.5)
    timelines = [make(name, 4, 8, 2 if name == "interleaved" else 1, recompute=0.5) for name in NAMES]
    assert len(figure.axes) == 8
    for i, timeline in enumerate(timelines):
        check_drawn(*figure.axes[2 * i : 2 * i + 2], timeline, 8.0)
        title = figure.axes[2 * i].get_title(loc="left")
        assert title.startswith(f"{NAMES[i]}: K=4, M=8, V=") and f"; time {timeline.makespan:g}, bubble" in title
    assert {axes.get_xlim() for axes in figure.axes} == {(0.0, timelines[0].makespan)}


def test_compare_takes_names_schedules_and_timelines(tmp_path):
    schedule = jpipe.Schedule([["F0", "F1", "B0", "B1"], ["F0", "B0", "F1", "B1"]], name="mine")
    timeline = make("forward", 2, 3, forward=4.0)
    items = ["1f1b", schedule, timeline]
    figure = jpipe.compare(items, tmp_path / "a.png", num_stages=2, num_microbatches=2, forward=2.0, unit="ms")
    assert (tmp_path / "a.png").stat().st_size > 0
    starts = ["1f1b", "", "mine", "", "forward"]  # forward only: nothing is kept, so there is no memory to show
    assert [axes.get_title(loc="left").partition(":")[0] for axes in figure.axes] == starts
    assert figure.axes[-1].get_xlabel() == "time (ms)"
    assert figure.axes[0].get_xlim() == (0, timeline.makespan)


@pytest.mark.parametrize(
    ("items", "sizes", "error", "message"),
    [
        ("1f1b", {}, TypeError, "'1f1b' is no list"),
        ([], {}, ValueError, "schedules is empty"),
        (["1f1b"], {"num_stages": 2}, ValueError, "'1f1b' is a name: pass num_stages and num_microbatches"),
        ([3], {}, TypeError, "schedule=3 must be a Schedule"),
    ],
)
def test_compare_names_what_is_wrong(items, sizes, error, message):
    with pytest.raises(error, match=message):
        jpipe.compare(items, **sizes)


DRAWN = {
    "schedules": ("examples/schedules.png",),
    "concepts": [f"docs/concepts-{name}.png" for name in ("bubble", "microbatches", "memory", "chunks")],
}


@pytest.mark.parametrize("script", ["schedules", pytest.param("concepts", marks=pytest.mark.slow)])
def test_pictures_of_the_docs_are_what_their_scripts_draw(script, tmp_path):
    """To a few pixels in a hundred, as fonts and lines differ by matplotlib's version."""
    draw = runpy.run_path(str(ROOT / "examples" / f"{script}.py"))["draw"]
    draw(tmp_path / "schedules.png" if script == "schedules" else tmp_path)
    for stored in DRAWN[script]:
        old, new = pyplot.imread(ROOT / stored), pyplot.imread(tmp_path / Path(stored).name)
        assert old.shape == new.shape, stored
        assert np.abs(old - new).max(-1).astype(bool).mean() < 0.03, f"run examples/{script}.py"
        assert (old[..., 3] == 1).all(), "opaque, so that it can be read on a dark page"


# --- where to ---------------------------------------------------------------------------------------------------------


def test_plot_into_a_file_and_into_a_new_figure(tmp_path):
    timeline = make("interleaved", 2, 4, 2)
    timeline.plot(tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").stat().st_size > 0
    axes = timeline.plot(unit="s")
    title = "interleaved: K=2, M=4, V=2; time 13.5, bubble 11.1 %"
    assert axes.get_title(loc="left") == title and axes.figure.axes[1].get_xlabel() == "time (s)"
    assert sorted(numbers_of(axes)) == sorted(str(s.action.microbatch) for s in timeline.spans)
    assert timeline.plot().figure.axes[1].get_xlabel() == "time (1 = the forward of one micro-batch on one stage)"


@pytest.mark.parametrize("draw", [lambda t: t.plot(), lambda t: jpipe.compare([t])], ids=["plot", "compare"])
def test_without_matplotlib_the_extra_is_named(monkeypatch, draw):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'jpipe\[plot\]'"):
        draw(make("gpipe", 2, 2))


# --- colours ----------------------------------------------------------------------------------------------------------

# Machado, Oliveira and Fernandes 2009, severity 1.0, on linear RGB; the rows sum to 1, so that greys stay.
VISION = {
    "usual": np.eye(3),
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def linear(colour) -> np.ndarray:
    """A colour's red, green and blue in proportion to light."""
    rgb = np.asarray(to_rgb(colour))
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def seen(colour, vision: str) -> np.ndarray:
    """CIELAB of a colour as it looks with a kind of colour vision; 2.3 is a just noticeable difference."""
    light = np.clip(np.asarray(VISION[vision]) @ linear(colour), 0, 1)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    x, y, z = np.cbrt(np.asarray(to_xyz) @ light / [0.9505, 1.0, 1.089])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("vision", VISION)
def test_kinds_can_be_told_apart(vision):
    colours = {**figures.COLOURS, "bubble": figures.BUBBLE}
    for one, other in itertools.combinations(colours, 2):
        distance = np.linalg.norm(seen(colours[one], vision) - seen(colours[other], vision))
        assert distance > (15 if "W" in (one, other) else 24), (one, other)
    assert figures.HATCH.keys() == {"R"}, "the forward once more is near to the forward, so it is hatched too"


def luminance(colour) -> float:
    """WCAG 2.2's, from 0 for black to 1 for white."""
    return float(linear(colour) @ [0.2126, 0.7152, 0.0722])


@pytest.mark.parametrize("kind", figures.COLOURS)
def test_numbers_stand_out_from_their_bars(kind):
    for num_chunks in (1, 2, 3, 8):
        for chunk in range(num_chunks):
            colour = figures.shade(kind, chunk, num_chunks)
            text, bar = (luminance(c) for c in (figures.text_colour(colour), colour))
            assert (max(text, bar) + 0.05) / (min(text, bar) + 0.05) >= 4.5  # WCAG 2.2, level AA
