"""Which layers idle stages compute along, and that nothing of what they give counts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jpipe
from device_programs import anything, programs_for
from jpipe.planning.idle_work import IdleWork

BATCH = {"x": np.arange(64.0, dtype=np.float32).reshape(8, 8) / 64}


def product(width=8, *, apply=lambda w, x: jnp.tanh(x @ w), dtype="float32"):
    return jpipe.Layer(lambda key, x: jax.random.normal(key, (x.shape[-1], width), dtype), apply)


def pipeline(layers, counts, **options):
    options = {"num_stages": 2, "num_microbatches": 4, "balance": counts, "inputs": lambda batch: batch["x"], **options}
    return jpipe.Pipeline(layers, lambda y, _: jnp.mean(y**2), **options)


def step_of(pipe):
    return pipe.planner.training_step(pipe.planner.for_training(BATCH))


def test_only_gpus_have_idle_work():
    layers = [product()] * 4
    for devices in ("cpu", "tpu", "gpu"):
        with programs_for(devices):
            step = step_of(pipeline(layers, [2, 2]))
        assert bool(step.idle_work.trips) == (devices == "gpu")
        assert (len(step.table.runs) > 1) == (devices == "gpu")


@pytest.mark.parametrize(
    ("ends", "counts", "expected"),
    [
        ((1, 1), [3, 3], ({1: 2, 0: 1, 2: 1}, [0, 2])),
        # The last stage takes longer with its end, and the first one waits for it: it may as well compute the same.
        ((1, 256), [3, 3], ({1: 2, 0: 1, 2: 1}, [0, 2])),
        ((256, 256), [3, 3], ({1: 2}, [])),
        ((1, 1), [4, 2], ({}, [])),
    ],
)
def test_layers_that_all_stages_have_equally_many_of_and_small_ends(ends, counts, expected):
    first = jpipe.Layer(lambda key, x: jnp.ones((ends[0], 256)), lambda w, x: jnp.tile(x, 32)[:, : ends[0]] @ w)
    last = jpipe.Layer(lambda key, x: jnp.ones((256, ends[1])), lambda w, x: x @ w)
    with programs_for("gpu"):
        found = step_of(pipeline([first, *[product(256)] * 4, last], counts)).idle_work
    assert (found.trips, sorted(found.single)) == expected


def test_layers_that_alternate_have_no_ends_along():
    """They would be computed in each pass."""
    blocks = [product(), product(apply=lambda w, x: jnp.sin(x @ w))] * 4
    with programs_for("gpu"):
        found = step_of(pipeline([lambda x: x, *blocks, lambda x: x], [5, 5])).idle_work
    assert (found.trips, found.single) == ({1: 1, 2: 1}, frozenset())


def until_small(w, x):
    return jax.lax.while_loop(lambda x: jnp.abs(x).max() > 0.1, lambda x: x / 2, jax.lax.stop_gradient(x)) + x @ w


def shown(w, x):
    jax.debug.print("{}", x.sum())
    return x @ w


@pytest.mark.parametrize("apply", [until_small, shown])
def test_what_may_never_end_or_calls_back_is_not_computed_of_anything(apply):
    layers = [product(apply=apply), product(), product(apply=apply), product()]
    with programs_for("gpu"):
        assert step_of(pipeline(layers, [2, 2])).idle_work == IdleWork()
        layers = [lambda x: x, *[product(), product(apply=apply)] * 2, lambda x: x]
        assert step_of(pipeline(layers, [3, 3])).idle_work.trips == {1: 1}, "the others are"


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble", "interleaved", "v"])
@pytest.mark.parametrize("ends", ["own", "shared"])
def test_nothing_counts_that_idle_stages_compute_of_whatever_lies_there(schedule, ends, monkeypatch):
    """In float64: such weights make rounding errors grow from layer to layer."""
    chunks = 2 if schedule in ("interleaved", "v") else 1
    layer = product(128, dtype="float64")
    layers, batch = [layer, *[layer] * (4 * chunks), layer], {"x": BATCH["x"].astype(np.float64)}
    counts = [3] + [2] * (2 * chunks - 2) + [3]
    results = []
    for devices in ("cpu", "gpu"):
        with programs_for(devices), jax.enable_x64(True):
            pipe = pipeline(layers, counts, schedule=schedule, num_chunks=chunks, ends=ends, remat="none")
            variables = pipe.init(jax.random.key(0), batch)
            with monkeypatch.context() as patch:
                patch.setattr(jax.lax, "empty", anything)
                results.append((pipe.value_and_grad(variables, batch), pipe.apply(variables, batch)))
            step = pipe.planner.training_step(pipe.planner.for_training(batch))
            assert (len(step.table.runs) > 1) == (devices == "gpu")
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(results[1]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10), *results)
