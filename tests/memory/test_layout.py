"""Where variables lie at rest, leaves shared out among all stages, and slices that go to the hosts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from cases import assert_equal, model, pipeline
from jpipe.memory import layout
from jpipe.memory.layout import ScatteredLeaf, slices_of, zeros_on_host


def leaf(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def test_along_which_dimension_a_leaf_is_scattered(make_mesh):
    mesh = make_mesh((2, 2), ("stage", "model"))
    dimension = lambda shape, *spec: ScatteredLeaf(leaf(*shape), PartitionSpec(*spec), mesh).dimension
    assert dimension((3, 4)) == dimension((2, 4)) == 1, "the largest that K divides"
    assert dimension((4, 4)) == 0
    assert dimension((2, 4), "model") == 1, "after other axes split it"
    assert dimension((3, 5)) is None
    assert dimension(()) is None
    assert ScatteredLeaf(leaf(4, 3), PartitionSpec("model"), mesh).sharding.spec == PartitionSpec(("model", "stage"))


def test_leaves_of_other_devices(make_mesh):
    known = ScatteredLeaf(leaf(4, 3), PartitionSpec(), make_mesh((4,), ("stage",)))
    value = np.arange(12, dtype=np.float32).reshape(4, 3)
    mine = make_mesh((4,), ("stage",))
    for lies in (
        value,
        jax.device_put(value, jax.devices()[7]),
        jax.device_put(value, NamedSharding(mine, PartitionSpec())),
    ):
        put = known.put(lies)
        assert put.sharding == known.sharding
        assert_equal(put, value)


@pytest.fixture(autouse=True)
def small_slices(monkeypatch):
    monkeypatch.setattr(layout, "SLICE_BYTES", 600)


UNKNOWN = AbstractMesh((1,), ("stage",))
"""Devices that may be a TPU's."""


@pytest.mark.parametrize(
    ("shape", "is_known", "view", "size"),
    [
        ((1, 4, 96, 128), False, (1, 384, 128), 32),  # rows of 512 bytes, whole tiles of them
        ((1, 4, 96, 50), False, (1, 4, 96, 50), 1),  # another dimension is innermost there, which rows would cut
        ((1, 4, 96, 50), True, (1, 384, 50), 128),
        ((1, 40, 2, 4), False, (1, 40, 2, 4), 18),  # entries of 32 bytes
        ((1, 5, 3, 2, 32, 128), False, (1, 5 * 3 * 2 * 32, 128), 32),
        ((1, 5000), False, (1, 1, 5000), 1),
        ((1, 128), False, (1, 128), 128),
    ],
)
def test_slices(make_mesh, shape, is_known, view, size):
    assert slices_of(shape, 4, make_mesh((1,)) if is_known else UNKNOWN) == (view, size)


@pytest.mark.parametrize("shape", [(1, 4, 96, 128), (1, 5000), (1, 40, 2, 4)])
def test_zeros_on_the_host_are_whole(shape, monkeypatch):
    """Slices and what is left over are written over what was there."""
    monkeypatch.setattr(layout, "to_host", lambda array: array)
    monkeypatch.setattr(jax.lax, "empty", jnp.ones)
    assert_equal(zeros_on_host(shape, np.dtype("float32"), UNKNOWN), np.zeros(shape, np.float32))


@pytest.fixture(scope="module")
def placed():
    truth = model("linen", "float32")
    pipe = pipeline(truth, "1f1b", 4, 3, balance="even")
    return truth, pipe, pipe.from_layer_variables(truth.trees, truth.batch)


def test_a_layers_values_are_on_its_stages_device_alone(placed):
    """Marks one layer at a time and looks where the mark went."""
    truth, pipe, _ = placed
    devices = list(pipe.mesh.devices.flat)
    for index in range(len(truth.layers)):
        marked = [
            jax.tree.map(np.ones_like if i == index else np.zeros_like, tree) for i, tree in enumerate(truth.trees)
        ]
        variables = pipe.from_layer_variables(marked)
        (stage,) = [k for k, (first, last) in enumerate(pipe.partition.bounds) if first <= index < last]
        for leaf in jax.tree.leaves(variables):
            for shard in leaf.addressable_shards:
                if devices.index(shard.device) != stage:
                    assert not np.any(shard.data), f"layer {index} is not only on stage {stage}"
        count = sum(int(np.sum(leaf)) for leaf in jax.tree.leaves(variables))
        assert count == sum(a.size for a in jax.tree.leaves(truth.trees[index])), "every element once"


def test_layer_variables_are_never_all_on_one_device(placed):
    """Leaves that can be split over the stages are."""
    _, pipe, variables = placed
    trees = pipe.layer_variables(variables)
    split = [leaf for leaf in jax.tree.leaves(trees) if any(n % 4 == 0 for n in leaf.shape)]
    assert split
    for leaf in split:
        assert {shard.data.size for shard in leaf.addressable_shards} == {leaf.size // 4}
