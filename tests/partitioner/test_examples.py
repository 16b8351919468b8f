"""Which equations couple examples, and what a micro-batch computes: beside the function of the whole mini-batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpipe.jax.tracing import trace
from jpipe.partitioner.examples import INDEX, CouplesError, Examples
from jpipe.partitioner.shardings import PARTIAL, REPLICATED, Shard

X, W = np.arange(24.0).reshape(8, 3) / 10, np.arange(8.0)


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def follow(function, *, strict=True, count=4, **options):
    """Of a function of outputs `[8, 3]` and of numbers `[8]` that the batch has."""
    closed, _ = trace(function, X, W)
    return Examples(closed, count, [Shard(0), Shard(0)], [True, False], strict=strict, **options)


@pytest.mark.parametrize(
    ("function", "at"),
    [
        (lambda x, w: jnp.tanh(x) * w[:, None], Shard(0)),
        (lambda x, w: x.sum(0), PARTIAL),
        (lambda x, w: (x.T * jnp.cumsum(w)).T, Shard(0)),
        (lambda x, w: jnp.where(w.sum() > 2, x.sum(), 0.0), PARTIAL),
        (lambda x, w: x.astype(jnp.float32).mean().astype(jnp.float64), PARTIAL),
        (lambda x, w: x.T.reshape(-1), Shard(0, 3)),
        (lambda x, w: x[jnp.arange(8), (w % 3).astype(jnp.int32)], Shard(0)),
        (lambda x, w: w * w.max(), Shard(0)),
        (lambda x, w: w.max(), REPLICATED),
    ],
)
def test_how_a_micro_batch_has_a_value(function, at):
    """Its values, joined or added up, are the function of all."""
    examples = follow(function)
    assert examples.results == [at]
    (number,) = examples.flat.results
    run = examples.function([(number, at)])
    ahead = iter(jax.core.eval_jaxpr(examples.ahead().jaxpr, examples.ahead().consts, W))
    known = {one: None if one == INDEX else next(ahead) for one in examples.known}

    def part(one, m):
        if one == INDEX:
            return jnp.int32(m)
        return known[one] if one.shard is None else jnp.split(known[one], 4, one.shard.dim)[m]

    parts = [run([X[2 * m : 2 * m + 2], W[2 * m : 2 * m + 2]], [part(one, m) for one in known])[0] for m in range(4)]
    whole = function(X, W)
    if at == PARTIAL:
        np.testing.assert_allclose(sum(parts), whole, rtol=1e-6 if "float32" in str(examples.flat.avals) else 1e-13)
    elif at == REPLICATED:
        np.testing.assert_array_equal(parts[0], whole)
    else:
        blocks = [np.split(np.asarray(p), at.outer, at.dim) for p in parts]
        joined = np.concatenate([blocks[m][i] for i in range(at.outer) for m in range(4)], at.dim)
        np.testing.assert_allclose(joined, whole, rtol=1e-13)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x, w: x @ x.T, "dot_general at test_examples.py:\\d+ makes pairs of examples"),
        (lambda x, w: x.mean() ** 2, "no linear function"),
        (lambda x, w: jnp.sort(x, 0), "in order"),
        (lambda x, w: x[:4] - x[4:], "by their place in the batch"),
        (lambda x, w: x.max(), "all examples together"),
        (lambda x, w: jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x), "isn't known to treat"),
    ],
)
def test_what_couples_examples(function, words):
    with pytest.raises(CouplesError, match=words):
        follow(function)
    (coupling, *_) = follow(function, strict=False).couplings
    assert coupling.is_sure is not any(word in words for word in ("known", "place"))


def test_what_only_a_print_needs_is_no_coupling():
    def shown(x, w):
        jax.debug.print("{}", x[0, 0])
        return x.sum()

    assert follow(shown).results == [PARTIAL]


def test_statistics_are_told_from_other_couplings():
    """The mean that examples are normalised by, if a result is made of it; and what only such a result needs."""

    def normed(x, w):
        mean = x.mean(0)
        return x - mean, mean, x.max(0)

    found = follow(normed, strict=False, statistics=[1, 2]).couplings
    assert found and all(one.is_statistic for one in found)
    assert not any(one.is_statistic for one in follow(normed, strict=False).couplings)
