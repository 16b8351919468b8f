"""Optimisers made anew from the same values run what is compiled; where there is any doubt they don't."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpipe
from jpipe.training.fingerprint import fingerprint

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
