"""What weights are split over at rest and at work, and the examples of a micro-batch."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jpipe.mesh.splits import WHOLE, Splits, check_shard_over
from jpipe.partitioner.shardings import REPLICATED, Shard


def struct(*shape):
    return jax.ShapeDtypeStruct(shape, np.float32)


@pytest.fixture
def mesh(make_mesh):
    return make_mesh((1, 2, 2, 2, 1), ("stage", "data", "fsdp", "model", "expert"))


def at_rest(splits, leaf, *spec, collection="params"):
    """The PartitionSpec of one leaf, as a tuple."""
    (found,) = splits.at_rest("layer", {collection: {"leaf": leaf}}, {collection: [PartitionSpec(*spec)]})[collection]
    return tuple(found)


def test_metadata_is_followed_as_far_as_the_mesh_goes(mesh):
    splits = Splits(mesh)
    assert at_rest(splits, struct(8, 8)) == ()
    assert at_rest(splits, struct(8, 8), "model") == ("model",)
    assert at_rest(splits, struct(8, 8), ("fsdp", "model"), None) == (("fsdp", "model"),)
    assert at_rest(splits, struct(8, 8), "tensor", ("expert", "model")) == (None, "model")
    assert at_rest(WHOLE, struct(8, 8), "model") == ()


def test_state_is_not_split_over_data_axes(mesh):
    splits = Splits(mesh, ("fsdp",))
    assert at_rest(splits, struct(64, 64), ("data", "model"), collection="batch_stats") == ("model",)


@pytest.mark.parametrize(
    ("shape", "spec", "expected"),
    [
        ((64, 32), (), ("fsdp",)),  # along the largest dimension
        ((64, 48), ("model",), ("model", "fsdp")),  # of which the largest part is left
        ((64, 16), ("model",), (("model", "fsdp"),)),
        ((63, 32), (), (None, "fsdp")),  # that it divides
        ((63, 33), (), ()),
        ((8, 8), (), ()),  # a small one isn't split
        ((64, 32), (None, "fsdp"), (None, "fsdp")),  # as it is already
    ],
)
def test_shard_over(mesh, shape, spec, expected):
    found = at_rest(Splits(mesh, ("fsdp",)), struct(*shape), *spec)
    assert found == expected
    NamedSharding(mesh, PartitionSpec(*found)).shard_shape(shape)  # JAX can split it so


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (("model", None, "data"), "more dimensions"),
        (("model", "model"), "twice over the mesh axis 'model'"),
        ((None, "model"), "don't divide 3"),
    ],
)
def test_what_can_not_be_split_is_named(mesh, spec, message):
    with pytest.raises(ValueError, match=rf"layer asks for params\['leaf'\] of shape \(8, 3\).*{message}"):
        at_rest(Splits(mesh), struct(8, 3), *spec)


def test_at_work_and_examples(mesh):
    splits = Splits(mesh)  # its axes at work: (data, fsdp) jointly, and model
    assert [axis.names for axis in splits.axes] == [("data", "fsdp"), ("model",)]
    assert splits.at_work(PartitionSpec("fsdp", "model")) == (REPLICATED, Shard(1))
    assert splits.at_work(PartitionSpec(("fsdp", "model"))) == (REPLICATED, Shard(0, 2))
    assert splits.of_examples(8) == (Shard(0), REPLICATED)
    assert splits.of_examples(6) == (REPLICATED, REPLICATED)
    assert WHOLE.axes == WHOLE.of_examples(8) == WHOLE.at_work(PartitionSpec("model")) == ()


def test_check_shard_over(mesh):
    assert check_shard_over(mesh, None) == ()
    assert check_shard_over(mesh, "fsdp") == ("fsdp",)
    assert check_shard_over(mesh, ["data", "fsdp"]) == ("data", "fsdp")
    with pytest.raises(ValueError, match="names 'model'"):
        check_shard_over(mesh, "model")
