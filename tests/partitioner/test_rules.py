"""Operations, loops and branches on shards and on partial sums, and that each rule is compared."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import subjaxprs

from jpipe.jax.primitives import ELEMENTWISE
from jpipe.partitioner.rule import RuleResult
from jpipe.partitioner.rules import RULES, elementwise
from jpipe.partitioner.shardings import PARTIAL, Axis
from partitioned import array, case, compare, integers, traced


def sorts(x):
    return jnp.sort(x, -1), jnp.argsort(x, 0), jnp.cumsum(x, 1), lax.top_k(x, 2), jnp.argmax(x, -1)


def written(x, y):
    moved = lax.dynamic_update_slice(x, y[:, :1], (0, 1, 0)), jnp.roll(x, 1, 0)
    return *moved, x.at[1].set(2.0), x.at[:, 0].add(y[:, 1])


def shapes(x):
    b, t, d = x.shape
    folded = x.reshape(b * t, d)
    timed = x.swapaxes(0, 1).reshape(t * b, d)
    back = (folded * 2).reshape(b, t, d), jnp.exp(timed).reshape(t, b, d)
    return *back, x.reshape(b, t, 2, d // 2), x.reshape(-1), x[None]


def reductions(x):
    simple = x.sum(), x.mean(0), x.max(), x.min(1), x.prod(2), (x > 0).any(0)
    return *simple, jnp.linalg.norm(x), x.std(), jax.nn.logsumexp(x, 0)


def running(x):
    return jnp.cumprod(x, 1), lax.cummax(x, 1), lax.cummin(x, 1), lax.cumlogsumexp(x, 1)


def of_bits(x, n):
    windows = lax.reduce_window(x, jnp.inf, lax.min, (1, 2), (1, 2), "VALID")
    behind = lax.optimization_barrier((x, n))[1] * 2
    return jnp.argmin(x, -1), (x > 0).all(1), lax.reduce_xor(n, (1,)), windows, behind


def stacked(x, y):
    joined = jnp.stack([x, y], 1), jnp.concatenate([x, y], 0)
    return *joined, jnp.pad(x, ((0, 0), (1, 2), (0, 0))), x[:, 1:], x[::-1], x[:, ::2]


def tiled(x):
    return jnp.tile(x, (1, 3, 1)), jnp.tile(x, (2, 1, 2)), jnp.tile(x.sum(0), (2, 1, 1)), jnp.tile(x[:, :0], 2)


def extremes(x, n):
    """With ties, and with what is not a number."""
    unknown = jnp.where(x > 1, jnp.nan, x)
    found = [f(a, i) for f in (jnp.argmax, jnp.argmin) for i in (0, 1) for a in (x, n, unknown, n > 1, -jnp.inf * n**2)]
    return (*found, jnp.argmax(x.reshape(2, 2, 8).swapaxes(0, 1).reshape(-1)), jnp.argmax(n))


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


def attention(x, q, k, v):
    heads = [jnp.einsum("btd,dhe->bthe", x, w) for w in (q, k, v)]
    scores = jnp.einsum("bthe,bshe->bhts", heads[0], heads[1])
    scores = jnp.where(jnp.tril(jnp.ones((x.shape[1],) * 2, bool)), scores, -1e9)
    return jnp.einsum("bhts,bshe->bthe", jax.nn.softmax(scores), heads[2])


def fused_attention(x, w):
    q, k, v = jnp.split(x @ w, 3, -1)
    return jax.nn.softmax(q @ k.swapaxes(1, 2)) @ v


def grouped(x, w):
    y = x @ w
    return y.reshape(*y.shape[:2], 2, 2, -1).sum(3)


def convolution(x, w):
    return nn.avg_pool(
        nn.max_pool(lax.conv(x.swapaxes(1, 3), w, (1, 1), "SAME").swapaxes(1, 3), (2, 2), (2, 2)), (2, 1)
    )


def depthwise(x, w):
    spec = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", feature_group_count=4, dimension_numbers=spec)


def cross_entropy(logits, ids):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), ids[..., None], -1).mean()


def rnn(x, w):
    advance = lambda h, a: ((h := jnp.tanh(h @ w + a)), h)
    return lax.scan(advance, jnp.zeros((x.shape[0], w.shape[0])), x.swapaxes(0, 1))[1]


def backwards_scan(x, w):
    return lax.scan(lambda h, a: (h * w.sum() + a.mean(), a * 2), jnp.zeros(x.shape[1:]), x, reverse=True)


def until(x, w):
    return lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, jnp.tanh(s[1] @ w)), (0, x))[1]


def each_until(n, x):
    return jax.vmap(lambda m, a: lax.while_loop(lambda s: s[0] < m, lambda s: (s[0] + 1, s[1] * 2 + 1), (0, a))[1])(
        n, x
    )


def branches(x, w):
    return lax.switch(jnp.asarray(1), [lambda x: x @ w, lambda x: jnp.sin(x) @ w, lambda x: x[..., :8] * 2 + w[0]], x)


def checkpointed(x, w):
    return jax.checkpoint(lambda x: jax.nn.gelu(jax.nn.silu(x @ w)), policy=jax.checkpoint_policies.dots_saveable)(x)


CASES = {
    "rotary": case(rotary, array(4, 6, 8)),
    "batch norm": case(normalised, array(4, 6, 8), array(8)),
    "dropout": case(dropped, array(4, 6)),
    "casts": case(casts, integers(200, 4, 6), array(4, 6), gradients=False),
    "integer division": case(
        lambda n: (n.sum(0) // 4, lax.div(n.sum(0), 3), (n > 2).sum(1) // 2), integers(9, 4, 6), gradients=False
    ),
    "product": case(lambda x, w, b: x @ w + b, array(4, 6, 8), array(8, 4), array(4)),
    "feed-forward": case(lambda x, w, v: x + jnp.tanh(x @ w) @ v, array(4, 6, 8), array(8, 12), array(12, 8)),
    "attention": case(attention, array(4, 6, 8), *(array(8, 2, 4, seed=i) for i in range(3))),
    "fused attention": case(fused_attention, array(4, 6, 8), array(8, 12)),
    "grouped": case(grouped, array(4, 6, 8), array(8, 16)),
    "contrastive": case(lambda x: jax.nn.log_softmax(x @ x.T), array(4, 8)),
    "convolution": case(convolution, array(4, 8, 6, 4), array(2, 4, 3, 3)),
    "depthwise": case(depthwise, array(2, 6, 6, 4), array(3, 3, 1, 8)),
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
    "look-up": case(lambda table, ids: table[ids], array(12, 8), integers(12, 4, 6)),
    "look-up outside": case(
        lambda t, i: jnp.take(t, i - 3, axis=0, mode="fill", fill_value=5.0), array(12, 8), integers(20, 4, 6)
    ),
    "cross-entropy": case(cross_entropy, array(4, 6, 8), integers(8, 4, 6)),
    "byte ids": case(lambda t, i: jnp.take(t, i.astype(jnp.uint8), axis=0), array(512, 4), integers(256, 4, 6)),
    "additions": case(lambda x, i, y: x.at[i].add(y), array(12, 8), integers(12, 6), array(6, 8)),
    "additions outside": case(lambda x, i, y: x.at[i - 20].add(y), array(12, 8), integers(40, 6), array(6, 8)),
    "promised additions": case(
        lambda x, i, y: x.at[i].add(y, mode="promise_in_bounds"), array(12, 8), integers(12, 6), array(6, 8)
    ),
    "additions at pairs": case(
        lambda x, i, j, y: x.at[i, :, j - 1].add(y), array(6, 3, 4), integers(6, 8), integers(5, 8), array(8, 3)
    ),
    "filled sum": case(lambda x, i: jnp.take(x.sum(0), i, mode="fill", fill_value=5.0), array(4, 6), integers(9, 4)),
    "rnn": case(rnn, array(4, 6, 8), array(8, 8)),
    "scan backwards": case(backwards_scan, array(4, 6, 8), array(2)),
    "while": case(until, array(4, 8), array(8, 8), gradients=False),
    "vmapped while": case(each_until, integers(5, 4), array(4, 6), gradients=False),
    "cond": case(branches, array(4, 8), array(8, 8)),
    "checkpoint": case(checkpointed, array(4, 6, 8), array(8, 4)),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(make_mesh, name):
    compare(make_mesh, CASES[name])


def primitives(jaxpr):
    """The names of the operations in a jaxpr and those within."""
    return {equation.primitive.name for equation in jaxpr.eqns}.union(*map(primitives, subjaxprs(jaxpr)))


def test_every_rule_is_of_an_operation_that_is_compared():
    found = set().union(*[primitives(traced(known).jaxpr) for known in CASES.values()])
    elsewhere = {"device_put", "select_and_gather_add"}  # does nothing here; of forward-mode derivatives alone
    assert set(RULES) - set(ELEMENTWISE) - found == elsewhere


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
