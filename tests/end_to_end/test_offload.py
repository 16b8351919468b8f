"""Residuals that go to the host while they wait change nothing of what a step computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import jpipe
from cases import assert_close, assert_equal, model, pipeline
from device_programs import programs_for
from jpipe.terminal.notices import warn_once
from small_pipeline import make

OFFLOADS_NAMES = jax.checkpoint_policies.save_and_offload_only_these_names
NAMED = {"names_which_can_be_saved": [], "offload_src": "device", "offload_dst": "pinned_host"}


def gradients(truth, case, **options):
    """(loss, gradients by layer, the step) of a pipeline."""
    pipe = pipeline(truth, *case, **options)
    variables = pipe.from_layer_variables(truth.trees, truth.batch)
    (loss, _), grads = pipe.value_and_grad(variables, truth.batch)
    step = pipe.planner.training_step(pipe.planner.for_training(truth.batch))
    return loss, pipe.layer_variables({"params": grads}), step


@pytest.mark.filterwarnings("ignore:offload= moves nothing on CPUs")
@pytest.mark.parametrize(
    ("kind", "case", "remat", "offload", "devices"),
    [
        ("linen", ("1f1b", 4, 6), "none", "residuals", "cpu"),
        ("linen", ("1f1b", 3, 4), "none", {"residuals": 0.5}, "gpu"),
        ("mixed", ("interleaved", 2, 4, 2), "none", "residuals", "tpu"),
        ("linen", ("zero_bubble", 3, 6), "none", ("residuals",), "gpu"),
        pytest.param("mixed", ("v", 2, 4, 2), "none", "residuals", "gpu", marks=pytest.mark.slow),
        pytest.param("alternating", ("gpipe", 3, 4), "layer", "boundaries", "cpu", marks=pytest.mark.slow),
        pytest.param("linen", ("one slot", 3, 6), "none", "residuals", "cpu", marks=pytest.mark.slow),
        pytest.param("linen", ("zb-v", 2, 6, 2), "none", "residuals", "gpu", marks=pytest.mark.slow),
        pytest.param("nnx factories", ("dualpipe-v", 2, 4, 2), "layer", "boundaries", "tpu", marks=pytest.mark.slow),
        pytest.param("mixed", ("zb-h2", 3, 6), "none", "residuals", "cpu", marks=pytest.mark.slow),
    ],
)
def test_a_step_is_the_same_to_the_bit(kind, case, remat, offload, devices):
    with jax.enable_x64(True), programs_for(devices):
        truth = model(kind, "float64")
        loss, grads, _ = gradients(truth, case, remat=remat)
        found, found_grads, step = gradients(truth, case, remat=remat, offload=offload)
        assert step.kept.away, "nothing goes"
        assert_equal(found_grads, grads)
        assert found == loss
        assert_close(found_grads, truth.truth[2], "gradients")


@pytest.mark.filterwarnings("ignore:offload= moves nothing on CPUs")
def test_a_policy_that_offloads_by_name_or_products():
    def block(params, x):
        hidden = checkpoint_name(jnp.tanh(x @ params["a"]), "hidden")
        return x + hidden @ params["b"]

    def init(key, x):
        keys = jax.random.split(key)
        return {"a": jax.random.normal(keys[0], (4, 8)) / 2, "b": jax.random.normal(keys[1], (8, 4)) / 2}

    def run(policy):
        pipe = jpipe.Pipeline(
            [jpipe.Layer(init, block)] * 4, lambda y, _: jnp.mean(y**2), num_stages=3, num_microbatches=4, remat=policy
        )
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

    with pytest.raises(ValueError, match=r"\['other'\].*the names in the layers are \['hidden'\]"):
        run(OFFLOADS_NAMES(names_which_can_be_offloaded=["other"], **NAMED))
    with pytest.raises(ValueError, match="from 'device' to 'unpinned_host', but a pipeline moves"):
        run(OFFLOADS_NAMES(names_which_can_be_offloaded=["hidden"], **NAMED | {"offload_dst": "unpinned_host"}))


def plan_step(**options):
    pipe = make(**options)
    batch = {name: np.ones((8, 4), np.float32) for name in ("inputs", "targets")}
    jax.eval_shape(pipe.init, jax.random.key(0), batch)
    return pipe.planner.training_step(pipe.planner.for_training(batch))


def test_cpus_move_nothing_and_say_so_once():
    warn_once.cache_clear()
    with pytest.warns(UserWarning, match="offload= moves nothing on CPUs") as caught:
        for _ in range(2):
            plan_step(remat="none", offload="residuals", num_stages=2, num_microbatches=4)
    assert len(caught) == 1


def test_where_nothing_waits_it_says_so():
    warn_once.cache_clear()
    with pytest.warns(UserWarning, match="moves no residuals: under '1f1b' with num_stages=1"):
        plan_step(num_stages=1, remat="none", offload="residuals")


@pytest.mark.parametrize(
    ("offload", "options", "words"),
    [
        ("residual", {}, r"offload='residual' is unknown; use some of \['residuals', 'boundaries', 'optimizer'\]"),
        (("residuals", "moments"), {}, "offload='moments' is unknown"),
        ({"residuals": 1.5}, {}, r"offload\['residuals'\]=1.5; use a share from 0 to 1"),
        ({"optimizer": 0.5}, {}, r"offload\['optimizer'\]=0.5; use 0 or 1"),
        ("residuals", {"remat": "full"}, 'with remat="stage" or "full" only a stage\'s input waits'),
    ],
)
def test_bad_input(offload, options, words):
    with pytest.raises(ValueError, match=words):
        make(**{"remat": "none", **options}, offload=offload)


def test_what_is_neither_a_word_nor_several():
    with pytest.raises(TypeError, match="offload=3 is neither a word nor several"):
        make(offload=3)
    with pytest.raises(TypeError, match=r"offload\['residuals'\]='all' is no number"):
        make(offload={"residuals": "all"})
