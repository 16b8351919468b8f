"""The layout: each layer's arrays lie on its stage's device, and come back."""

import jax
import numpy as np
import optax
import pytest

from cases import assert_equal, model, params_of, pipeline
from jpipe.memory.layout import StageTree


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
