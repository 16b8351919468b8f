"""Which layers a sweep visits on each virtual stage, in which order, and which of them count."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jpipe
from device_programs import programs_for
from jpipe.execution.sweep import Job, sweep

LAYERS = "ecaaabacaaabah"  # layers of one letter are equal
COUNTS = [7, 7]


def step_of(devices):
    kinds = {
        letter: jpipe.Layer(lambda key, x: jnp.ones((8, 8)), lambda w, x, i=i: jnp.sin(x @ w + i), name=letter)
        for i, letter in enumerate(sorted({*LAYERS}))
    }
    layers = [kinds[letter] for letter in LAYERS]
    options = {"num_stages": 2, "num_microbatches": 4, "balance": COUNTS, "inputs": lambda batch: batch}
    with programs_for(devices):
        pipe = jpipe.Pipeline(layers, lambda y, _: jnp.mean(y), **options)
        return pipe.planner.training_step(pipe.planner.for_training(np.ones((8, 8), np.float32)))


def visited(step, virtual_stage, *, counts=True, reverse=False):
    """The layers that a sweep visits, and whether each counts."""

    def visit(job, _, log):
        places, count = log
        layer = jnp.asarray(step.model.groups[job.g].indices)[job.position]
        return places.at[count].set(jnp.stack([layer, jnp.asarray(job.counts, jnp.int32)])), count + 1

    def run(virtual_stage, counts):
        job = Job(jnp.int32(0), {}, counts, virtual_stage)
        log = jnp.zeros((64, 2), jnp.int32), jnp.int32(0)
        return sweep(step, job, "B" if reverse else "F", lambda job, log: (), visit, log)

    traced = jnp.int32(virtual_stage)
    places, count = jax.jit(run)(traced, counts) if counts is not True else jax.jit(lambda s: run(s, True))(traced)
    return [tuple(row) for row in places[:count].tolist()]


@pytest.mark.parametrize("devices", ["tpu", "gpu"])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_virtual_stage_visits_its_layers_in_order(devices, reverse):
    step = step_of(devices)
    for stage in range(2):
        layers = [*range(sum(COUNTS[:stage]), sum(COUNTS[: stage + 1]))]
        assert visited(step, stage, reverse=reverse) == [(i, 1) for i in (layers[::-1] if reverse else layers)]


def test_one_that_idles_visits_what_is_computed_along_and_nothing_counts():
    step = step_of("gpu")
    assert step.idle_work.trips
    found = visited(step, 1, counts=jnp.bool_(False))
    groups = {i: g for g, group in enumerate(step.model.groups) for i in group.indices}
    assert found and {groups[i] for i, _ in found} == {*step.idle_work.trips}
    assert not any(counts for _, counts in found)
