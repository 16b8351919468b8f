"""Layers' own trees, put together on the devices from arrays of which a process or device has only a part."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jpipe
from cases import assert_equal, compilations, model, pipeline
from jpipe.memory.layer_trees import put_together_on_devices, take_apart

AXES = ("stage", "data", "model")
jit_take_apart = jax.jit(take_apart)


def layouts_of(variables):
    return {name: tree.layout for name, tree in variables.items()}


@pytest.fixture
def mixed():
    """A model of all kinds of layers, dtypes and shapes."""
    return model("mixed", "float32")


def layouts_for(truth, k, **options):
    pipe = pipeline(truth, "1f1b", k, 2, balance="even", **options)
    variables = pipe.from_layer_variables(truth.trees, truth.batch)
    return pipe, variables, layouts_of(variables)


@pytest.mark.parametrize("kind", ["linen", "mixed"])
@pytest.mark.parametrize("explicit", [False, True])
def test_is_the_inverse_of_take_apart_also_from_other_numbers_of_stages(make_mesh, kind, explicit):
    truth = model(kind, "float32")
    _, variables, _ = layouts_for(truth, 2, mesh=make_mesh((2, 2, 2), AXES, explicit=explicit))
    taken = jit_take_apart(variables)
    for k in (1, 2, 4):
        mesh = make_mesh((k, 2, 4 // k), AXES, explicit=explicit)
        _, expected, layouts = layouts_for(truth, k, mesh=mesh)
        found = put_together_on_devices(layouts, taken)
        assert_equal(found, expected)
        shardings = lambda tree: [leaf.sharding for leaf in jax.tree.leaves(tree)]
        assert shardings(found) == shardings({name: lay.shapes for name, lay in layouts.items()})


def test_weights_that_other_axes_split(make_mesh):
    truth = model("linen", "float32")
    mesh = make_mesh((2, 2, 2), AXES)
    _, variables, layouts = layouts_for(truth, 2, mesh=mesh, shard_over=("data",))
    assert_equal(put_together_on_devices(layouts, jit_take_apart(variables)), variables)


def test_layers_that_are_missing_hold_zeros_and_leaves_keep_their_dtypes(mixed):
    _, variables, layouts = layouts_for(mixed, 4)
    taken = jit_take_apart({"params": variables["params"], "moments": jax.tree.map(jnp.ones_like, variables["params"])})
    layouts = {"params": layouts["params"], "moments": layouts["params"]}
    narrow = lambda leaf: np.asarray(leaf).astype(np.float16)
    some = {i: {"moments": jax.tree.map(narrow, item["moments"])} for i, item in taken.items() if i != 2}
    found = put_together_on_devices(layouts, some)
    assert {leaf.dtype for leaf in jax.tree.leaves(found["moments"])} == {jnp.dtype("float16")}
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(found["params"]))
    total = sum(float(np.sum(leaf)) for leaf in jax.tree.leaves(found["moments"]))
    assert total == sum(leaf.size for i in some for leaf in jax.tree.leaves(some[i]))


def test_is_compiled_once_for_layers_that_are_alike():
    block = lambda rngs: nnx.Linear(8, 8, rngs=rngs)
    layers = [block] * 12
    pipe = jpipe.Pipeline(layers, lambda y, _: jnp.mean(y), num_stages=4, num_microbatches=2, balance="even")
    variables = pipe.init(jax.random.key(0), np.ones((2, 8), np.float32))
    layouts, taken = layouts_of(variables), jit_take_apart(variables)
    put_together_on_devices(layouts, {})
    with compilations() as count:
        found = put_together_on_devices(layouts, taken)
    assert_equal(found, variables)
    assert count() <= 4, "zeros, the first layer, those between, the last"
