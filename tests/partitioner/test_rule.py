"""Rules that follow from labels, as those of an einsum."""

from jpipe.partitioner.rule import RuleResult, by_labels, on_partial
from jpipe.partitioner.shardings import PARTIAL, REPLICATED, Shard


def test_by_labels():
    """The table of `jpipe.partitioner.rule`: the product "bd,df->bf"."""
    rule = lambda *shardings, order=None: by_labels(["bd", "df"], ["bf"], shardings, order)
    assert rule(Shard(0), REPLICATED) == RuleResult([Shard(0), REPLICATED], [Shard(0)])
    assert rule(Shard(1, 2), REPLICATED) == RuleResult([Shard(1, 2), Shard(0, 2)], [PARTIAL])
    assert rule(REPLICATED, Shard(1)) == RuleResult([REPLICATED, Shard(1)], [Shard(1)])
    assert rule(Shard(0), Shard(1), order=(1, 0)) == rule(REPLICATED, Shard(1))
    assert rule(REPLICATED, PARTIAL) is None


def test_dimensions_without_a_label_are_not_split_and_operands_behind_are_replicated():
    labels = [0, None]  # the second dimension is never split
    assert list(labels) == [0, None]
    assert by_labels([labels], [range(2)], [Shard(1), Shard(0)]) is None
    assert by_labels([labels], [range(2)], [Shard(0), Shard(0)]) == RuleResult([Shard(0), REPLICATED], [Shard(0)])


def test_on_partial():
    assert on_partial([REPLICATED, PARTIAL, Shard(0)], 1) == RuleResult([PARTIAL] * 3, [PARTIAL])
    assert on_partial([PARTIAL, Shard(0)], 2, 1) == RuleResult([PARTIAL, REPLICATED], [PARTIAL, PARTIAL])
    assert on_partial([REPLICATED, PARTIAL], 1, 1) is None
