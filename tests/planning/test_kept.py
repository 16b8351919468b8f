"""What actions keep: where it lies, which residuals go to the host and come back, and what is said where none does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import jpipe
from cases import assert_equal
from jpipe.processes.progress import warn_once
from small_pipeline import make

OFFLOADS_NAMES = jax.checkpoint_policies.save_and_offload_only_these_names
NAMED = {"names_which_can_be_saved": [], "offload_src": "device", "offload_dst": "pinned_host"}


def squares(outputs, batch):
    return jnp.mean(outputs**2)


@pytest.mark.filterwarnings("ignore:offload= moves nothing on CPUs")
def test_a_policy_that_offloads_by_name_or_products():
    def block(params, x):
        hidden = checkpoint_name(jnp.tanh(x @ params["a"]), "hidden")
        return x + hidden @ params["b"]

    def init(key, x):
        keys = jax.random.split(key)
        return {"a": jax.random.normal(keys[0], (4, 8)) / 2, "b": jax.random.normal(keys[1], (8, 4)) / 2}

    def run(policy):
        pipe = make([jpipe.Layer(init, block)] * 4, squares, num_stages=3, num_microbatches=4, remat=policy)
        batch = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
        variables = pipe.init(jax.random.key(0), batch)
        grads = pipe.value_and_grad(variables, batch)[1]
        return jax.tree.map(np.asarray, grads), pipe.planner.training_step(pipe.planner.for_training(batch)).kept

    saved, _ = run(jax.checkpoint_policies.save_only_these_names("hidden"))
    moved, kept = run(OFFLOADS_NAMES(names_which_can_be_offloaded=["hidden"], **NAMED))
    assert_equal(moved, saved)
    shapes = lambda kept: [[leaf.shape for leaf in one.leaves] for one in kept.away["residual_away"].record_types]
    assert shapes(kept)[1] == [(2, 8)], "what has the name, and nothing else"

    saved, _ = run(jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
    moved, kept = run(jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host"))
    assert_equal(moved, saved)
    assert (2, 8) in shapes(kept)[1]

    with pytest.raises(ValueError, match="from 'device' to 'unpinned_host'; use 'device', 'pinned_host'"):
        run(OFFLOADS_NAMES(names_which_can_be_offloaded=["hidden"], **NAMED | {"offload_dst": "unpinned_host"}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_stages": 2, "num_microbatches": 4, "offload": "residuals"}, "offload= moves nothing on CPUs"),
        ({"num_stages": 1, "offload": "residuals"}, "moves no residuals: under '1f1b' with num_stages=1"),
        (
            {"num_stages": 2, "num_microbatches": 4, "offload": {"residuals": 0.5}},
            r"offload={'residuals': 0.5} moves no residuals: each of the layers' residua",
        ),
    ],
)
def test_where_nothing_moves_it_is_said_once(options, message):
    warn_once.cache_clear()
    pipe = make(**{"remat": "none"} | options)
    batch = {name: np.ones((8, 4), np.float32) for name in ("inputs", "targets")}
    variables = jax.eval_shape(pipe.init, jax.random.key(0), batch)
    with pytest.warns(UserWarning, match=message) as caught:
        for _ in range(2):
            jax.eval_shape(pipe.value_and_grad, variables, batch)
    assert len(caught) == 1


def test_values_inside_of_a_jit_cannot_go():
    block = jax.jit(lambda w, x: x + checkpoint_name(jnp.tanh(x @ w), "hidden"))
    layer = jpipe.Layer(lambda key, x: jnp.ones((4, 4)), block)
    policy = OFFLOADS_NAMES(names_which_can_be_offloaded=["hidden"], **NAMED)
    pipe = make([layer] * 4, squares, num_microbatches=4, remat=policy)
    with pytest.raises(ValueError, match="offloads a value inside of a jit or scan"):
        batch = np.ones((8, 4), np.float32)
        jax.eval_shape(pipe.value_and_grad, jax.eval_shape(pipe.init, jax.random.key(0), batch), batch)


@pytest.mark.filterwarnings("ignore:offload= moves nothing on CPUs")
@pytest.mark.parametrize(("share", "goes"), [(1.0, 2), (0.6, 1)])
def test_a_share_takes_the_largest_first(share, goes):
    """Of a block's two residuals, 4 and 16 wide, a share of 0.6 has room for the narrower alone."""

    def block(params, x):
        return x + jnp.tanh(x @ params["a"]) @ params["b"]

    init = lambda key, x: {"a": jnp.ones((4, 16)), "b": jnp.ones((16, 4))}
    layers = [jpipe.Layer(init, block)] * 6
    pipe = make(layers, squares, num_microbatches=4, remat="none", offload={"residuals": share})
    batch = np.ones((8, 4), np.float32)
    jax.eval_shape(pipe.init, jax.random.key(0), batch)
    kept = pipe.planner.training_step(pipe.planner.for_training(batch)).kept
    assert kept.rows_of[1].count("residual_away") == goes
