"""What a profile means in words, from times that are known."""

import socket
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jpipe
from jpipe.planning.costs import Cost
from jpipe.tools.findings import (
    ProcessTime,
    _factors,
    _slow_process,
    best_cut,
    find,
    host_names,
    layer_shares,
    microbatch_sizes,
    other_schedules,
    process_times,
)
from jpipe.tools.measure import LayerTimes, StageTimes, StepModel
from jpipe.tools.profile import process_table

LAYERS = 8
BATCH = np.ones((16, 4), np.float32)


def layers():
    return [lambda x, i=i: x + i for i in range(LAYERS)]


def loss_fn(outputs, batch):
    return jnp.mean(outputs)


def planned(**options):
    """A pipeline of eight layers that has seen a batch."""
    options = {"num_stages": 2, "num_microbatches": 4, "balance": "even", "remat": "none"} | options
    pipe = jpipe.Pipeline(layers(), loss_fn, **options)
    jax.eval_shape(pipe.init, jax.random.key(0), BATCH)
    return pipe


def costs(of_layers, scale=1.0, residual_bytes=0):
    """A third of a layer's time is its forward, the rest its backward."""
    return [Cost(scale * t / 3, 2 * scale * t / 3, 0, 0, residual_bytes) for t in of_layers]


def findings_of(pipe, of_layers, *, idle=0.0, update=0.0, contention=1.0, kept=1.0, others=None, noise=0.0):
    """Findings where layers take these times in stages as alone.

    Args:
      pipe: a pipeline.
      of_layers: forward and backward of each layer, `[N]`.
      idle: a step without actions.
      update: the optimiser's update.
      contention: how many times as long stages take together.
      kept: what layers take without recomputation, of what they take.
      others: by number of micro-batches, what layers take in its micro-batches, of what they take.
      noise: by how much rounds differ.
    """
    schedule, total = pipe.schedule, np.zeros(pipe.schedule.num_stages)
    for virtual_stage, (start, stop) in enumerate(pipe.partition.bounds):
        total[schedule.placement.stage_of(virtual_stage)] += sum(of_layers[start:stop])
    stages = StageTimes(tuple(total / 3), tuple(2 * total / 3), (0.0,) * len(total))
    step = contention * stages.makespan(schedule) + idle + update
    model = StepModel(schedule, stages, idle=idle, update=update, measured=step, noise=noise)
    times = LayerTimes(
        costs(of_layers),
        costs(of_layers, kept, residual_bytes=2**20),
        {m: costs(of_layers, scale) for m, scale in (others or {}).items()},
    )
    sizes = microbatch_sizes(pipe.planner, BATCH, model, times, other_schedules(pipe.planner, BATCH))
    return find(pipe.planner, model, times, sizes)


def with_change(found):
    return [finding for finding in found if finding.change]


def test_nothing_to_find_where_stages_are_equal():
    assert findings_of(planned(num_stages=1), [3.0] * LAYERS) == ()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_layers_to_move(schedule):
    """Two stages of 2 and 6 equal layers, M=4: 2 + 6 + 3 * 6 layers' time becomes 4 + 4 + 3 * 4."""
    pipe = planned(balance=[2, 6], schedule=schedule)
    (found,) = with_change(findings_of(pipe, [3.0] * LAYERS, idle=6.0, update=12.0, contention=2.0))
    assert found.change == {"balance": [4, 4]}
    assert found.promise == pytest.approx((2 * 3 * 20 + 18) / (2 * 3 * 26 + 18))
    assert found.text == (
        "stage 1 takes 1.50 times the mean of the stages: balance=[4, 4] instead of [2, 6], step -21 %"
    )


def test_layers_to_move_among_chunks():
    pipe = planned(balance=[1, 3, 1, 3], num_chunks=2, schedule="interleaved")
    (found,) = with_change(findings_of(pipe, [1.0] * LAYERS))
    assert found.change == {"balance": [2, 2, 2, 2]}
    assert "stage 1 takes 1.50 times the mean of the stages: balance=[2, 2, 2, 2] instead of [1, 3, 1, 3]" in found.text


def test_a_layer_that_no_cut_makes_lighter():
    found = findings_of(planned(balance=[1, 7]), [30.0, *[1.0] * 7])
    assert with_change(found) == []
    assert any("stage 0 takes 1.62 times" in finding.text and "layer 0 (" in finding.text for finding in found)


def test_more_micro_batches_where_examples_take_as_long():
    """Equal stages: (M + K - 1) / M times the work, here 5/4, and 17/16 with M=16."""
    found = findings_of(planned(), [1.0] * LAYERS, others={8: 0.5, 16: 0.25})
    (change,) = with_change(found)
    assert change.change == {"num_microbatches": 16, "schedule": "1f1b"}
    assert change.promise == pytest.approx((17 / 16) / (5 / 4))
    assert "M=4 leaves a bubble of 20.0%, M=16 of 5.9%" in change.text and "step -15 %" in change.text


def test_fewer_micro_batches_where_examples_take_longer_in_small_ones():
    """Half as many micro-batches that take no longer each: 3 turns instead of 5."""
    found = findings_of(planned(), [1.0] * LAYERS, others={2: 1.0, 8: 1.0})
    (change,) = with_change(found)
    assert change.change["num_microbatches"] == 2
    assert change.promise == pytest.approx(3 / 5)
    said = "an example takes 2.0 times as long in micro-batches of 4 as of 8: they are too small to keep a device busy"
    assert f"{said}; use a larger batch in as many micro-batches" in [finding.text for finding in found]


def test_a_bubble_that_only_a_larger_batch_makes_smaller():
    """It said "M=8 ...: step +80 %", which nobody wants."""
    (found,) = findings_of(planned(), [1.0] * LAYERS, others={8: 1.0})
    assert found.text == (
        "M=4 leaves a bubble of 20.0%, and other numbers of micro-batches of this batch shorten the step by less than "
        "10%; use a larger batch of micro-batches as large, M=8 leaves 11.1%"
    )
    assert found.change == {} and found.promise is None


def test_a_bubble_that_more_micro_batches_hardly_make_smaller():
    """1/17 of 16 + 1 turns is a bubble of 5.9 %; 8 larger micro-batches leave 11.1 %."""
    assert findings_of(planned(num_microbatches=16), [1.0] * LAYERS, others={8: 2.0}) == ()


def test_stages_that_are_even_enough():
    """4 and 4.52 seconds, 1.06 times the mean: a step of 8.52 + 3 * 4.52, and 5 * 4.26 if they were equal, 3.5 % less.

    It said to split a layer.
    """
    assert findings_of(planned(), [1.0] * 4 + [1.13] * 4) == ()
    assert findings_of(planned(), [1.0] * 4 + [1.05] * 4) == ()
    (found,) = findings_of(planned(balance=[3, 5]), [1.0] * LAYERS)  # 3 and 5: 8 + 3 * 5 turns to 8 + 3 * 4
    assert found.text == (
        "stage 1 takes 1.25 times the mean of the stages: balance=[4, 4] instead of [3, 5], step -13 %"
    )
    assert findings_of(planned(balance=[3, 5]), [1.0] * LAYERS, noise=0.14)[0].text.startswith("the step took longer")
    assert len(findings_of(planned(balance=[3, 5]), [1.0] * LAYERS, noise=0.14)) == 1


def test_recomputation_that_memory_buys_off():
    """Under 1F1B the first of two stages holds three micro-batches of four layers, 1 MiB each."""
    (found,) = with_change(findings_of(planned(remat="layer"), [1.0] * LAYERS, kept=0.75))
    assert found.change == {"remat": "none"} and found.promise == pytest.approx(0.75)
    assert "holds up to 12.0 MiB of residuals: step -25 %" in found.text


def test_what_is_around_the_stages():
    pipe = planned()
    found = findings_of(pipe, [1.0] * LAYERS, idle=10.0, update=8.0, contention=1.5)  # 1.5 * 20 + 18
    texts = "\n".join(finding.text for finding in found)
    assert "stages take 1.5 times as long together" in texts
    each = f"{10 / pipe.schedule.ticks.num_ticks * 1e3:.2g} ms in each of {pipe.schedule.ticks.num_ticks} ticks"
    assert f"take 21% of the step: 0 ms once, of which a larger batch has less, and {each}" in texts
    assert "the weight update" not in texts  # 8 of 48 are less than a fifth


def test_too_little_work_promises_nothing():
    found = findings_of(planned(balance=[2, 6]), [1.0] * LAYERS, idle=20.0, update=20.0, contention=9.0)
    assert with_change(found) == []
    assert any("too little to promise anything" in finding.text for finding in found)


# --- changes that a pipeline takes ---


def named(name, **sizes):
    return jpipe.make_schedule(name, **({"num_stages": 2, "num_microbatches": 4} | sizes))


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": named("gpipe")},
        {"schedule": "interleaved", "num_chunks": 2, "balance": [1, 3, 1, 3]},
        {"balance": [1.0] * 6 + [3.0] * 2},
        {"remat": "layer", "balance": "size"},
    ],
    ids=str,
)
def test_a_pipeline_takes_all_changes_besides_its_other_arguments(options):
    found = findings_of(planned(**options), [1.0] * LAYERS, kept=0.5, others={8: 0.4, 16: 0.2})
    assert any("num_microbatches" in finding.change for finding in found)
    for finding in with_change(found):
        planned(**options | finding.change)


def test_a_promise_is_more_than_the_noise():
    pipe = planned(balance=[3, 5], schedule="gpipe")
    (quiet,) = with_change(findings_of(pipe, [3.0] * LAYERS, noise=0.08))
    assert quiet.change == {"balance": [4, 4]} and 0.8 < quiet.promise < 0.9
    noisy = findings_of(pipe, [3.0] * LAYERS, noise=0.25)
    assert not with_change(noisy)
    assert [finding.text for finding in noisy if "by 25%: something else runs" in finding.text]


# --- hosts ------------------------------------------------------------------------------------------------------------


def mesh_of(processes):
    """A mesh of stages and data on devices of these processes, `[data, K]`."""
    devices = np.vectorize(lambda process: SimpleNamespace(process_index=process), otypes=[object])(processes)
    return SimpleNamespace(devices=devices, axis_names=("data", "stage"))


def test_one_process_has_nobody_to_be_compared_with(make_mesh):
    assert host_names() == [socket.gethostname()]
    assert process_times((0.5,), host_names(), make_mesh((2,))) == ()


def test_each_process_with_its_stages_over_the_median():
    mesh = mesh_of([[0, 0, 1, 1], [2, 2, 1, 1]])
    found = process_times((0.2, 0.5, 0.1, 0.2), ("a", "b", "c", "d"), mesh)
    assert [own.stages for own in found] == [(0, 1), (2, 3), (0, 1), ()]
    assert [own.of_median for own in found] == pytest.approx([1.0, 2.5, 0.5, 1.0])
    table = process_table(found)
    assert table.rows[1] == ("1", "b", "2, 3", "500", "2.50")
    assert table.marks == {1: "slowest"}
    assert [finding.text for finding in _slow_process(found)] == [
        "process 1 on b (stages 2, 3) takes 2.50 times the median of the processes for the same layers, and every step "
        "waits for it: see what else runs on that machine, or run without it"
    ]


def test_of_two_the_slow_one_is_over_the_fast_one():
    assert [own.of_median for own in process_times((0.1, 0.3), ("a", "b"), mesh_of([[0, 1]]))] == pytest.approx([1, 3])


def test_processes_that_are_alike_are_no_finding():
    alike = [ProcessTime(p, "a", (p,), seconds, seconds) for p, seconds in enumerate((1.0, 1.01, 1.015))]
    assert process_table(alike).marks == {}
    assert list(_slow_process(alike)) == list(_slow_process(())) == []


# --- changes ----------------------------------------------------------------------------------------------------------


def planned_of_changes(**options):
    """A pipeline of four layers that has seen a batch."""
    options = {"num_stages": 2, "num_microbatches": 4, "balance": [1, 3], "remat": "none"} | options
    pipe = jpipe.Pipeline([lambda x, i=i: x + i for i in range(4)], lambda y, _: y.mean(), **options)
    jax.eval_shape(pipe.init, jax.random.key(0), BATCH)
    return pipe


def costs_of_changes(of_layers):
    return [Cost(t / 3, 2 * t / 3, 0, 0, 0) for t in of_layers]


STAGES = StageTimes((2.0, 6.0), (4.0, 12.0), (0.0, 3.0))
"""Of layers of 6 seconds each, and 3 of recomputation on the second stage."""


def test_stages_times_are_shared_among_their_layers():
    shares = layer_shares(
        planned_of_changes().planner, LayerTimes(costs_of_changes([9.0] * 4), costs_of_changes([9.0] * 4)), STAGES
    )
    assert shares.forward == pytest.approx((2.0,) * 4) and shares.backward == pytest.approx((4.0,) * 4)
    assert shares.recompute == pytest.approx((0.0, 1.0, 1.0, 1.0))


def test_the_best_cut_puts_them_together_anew():
    cut, stages = best_cut(
        planned_of_changes().planner, LayerTimes(costs_of_changes([9.0] * 4), costs_of_changes([9.0] * 4)), STAGES
    )
    assert cut.counts == (2, 2) or list(cut.counts) == [2, 2]
    assert stages.forward == pytest.approx((4.0, 4.0)) and stages.recompute == pytest.approx((1.0, 2.0))


def test_without_recomputation_stages_take_what_their_layers_do():
    kept, here = costs_of_changes([2.0, 3.0, 3.0, 3.0]), costs_of_changes([4.0] * 4)
    assert _factors(planned_of_changes().planner, kept, here) == pytest.approx([0.5, 0.75])


def test_an_order_of_ones_own_is_tried_with_no_other_number_of_micro_batches():
    own = [["F0", "F1", "B0", "B1"], ["F0", "B0", "F1", "B1"]]
    for name in ("custom", "1f1b", "naive", "interleaved"):
        schedule = jpipe.Schedule(own, slots=("FB",), name=name)
        assert other_schedules(planned_of_changes(num_microbatches=2, schedule=schedule).planner, BATCH) == {}
    assert sorted(other_schedules(planned_of_changes(schedule=named("gpipe")).planner, BATCH)) == [1, 2, 8, 16]
