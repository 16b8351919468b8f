from dataclasses import replace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpipe
from jpipe.forecasting.hardware import CHIPS
from jpipe.forecasting.time_model import predict_time, roofline

V5E, BATCH = CHIPS["v5e"], jax.ShapeDtypeStruct((64, 128), jnp.float32)


def make(**options):
    options = {"num_stages": 2, "num_microbatches": 8, "balance": "even", "remat": "none"} | options
    layers = [nn.Dense(128, use_bias=False) for _ in range(8)]
    return jpipe.Pipeline(layers, lambda y, _: jnp.mean(y**2), **options)


def test_products_take_the_longer_of_flops_and_bytes():
    product = lambda n: jax.make_jaxpr(lambda x, y: x @ y)(jnp.ones((n, 2048)), jnp.ones((2048, 2048)))
    assert roofline(product(8192), V5E) == pytest.approx(2 * 8192 * 2048**2 / V5E.flops)
    assert roofline(product(1), V5E) == pytest.approx(4 * (2048**2 + 2 * 2048) / V5E.memory_bandwidth)


def test_loops_take_their_trips_and_branches_the_longest():
    once = lambda x: x @ x
    x = jnp.ones((64, 64))
    single = roofline(jax.make_jaxpr(once)(x), V5E)
    looped = jax.make_jaxpr(lambda x: jax.lax.scan(lambda x, _: (once(x), None), x, length=5)[0])(x)
    either = jax.make_jaxpr(lambda x: jax.lax.cond(x[0, 0] > 0, once, lambda x: x, x))(x)
    assert roofline(looped, V5E) == pytest.approx(5 * single)
    assert roofline(either, V5E) == pytest.approx(single)


def test_parts_add_up_and_the_bubble_is_the_schedules():
    fast = replace(V5E, link_bandwidth=1e30)
    found = predict_time(make(), BATCH, fast)
    assert found.total == pytest.approx(sum(found.parts.values()))
    assert found.computation + found.bubble == pytest.approx(found.timeline.makespan)
    # (K-1) of M+K-1, and what the first stage waits more: its first layer has no cotangent to give.
    assert 1 / 9 < found.timeline.bubble_fraction < 0.2
    assert found.limit in found.parts


def test_slower_links_and_memory_take_longer():
    base = predict_time(make(), BATCH, V5E)
    slow = predict_time(make(), BATCH, replace(V5E, link_bandwidth=V5E.link_bandwidth / 100))
    assert slow.bubble > base.bubble and slow.computation == base.computation


def test_remat_computes_again():
    none, stage = (predict_time(make(remat=remat), BATCH, V5E).computation for remat in ("none", "stage"))
    assert 1.2 < stage / none < 1.5


def test_an_optimisers_state_is_read_and_written():
    pipe = make()
    without, adam = (predict_time(pipe, BATCH, V5E, tx=tx).update for tx in (None, optax.adam(1e-3)))
    assert adam / without == pytest.approx(7 / 3, rel=1e-3)  # p, g in and p out; and two moments in and out


def test_a_data_axis_shares_the_work_and_sends_gradients():
    one = predict_time(make(), BATCH, V5E)
    two = predict_time(make(mesh=jpipe.make_mesh(stage=2, data=2, devices=jax.devices()[:4])), BATCH, V5E)
    assert two.computation == pytest.approx(one.computation / 2)
    assert one.collectives == 0
    assert two.collectives > 4 * 128**2 * 4 / V5E.link_bandwidth * 0.9  # a stage's gradients


def test_shared_ends_are_computed_by_all():
    own, shared = (predict_time(make(ends=ends, remat="layer"), BATCH, V5E) for ends in ("own", "shared"))
    assert np.isfinite(shared.total) and shared.computation == pytest.approx(own.computation, rel=0.05)
