"""Partitioned functions compute what the whole ones do, however their arguments lie, and so do their gradients."""

import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun, subjaxprs

from jpipe.partitioner.per_device import partition_jaxpr
from jpipe.partitioner.rules import RULES
from jpipe.partitioner.shardings import (
    PARTIAL,
    REPLICATED,
    Axis,
    Shard,
    convert,
    is_possible,
    replicated,
    settled,
)
from jpipe.seam.primitives import ELEMENTWISE

AXES = (Axis(("data", "fsdp"), (1, 2), of_examples=True), Axis(("model",), (2,)))
NAMES = ("stage", "data", "fsdp", "model")


def array(*shape, seed=0):
    return np.random.default_rng((seed, *shape)).standard_normal(shape)


def integers(limit, *shape):
    return np.random.default_rng((limit, *shape)).integers(0, limit, shape).astype(np.int32)


def attention(x, q, k, v):
    heads = [jnp.einsum("btd,dhe->bthe", x, w) for w in (q, k, v)]
    scores = jnp.einsum("bthe,bshe->bhts", heads[0], heads[1])
    scores = jnp.where(jnp.tril(jnp.ones((x.shape[1],) * 2, bool)), scores, -1e9)
    return jnp.einsum("bhts,bshe->bthe", jax.nn.softmax(scores), heads[2])


def fused_attention(x, w):
    q, k, v = jnp.split(x @ w, 3, -1)
    return jax.nn.softmax(q @ k.swapaxes(1, 2)) @ v


def rotary(x):
    a, b = jnp.split(x, 2, -1)
    angle = jnp.arange(x.shape[1])[:, None] * jnp.ones(a.shape[-1])
    return jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)], -1)


def grouped(x, w):
    y = x @ w
    return y.reshape(*y.shape[:2], 2, 2, -1).sum(3)


def rnn(x, w):
    advance = lambda h, a: ((h := jnp.tanh(h @ w + a)), h)
    return lax.scan(advance, jnp.zeros((x.shape[0], w.shape[0])), x.swapaxes(0, 1))[1]


def backwards_scan(x, w):
    return lax.scan(lambda h, a: (h * w.sum() + a.mean(), a * 2), jnp.zeros(x.shape[1:]), x, reverse=True)


def look_up(table, ids):
    return table[ids]


def cross_entropy(logits, ids):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), ids[..., None], -1).mean()


def convolution(x, w):
    return nn.avg_pool(
        nn.max_pool(lax.conv(x.swapaxes(1, 3), w, (1, 1), "SAME").swapaxes(1, 3), (2, 2), (2, 2)), (2, 1)
    )


def depthwise(x, w):
    spec = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", feature_group_count=4, dimension_numbers=spec)


def normalised(x, scale):
    mean, variance = x.mean((0, 1)), x.var((0, 1))
    return (x - mean) * lax.rsqrt(variance + 1e-3) * scale


def until(x, w):
    return lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, jnp.tanh(s[1] @ w)), (0, x))[1]


def each_until(n, x):
    return jax.vmap(lambda m, a: lax.while_loop(lambda s: s[0] < m, lambda s: (s[0] + 1, s[1] * 2 + 1), (0, a))[1])(
        n, x
    )


def casts(n, x):
    unsigned = n.astype(jnp.uint8)
    sums = unsigned.sum(0, dtype=jnp.uint8), x.astype(jnp.bfloat16).sum(0, dtype=jnp.float32)
    return sums[0].astype(jnp.float32), sums[1].astype(jnp.float64), lax.bitcast_convert_type(x, jnp.uint32)


def branches(x, w):
    return lax.switch(jnp.asarray(1), [lambda x: x @ w, lambda x: jnp.sin(x) @ w, lambda x: x[..., :8] * 2 + w[0]], x)


def checkpointed(x, w):
    return jax.checkpoint(lambda x: jax.nn.gelu(jax.nn.silu(x @ w)), policy=jax.checkpoint_policies.dots_saveable)(x)


def dropped(x):
    return jnp.where(jax.random.bernoulli(jax.random.key(3), 0.5, x.shape), x, 0)


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


FUNCTIONS = {
    "product": (lambda x, w, b: x @ w + b, array(4, 6, 8), array(8, 4), array(4)),
    "feed-forward": (lambda x, w, v: x + jnp.tanh(x @ w) @ v, array(4, 6, 8), array(8, 12), array(12, 8)),
    "attention": (attention, array(4, 6, 8), *(array(8, 2, 4, seed=i) for i in range(3))),
    "fused attention": (fused_attention, array(4, 6, 8), array(8, 12)),
    "rotary": (rotary, array(4, 6, 8)),
    "grouped": (grouped, array(4, 6, 8), array(8, 16)),
    "rnn": (rnn, array(4, 6, 8), array(8, 8)),
    "scan backwards": (backwards_scan, array(4, 6, 8), array(2)),
    "contrastive": (lambda x: jax.nn.log_softmax(x @ x.T), array(4, 8)),
    "look-up": (look_up, array(12, 8), integers(12, 4, 6)),
    "look-up outside": (
        lambda t, i: jnp.take(t, i - 3, axis=0, mode="fill", fill_value=5.0),
        array(12, 8),
        integers(20, 4, 6),
    ),
    "look-up clipped": (lambda t, i: jnp.take(t, i - 3, axis=0, mode="clip"), array(12, 8), integers(20, 4, 6)),
    "cross-entropy": (cross_entropy, array(4, 6, 8), integers(8, 4, 6)),
    "convolution": (convolution, array(4, 8, 6, 4), array(2, 4, 3, 3)),
    "depthwise": (depthwise, array(2, 6, 6, 4), array(3, 3, 1, 8)),
    "batch norm": (normalised, array(4, 6, 8), array(8)),
    "while": (until, array(4, 8), array(8, 8)),
    "cond": (branches, array(4, 8), array(8, 8)),
    "checkpoint": (checkpointed, array(4, 6, 8), array(8, 4)),
    "dropout": (dropped, array(4, 6)),
    "sorts": (sorts, array(4, 6, 8)),
    "writes": (written, array(4, 6, 8), array(4, 6, 8, seed=1)),
    "shapes": (shapes, array(4, 6, 8)),
    "reductions": (reductions, array(4, 6, 8)),
    "running": (running, array(4, 6, 8)),
    "of bits": (of_bits, array(4, 6), integers(9, 4, 6)),
    "stacked": (stacked, array(4, 6, 8), array(4, 6, 8, seed=1)),
    "vmapped": (
        lambda x, w: jax.vmap(lambda a: jnp.linalg.norm(a @ w, axis=0) * a[0, 0])(x),
        array(4, 6, 8),
        array(8, 2),
    ),
    "integer division": (lambda n: (n.sum(0) // 4, lax.div(n.sum(0), 3), (n > 2).sum(1) // 2), integers(9, 4, 6)),
    "casts": (casts, integers(200, 4, 6), array(4, 6)),
    "byte ids": (lambda t, i: jnp.take(t, i.astype(jnp.uint8), axis=0), array(512, 4), integers(256, 4, 6)),
    "filled sum": (lambda x, i: jnp.take(x.sum(0), i, mode="fill", fill_value=5.0), array(4, 6), integers(9, 4)),
    "top k": (lambda x: (lax.top_k(x, 2, axis=0), lax.top_k(x, 2)), array(4, 6)),
    "not a number": (lambda x: (x / 0.0 * 0.0).max(0) + jnp.where(x > 1, jnp.nan, x).max(0), array(4, 6)),
    "vmapped while": (each_until, integers(5, 4), array(4, 6)),
    "nothing": (lambda x: (x[:, :0].reshape(4, -1), x.sum(0)), array(4, 6)),
    "triangular": (lambda x: jnp.linalg.cholesky(x @ x.swapaxes(1, 2) + 9 * jnp.eye(4)), array(2, 4, 6)),
}


_NOT = ("while", "of bits", "vmapped while", "integer division", "casts", "top k", "not a number", "nothing")
DIFFERENTIABLE = [name for name in FUNCTIONS if name not in _NOT]


def possible(shape):
    """The shardings of an array: every one with a run of elements a device, some with several, and partial ones."""
    shards = [REPLICATED, *[Shard(d) for d in range(len(shape))]]
    found = [(a, b) for a, b in itertools.product(shards, shards)]
    found += [(Shard(0, 1), Shard(0, 2)), (Shard(0, 2), Shard(0, 1)), (Shard(1, 2), REPLICATED)][
        : 3 if len(shape) > 1 else 0
    ]
    found += [(PARTIAL, REPLICATED), (REPLICATED, PARTIAL), *[(PARTIAL, Shard(d)) for d in range(len(shape))]]
    return [s for s in found if is_possible(shape, s, AXES)]


def chosen(arguments, count=5):
    """A few of the ways in which all arguments may lie."""
    ways = list(itertools.product(*[possible(np.shape(a)) for a in arguments]))
    rng = np.random.default_rng(len(ways))
    return [ways[i] for i in rng.permutation(len(ways))[:count]]


def run_partitioned(make_mesh, jaxpr, shardings, arguments):
    """The whole results of a jaxpr that is carried out on parts; its arguments lie as `shardings` say."""
    mesh = make_mesh((1, 1, 2, 2), NAMES)
    local = partition_jaxpr(jaxpr, AXES, shardings, [settled] * len(jaxpr.jaxpr.outvars))
    whole = replicated(AXES)

    def run(*arguments):
        parts = [convert(jnp.asarray(a), AXES, whole, s) for a, s in zip(arguments, shardings, strict=True)]
        results = jaxpr_as_fun(local.jaxpr)(*parts)
        return [convert(x, AXES, s, whole) for x, s in zip(results, local.shardings, strict=True)]

    everywhere = jax.sharding.PartitionSpec()
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False))(
        *arguments
    )


def check(make_mesh, function, arguments, count):
    """Compares a function under several shardings of its arguments."""
    jaxpr = jax.make_jaxpr(function)(*arguments)
    expected = jax.tree.leaves(jax.jit(function)(*arguments))
    for shardings in chosen(arguments, count):
        found = run_partitioned(make_mesh, jaxpr, shardings, arguments)
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12, err_msg=f"result {i} under {shardings}")


def gradient_of(function, arguments):
    """The gradients of a sum of a function's results, weighted unequally, by its floating-point arguments."""
    floats = [i for i, a in enumerate(arguments) if a.dtype == np.float64]

    def total(*arguments):
        leaves = [y for y in jax.tree.leaves(function(*arguments)) if y.dtype == jnp.float64]
        return sum(jnp.sum(y * jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)) for y in leaves)

    return jax.grad(total, floats)


def primitives(jaxpr):
    """The names of the operations in a jaxpr and those within."""
    return {equation.primitive.name for equation in jaxpr.eqns}.union(*map(primitives, subjaxprs(jaxpr)))


def test_every_rule_is_of_an_operation_that_is_compared_here():
    traced = set()
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        for name, (function, *arguments) in FUNCTIONS.items():
            traced |= primitives(jax.make_jaxpr(function)(*arguments).jaxpr)
            if name in DIFFERENTIABLE:
                traced |= primitives(jax.make_jaxpr(gradient_of(function, arguments))(*arguments).jaxpr)
    elsewhere = {"device_put", "select_and_gather_add"}  # does nothing here; of forward-mode derivatives alone
    assert set(RULES) - set(ELEMENTWISE) - traced == elsewhere


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values(make_mesh, name):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        function, *arguments = FUNCTIONS[name]
        check(make_mesh, function, arguments, 3)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients(make_mesh, name):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        function, *arguments = FUNCTIONS[name]
        check(make_mesh, gradient_of(function, arguments), arguments, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients_however_arguments_lie(make_mesh, name):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        function, *arguments = FUNCTIONS[name]
        check(make_mesh, function, arguments, 40)
        if name in DIFFERENTIABLE:
            check(make_mesh, gradient_of(function, arguments), arguments, 40)
