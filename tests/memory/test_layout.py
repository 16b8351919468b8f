"""Where variables lie at rest, leaves shared out among all stages, and slices that go to the hosts."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from cases import assert_equal, model, params_of, pipeline
from jpipe.memory import layout
from jpipe.memory.layout import HostSlices, ScatteredLeaf, StageTree


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


def test_host_slices():
    slices = HostSlices.of((1, 4, 96, 50), 4)  # rows of 200 bytes, runs of whole tiles
    assert (slices.view, slices.dim, slices.run) == ((384, 50), 0, 32)
    assert [(count, shape) for count, shape, _ in slices.parts] == [(12, (32, 50))]
    slices = HostSlices.of((1, 5000), 4)
    assert [(count, shape, at(count - 1)) for count, shape, at in slices.parts] == [
        (4, (1, 1024), (0, 3072)),
        (1, (1, 904), (0, 4096)),
    ]
    assert HostSlices.of((1, 4, 31, 50), 4).run == 1  # rows that fill no tiles aren't merged: an entry at a time


@pytest.mark.parametrize("shape", [(1, 4, 96, 50), (1, 5000), (1, 4, 31, 50), (3, 40), (1, 1, 70, 9), (2, 3, 5, 33, 7)])
def test_slices_are_the_array(shape):
    slices = HostSlices.of(shape, 4)
    array = np.arange(np.prod(shape)).reshape(slices.view)
    found = np.full_like(array, -1)
    for count, part, at in slices.parts:
        for i in range(count):
            begin = (*at(i), *(0 for _ in part[len(at(i)) :]))
            where = tuple(slice(start, start + size) for start, size in zip(begin, part, strict=True))
            assert found[where].shape == part
            assert (found[where] == -1).all(), "two slices overlap"
            found[where] = array[where]
    np.testing.assert_array_equal(found, array)


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


def test_sums_over_all_elements_are_exact(placed):
    truth, _, variables = placed
    trees = [params_of(layer, tree) for layer, tree in zip(truth.layers, truth.trees, strict=True)]
    np.testing.assert_allclose(optax.tree.norm(variables), optax.tree.norm(trees), rtol=1e-6)


def test_is_a_pytree_with_keys(placed):
    _, _, variables = placed
    params = variables["params"]
    assert isinstance(params, StageTree)
    doubled = jax.tree.map(lambda a: 2 * a, params)
    assert isinstance(doubled, StageTree)
    assert doubled.layout is params.layout
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    assert len(set(paths)) == len(paths)
    assert paths == [f"[{name!r}]" for name in sorted(params.layout.storage.buffers)]


def test_layouts_of_equal_pipelines_are_equal(placed):
    truth, pipe, variables = placed
    again = pipeline(truth, "gpipe", 4, 6, balance="even", remat="none")
    outputs = again.apply(again.from_layer_variables(truth.trees, truth.batch), truth.batch)
    assert (
        again.from_layer_variables(truth.trees)["params"].layout
        == pipe.from_layer_variables(truth.trees)["params"].layout
    )
    assert_equal(again.apply(variables, truth.batch), outputs)


def test_layer_variables_are_never_all_on_one_device(placed):
    """Leaves that can be split over the stages are."""
    _, pipe, variables = placed
    trees = pipe.layer_variables(variables)
    split = [leaf for leaf in jax.tree.leaves(trees) if any(n % 4 == 0 for n in leaf.shape)]
    assert split
    for leaf in split:
        assert {shard.data.size for shard in leaf.addressable_shards} == {leaf.size // 4}
