"""Elementwise operations on shards and on partial sums."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jpipe.partitioner.elementwise import elementwise
from jpipe.partitioner.rule import RuleResult
from jpipe.partitioner.shardings import PARTIAL, Axis
from partitioned import array, case, compare, integers


def rotary(x):
    a, b = jnp.split(x, 2, -1)
    angle = jnp.arange(x.shape[1])[:, None] * jnp.ones(a.shape[-1])
    return jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)], -1)


def normalised(x, scale):
    mean, variance = x.mean((0, 1)), x.var((0, 1))
    return (x - mean) * lax.rsqrt(variance + 1e-3) * scale


def casts(n, x):
    unsigned = n.astype(jnp.uint8)
    sums = unsigned.sum(0, dtype=jnp.uint8), x.astype(jnp.bfloat16).sum(0, dtype=jnp.float32)
    return sums[0].astype(jnp.float32), sums[1].astype(jnp.float64), lax.bitcast_convert_type(x, jnp.uint32)


def dropped(x):
    return jnp.where(jax.random.bernoulli(jax.random.key(3), 0.5, x.shape), x, 0)


def integer_division(n):
    return n.sum(0) // 4, lax.div(n.sum(0), 3), (n > 2).sum(1) // 2


CASES = {
    "rotary": case(rotary, array(4, 6, 8)),
    "batch norm": case(normalised, array(4, 6, 8), array(8)),
    "dropout": case(dropped, array(4, 6)),
    "casts": case(casts, integers(200, 4, 6), array(4, 6), gradients=False),
    "integer division": case(
        lambda n: (n.sum(0) // 4, lax.div(n.sum(0), 3), (n > 2).sum(1) // 2), integers(9, 4, 6), gradients=False
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(make_mesh, name):
    compare(make_mesh, CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_however_arguments_lie(make_mesh, name):
    compare(make_mesh, CASES[name], 40, 40)


@pytest.mark.parametrize(
    ("is_data", "old", "new", "is_delayed"),
    [
        (True, jnp.bfloat16, jnp.float32, True),
        (True, jnp.float32, jnp.bfloat16, True),
        (True, jnp.float32, jnp.float16, False),  # which has no numbers as large
        (True, jnp.int32, jnp.int8, False),
        (False, jnp.bfloat16, jnp.float32, False),
    ],
)
def test_a_partial_sum_is_passed_on_through_a_cast_over_data_axes(is_data, old, new, is_delayed):
    """A regression: a widening cast of a partial sum over a tensor axis, for a norm, added it up a second time."""
    (equation,) = jax.make_jaxpr(lambda x: x.astype(new))(jnp.zeros(4, old)).jaxpr.eqns
    found = elementwise(equation, [PARTIAL], Axis(("a",), (2,), is_data=is_data))
    assert found == (RuleResult([PARTIAL], [PARTIAL]) if is_delayed else None)
