"""The step's program, of which only some actions run."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpipe
from cases import assert_equal
from jpipe.planning.costs import Cost
from jpipe.tools.measure import SLICES, LayerTimes, Program, StepModel, measure_layers
from wide import make, stage_times


def counted(calls, index, x):
    """x, and a note for each call of a layer that it was called."""
    jax.debug.callback(lambda _: calls.append(index), x[0, 0])
    return x


def test_a_program_runs_the_actions_that_it_is_told_to():
    """Each layer tells when it is called; the backward's `jax.checkpoint` calls those again that move something."""
    calls = []
    layers = [lambda x, i=i: counted(calls, i, x) for i in range(4)]
    batch = {"inputs": np.ones((6, 3), np.float32)}
    pipe = jpipe.Pipeline(
        layers, lambda y, b: y.mean(), num_stages=2, num_microbatches=3, balance=[1, 3], remat="none", schedule="gpipe"
    )
    program = Program(pipe, pipe.create_state(jax.random.key(0), batch, optax.sgd(0.1)), batch)

    def called(run, *only):
        calls.clear()
        jax.block_until_ready(run(*only))
        jax.effects_barrier()
        return {index: calls.count(index) for index in set(calls)}

    assert called(program.run, program.only("FB")) == {0: 3, 1: 6, 2: 6, 3: 6}
    assert called(program.run, program.only("")) == {}
    assert called(program.run, program.only("F", 0)) == {0: 3}
    assert called(program.run, program.only("F", 1)) == {1: 3, 2: 3, 3: 3}
    assert called(program.run, program.only("B", 0)) == {}
    assert called(program.run, program.only("B", 1)) == {1: 3, 2: 3, 3: 3}


def test_a_program_of_all_actions_computes_what_the_pipeline_does():
    pipe, state, batch = make()
    program = Program(pipe, state, batch)
    (loss, updates, _), grads = program.run(program.only("FB"))
    key = jax.random.fold_in(state.key, state.step)
    (expected, other_updates), other = pipe.value_and_grad(state.variables, batch, key)
    assert_equal((loss, updates, grads), (expected, other_updates, other))


# --- layer times ------------------------------------------------------------------------------------------------------


BATCH = np.ones((8, 4), np.float32)


def planned(**options):
    layers = [jnp.tanh, jnp.sin, jnp.cos, lambda x: x.reshape(2, -1, 4).mean(0)]
    options = {"num_stages": 2, "num_microbatches": 2, "balance": [1, 3], "loss_over": "microbatch"} | options
    pipe = jpipe.Pipeline(layers, lambda y, _: y.mean(), **options)
    jax.eval_shape(pipe.init, jax.random.key(0), BATCH)
    return pipe


def test_the_part_of_a_backward_that_is_recomputed():
    cost = lambda backward: Cost(1.0, backward, 0)
    times = LayerTimes(planned().planner, [cost(4.0)] * 4, [cost(b) for b in (3.0, 2.0, 2.0, 8.0)])
    apart = times.with_recomputation(stage_times((1.0, 1.0), (4.0, 4.0), (0.0, 0.0)))
    assert apart.recompute == pytest.approx([1.0, 0.0])  # never less than nothing
    assert apart.backward == pytest.approx([3.0, 4.0])


def test_layers_are_timed_with_recomputation_and_without():
    times = measure_layers(planned().planner, BATCH)
    assert len(times.here) == len(times.kept) == 4 and times.here is not times.kept
    times = measure_layers(planned(remat="none").planner, BATCH)
    assert times.here is times.kept


# --- prediction -------------------------------------------------------------------------------------------------------


def gpipe(num_stages=4, num_microbatches=8):
    return jpipe.make_schedule("gpipe", num_stages=num_stages, num_microbatches=num_microbatches)


def test_equal_stages_wait_for_the_bubble_alone():
    """K=4, M=8 leaves 3/11 of the stages' time (GPipe, section 2.3)."""
    stages = stage_times((1.0,) * 4, (2.0,) * 4, (1.0,) * 4)
    model = StepModel(gpipe(), stages, idle=5.0, update=3.0, measured=52.0)
    assert model.contention == pytest.approx(1.0)  # (8 + 3) * 4 = 44
    expected = {"computation": 24, "recomputation": 8, "bubble": 12, "imbalance": 0}
    assert model.what_if().seconds == pytest.approx(expected | {"transfer and set-up": 5, "weight update": 3}, abs=1e-9)
    assert tuple(model.what_if().seconds) == SLICES


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 3), (2, 1), (2, 4), (3, 6), (4, 8)])
def test_slices_are_what_stages_do_on_average(schedule, num_stages, num_microbatches):
    """Sums over the timeline: work by kind, and what is left of each stage's time; waiting apart in equal stages."""
    sizes = {"num_stages": num_stages, "num_microbatches": num_microbatches}
    made = jpipe.make_schedule(schedule, **sizes, num_chunks=2 if schedule == "interleaved" else 1)
    random = np.random.default_rng(num_stages * num_microbatches)
    stages = stage_times(*(random.uniform(0.1, 2.0, num_stages) for _ in range(3)))
    timeline = stages.timeline(made)
    computed = sum(span.end - span.start - span.recompute for span in timeline.spans)
    recomputed = sum(span.recompute for span in timeline.spans)
    waited = sum(timeline.makespan - busy for busy in timeline.busy)
    equal = stages.even.timeline(made)
    waited_if_equal = sum(equal.makespan - busy for busy in equal.busy)
    model = StepModel(made, stages, idle=0.5, update=0.25, measured=0.75 + 2 * timeline.makespan)
    expected = [computed, recomputed, waited_if_equal, waited - waited_if_equal]
    expected = [2 * each / num_stages for each in expected] + [0.5, 0.25]
    assert list(model.what_if().seconds.values()) == pytest.approx(expected, abs=1e-12)
    assert sum(model.what_if().seconds.values()) == pytest.approx(model.what_if().step)
    assert all(seconds >= 0 for seconds in model.what_if().seconds.values())


def test_a_step_too_short_to_be_taken_apart_is_an_error():
    stages = stage_times((1.0,) * 4, (2.0,) * 4, (0.0,) * 4)
    with pytest.raises(ValueError, match="too short to be taken apart"):
        StepModel(gpipe(), stages, idle=5.0, update=3.0, measured=7.0).what_if()
