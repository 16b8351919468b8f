"""Other settings: what is tried, and what they would make of a step, from times that are known."""

import jax
import numpy as np
import pytest

import jpipe
from jpipe.planning.costs import Cost
from jpipe.profiling.changes import best_cut, layer_shares, other_schedules, without_remat
from jpipe.profiling.layer_times import LayerTimes
from jpipe.profiling.prediction import StageTimes

BATCH = np.ones((16, 4), np.float32)


def planned(**options):
    """A pipeline of four layers that has seen a batch."""
    options = {"num_stages": 2, "num_microbatches": 4, "balance": [1, 3], "remat": "none"} | options
    pipe = jpipe.Pipeline([lambda x, i=i: x + i for i in range(4)], lambda y, _: y.mean(), **options)
    jax.eval_shape(pipe.init, jax.random.key(0), BATCH)
    return pipe


def costs(of_layers):
    return [Cost(t / 3, 2 * t / 3, 0, 0, 0) for t in of_layers]


def named(name, **sizes):
    return jpipe.make_schedule(name, **({"num_stages": 2, "num_microbatches": 4} | sizes))


STAGES = StageTimes((2.0, 6.0), (4.0, 12.0), (0.0, 3.0))
"""Of layers of 6 seconds each, and 3 of recomputation on the second stage."""


def test_stages_times_are_shared_among_their_layers():
    shares = layer_shares(planned().planner, LayerTimes(costs([9.0] * 4), costs([9.0] * 4)), STAGES)
    assert shares.forward == pytest.approx((2.0,) * 4) and shares.backward == pytest.approx((4.0,) * 4)
    assert shares.recompute == pytest.approx((0.0, 1.0, 1.0, 1.0))


def test_the_best_cut_puts_them_together_anew():
    cut, stages = best_cut(planned().planner, LayerTimes(costs([9.0] * 4), costs([9.0] * 4)), STAGES)
    assert cut.counts == (2, 2) or list(cut.counts) == [2, 2]
    assert stages.forward == pytest.approx((4.0, 4.0)) and stages.recompute == pytest.approx((1.0, 2.0))


def test_without_recomputation_stages_take_what_their_layers_do():
    kept = without_remat(planned().planner, LayerTimes(costs([4.0] * 4), costs([2.0, 3.0, 3.0, 3.0])), STAGES)
    assert kept.total == pytest.approx((0.5 * 6.0, 0.75 * 21.0))


def test_an_order_of_ones_own_is_tried_with_no_other_number_of_micro_batches():
    own = [["F0", "F1", "B0", "B1"], ["F0", "B0", "F1", "B1"]]
    for name in ("custom", "1f1b", "naive", "interleaved"):
        schedule = jpipe.Schedule(own, slots=("FB",), name=name)
        assert other_schedules(planned(num_microbatches=2, schedule=schedule).planner, BATCH) == {}
    assert sorted(other_schedules(planned(schedule=named("gpipe")).planner, BATCH)) == [1, 2, 8, 16]
