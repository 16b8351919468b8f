"""What the first layer takes, told from the batch that holds it."""

import numpy as np
import pytest

from jpipe.batches.bare_inputs import default_inputs, is_bare
from jpipe.batches.microbatches import cut_batch


def batch(size, width=4):
    return {"inputs": np.ones((size, width), np.float32), "ids": np.ones(size, np.int64)}


def test_what_the_inputs_are():
    x, t = np.ones(2), np.zeros(2)
    for whole in ({"inputs": x, "targets": t}, (x, t), [x, t], x):
        assert default_inputs(whole) is x
    with pytest.raises(ValueError, match=r"the keys \['x'\] and no 'inputs'"):
        default_inputs({"x": x})
    with pytest.raises(ValueError, match="an empty tuple"):
        default_inputs(())


def test_bare_inputs_are_told_from_batches():
    seen = cut_batch(batch(8), 2).shapes
    bare = lambda given: is_bare(given, seen, seen["inputs"], default_inputs, None)
    assert bare(batch(8)["inputs"])
    assert not bare(batch(8))
    assert not bare({"inputs": batch(8)["inputs"]}), "without what only the loss needs"
    with pytest.raises(
        ValueError,
        match=r"batch\['x'\] in a dict: neither a training batch, batch\[.* nor the bare inputs, a bare array",
    ):
        bare({"x": np.ones(8)})


def test_where_the_structure_does_not_tell_shapes_do_or_the_caller():
    """One array, which `inputs` cuts: it was cut twice where bare inputs were meant."""
    tokens = lambda length: np.zeros((8, length), np.int32)
    seen, read = cut_batch(tokens(9), 2).shapes, lambda batch: batch[:, :-1]
    bare = lambda given, said=None: is_bare(given, seen, cut_batch(tokens(8), 2).shapes, read, said)
    assert (bare(tokens(9)), bare(tokens(8))) == (False, True)
    assert (bare(tokens(5), True), bare(tokens(5), False), bare(tokens(9), True)) == (True, False, True)
    with pytest.raises(ValueError, match=r"int32\[8,5\] may be a batch, .* say which: .* bare=False\), or"):
        bare(tokens(5))
    with pytest.raises(ValueError, match=r"bare=True, but the batch is batch\['x'\] in a dict"):
        bare({"x": tokens(8)}, True)
    assert not is_bare(tokens(5), seen, seen, default_inputs, None), "where inputs are the whole batch, all is the same"
    doubled = lambda batch: 2 * batch
    with pytest.raises(ValueError, match="say which"):
        is_bare(tokens(9), seen, seen, doubled, None)
