"""Costs and prices, worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpipe.partitioner.prices import (
    FLOPS,
    PRICES,
    SCATTERED,
    SENT,
    SPLIT_SUMS,
    WRITTEN,
    cost_of_conversion,
    cost_of_work,
    price,
)
from jpipe.partitioner.shardings import PARTIAL, REPLICATED, Axis, Shard
from planned import COLUMNS, WHOLE, plan_of, sent


def test_a_loop_costs_what_its_iterations_do():
    def function(x, w):
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=5)[0]

    plan = plan_of(function, [WHOLE, COLUMNS], (64, 512), (512, 512))
    (loop,) = [e.way for e in plan.equations if e.way.plans]
    ((body, times),) = loop.plans
    assert times == 5 and (loop.cost == 5 * body.cost).all() and body.cost.any()
    assert [kind for kind, *_ in sent(body)] == ["all_gather"]


def test_prices_weigh_the_quantities():
    cost = 10 * SENT + 100 * SCATTERED + 5000 * FLOPS + 256 * WRITTEN
    assert price(PRICES, cost) == pytest.approx(10 + 120 + 5 + 2)
    assert price(SPLIT_SUMS, cost) == pytest.approx(10 + 100 + 5 + 32)


def test_a_device_computes_and_writes_its_part():
    """A product of `[8, 16]` and `[16, 4]`, split along the 16 over two devices, in bfloat16."""
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in [(8, 16), (16, 4)]]
    (product,) = jax.make_jaxpr(jnp.dot)(*shapes).jaxpr.eqns
    cost = cost_of_work(product, [(8, 8), (8, 4)], [(8, 4)])
    np.testing.assert_array_equal(cost, 2 * 8 * 8 * 4 * FLOPS + 8 * 4 * 2 * WRITTEN)


def test_a_sum_that_is_scattered_is_counted_apart():
    axes, size = (Axis(("model",), (4,)),), 8 * 4 * 2
    scattered = cost_of_conversion(axes, (8, 4), 2, (PARTIAL,), (Shard(0),))
    whole = cost_of_conversion(axes, (8, 4), 2, (PARTIAL,), (REPLICATED,))
    np.testing.assert_array_equal([scattered, whole], [3 / 4 * size * SCATTERED, 2 * 3 / 4 * size * SENT])
    assert not cost_of_conversion(axes, (8, 4), 2, (REPLICATED,), (Shard(0),)).any(), "a device cuts what it has"
