"""Labels of dimensions, and look-ups and writes at indices, against the operations themselves."""

import jax
import jax.numpy as jnp
import pytest

from jpipe.partitioner.rule import RuleResult, by_labels
from jpipe.partitioner.shardings import PARTIAL, REPLICATED, Shard
from partitioned import array, case, compare, integers


def test_by_labels():
    """The table of `jpipe.partitioner.rule`: the product "bd,df->bf"."""
    rule = lambda *shardings, order=(): by_labels(["bd", "df"], ["bf"], shardings, order)
    assert rule(Shard(0), REPLICATED) == RuleResult([Shard(0), REPLICATED], [Shard(0)])
    assert rule(Shard(1, 2), REPLICATED) == RuleResult([Shard(1, 2), Shard(0, 2)], [PARTIAL])
    assert rule(REPLICATED, Shard(1)) == RuleResult([REPLICATED, Shard(1)], [Shard(1)])
    assert rule(Shard(0), Shard(1), order=(1, 0)) == rule(REPLICATED, Shard(1))
    assert rule(REPLICATED, PARTIAL) is None


def look_up(table, ids):
    return table[ids]


def cross_entropy(logits, ids):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), ids[..., None], -1).mean()


CASES = {
    "look-up": case(look_up, array(12, 8), integers(12, 4, 6)),
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
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(make_mesh, name):
    compare(make_mesh, CASES[name], 3, 2)
