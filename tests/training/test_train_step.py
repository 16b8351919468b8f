"""Optimisers made anew from the same values run the step that is compiled; few steps are kept."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jpipe
from cases import compilations
from jpipe.training.train_step import MOST_TRAIN_STEPS

BATCH = np.ones((4, 8), np.float32)


def pipeline():
    layers = [nn.Dense(8, use_bias=False) for _ in range(2)]
    return jpipe.Pipeline(layers, lambda y, _: jnp.mean(y), num_stages=2, num_microbatches=2, balance="even")


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


def test_few_steps_are_kept_and_can_be_dropped():
    pipe = pipeline()
    txs = [optax.sgd(0.1 * i) for i in range(MOST_TRAIN_STEPS + 1)]
    for tx in txs:
        pipe._train_steps.of(tx, BATCH)
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
