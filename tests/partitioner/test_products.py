"""Products and convolutions on parts of arrays: every dimension split, what is summed over left partial."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax import lax

from partitioned import array, case, compare


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


CASES = {
    "product": case(lambda x, w, b: x @ w + b, array(4, 6, 8), array(8, 4), array(4)),
    "feed-forward": case(lambda x, w, v: x + jnp.tanh(x @ w) @ v, array(4, 6, 8), array(8, 12), array(12, 8)),
    "attention": case(attention, array(4, 6, 8), *(array(8, 2, 4, seed=i) for i in range(3))),
    "fused attention": case(fused_attention, array(4, 6, 8), array(8, 12)),
    "grouped": case(grouped, array(4, 6, 8), array(8, 16)),
    "contrastive": case(lambda x: jax.nn.log_softmax(x @ x.T), array(4, 8)),
    "convolution": case(convolution, array(4, 8, 6, 4), array(2, 4, 3, 3)),
    "depthwise": case(depthwise, array(2, 6, 6, 4), array(3, 3, 1, 8)),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(make_mesh, name):
    compare(make_mesh, CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_however_arguments_lie(make_mesh, name):
    compare(make_mesh, CASES[name], 40, 40)
