"""Loops, branches and calls on parts of arrays."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from partitioned import array, case, compare, integers


def rnn(x, w):
    advance = lambda h, a: ((h := jnp.tanh(h @ w + a)), h)
    return lax.scan(advance, jnp.zeros((x.shape[0], w.shape[0])), x.swapaxes(0, 1))[1]


def backwards_scan(x, w):
    return lax.scan(lambda h, a: (h * w.sum() + a.mean(), a * 2), jnp.zeros(x.shape[1:]), x, reverse=True)


def until(x, w):
    return lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, jnp.tanh(s[1] @ w)), (0, x))[1]


def each_until(n, x):
    return jax.vmap(lambda m, a: lax.while_loop(lambda s: s[0] < m, lambda s: (s[0] + 1, s[1] * 2 + 1), (0, a))[1])(
        n, x
    )


def branches(x, w):
    return lax.switch(jnp.asarray(1), [lambda x: x @ w, lambda x: jnp.sin(x) @ w, lambda x: x[..., :8] * 2 + w[0]], x)


def checkpointed(x, w):
    return jax.checkpoint(lambda x: jax.nn.gelu(jax.nn.silu(x @ w)), policy=jax.checkpoint_policies.dots_saveable)(x)


CASES = {
    "rnn": case(rnn, array(4, 6, 8), array(8, 8)),
    "scan backwards": case(backwards_scan, array(4, 6, 8), array(2)),
    "while": case(until, array(4, 8), array(8, 8), gradients=False),
    "vmapped while": case(each_until, integers(5, 4), array(4, 6), gradients=False),
    "cond": case(branches, array(4, 8), array(8, 8)),
    "checkpoint": case(checkpointed, array(4, 6, 8), array(8, 4)),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(make_mesh, name):
    compare(make_mesh, CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_however_arguments_lie(make_mesh, name):
    compare(make_mesh, CASES[name], 40, 40)
