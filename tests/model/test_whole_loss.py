"""The parts of a loss, and their gradients, add up to the loss of the mini-batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpipe.model.loss import PartsOfLoss
from jpipe.partitioner.shardings import REPLICATED, Shard

X, MASK, NUMBER = np.arange(24.0).reshape(8, 3) / 10, np.float64([1, 0, 1, 1, 0, 0, 0, 1]), np.float64(2)


def shapes(*arrays):
    return [jax.ShapeDtypeStruct(np.shape(a), a.dtype) for a in arrays]


def terms(outputs, batch, key=None):
    x, number = outputs
    return [(jnp.sin(x) * batch[:, None]).sum() / batch.sum() * number, jnp.mean(x**2) + number**2]


@pytest.mark.parametrize("count", [2, 4, 8])
def test_parts_and_gradients(count):
    """An output without examples is each micro-batch's own: of the same number, its gradients are parts, too."""
    with jax.enable_x64(True):
        part = slice(0, 8 // count)
        of_part = tuple(shapes(X[part], NUMBER)), *shapes(MASK[part]), None
        of_all = tuple(shapes(X, NUMBER)), *shapes(MASK), None
        loss = PartsOfLoss(terms, of_part, of_all, [Shard(0), REPLICATED])
        assert [shape.shape for shape in loss.shapes] == [()], "the sum of the mask"
        wanted, vjp = jax.vjp(lambda x, n: terms((x, n), MASK), X, NUMBER)
        gradients = vjp([1.0, 2.0])
        values, found = [], []
        for x, mask in zip(np.split(X, count), np.split(MASK, count), strict=True):
            value, back = jax.vjp(lambda x, n, mask=mask: loss((x, n), mask, None, [MASK.sum()]), x, NUMBER)
            values.append(value)
            found.append(back([jnp.float64(1), jnp.float64(2)]))
        np.testing.assert_allclose(np.sum(values, 0), wanted, rtol=1e-13)
        np.testing.assert_allclose(np.concatenate([x for x, _ in found]), gradients[0], rtol=1e-13)
        np.testing.assert_allclose(sum(n for _, n in found), gradients[1], rtol=1e-13)
