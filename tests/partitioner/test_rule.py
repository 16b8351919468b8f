"""Labels of dimensions; look-ups and writes at indices are compared in `test_rules.py`."""

from jpipe.partitioner.rule import RuleResult, by_labels
from jpipe.partitioner.shardings import PARTIAL, REPLICATED, Shard


def test_by_labels():
    """The table of `jpipe.partitioner.rule`: the product "bd,df->bf"."""
    rule = lambda *shardings, order=(): by_labels(["bd", "df"], ["bf"], shardings, order)
    assert rule(Shard(0), REPLICATED) == RuleResult([Shard(0), REPLICATED], [Shard(0)])
    assert rule(Shard(1, 2), REPLICATED) == RuleResult([Shard(1, 2), Shard(0, 2)], [PARTIAL])
    assert rule(REPLICATED, Shard(1)) == RuleResult([REPLICATED, Shard(1)], [Shard(1)])
    assert rule(Shard(0), Shard(1), order=(1, 0)) == rule(REPLICATED, Shard(1))
    assert rule(REPLICATED, PARTIAL) is None
