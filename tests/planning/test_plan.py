"""The plan: one value, made of a request, a traced model and its loss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpipe.memory.batches import cut_batch
from jpipe.planning.plan import make_plan
from small_pipeline import dense, make

BATCH = np.ones((8, 16), np.float32)


def planner(balance, **options):
    return make([dense(16) for _ in range(4)], lambda y, _: jnp.mean(y), balance=balance, **options).planner


def plan(found):
    """A plan by hand, as the planner makes it."""
    micro = cut_batch(BATCH, 2)
    model, loss = found.model(micro), found.loss(micro)
    key = jax.eval_shape(lambda: jax.random.key(0))
    return make_plan(found.request, found.request.layers, model, loss, found.layers(micro, key))


@pytest.mark.parametrize(
    ("balance", "early", "measured"),
    [("even", (2, 2), 0), ([1, 3], (1, 3), 4), ([3.0, 1, 1, 1], (1, 3), 0), (np.asarray([3, 1]), (3, 1), 4)],
)
def test_cuts_that_follow_from_no_shapes(balance, early, measured):
    """Of layers that the user counted out, FLOPs are shown."""
    found = planner(balance)
    assert found.partition.counts == early
    assert plan(found).partition.counts == early
    assert len(plan(found).costs) == measured


def test_times_of_stages():
    """Matrix products of `[4, 16]` and `[16, 16]`: one forward, two more backward; without costs a third is forward."""
    forward, backward = plan(planner([1, 3])).stage_times
    assert 2.9 < forward[1] / forward[0] < 3.1
    assert 1.9 < backward[1] / forward[1] < 2.3
    given = plan(planner([3.0, 3.0, 3.0, 2.7], num_chunks=2, schedule="interleaved"))
    np.testing.assert_allclose(given.stage_times, [(2.0, 1.9), (4.0, 3.8)], err_msg="layers 0 and 2; 1 and 3")
    with pytest.warns(UserWarning, match="layer 0"):
        idle = plan(planner([3.0, 0.0, 0.0, 0.0]))
    assert idle.partition.counts == (1, 3)
    np.testing.assert_allclose(idle.stage_times, [(1.0, 3e-6), (2.0, 3e-6)])
    assert plan(planner([0.0] * 4)).stage_times == ((1.0, 1.0), (2.0, 2.0))
