"""Batches, and the shapes of their micro-batches."""

import jax
import numpy as np
import pytest

from jpipe.batches.microbatches import (
    batch_size,
    check_no_example,
    cut_batch,
    cut_for_evaluation,
    cut_for_training,
    split_microbatches,
)


def batch(size, width=4):
    return {"inputs": np.ones((size, width), np.float32), "ids": np.ones(size, np.int64)}


def test_a_micro_batch_is_known_by_its_shapes():
    """So that it can be looked up."""
    found = cut_for_training(batch(8), 4, 1)
    assert jax.tree.map(lambda a: (a.shape, a.dtype.name), found.shapes) == {
        "inputs": ((2, 4), "float32"),
        "ids": ((2,), "int32"),
    }
    assert found.count == 4 and not found.bare
    assert found == cut_for_training(jax.eval_shape(lambda: batch(8)), 4, 1) == cut_batch(batch(8), 4)
    assert hash(found) == hash(cut_batch(batch(8), 4))
    others = [
        cut_batch(batch(8), 2),
        cut_batch(batch(8, 5), 4),
        cut_batch(batch(8)["inputs"], 4),
        cut_batch(batch(8), 4, bare=True),
    ]
    assert len({found, *others}) == 5


@pytest.mark.parametrize(
    ("size", "m", "shards", "message"),
    [
        (30, 4, 1, "batch size 30 is not divisible by num_microbatches=4; use 1, 2, 3, 5, 6, 10, 15 or 30"),
        (1, 2, 1, "batch size 1 is not divisible by num_microbatches=2; use 1$"),
        (8, 4, 4, r"micro-batches of 2 \(8 / num_microbatches=4\) can't be split over the 4 .* divisible by 16"),
    ],
)
def test_sizes_that_training_can_not_cut(size, m, shards, message):
    with pytest.raises(ValueError, match=message):
        cut_for_training(batch(size), m, shards)


@pytest.mark.parametrize(
    ("size", "shards", "count"), [(16, 1, 4), (6, 1, 3), (5, 1, 1), (16, 4, 4), (8, 4, 2), (12, 4, 3), (6, 4, 3)]
)
def test_evaluation_cuts_any_size(size, shards, count):
    """Into four, or the next fewer; so that data axes can split them, where there is a way."""
    assert cut_for_evaluation(batch(size), 4, shards).count == count


def test_batch_size():
    assert batch_size(batch(3)) == 3
    with pytest.raises(ValueError, match=r"differ in batch size: batch\['a'\] has 3, batch\['b'\] has 4"):
        batch_size({"a": np.ones(3), "b": np.ones(4)})
    with pytest.raises(ValueError, match="batch size 0"):
        batch_size(batch(0))


def test_a_micro_batch_of_twice_as_many():
    found = cut_batch(batch(8), 2)
    assert (found.size, found.doubled.size) == (4, 8)
    assert found.doubled.leaves == cut_batch(batch(8), 1).leaves


def test_a_single_example():
    seen = cut_batch(batch(8), 2).shapes
    check_no_example(batch(3), seen)
    check_no_example(np.ones(4), seen)
    with pytest.raises(ValueError, match=r"batch\['inputs'\] has the shape \(4,\), that of one example"):
        check_no_example({"inputs": np.ones(4, np.float32), "ids": np.ones(8, np.int64)}, seen)


def test_micro_batches_are_runs_of_examples():
    x = np.arange(12).reshape(6, 2)
    parts = split_microbatches({"x": x}, 3)["x"]
    np.testing.assert_array_equal(parts, [x[:2], x[2:4], x[4:]])
