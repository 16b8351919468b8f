"""Layers alone: sums over stages, the part that is recomputed, sizes that a layer refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jpipe
from jpipe.planning.costs import Cost
from jpipe.profiling.changes import recomputed
from jpipe.profiling.layer_times import LayerTimes, by_stage, measure_layers

BATCH = np.ones((8, 4), np.float32)


def planned(**options):
    layers = [jnp.tanh, jnp.sin, jnp.cos, lambda x: x.reshape(2, -1, 4).mean(0)]
    options = {"num_stages": 2, "num_microbatches": 2, "balance": [1, 3]} | options
    pipe = jpipe.Pipeline(layers, lambda y, _: y.mean(), **options)
    jax.eval_shape(pipe.init, jax.random.key(0), BATCH)
    return pipe


def test_sums_over_stages_and_their_chunks():
    planner = planned().planner
    assert by_stage(planner, [1.0, 2.0, 3.0, 4.0]).tolist() == [1.0, 9.0]
    assert by_stage(planner, [1.0, 2.0, 3.0, 4.0], jpipe.partition([1.0] * 4, 2)).tolist() == [3.0, 7.0]
    chunks = planned(schedule="interleaved", num_chunks=2, balance="even").planner
    assert by_stage(chunks, [1.0, 2.0, 3.0, 4.0]).tolist() == [4.0, 6.0]


def test_the_part_of_a_backward_that_is_recomputed():
    cost = lambda backward: Cost(1.0, backward, 0, 0, 0)
    times = LayerTimes([cost(4.0)] * 4, [cost(b) for b in (3.0, 2.0, 2.0, 8.0)])
    assert recomputed(planned().planner, times) == pytest.approx([0.25, 0.0])  # never less than nothing


def test_a_number_of_micro_batches_that_a_layer_refuses_is_left_out():
    times = measure_layers(planned().planner, BATCH, [4, 8])  # of two examples, and of one
    assert sorted(times.others) == [4]
    assert len(times.here) == len(times.kept) == len(times.others[4]) == 4
