"""The state of training: its shapes and shardings before it is made, and where an optimiser's state lies."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec

import jpipe
from cases import model, pipeline
from jpipe.memory.layout import StageTree
from jpipe.training.train_state import state_shardings
from updates import is_matrix, labels


@pytest.fixture(autouse=True)
def standard_promotion():
    """Optax itself mixes dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize(
    "tx",
    [
        optax.adamw(1e-3),
        optax.chain(optax.clip_by_global_norm(0.05), jpipe.per_layer(optax.adamw(1e-3, mask=is_matrix))),
        jpipe.per_layer(optax.adafactor(1e-3, min_dim_size_to_factor=4)),
        jpipe.per_layer(optax.multi_transform({"matrices": optax.adamw(1e-2), "rest": optax.sgd(0.1, 0.9)}, labels)),
        optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2),
    ],
    ids=["adamw", "chain", "adafactor", "multi_transform", "MultiSteps"],
)
def test_state_lies_with_its_layers(tx):
    truth = model("mixed", "float32")
    pipe = pipeline(truth, "1f1b", 4, 3, balance="even")
    tx = tx if isinstance(tx, optax.GradientTransformation) else tx.gradient_transformation()
    state = pipe.create_state(jax.random.key(0), truth.batch, tx)
    split = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path((state.variables, state.opt_state)):
        name = jax.tree_util.keystr(path)
        assert len(leaf.sharding.device_set) == 4, name
        if leaf.ndim > 0:
            assert leaf.shape[0] == 4, name
            assert leaf.sharding.spec[0] == "stage", f"{name} is on all stages"
            assert {shard.data.shape[0] for shard in leaf.addressable_shards} == {1}, name
            split += 1
    assert split >= 2
    for leaf in (state.step, state.key):
        assert leaf.sharding.spec == PartitionSpec()
    expected = pipe.abstract_state(truth.batch, tx)
    assert jax.tree.structure(expected) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(state), strict=True):
        assert (a.shape, a.dtype, a.sharding) == (b.shape, b.dtype, b.sharding)


def test_what_mirrors_the_parameters_lies_as_they_do_and_the_rest_by_its_shape(make_mesh):
    truth = model("linen", "float32")
    mesh = make_mesh((2, 2), ("stage", "data"))
    pipe = pipeline(truth, "1f1b", 2, 2, balance="even", mesh=mesh, shard_over=("data",))
    params = jax.eval_shape(pipe.init, jax.random.key(0), truth.batch)["params"]
    leaf = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.dtype("float32"))
    rows = StageTree({name: leaf(2, 7) for name in params}, params.layout)
    state = {"mu": params, "rows": rows, "count": leaf(), "vector": leaf(2), "stat": leaf(2, 5)}
    found = state_shardings(state, params)
    assert dict(found["mu"]) == {name: shape.sharding for name, shape in params.layout.shapes.items()}
    assert {sharding.spec for sharding in jax.tree.leaves(found["rows"])} == {PartitionSpec("stage")}
    assert found["stat"].spec == PartitionSpec("stage")
    assert found["count"].spec == found["vector"].spec == PartitionSpec()
