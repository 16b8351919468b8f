"""What a step should take, against closed forms and against what each stage does at any moment."""

import numpy as np
import pytest

import jpipe
from jpipe.profiling.prediction import SLICES, StageTimes, StepModel, fit


def gpipe(num_stages=4, num_microbatches=8):
    return jpipe.make_schedule("gpipe", num_stages=num_stages, num_microbatches=num_microbatches)


def test_equal_stages_wait_for_the_bubble_alone():
    """K=4, M=8 leaves 3/11 of the stages' time (GPipe, section 2.3)."""
    stages = StageTimes((1.0,) * 4, (2.0,) * 4, (1.0,) * 4)
    model = fit(gpipe(), stages, idle=5.0, update=3.0, step=52.0)
    assert model.contention == pytest.approx(1.0)  # (8 + 3) * 4 = 44
    expected = {"computation": 24, "recomputation": 8, "bubble": 12, "imbalance": 0}
    assert model.slices == pytest.approx(expected | {"transfer and set-up": 5, "weight update": 3}, abs=1e-9)
    assert tuple(model.slices) == SLICES


def test_unequal_stages_wait_more():
    """Sum f + (M-1) max f + sum b + (M-1) max b, whatever the stages' times f and b."""
    forward, backward = (1.0, 2.0, 4.0, 1.0), (3.0, 2.0, 5.0, 2.0)
    stages = StageTimes(forward, backward, (0.0,) * 4)
    total = sum(forward) + 7 * 4 + sum(backward) + 7 * 5
    model = fit(gpipe(), stages, idle=1.0, update=1.0, step=2.0 + 3 * total)
    assert model.contention == pytest.approx(3.0)
    mean = np.mean(forward) + np.mean(backward)
    assert model.slices["computation"] == pytest.approx(3 * 8 * mean)
    assert model.slices["bubble"] == pytest.approx(3 * 3 * mean)
    assert model.slices["imbalance"] == pytest.approx(3 * (total - 11 * mean))
    assert sum(model.slices.values()) == pytest.approx(2.0 + 3 * total)


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 3), (2, 1), (2, 4), (3, 6), (4, 8)])
def test_slices_are_what_stages_do_on_average(schedule, num_stages, num_microbatches):
    """Sums over the timeline: work by kind, and what is left of each stage's time; waiting apart in equal stages."""
    sizes = {"num_stages": num_stages, "num_microbatches": num_microbatches}
    made = jpipe.make_schedule(schedule, **sizes, num_chunks=2 if schedule == "interleaved" else 1)
    random = np.random.default_rng(num_stages * num_microbatches)
    stages = StageTimes(*(tuple(random.uniform(0.1, 2.0, num_stages).tolist()) for _ in range(3)))
    timeline = stages.timeline(made)  # in milliseconds
    computed = sum(span.end - span.start - span.recompute for span in timeline.spans)
    recomputed = sum(span.recompute for span in timeline.spans)
    waited = sum(timeline.makespan - busy for busy in timeline.busy)
    equal = stages.even.timeline(made)
    waited_if_equal = sum(equal.makespan - busy for busy in equal.busy)
    model = fit(made, stages, idle=0.5, update=0.25, step=0.75 + 2 * timeline.makespan / 1e3)
    expected = [computed, recomputed, waited_if_equal, waited - waited_if_equal]
    expected = [2 * each / num_stages / 1e3 for each in expected] + [0.5, 0.25]
    assert list(model.slices.values()) == pytest.approx(expected, abs=1e-12)
    assert sum(model.slices.values()) == pytest.approx(model.step())
    assert all(seconds >= 0 for seconds in model.slices.values())


def test_another_number_of_micro_batches_has_other_ticks():
    """Half as long micro-batches, twice as many of them; transfers grow with the ticks, what is done once doesn't."""
    stages = StageTimes((2.0,) * 4, (4.0,) * 4, (0.0,) * 4)
    model = fit(gpipe(), stages, idle=11.0, setup=4.0, update=0.0, step=11.0 + 66.0)
    more = gpipe(num_microbatches=16)
    ticks = more.ticks.num_ticks / gpipe().ticks.num_ticks
    assert model.step(stages.scaled([0.5] * 4), more) == pytest.approx(19 * 3 + 4 + 7 * ticks)


def test_a_step_too_short_to_be_taken_apart_is_an_error():
    stages = StageTimes((1.0,) * 4, (2.0,) * 4, (0.0,) * 4)
    with pytest.raises(ValueError, match="too short to be taken apart"):
        fit(gpipe(), stages, idle=5.0, update=3.0, step=7.0)


def test_slices_add_up_where_unlike_stages_wait_less_than_equal_ones():
    """M=2, a first stage whose backward is the longer: 11 units, where equal stages take 12, to which they added up."""
    schedule = jpipe.make_schedule("1f1b", num_stages=2, num_microbatches=2)
    stages = StageTimes((2.0, 2.0), (3.0, 1.0), (0.0, 0.0))
    assert (stages.makespan(schedule), stages.even.makespan(schedule)) == pytest.approx((11, 12))
    model = StepModel(schedule, stages, idle=0.5, setup=0.0, update=0.25, contention=1.0)
    assert list(model.slices.values()) == pytest.approx([8, 0, 3, 0, 0.5, 0.25])
    assert sum(model.slices.values()) == pytest.approx(model.step())
