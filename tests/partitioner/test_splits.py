"""What weights are split over at rest and at work, and the examples of a micro-batch."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jpipe.partitioner.shardings import REPLICATED, Axis, Shard
from jpipe.partitioner.splits import WHOLE, Splits

DATA = ("data", "fsdp")


def struct(*shape):
    return jax.ShapeDtypeStruct(shape, np.float32)


@pytest.fixture
def mesh(make_mesh):
    return make_mesh((1, 2, 2, 2, 1), ("stage", "data", "fsdp", "model", "expert"))


def at_rest(splits, leaf, *spec, collection="params"):
    """The PartitionSpec of one leaf, as a tuple."""
    variables, specs = {collection: {"leaf": leaf}}, {collection: [PartitionSpec(*spec)]}
    (found,) = splits.at_rest("layer", variables, specs, ["params"])[collection]
    return tuple(found)


def test_metadata_is_followed_as_far_as_the_mesh_goes(mesh):
    splits = Splits(mesh, DATA)
    assert at_rest(splits, struct(8, 8)) == ()
    assert at_rest(splits, struct(8, 8), "model") == ("model",)
    assert at_rest(splits, struct(8, 8), ("fsdp", "model"), None) == (("fsdp", "model"),)
    assert at_rest(splits, struct(8, 8), "tensor", ("expert", "model")) == (None, "model")
    assert at_rest(WHOLE, struct(8, 8), "model") == ()


def test_state_is_not_split_over_data_axes(mesh):
    splits = Splits(mesh, DATA, ("fsdp",))
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
    found = at_rest(Splits(mesh, DATA, ("fsdp",)), struct(*shape), *spec)
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
        at_rest(Splits(mesh, DATA), struct(8, 3), *spec)


def test_shards_are_of_the_data_axes(mesh):
    assert Splits(mesh, DATA).num_shards == 4
    assert Splits(mesh, ("expert",)).num_shards == WHOLE.num_shards == 1
    named = Splits(mesh, ("model",))
    assert named.axes[0] == Axis(("model",), (2,), is_data=True)
    assert named.at_work(PartitionSpec(("fsdp", "model"))) == (REPLICATED, REPLICATED, Shard(0)), "gathered over model"
    assert at_rest(named, struct(8, 8), ("data", "model"), collection="batch_stats") == ("data",)
