from dataclasses import replace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpipe
from jpipe.forecasting.hardware import CHIPS
from jpipe.forecasting.time_model import predict_time

V5E, BATCH = CHIPS["v5e"], jax.ShapeDtypeStruct((64, 128), jnp.float32)


def make(**options):
    options = {"num_stages": 2, "num_microbatches": 8, "balance": "even", "remat": "none"} | options
    layers = [nn.Dense(128, use_bias=False) for _ in range(8)]
    return jpipe.Pipeline(layers, lambda y, _: jnp.mean(y**2), **options)


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
    # Zeros, a norm, p, g and p out: 1 + 1 + 1 + 1 + 2 + 1; and two moments in and out.
    assert adam / without == pytest.approx(11 / 7, rel=1e-3)


def test_weight_gradients_that_wait_are_those_that_only_parameters_need():
    spans = predict_time(make(schedule="zero_bubble"), BATCH, V5E).timeline.spans
    whole = predict_time(make(), BATCH, V5E).timeline.spans
    longest = lambda spans, kind: max(span.end - span.start for span in spans if span.action.kind == kind)
    assert longest(spans, "I") + longest(spans, "W") == pytest.approx(longest(whole, "B"), rel=0.3)
    assert longest(spans, "W") > 0


def test_a_data_axis_shares_the_work_and_sends_gradients():
    one = predict_time(make(), BATCH, V5E)
    two = predict_time(make(mesh=jpipe.make_mesh(stage=2, data=2, devices=jax.devices()[:4])), BATCH, V5E)
    assert two.computation == pytest.approx(one.computation / 2)
    assert one.collectives == 0
    assert two.collectives > 4 * 128**2 * 4 / V5E.link_bandwidth * 0.9  # a stage's gradients


def test_shared_ends_are_computed_by_all():
    own, shared = (predict_time(make(ends=ends, remat="layer"), BATCH, V5E) for ends in ("own", "shared"))
    assert np.isfinite(shared.total) and shared.computation == pytest.approx(own.computation, rel=0.05)
