"""What stages hold, drawn; more, with pictures of all sizes, is in `test_figures.py`."""

import pytest
from matplotlib.figure import Figure

import jpipe
from jpipe.pictures.in_flight import draw_memory, peak


@pytest.mark.parametrize("name, num_chunks, most", [("gpipe", 1, 8), ("1f1b", 1, 7), ("interleaved", 2, None)])
def test_peaks_are_in_micro_batches(name, num_chunks, most):
    schedule = jpipe.make_schedule(name, num_stages=4, num_microbatches=8, num_chunks=num_chunks)
    timeline = jpipe.simulate(schedule)
    peaks = [count / num_chunks for count in timeline.peak_in_flight]
    assert peak(timeline) == max(peaks) == (most or max(peaks))
    axes = Figure().subplots()
    draw_memory(axes, timeline, scale=peak(timeline))
    texts = [text.get_text() for text in axes.texts]
    assert texts == [f"peak {peaks[0]:g}", *(f"{number:g}" for number in peaks[1:])]
