"""Optimisers made anew from the same values run what is compiled; where there is any doubt they don't."""

import functools
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpipe
from cases import compilations
from jpipe.training.fingerprint import fingerprint
from jpipe.training.train_step import MOST_TRAIN_STEPS

RATE = 0.1
SETTINGS = SimpleNamespace(rate=0.1)


def is_matrix(tree):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, tree)


def rate():
    return RATE


SAME = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9),
    "adamw": lambda: optax.adamw(1e-3, mask=is_matrix, mu_dtype=jnp.bfloat16),
    "schedule": lambda: optax.adam(optax.warmup_cosine_decay_schedule(0.0, 1.0, 10, 100)),
    "one's own schedule": lambda: optax.adam(lambda step: 0.1 / (1 + step)),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)),
    "per_layer": lambda: jpipe.per_layer(optax.lamb(1e-3)),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(1e-3),
    "global number": lambda: optax.adam(lambda step: rate()),
}
NOT_SAME = {
    "number": (lambda: optax.sgd(0.1), lambda: optax.sgd(0.2)),
    "sign of zero": (lambda: optax.scale(0.0), lambda: optax.scale(-0.0)),
    "type": (lambda: optax.scale(1), lambda: optax.scale(1.0)),
    "boolean": (lambda: optax.scale(1), lambda: optax.scale(True)),
    "code": (lambda: optax.adam(lambda step: 0.1), lambda: optax.adam(lambda step: 0.2)),
    "constant": (lambda: optax.adam(lambda step: 0.0), lambda: optax.adam(lambda step: -0.0)),
    "array": (lambda: optax.scale(np.ones(())), lambda: optax.scale(np.ones(()))),
}
NEVER_SAME = {
    "object": lambda: optax.adam(lambda step: SETTINGS.rate),
    "method": lambda: optax.MultiSteps(optax.adam(1e-3), 4).gradient_transformation(),
    "partial": lambda: optax.adam(functools.partial(max, 0.1)),
}


@pytest.mark.parametrize("name", SAME)
def test_made_anew(name):
    assert fingerprint(SAME[name]()) == fingerprint(SAME[name]())
    assert hash(fingerprint(SAME[name]())) == hash(fingerprint(SAME[name]()))


@pytest.mark.parametrize("name", NOT_SAME)
def test_others(name):
    first, second = NOT_SAME[name]
    assert fingerprint(first()) != fingerprint(second())


@pytest.mark.parametrize("name", NEVER_SAME)
def test_what_may_have_changed(name):
    assert fingerprint(NEVER_SAME[name]()) != fingerprint(NEVER_SAME[name]())


def test_a_global_number_that_changed(monkeypatch):
    """In a function that the schedule calls: as in a notebook whose cell with the rate is run again."""
    make = SAME["global number"]
    before = fingerprint(make())
    monkeypatch.setitem(globals(), "RATE", 0.2)
    assert fingerprint(make()) != before


# --- training steps ---------------------------------------------------------------------------------------------------

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
