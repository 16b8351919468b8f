"""What a step should take, against closed forms, and findings from times that are known."""

import numpy as np
import pytest

import jpipe
from jpipe.profiling.prediction import SLICES, StageTimes, fit


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


def test_another_number_of_micro_batches_has_other_ticks():
    """Half as long micro-batches, twice as many of them; transfers grow with the ticks."""
    stages = StageTimes((2.0,) * 4, (4.0,) * 4, (0.0,) * 4)
    model = fit(gpipe(), stages, idle=11.0, update=0.0, step=11.0 + 66.0)
    more = gpipe(num_microbatches=16)
    ticks = more.ticks.num_ticks / gpipe().ticks.num_ticks
    assert model.step(stages.scaled([0.5] * 4), more) == pytest.approx(19 * 3 + 11 * ticks)


def test_a_step_too_short_to_be_taken_apart_is_an_error():
    stages = StageTimes((1.0,) * 4, (2.0,) * 4, (0.0,) * 4)
    with pytest.raises(ValueError, match="too short to be taken apart"):
        fit(gpipe(), stages, idle=5.0, update=3.0, step=7.0)
