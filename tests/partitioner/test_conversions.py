"""Conversions from every sharding to every other, against arrays that are cut in NumPy."""

import itertools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jpipe.partitioner.conversions import convert
from jpipe.partitioner.shardings import PARTIAL, REPLICATED, Axis, Shard, is_possible, part_shape
from parts import AXES, DEVICES, X, cut


def parts_of(x, sharding):
    """The parts of all devices `[2, 2, ...]`; where the sharding is partial, the last device has what is missing."""
    parts = np.stack([cut(x, sharding, device) for device in DEVICES]).reshape(
        2, 2, *part_shape(x.shape, sharding, AXES)
    )
    for i in range(2):
        if sharding[i] == PARTIAL:
            first = np.random.default_rng(i).integers(0, 99, parts.shape).take([0], i)
            parts = np.concatenate([first, parts.take([1], i) - first], i)
    return parts


def whole_of(parts, sharding):
    """Parts of all devices with partial sums added up, each on all devices that it is a sum over."""
    for i in range(2):
        if sharding[i] == PARTIAL:
            parts = np.broadcast_to(parts.sum(i, keepdims=True), parts.shape)
    return parts


SOME = [
    *itertools.product([REPLICATED, PARTIAL, Shard(0), Shard(1)], repeat=2),
    (Shard(0), Shard(0, 2)),
    (Shard(0, 2), Shard(0)),
    (Shard(0, 2), Shard(0, 4)),
    (Shard(1, 2), PARTIAL),
    (REPLICATED, Shard(0, 4)),
]
SOME = [s for s in SOME if is_possible(X.shape, s, AXES)]


TWO_AXES = AXES, (2, 2), ("data", "model")
PARTS_OF_ONE = (Axis(("model",), (2,), inner=2), Axis(("model",), (2,), outer=2)), (4,), ("model",)


@pytest.mark.parametrize(("axes", "shape", "names"), [TWO_AXES, PARTS_OF_ONE], ids=["axes", "parts of one axis"])
@pytest.mark.parametrize("now", SOME)
def test_convert(make_mesh, now, axes, shape, names):
    """To every other sharding, in one program."""
    everywhere = PartitionSpec(names)

    def run(parts):  # [1, ...]
        return [convert(parts[0], axes, now, wanted)[None] for wanted in SOME]

    mesh, given = make_mesh(shape, names), parts_of(X, now)
    converted = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False))
    for wanted, parts in zip(SOME, converted(given.reshape(4, *given.shape[2:])), strict=True):
        parts = np.asarray(parts).reshape(2, 2, *parts.shape[1:])
        expected = np.stack([cut(X, wanted, device) for device in DEVICES])
        found = whole_of(parts, wanted)
        np.testing.assert_array_equal(found.reshape(expected.shape), expected, f"{now} -> {wanted}")
