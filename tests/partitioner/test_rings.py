"""Products beside the transfers that they wait for: values and gradients, and how many transfers there are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jpipe.partitioner import find_rings, per_device

WIDTH, HIDDEN = 16, 32
RING = {2: (0, 1), 3: (0, 1, 2), 4: (0, 1, 3, 2)}
SHAPES = {"g": (WIDTH, HIDDEN), "u": (WIDTH, HIDDEN), "d": (HIDDEN, WIDTH), **dict.fromkeys("qkvo", (WIDTH, WIDTH))}
SPECS = {name: P("model", None) if name in "do" else P(None, "model") for name in SHAPES}


@pytest.fixture(autouse=True)
def however_small(monkeypatch):
    for least in ("LEAST_FLOPS", "LEAST_IF_SHARED", "LEAST_OF_SUMS"):
        monkeypatch.setattr(find_rings, least, 0.0)


def norm(x):
    return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def feed_forward(x, w):
    h = norm(x)
    return x + (jax.nn.silu(h @ w["g"]) * (h @ w["u"])) @ w["d"]


def attention(x, w):
    h, (b, t, _) = norm(x), x.shape
    q, k, v = ((h @ w[name]).reshape(b, t, 4, -1) for name in "qkv")
    scores = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k))
    return x + jnp.einsum("bhts,bshd->bthd", scores, v).reshape(b, t, -1) @ w["o"]


def block(x, w):
    return feed_forward(attention(x, w), w)


def gradients(function):
    return jax.grad(lambda x, w: jnp.sum(jnp.sin(function(x, w))), (0, 1))


@pytest.mark.parametrize("devices", [2, 3, 4])
@pytest.mark.parametrize("between", [P("data", "model"), P("data", None)], ids=["sequence", "whole"])
@pytest.mark.parametrize("function", [feed_forward, attention, block])
def test_values_and_gradients(function, between, devices):
    mesh = jax.make_mesh((2, devices), ("data", "model"), (AxisType.Auto,) * 2, devices=jax.devices()[: 2 * devices])
    rng = np.random.default_rng(0)
    with jax.enable_x64():
        weights = {name: jnp.asarray(rng.normal(size=(12, 12)) / 4) for name in SHAPES}
        x = jnp.asarray(rng.normal(size=(4, 24, 12)))
        for of, results in ((function, between), (gradients(function), (between, SPECS))):
            specs = {"in_specs": (between, SPECS), "out_specs": results}
            run = per_device(of, mesh, **specs, data_axes=["data"], rings={"model": RING[devices]})
            found = jax.jit(jax.shard_map(run, mesh=mesh, check_vma=False, **specs))(x, weights)
            expected = of(x, weights)
            for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)


def transfers(function, by_ring):
    mesh = jax.make_mesh((4,), ("model",), (AxisType.Auto,), devices=jax.devices()[:4])
    specs = {"in_specs": (P(None, "model"), SPECS), "out_specs": P(None, "model")}
    run = per_device(function, mesh, **specs, rings={"model": RING[4]} if by_ring else {})
    weights = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
    x = jax.ShapeDtypeStruct((1, 16, WIDTH), jnp.float32)
    text = jax.jit(jax.shard_map(run, mesh=mesh, check_vma=False, **specs)).lower(x, weights).as_text()
    return [text.count(f'"stablehlo.{kind}"') for kind in ("all_gather", "reduce_scatter", "collective_permute")]


def test_gathers_and_scatters_go_round_the_ring():
    """Of four devices a gather is three permutations, and so is a scattered sum."""
    assert transfers(feed_forward, False) == [1, 1, 0]
    assert transfers(feed_forward, True) == [0, 0, 6]
