"""The state of training: its shapes and shardings before it is made, and where an optimiser's state lies."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import train_state as of_flax
from jax.sharding import PartitionSpec

import jpipe
from cases import assert_equal, compilations, model, pipeline
from updates import labels
from updates import standard_promotion as standard_promotion


@pytest.mark.parametrize(
    "tx",
    [
        jpipe.per_layer(optax.adafactor(1e-3, min_dim_size_to_factor=4)),
        jpipe.per_layer(optax.multi_transform({"matrices": optax.adamw(1e-2), "rest": optax.sgd(0.1, 0.9)}, labels)),
        optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2),
    ],
    ids=["adafactor", "multi_transform", "MultiSteps"],
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


# --- the state of a loop of one's own ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loop(make_mesh):
    """A pipeline, its batch, parameters, optimiser, and a jitted step of a loop with Flax's `TrainState` and a key."""
    truth = model("linen", "float32")
    pipe = pipeline(truth, "1f1b", 2, 2, balance="even", mesh=make_mesh((2, 2), ("stage", "data")))
    params = pipe.from_layer_variables(truth.trees, truth.batch)["params"]
    with jax.numpy_dtype_promotion("standard"):
        tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1e-2, 0, 100)))

    @jax.jit
    def step(state, key, batch):
        key, own = jax.random.split(key)
        (loss, _), grads = pipe.value_and_grad({"params": state.params}, batch, own)
        return state.apply_gradients(grads=grads), key, loss

    return pipe, truth.batch, params, tx, step


@pytest.mark.parametrize("placed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_loop_of_ones_own_compiles_its_step_once(loop, placed):
    pipe, batch, params, tx, step = loop
    state, key = of_flax.TrainState.create(apply_fn=pipe.apply, params=params, tx=tx), jax.random.key(1)
    if placed:
        state, key = pipe.place_state((state, key), tx)
    step.clear_cache()
    with compilations() as count:
        state, key, _ = step(state, key, batch)
        assert count() == 1
        for _ in range(2):
            state, key, _ = step(state, key, batch)
        assert count() == (1 if placed else 2)  # what begins on one device comes back on the mesh


def test_what_is_placed_keeps_its_values_and_what_lies_on_the_mesh_its_place(loop):
    pipe, _, params, tx, _ = loop
    raw = jnp.arange(2, dtype=jnp.uint32)
    given = {"opt": tx.init(params), "params": params, "raw": raw, "step": 3, "rate": np.float32(0.5)}
    placed = pipe.place_state(given, tx)
    assert_equal(placed, jax.tree.map(jnp.asarray, given))
    everywhere = set(pipe.mesh.devices.flat)
    assert all(leaf.sharding.device_set == everywhere for leaf in jax.tree.leaves(placed))
    assert all(a is b for a, b in zip(jax.tree.leaves(placed["params"]), jax.tree.leaves(params), strict=True))
    assert placed["step"].sharding.spec == placed["raw"].sharding.spec == PartitionSpec()
    key = pipe.place_state(jax.random.key(5), None)
    assert jnp.array_equal(jax.random.key_data(key), jax.random.key_data(jax.random.key(5)))
    back = pipe.place_state(jax.device_get(given), tx)  # from the host, each stage's on its own devices
    assert_equal(back, placed)
    for leaf, shape in zip(jax.tree.leaves(back["params"]), jax.tree.leaves(params.layout.shapes), strict=True):
        assert leaf.sharding == shape.sharding


def of_other_stages(pipe, tx):
    sizes = {"num_stages": 4, "num_microbatches": 2, "balance": "even"}
    four = jpipe.Pipeline([nn.Dense(4) for _ in range(4)], lambda y, b: jnp.mean(y), **sizes)
    return tx.init(four.init(jax.random.key(0), np.ones((4, 4), np.float32))["params"])


def gone(*_):
    array = jnp.zeros(3)
    array.delete()
    return array


@pytest.mark.parametrize(
    ("make_state", "kind", "message"),
    [
        (lambda pipe, tx: {"name": "adam"}, TypeError, r"state\['name'\] is a str, which can't lie on devices"),
        (gone, ValueError, "state: these arrays were donated"),
        (of_other_stages, ValueError, r"laid out for num_stages=4, and this pipeline has 2; begin with"),
    ],
)
def test_what_cannot_be_placed(loop, make_state, kind, message):
    pipe, _, _, tx, _ = loop
    with pytest.raises(kind, match=message):
        pipe.place_state(make_state(pipe, tx), tx)


# --- train step -------------------------------------------------------------------------------------------------------


def test_one_compiled_step_for_each_optimizer():
    layers, batch = [nn.Dense(8, use_bias=False) for _ in range(2)], np.ones((4, 8), np.float32)
    pipe = jpipe.Pipeline(layers, lambda y, _: jnp.mean(y), num_stages=2, num_microbatches=2, balance="even")
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9))
    state = pipe.create_state(jax.random.key(0), batch, tx)
    state, _ = pipe.train_step(state, batch)
    with compilations() as count:
        for _ in range(3):
            state, _ = pipe.train_step(state, batch)
            assert state.tx is tx
    assert count() == 0
    with compilations() as count:
        other = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.2, momentum=0.9))
        state, _ = pipe.train_step(state.replace(tx=other), batch)
    assert count() == 1
