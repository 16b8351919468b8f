"""Training steps: what one gives, and which of them are kept compiled."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jpipe
from cases import assert_close, assert_equal, compilations, linen, tokens
from cases import pipeline as pipeline_of
from jpipe.training.train_state import TrainState
from jpipe.training.train_step import MOST_TRAIN_STEPS, train_step

BATCH = np.ones((4, 8), np.float32)


def pipeline():
    layers = [nn.Dense(8, use_bias=False) for _ in range(2)]
    return jpipe.Pipeline(layers, lambda y, _: jnp.mean(y), num_stages=2, num_microbatches=2, balance="even")


def test_a_step_updates_counts_and_tells_whether_all_was_finite():
    """On plain arrays, without a pipeline: the key of each step is its own, other collections are replaced."""

    def value_and_grad(step, variables, batch, key):
        assert step == "handed on"
        total = jnp.sum(variables["params"]["w"] * batch)
        drawn = {"stats": {"drawn": jax.random.key_data(key)}}
        return (total, drawn, {"accuracy": jnp.float32(1)}), {"w": batch}

    tx = optax.apply_if_finite(optax.sgd(1.0), 9)
    params, stats = {"w": jnp.zeros(2)}, {"drawn": jnp.zeros(2, jnp.uint32)}
    state = TrainState(jnp.int32(0), {"params": params, "stats": stats}, tx.init(params), jax.random.key(0), tx)
    state, metrics = train_step(value_and_grad, "handed on", state, jnp.array([3.0, 4.0]))
    assert {name: float(value) for name, value in metrics.items()} == dict(loss=0, grad_norm=5, finite=1, accuracy=1)
    assert_equal(state.variables["params"]["w"], np.array([-3, -4], np.float32))
    assert int(state.step) == 1
    first = state.variables["stats"]["drawn"]
    skipped, metrics = train_step(value_and_grad, "handed on", state, jnp.array([jnp.nan, 1.0]))
    assert not metrics["finite"]
    assert_equal(skipped.variables, state.variables, "nor the statistics of a batch that is skipped")
    after, _ = train_step(value_and_grad, "handed on", skipped, jnp.zeros(2))
    assert int(after.step) == 3
    assert not np.array_equal(after.variables["stats"]["drawn"], first)


def test_one_compiled_step_for_equal_optimizers():
    """Each new tx compiled the step anew, and all were kept."""
    pipe = pipeline()
    make = lambda rate: optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(rate, momentum=0.9))
    state = pipe.create_state(jax.random.key(0), BATCH, make(0.1))
    state, _ = pipe.train_step(state, BATCH)
    with compilations() as count:
        for _ in range(3):
            tx = make(0.1)
            state, _ = pipe.train_step(state.replace(tx=tx), BATCH)
            assert state.tx is tx
    assert count() == 0
    with compilations() as count:
        state, _ = pipe.train_step(state.replace(tx=make(0.2)), BATCH)
    assert count() == 1


def test_a_scan_over_steps_is_the_loop_over_them_and_the_models():
    """In one program of the user's, on batches `[3, B, ...]`."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        truth, tx = linen(jnp.float64, num_blocks=2), optax.adam(1e-2)
        batches = [truth.batch | tokens(seed=seed) for seed in range(3)]
        pipe = pipeline_of(truth, "1f1b", 2, 3)
        variables = pipe.from_layer_variables(truth.trees, truth.batch)
        start = pipe.create_state(jax.random.key(0), truth.batch, tx, variables)
        joined = jax.tree.map(lambda *leaves: np.stack(leaves), *batches)
        end, metrics = jax.jit(lambda state, batches: jax.lax.scan(pipe.train_step, state, batches))(start, joined)

        @jax.jit
        def step(trees, opt_state, batch):
            loss, grads = jax.value_and_grad(truth.loss_of)(trees, batch)
            updates, opt_state = tx.update(grads, opt_state, trees)
            return optax.apply_updates(trees, updates), opt_state, loss

        state, trees, opt_state = start, truth.trees, tx.init(truth.trees)
        for i, batch in enumerate(batches):
            trees, opt_state, loss = step(trees, opt_state, batch)
            state, found = pipe.train_step(state, batch)
            assert_close([metrics["loss"][i], found["loss"]], [loss, loss], "loss")
        assert_close(pipe.layer_variables(end.variables), trees, "variables after the scan")
        assert_close(pipe.layer_variables(state.variables), trees, "variables after the loop")
        assert int(end.step) == 3


def test_few_steps_are_kept_and_can_be_dropped():
    pipe = pipeline()
    txs = [optax.sgd(0.1 * i) for i in range(MOST_TRAIN_STEPS + 1)]
    pipe.planner.plan_for(BATCH)
    for tx in txs:
        pipe._train_steps.of(tx)
    assert [tx for tx, _ in pipe._train_steps._compiled.values()] == txs[1:]

    state = pipe.create_state(jax.random.key(0), BATCH, txs[0])
    state, before = pipe.train_step(state, BATCH)
    pipe.clear_cache()
    assert not pipe._train_steps._compiled
    with compilations() as count:
        state, _ = pipe.train_step(state, BATCH)
        pipe.evaluate(state.variables, BATCH)
        pipe.init(jax.random.key(0), BATCH)
    assert count() >= 3
    assert jnp.isfinite(before["loss"])


class TwoLayers(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8)(nn.relu(nn.Dense(8)(x)))


def test_nothing_that_was_compiled_is_forgotten():
    """`model_variables` kept its program: it was no part of a list of names."""
    pipe = jpipe.Pipeline(TwoLayers(), lambda y, _: jnp.mean(y**2), num_stages=2, num_microbatches=2)
    x = np.ones((4, 8), np.float32)
    variables = pipe.init(jax.random.key(0), x)
    run = lambda: (pipe.value_and_grad(variables, x), pipe.evaluate(variables, x), pipe.apply(variables, x))
    run(), pipe.model_variables(variables), pipe.init(jax.random.key(0), x)
    programs = {name: value for name, value in vars(pipe).items() if hasattr(value, "clear_cache")}
    programs.pop("planner"), programs.pop("_generator")
    used = {name for name, program in programs.items() if program._cache_size()}
    assert used >= {"_jit_to_model", "_jit_init", "_jit_apply", "_jit_evaluate", "_jit_value_and_grad"}
    pipe.clear_cache()
    assert not any(program._cache_size() for program in programs.values())
    run(), pipe.model_variables(variables)
