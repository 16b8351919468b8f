"""What actions keep: by name of the rows, in the order of the layer's residuals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jpipe
from cases import assert_equal
from jpipe.memory.storage import Row

IN_PARTS = [["F0", "F1", "I0", "I1", "W0", "W1"], ["F0", "I0", "F1", "I1", "W0", "W1"]]
BATCH = np.ones((4, 4), np.float32)


def block(params, x):
    return x + jax.nn.gelu(x @ params[0]) @ params[1]


def step_of(schedule):
    init = lambda key, x: [jax.random.normal(key, shape) for shape in ((4, 8), (8, 4))]
    layers = [jnp.sin, jpipe.Layer(init, block), jpipe.Layer(init, block), jnp.cos]
    pipe = jpipe.Pipeline(
        layers,
        lambda y, _: jnp.mean(y),
        num_stages=2,
        num_microbatches=2,
        schedule=schedule,
        remat="none",
        balance="even",
    )
    jax.eval_shape(pipe.init, jax.random.key(0), BATCH)
    return pipe.planner.training_step(pipe.planner.for_training(BATCH))


def test_a_split_backward_has_rows_of_its_own():
    whole, parts = step_of("1f1b").kept, step_of(jpipe.Schedule(IN_PARTS, slots=("F", "B", "W"))).kept
    assert (list(whole.storages), whole.rows_of[1]) == (["residual"], ("residual", "residual"))
    assert (list(parts.storages), parts.rows_of[1]) == (["residual", "kept", "stash"], ("kept", "kept"))
    assert [leaf.shape for leaf in parts.storages["stash"].record_types[1].leaves] == [(2, 8), (2, 4)]


@pytest.mark.parametrize("slots", [None, ("F", "B", "W")])
def test_residuals_come_back_in_their_own_order(slots):
    kept = step_of("1f1b" if slots is None else jpipe.Schedule(IN_PARTS, slots=slots)).kept
    rows = {name: Row(0, 0) for name in kept.storages}
    leaves = [jnp.full((2, 4), 1.0), jnp.full((2, 8), 2.0)]
    written = kept.write_residuals(kept.empty(), (1, 0), leaves, rows)
    assert_equal(kept.read_residuals(written, (1, 0), rows, {}), leaves)
