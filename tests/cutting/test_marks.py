"""`jpipe.cut` is an identity, whatever is done to it."""

import jax
import jax.numpy as jnp
import numpy as np

import jpipe


def test_it_does_nothing():
    x = {"a": jnp.arange(3.0), "b": (jnp.ones(()), jnp.arange(2))}
    jax.tree.map(np.testing.assert_array_equal, jpipe.cut(x), x)
    function = lambda x: jnp.sin(jpipe.cut(x**2)).sum()
    plain = lambda x: jnp.sin(x**2).sum()
    y = jnp.arange(4.0)
    np.testing.assert_array_equal(jax.jit(jax.grad(function))(y), jax.grad(plain)(y))
    np.testing.assert_array_equal(jax.vmap(function)(y[:, None]), jax.vmap(plain)(y[:, None]))
