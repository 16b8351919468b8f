"""Traced functions and their replays; constants and random keys of every type in a whole pipeline."""

import contextlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jpipe
from cases import assert_close, assert_equal, compilations
from jpipe.jaxprs.tracing import compiled, replay, trace

BATCH = {
    "inputs": np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32),
    "targets": np.zeros((8, 4), np.float32),
}


def mean_square(outputs, batch):
    return jnp.mean(jnp.square(outputs - batch["targets"]))


def make(layers, loss=mean_square, **options):
    return jpipe.Pipeline(layers, loss, **({"num_stages": 2, "num_microbatches": 2, "balance": "even"} | options))


# --- traces and replays -----------------------------------------------------------------------------------------------


def test_a_replay_gives_arrays():
    """A regression: a jaxpr hands literals back as Python scalars, which have no `astype`."""
    made = lambda x: {"constant": jnp.asarray(0.1), "python": 2.0, "flag": jnp.asarray(True), "x": x}
    closed, shapes = jax.make_jaxpr(made, return_shape=True)(1)
    found = replay(closed, shapes)(1)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(found))
    assert_equal(found, {"constant": jnp.float32(0.1), "python": jnp.float32(2), "flag": np.True_, "x": np.int32(1)})


def test_reductions_over_mesh_axes_are_left_out():
    """What is traced sees all of a micro-batch: over axes of the mesh a mean is the identity, over others it isn't."""
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    own = jax.vmap(lambda x: jax.lax.pmean(x, ("data", "mine")), axis_name="mine")
    mesh = jax.sharding.AbstractMesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.sharding.use_abstract_mesh(mesh):
        closed, shapes = trace(lambda x: (jax.lax.psum(x, "data"), own(x)), x)
        for ask in (lambda x: x + jax.lax.axis_index("data").astype(x.dtype), lambda x: jax.lax.all_gather(x, "data")):
            with pytest.raises(ValueError, match="over the mesh axis 'data': a layer sees whole arrays"):
                trace(ask, x)
    first, second = replay(closed, shapes)(x)
    assert_equal(first, x)
    assert_close(second, np.broadcast_to(x.mean(0), (2, 3)))


# --- values that are literals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [lambda: jnp.asarray(0.1), lambda: jnp.full((), 0.1), lambda: 2.0],
    ids=["asarray", "full", "Python"],
)
@pytest.mark.parametrize("num_stages", [1, 2])
def test_initial_values_that_are_literals(value, num_stages):
    """A regression: `init` raised "'TypedFloat' object has no attribute 'astype'" (LayerScale, ReZero, counters)."""
    scale = jpipe.Layer(lambda key, x: value(), lambda a, x: a * x)
    pipe = make([scale, nn.Dense(4)], num_stages=num_stages)
    variables = pipe.init(jax.random.key(0), BATCH)
    tree = pipe.layer_variables(variables)[0]
    assert_equal(tree, jnp.asarray(value(), jnp.float32))
    (loss, _), _ = pipe.value_and_grad(variables, BATCH)
    assert_close(loss, pipe.evaluate(variables, BATCH))


class Flagged(nn.Module):
    """Keeps a flag and a counter whose first values are literals."""

    @nn.compact
    def __call__(self, x):
        seen = self.variable("kept", "seen", lambda: jnp.asarray(False))
        count = self.variable("kept", "count", lambda: jnp.zeros((), jnp.int32))
        if not self.is_initializing() and self.is_mutable_collection("kept"):
            seen.value, count.value = jnp.asarray(True), count.value + 1
        return x


def test_state_and_boundaries_that_are_literals():
    """A regression: a constant flag at a boundary, or as new state, was a Python scalar."""
    layers = [lambda x: (x, jnp.asarray(True)), lambda x, flag: jnp.where(flag, x, 0), Flagged(), nn.Dense(4)]
    pipe = make(layers)
    variables = pipe.init(jax.random.key(0), BATCH)
    (loss, updates), _ = pipe.value_and_grad(variables, BATCH)
    assert_close(loss, pipe.evaluate(variables, BATCH))
    kept = pipe.layer_variables(updates)[2]["kept"]
    assert_equal(kept, {"seen": np.True_, "count": np.int32(1)})


def test_a_constant_loss():
    """A regression: the loss was a Python scalar."""
    pipe = make([nn.Dense(4)] * 2, loss=lambda y, batch: 0.5)
    variables = pipe.init(jax.random.key(0), BATCH)
    (loss, _), grads = pipe.value_and_grad(variables, BATCH)
    assert float(loss) == float(pipe.evaluate(variables, BATCH)) == 0.5
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(grads))


# --- keys of other implementations ------------------------------------------------------------------------------------


class Drop(nn.Module):
    @nn.compact
    def __call__(self, x, deterministic):
        return nn.Dropout(0.5)(nn.Dense(4)(x), deterministic=deterministic)


class NnxDrop(nnx.Module):
    def __init__(self, rngs):
        self.dense, self.dropout = nnx.Linear(4, 4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.dense(x))


DROPS = [Drop(), Drop(), lambda rngs: NnxDrop(rngs), nn.BatchNorm()]


@pytest.mark.parametrize(
    ("impl", "remat"),
    [
        pytest.param("rbg", "layer", marks=pytest.mark.slow),
        pytest.param("rbg", "none", marks=pytest.mark.slow),
        pytest.param("unsafe_rbg", "full", marks=pytest.mark.slow),
    ],
)
def test_keys_of_another_implementation(impl, remat):
    """A regression: `init` passed, and the step failed in XLA's verifier: keys were traced as the default ones."""
    key = jax.random.key(0, impl=impl)
    pipe, tx = make(DROPS, remat=remat), optax.sgd(0.1)
    state = pipe.create_state(key, BATCH, tx)
    types = lambda tree: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)
    assert types(pipe.abstract_state(BATCH, tx, key)) == types(state)
    losses = [float(pipe.value_and_grad(state.variables, BATCH, k)[0][0]) for k in (key, jax.random.fold_in(key, 1))]
    assert losses[0] != losses[1]
    pipe.evaluate(state.variables, BATCH)
    state, _ = pipe.train_step(state, BATCH)
    assert state.key.dtype == key.dtype
    # and the same pipeline takes a key of the default implementation
    assert float(pipe.value_and_grad(state.variables, BATCH, jax.random.key(0))[0][0]) > 0


@pytest.mark.slow
def test_the_numbers_of_another_implementation_do_not_depend_on_the_stages():
    key, losses = jax.random.key(5, impl="rbg"), []
    for k in (1, 2, 4):
        pipe = make(DROPS, num_stages=k)
        losses.append(float(pipe.value_and_grad(pipe.init(key, BATCH), BATCH, key)[0][0]))
    np.testing.assert_allclose(losses[1:], losses[0], rtol=1e-5)


def test_another_default_implementation():
    """A regression, as above."""
    with jax.default_prng_impl("rbg"):
        pipe = make(DROPS)
        state = pipe.create_state(jax.random.key(0), BATCH, optax.sgd(0.1))
        state, _ = pipe.train_step(state, BATCH)
        pipe.value_and_grad(state.variables, BATCH, jax.random.PRNGKey(0))
        pipe.value_and_grad(state.variables, BATCH, jax.random.key(0, impl="threefry2x32"))
        pipe.evaluate(state.variables, BATCH)


def test_raw_keys_of_another_implementation():
    """A regression: a raw key doesn't say which it is of; it was wrapped as a default one and failed late."""
    raw = jax.random.key_data(jax.random.key(0, impl="rbg"))
    pipe = make(DROPS)
    with pytest.raises(TypeError, match=r"key is a raw key of shape \(4,\), but .*'threefry2x32' have \(2,\); pass"):
        pipe.init(raw, BATCH)


# --- layers that hand their key on and don't draw from it -------------------------------------------------------------


class Step(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.Dense(4)(x), None


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        steps = nn.scan(Step, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return steps()(x, None)[0]


class RematScanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.remat_scan(nn.Dense, lengths=(2, 2))(4)(x)


class DroppingStep(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.Dropout(0.5, deterministic=False)(x), None


class DroppingScan(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.scan(DroppingStep, split_rngs={"dropout": True}, length=3)()(x, None)[0]


@pytest.mark.parametrize("layer", [Scanned(), RematScanned()], ids=["scan", "remat_scan"])
def test_loops_that_split_keys_for_parameters_alone(layer):
    """A regression: "draws random numbers, but key=None", as all operands of a loop were taken for used."""
    pipe = make([layer, nn.Dense(4)])
    variables = pipe.init(jax.random.key(0), BATCH)
    (loss, _), _ = pipe.value_and_grad(variables, BATCH)
    assert_close(loss, pipe.evaluate(variables, BATCH))


def test_loops_that_draw_need_a_key():
    pipe = make([DroppingScan(), nn.Dense(4)])
    variables = pipe.init(jax.random.key(0), BATCH)
    with pytest.raises(ValueError, match=r"layer 0 \(DroppingScan\) draws random numbers, but key=None"):
        pipe.value_and_grad(variables, BATCH)


def test_a_compiled_function_runs_for_real_in_a_trace_and_computes_nothing_ahead():
    found = []

    def outer(x):
        with compilations() as count:
            run = compiled(lambda a: a + jnp.tanh(jax.random.normal(jax.random.key(3), (7,))), np.zeros(7, np.float32))
            assert count() == 1
        found.append(run(np.zeros(7, np.float32)))
        return x

    for way in (contextlib.nullcontext(), jax.disable_jit()):
        with way:
            jax.make_jaxpr(outer)(1.0)
    expected = np.tanh(jax.random.normal(jax.random.key(3), (7,)))
    assert len(found) == 2
    for one in found:
        np.testing.assert_allclose(np.asarray(one), expected, rtol=1e-6)
