"""`jaxpr_per_device` alone, in a `jax.shard_map`: as the function, with no more collectives than the compiler adds."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from collectives import read
from partitioned import array, on_mesh

P = PartitionSpec
SHAPES = {"q": (16, 4, 4), "k": (16, 4, 4), "v": (16, 4, 4), "o": (4, 4, 16), "gate": (16, 32), "up": (16, 32)}
SHAPES |= {"down": (32, 16), "a": (16,), "b": (16,)}
SPECS = {name: P(None, "model") for name in ("q", "k", "v", "gate", "up")} | {"o": P("model"), "down": P("model")}
SPECS |= {"a": P(), "b": P()}


def rms(x, weight):
    wide = x.astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)
    return weight * (wide * lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)).astype(x.dtype)


def block(p, x):
    """A Llama block: attention and SwiGLU, each after a norm and beside a residual connection; `[b, t, d]`."""
    h = rms(x, p["a"])
    q, k, v = [jnp.einsum("btd,dhe->bthe", h, p[name]) for name in "qkv"]
    attended = jnp.einsum("bhts,bshe->bthe", jax.nn.softmax(jnp.einsum("bthe,bshe->bhts", q, k)), v)
    x = x + jnp.einsum("bthe,hed->btd", attended, p["o"])
    h = rms(x, p["b"])
    return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


def trained(p, x):
    """The loss and the gradients of two blocks, one after the other."""
    loss = lambda p: jnp.mean(block(p, block(p, x)) ** 2)
    return jax.value_and_grad(loss)(p)


def images(kernel, scale, head, x):
    """A convolution, a norm by the batch's statistics, and a product; the gradients too. `[b, 6, 6, 4]` -> `[b, 8]`."""

    def outputs(kernel, scale, head):
        y = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        mean, variance = y.mean((0, 1, 2)), y.var((0, 1, 2))
        y = jax.nn.relu((y - mean) * lax.rsqrt(variance + 1e-3) * scale)
        return y.mean((1, 2)) @ head, (mean, variance)

    y, back, statistics = jax.vjp(outputs, kernel, scale, head, has_aux=True)
    return y, back(jnp.sin(y)), statistics


def recurrent(w, x):
    """A scan, and a branch that a value decides; `[b, t, d]`."""
    state, ys = lax.scan(lambda h, a: ((h := jnp.tanh(h @ w + a)), h), jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))
    return lax.cond(jnp.sum(state) > 0, lambda: ys.swapaxes(0, 1) @ w, lambda: jnp.sin(x) @ w)


KERNEL, HEAD = P(None, None, None, "model"), P("model")
CASES = {
    "transformer": (
        trained,
        ({name: array(*shape) / 4 for name, shape in SHAPES.items()}, array(4, 6, 16)),
        (SPECS, P("data")),
        (P(), SPECS),
    ),
    "images": (
        images,
        (array(3, 3, 4, 8), array(8), array(8, 8), array(4, 6, 6, 4)),
        (KERNEL, P("model"), HEAD, P("data")),
        (P("data"), (KERNEL, P("model"), HEAD), P("model")),
    ),
    "recurrent": (recurrent, (array(8, 8), array(4, 6, 8)), (P(None, "model"), P("data")), P("data", None, "model")),
}


@pytest.mark.parametrize(("name", "explicit"), [*((name, False) for name in CASES), ("recurrent", True)])
def test_equals_the_plain_function(make_mesh, name, explicit):
    function, arguments, in_specs, out_specs = CASES[name]
    mesh = make_mesh((2, 2), ("data", "model"), explicit=explicit)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        split = jax.device_put(arguments, jax.tree.map(lambda s: NamedSharding(mesh, s), in_specs))
        found = on_mesh(function, mesh, in_specs, out_specs, data_axes=["data"])(*split)
        expected = jax.jit(function)(*arguments)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12)


def back(p, x, cotangent):
    """The gradients of a block, whose forward is computed on the way."""
    return jax.vjp(block, p, x)[1](cotangent)


@pytest.mark.parametrize(
    ("function", "in_specs", "out_specs", "num_sums"),
    [(block, (SPECS, P()), P(), 2), (back, (SPECS, P(), P()), (SPECS, P()), 3)],
)
def test_a_block_sends_no_more_than_by_the_compiler_and_as_narrow(make_mesh, function, in_specs, out_specs, num_sums):
    """A regression: sums over a tensor axis were taken twice, in float32 for the norm and again beside it."""
    mesh, narrow = make_mesh((4,), ("model",)), lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    arguments = [{name: narrow(*shape) for name, shape in SHAPES.items()}, *[narrow(2, 8, 16)] * (len(in_specs) - 1)]
    text = on_mesh(function, mesh, in_specs, out_specs).lower(*arguments).as_text()
    kinds = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 4}  # sent, in 3 / 4 of the elements that are given
    found = re.findall(rf'"stablehlo\.({"|".join(kinds)})"[\s\S]*?-> tensor<(\S+)x(\w+)>', text)
    assert {dtype for *_, dtype in found} == {"bf16"}
    sizes = [(kind, list(map(int, shape.split("x")))) for kind, shape, _ in found]
    large = [(kind, math.prod(shape)) for kind, shape in sizes if len(shape) > 1]  # but gradients of norms' weights
    assert sum(kinds[kind] * count for kind, count in large) == num_sums * 2 * (2 * 8 * 16)
    specs = jax.tree.map(lambda s: NamedSharding(mesh, s), (in_specs, out_specs))
    compilers = jax.jit(function, in_shardings=specs[0], out_shardings=specs[1]).lower(*arguments)
    assert [c.kind for c in read(compilers.compile().as_text())] == ["all-reduce"] * num_sums
