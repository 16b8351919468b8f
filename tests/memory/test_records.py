"""Records and layers' own trees, out of the buffers and into them, wherever their leaves are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jpipe
from cases import assert_equal, compilations, model, pipeline
from jpipe.memory import records
from jpipe.memory.records import Records, from_layers, to_layers


@pytest.fixture(scope="module")
def found():
    """Records of parameters and of moments in float16, and the buffers of both."""
    truth = model("mixed", "float32")
    pipe = pipeline(truth, "1f1b", 4, 2, balance="even")
    params = pipe.from_layer_variables(truth.trees, truth.batch)["params"]
    records = Records({"params": params.layout, "moments": params.layout})
    moments = {name: jnp.full_like(array, 3, jnp.float16) for name, array in params.items()}
    return records, {"params": dict(params), "moments": moments}


def test_what_is_put_is_taken_and_nothing_else_changes(found):
    records, arrays = found
    for v, j, _ in records.places:
        taken = records.take(arrays, v, j)
        assert {a.dtype for a in jax.tree.leaves(taken.get("moments"))} <= {jnp.dtype("float16")}, "as the arrays"
        more = {name: [np.asarray(a) + np.ones_like(a) for a in own] for name, own in taken.items()}
        changed = records.put(jax.tree.map(jnp.copy, arrays), v, j, more)
        assert_equal(jax.device_get(records.take(changed, v, j)), more)
        assert_equal(records.put(changed, v, j, taken), arrays)


pytestmark = pytest.mark.filterwarnings("ignore:nothing is split over the mesh axis 'model'")
AXES = ("stage", "data", "model")
jit_to_layers = jax.jit(to_layers)


def layouts_of(variables):
    return {name: tree.layout for name, tree in variables.items()}


def layouts_for(truth, k, **options):
    pipe = pipeline(truth, "1f1b", k, 2, balance="even", **options)
    variables = pipe.from_layer_variables(truth.trees, truth.batch)
    return variables, layouts_of(variables)


LIKE_A_CLUSTER = {
    "this process has all": records.is_whole,
    "a part of each leaf": lambda leaf: False,
    "all of some": lambda leaf: leaf.ndim < 2,
}


@pytest.mark.parametrize(
    ("kind", "explicit", "has"),
    [
        ("linen", False, "all of some"),
        ("mixed", True, "a part of each leaf"),
        pytest.param("linen", False, "this process has all", marks=pytest.mark.slow),
        pytest.param("linen", False, "a part of each leaf", marks=pytest.mark.slow),
        pytest.param("mixed", True, "this process has all", marks=pytest.mark.slow),
        pytest.param("mixed", True, "all of some", marks=pytest.mark.slow),
    ],
)
def test_there_and_back_also_to_other_numbers_of_stages(make_mesh, monkeypatch, kind, explicit, has):
    monkeypatch.setattr(records, "is_whole", LIKE_A_CLUSTER[has])
    truth = model(kind, "float32")
    variables, _ = layouts_for(truth, 2, mesh=make_mesh((2, 2, 2), AXES, explicit=explicit))
    taken = jit_to_layers(variables)
    for k in (1, 4):
        mesh = make_mesh((k, 2, 4 // k), AXES, explicit=explicit)
        with monkeypatch.context() as usual:
            usual.setattr(records, "is_whole", LIKE_A_CLUSTER["this process has all"])
            expected, layouts = layouts_for(truth, k, mesh=mesh)
        found = from_layers(layouts, taken)
        assert_equal(found, expected)
        shardings = lambda tree: [leaf.sharding for leaf in jax.tree.leaves(tree)]
        assert shardings(found) == shardings({name: lay.shapes for name, lay in layouts.items()})


def test_layers_and_collections_that_are_missing_hold_zeros(monkeypatch):
    variables, layouts = layouts_for(model("mixed", "float32"), 4)
    moments = jax.tree.map(jnp.ones_like, variables["params"])
    taken = jit_to_layers({"params": variables["params"], "moments": moments})
    layouts = {"params": layouts["params"], "moments": layouts["params"]}
    some = {i: {"moments": item["moments"]} for i, item in taken.items() if i != 2}
    for has in LIKE_A_CLUSTER.values():
        monkeypatch.setattr(records, "is_whole", has)
        found = from_layers(layouts, some)
        assert all(not np.any(leaf) for leaf in jax.tree.leaves(found["params"]))
        total = sum(float(np.sum(leaf)) for leaf in jax.tree.leaves(found["moments"]))
        assert total == sum(leaf.size for i in some for leaf in jax.tree.leaves(some[i]))


def test_is_compiled_once_for_layers_that_are_alike(monkeypatch):
    monkeypatch.setattr(records, "is_whole", LIKE_A_CLUSTER["a part of each leaf"])
    block = lambda rngs: nnx.Linear(8, 8, rngs=rngs)
    layers = [block] * 12
    pipe = jpipe.Pipeline(layers, lambda y, _: jnp.mean(y), num_stages=4, num_microbatches=2, balance="even")
    variables = pipe.init(jax.random.key(0), np.ones((2, 8), np.float32))
    layouts, taken = layouts_of(variables), jit_to_layers(variables)
    with compilations() as count:
        found = from_layers(layouts, taken)
    assert_equal(found, variables)
    assert count() <= 3, "the first layer, those between, the last"
