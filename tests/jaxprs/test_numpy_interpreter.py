"""Jaxprs run in NumPy give what they give in JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpipe.jaxprs.numpy_interpreter import interpret

RANDOM = np.random.default_rng(0)
X, Y = (RANDOM.standard_normal((3, 4)).astype(np.float32) for _ in range(2))
COUNT = np.asarray(7, np.int32)


@jax.custom_jvp
def own(x):
    return x * 2


own.defjvp(lambda primals, tangents: (own(*primals), tangents[0]))

FUNCTIONS = {
    "arithmetic": lambda x, y, n: (x + y, x - y, x * y, x / y, -x, x**2, x**-3, jnp.fmod(x, y)),
    "integers": lambda x, y, n: (n // 2, -n // 2, jax.lax.div(-n, np.int32(2)), n % 3, n**2, n.astype(jnp.float32)),
    "bounds": lambda x, y, n: (jnp.maximum(x, y), jnp.minimum(x, 0), jnp.clip(x, -0.5, 0.5), jnp.sign(x), jnp.abs(x)),
    "roots": lambda x, y, n: (jnp.sqrt(y * y), jax.lax.rsqrt(y * y), jnp.square(x), jnp.abs(x) ** 0.3, 0.9**n),
    "exponentials": lambda x, y, n: (jnp.exp(x), jnp.log(x * x), jnp.log1p(x * x), jnp.expm1(x), jnp.tanh(x)),
    "choices": lambda x, y, n: (jnp.where(x > y, x, 0.0), jnp.where((x < 0) & ~(y >= 0) | (x == y), 1, 2)),
    "shapes": lambda x, y, n: (x.T, x.reshape(-1), jnp.concatenate([x, y], 1), x[None], jnp.ones((2, 3)) * x[0, 0]),
    "reductions": lambda x, y, n: (x.sum(), x.sum(0), x.max(1, keepdims=True), x.min(), jnp.all(x > 0), jnp.any(x > 0)),
    "left to JAX": lambda x, y, n: (
        x @ y.T,
        jnp.cumsum(x),
        jax.lax.while_loop(lambda n: n < 9, lambda n: n + 1, n),
        x @ x.T,
    ),
    "branches": lambda x, y, n: jax.lax.cond(n > 3, lambda x, y: x + 1, lambda x, y: y, x, y),
    "switch": lambda x, y, n: jax.lax.switch(n, [lambda x: x, lambda x: x * 3], x),
    "calls": lambda x, y, n: (jax.jit(jnp.var)(x), jax.checkpoint(jnp.sin)(x), own(x), jax.nn.silu(x)),
    "constants": lambda x, y, n: (x * jnp.asarray(Y), jnp.arange(4) + n, 3.0),
    "half precision": lambda x, y, n: x.astype(jnp.bfloat16) * y.astype(jnp.bfloat16),
    "no finite numbers": lambda x, y, n: (jnp.isfinite(x / 0), jnp.where(x > 0, x / 0, jnp.sqrt(-1 - x * x))),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    with jax.numpy_dtype_promotion("standard"):
        closed = jax.make_jaxpr(FUNCTIONS[name])(X, Y, COUNT)
        expected = jax.tree.leaves(jax.jit(FUNCTIONS[name])(X, Y, COUNT))
    found = interpret(closed, X, Y, COUNT)
    for got, want in zip(found, expected, strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_allclose(got.astype(np.float32), np.asarray(want, np.float32), rtol=2e-6, atol=1e-6)
