"""Operations on dimensions, and that each rule is compared somewhere."""

import jax
import jax.numpy as jnp
import pytest
import test_control_flow
import test_elementwise
import test_lookups
import test_products
from jax import lax
from jax.extend.core import subjaxprs

from jpipe.partitioner.rules import RULES
from jpipe.seam.primitives import ELEMENTWISE
from partitioned import array, case, compare, integers, traced


def sorts(x):
    return jnp.sort(x, -1), jnp.argsort(x, 0), jnp.cumsum(x, 1), lax.top_k(x, 2), jnp.argmax(x, -1)


def written(x, y):
    return (
        lax.dynamic_update_slice(x, y[:, :1], (0, 1, 0)),
        x.at[1].set(2.0),
        x.at[:, 0].add(y[:, 1]),
        jnp.roll(x, 1, 0),
    )


def shapes(x):
    b, t, d = x.shape
    folded = x.reshape(b * t, d)
    timed = x.swapaxes(0, 1).reshape(t * b, d)
    return (
        (folded * 2).reshape(b, t, d),
        jnp.exp(timed).reshape(t, b, d),
        x.reshape(b, t, 2, d // 2),
        x.reshape(-1),
        x[None],
    )


def reductions(x):
    return (
        x.sum(),
        x.mean(0),
        x.max(),
        x.min(1),
        x.prod(2),
        (x > 0).any(0),
        jnp.linalg.norm(x),
        x.std(),
        jax.nn.logsumexp(x, 0),
    )


def running(x):
    return jnp.cumprod(x, 1), lax.cummax(x, 1), lax.cummin(x, 1), lax.cumlogsumexp(x, 1)


def of_bits(x, n):
    return (
        jnp.argmin(x, -1),
        (x > 0).all(1),
        lax.reduce_xor(n, (1,)),
        lax.reduce_window(x, jnp.inf, lax.min, (1, 2), (1, 2), "VALID"),
        lax.optimization_barrier((x, n))[1] * 2,
    )


def stacked(x, y):
    return (
        jnp.stack([x, y], 1),
        jnp.concatenate([x, y], 0),
        jnp.pad(x, ((0, 0), (1, 2), (0, 0))),
        x[:, 1:],
        x[::-1],
        x[:, ::2],
    )


def vmapped(x, w):
    return jax.vmap(lambda a: jnp.linalg.norm(a @ w, axis=0) * a[0, 0])(x)


def tiled(x):
    return jnp.tile(x, (1, 3, 1)), jnp.tile(x, (2, 1, 2)), jnp.tile(x.sum(0), (2, 1, 1)), jnp.tile(x[:, :0], 2)


def not_a_number(x):
    return (x / 0.0 * 0.0).max(0) + jnp.where(x > 1, jnp.nan, x).max(0)


def extremes(x, n):
    """With ties, and with what is not a number."""
    unknown = jnp.where(x > 1, jnp.nan, x)
    found = [f(a, i) for f in (jnp.argmax, jnp.argmin) for i in (0, 1) for a in (x, n, unknown, n > 1, -jnp.inf * n**2)]
    return (*found, jnp.argmax(x.reshape(2, 2, 8).swapaxes(0, 1).reshape(-1)), jnp.argmax(n))


CASES = {
    "writes": case(written, array(4, 6, 8), array(4, 6, 8, seed=1)),
    "sorts": case(sorts, array(4, 6, 8)),
    "shapes": case(shapes, array(4, 6, 8)),
    "reductions": case(reductions, array(4, 6, 8)),
    "running": case(running, array(4, 6, 8)),
    "of bits": case(of_bits, array(4, 6), integers(9, 4, 6), gradients=False),
    "stacked": case(stacked, array(4, 6, 8), array(4, 6, 8, seed=1)),
    "tiled": case(tiled, array(4, 6, 8)),
    "vmapped": case(
        lambda x, w: jax.vmap(lambda a: jnp.linalg.norm(a @ w, axis=0) * a[0, 0])(x), array(4, 6, 8), array(8, 2)
    ),
    "top k": case(lambda x: (lax.top_k(x, 2, axis=0), lax.top_k(x, 2)), array(4, 6), gradients=False),
    "not a number": case(
        lambda x: (x / 0.0 * 0.0).max(0) + jnp.where(x > 1, jnp.nan, x).max(0), array(4, 6), gradients=False
    ),
    "where the extremes are": case(extremes, array(4, 8), integers(3, 4, 8), gradients=False),
    "triangular": case(lambda x: jnp.linalg.cholesky(x @ x.swapaxes(1, 2) + 9 * jnp.eye(4)), array(2, 4, 6)),  # no rule
    "nothing": case(lambda x: (x[:, :0].reshape(4, -1), x.sum(0)), array(4, 6), gradients=False),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(make_mesh, name):
    compare(make_mesh, CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_however_arguments_lie(make_mesh, name):
    compare(make_mesh, CASES[name], 40, 40)


def primitives(jaxpr):
    """The names of the operations in a jaxpr and those within."""
    return {equation.primitive.name for equation in jaxpr.eqns}.union(*map(primitives, subjaxprs(jaxpr)))


def test_every_rule_is_of_an_operation_that_is_compared():
    files = (test_control_flow, test_elementwise, test_lookups, test_products)
    cases = [known for each in (CASES, *[file.CASES for file in files]) for known in each.values()]
    found = set().union(*[primitives(traced(known).jaxpr) for known in cases])
    elsewhere = {"device_put", "select_and_gather_add"}  # does nothing here; of forward-mode derivatives alone
    assert set(RULES) - set(ELEMENTWISE) - found == elsewhere
