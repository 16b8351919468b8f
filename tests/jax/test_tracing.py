"""Traced functions and their replays; constants and random keys of every type in a whole pipeline."""

import contextlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.extend.core import jaxpr_as_fun

import jpipe
from cases import assert_close, assert_equal, compilations
from jpipe.jax.tracing import compiled, depends_on, equations_in, interpret, replay, trace, unrounded, uses

RANDOM = np.random.default_rng(0)
NUMBERS, Y = (RANDOM.standard_normal((3, 4)).astype(np.float32) for _ in range(2))
COUNT = np.asarray(7, np.int32)


@jax.custom_jvp
def in_calls(x):
    return x * 2


in_calls.defjvp(lambda primals, tangents: (in_calls(*primals), tangents[0]))

FUNCTIONS = {
    "arithmetic": lambda x, y, n: (x + y, x - y, x * y, x / y, -x, x**2, x**-3, jnp.fmod(x, y)),
    "bounds": lambda x, y, n: (jnp.maximum(x, y), jnp.minimum(x, 0), jnp.clip(x, -0.5, 0.5), jnp.sign(x), jnp.abs(x)),
    "choices": lambda x, y, n: (jnp.where(x > y, x, 0.0), jnp.where((x < 0) & ~(y >= 0) | (x == y), 1, 2)),
    "shapes": lambda x, y, n: (x.T, x.reshape(-1), jnp.concatenate([x, y], 1), x[None], jnp.ones((2, 3)) * x[0, 0]),
    "reductions": lambda x, y, n: (x.sum(), x.sum(0), x.max(1, keepdims=True), x.min(), jnp.all(x > 0), jnp.any(x > 0)),
    "left to JAX": lambda x, y, n: (x @ y.T, jnp.cumsum(x), jax.lax.while_loop(lambda n: n < 9, lambda n: n + 1, n)),
    "branches": lambda x, y, n: jax.lax.cond(n > 3, lambda x, y: x + 1, lambda x, y: y, x, y),
    "switch": lambda x, y, n: jax.lax.switch(n, [lambda x: x, lambda x: x * 3], x),
    "calls": lambda x, y, n: (jax.jit(jnp.var)(x), jax.checkpoint(jnp.sin)(x), in_calls(x), jax.nn.silu(x)),
    "constants": lambda x, y, n: (x * jnp.asarray(Y), jnp.arange(4) + n, 3.0),
    "no finite numbers": lambda x, y, n: (jnp.isfinite(x / 0), jnp.where(x > 0, x / 0, jnp.sqrt(-1 - x * x))),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    with jax.numpy_dtype_promotion("standard"):
        closed = jax.make_jaxpr(FUNCTIONS[name])(NUMBERS, Y, COUNT)
        expected = jax.tree.leaves(jax.jit(FUNCTIONS[name])(NUMBERS, Y, COUNT))
    found = interpret(closed, NUMBERS, Y, COUNT)
    for got, want in zip(found, expected, strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_allclose(got.astype(np.float32), np.asarray(want, np.float32), rtol=2e-6, atol=1e-6)


# --- small jaxprs, run on this host -----------------------------------------------------------------------------------


X = np.linspace(-1, 1, 6, dtype=np.float32)


def names(closed):
    """The primitives of a jaxpr, and of those inside of it."""
    return [equation.primitive.name for equation in equations_in(closed.jaxpr.eqns)]


# Of (x, y, z) to three results: whether each depends on each, row by row.
CALLS = {
    "plain": (lambda x, y, z: (x + y, z * 2, 3.0), [[1, 1, 0], [0, 0, 1], [0, 0, 0]]),
    "handed through": (lambda x, y, z: (y, x, z), [[0, 1, 0], [1, 0, 0], [0, 0, 1]]),
    "jit": (lambda x, y, z: jax.jit(lambda a, b: (a, b * 2, 1.0))(x, y), [[1, 0, 0], [0, 1, 0], [0, 0, 0]]),
    "checkpoint": (
        lambda x, y, z: jax.checkpoint(lambda a, b: (a * 2, b * 3, a + b))(x, z),
        [[1, 0, 0], [0, 0, 1], [1, 0, 1]],
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_dependence_through_calls(name):
    function, expected = CALLS[name]
    closed = jax.make_jaxpr(function)(X, X, X)
    for column, v in enumerate(closed.jaxpr.invars):
        assert depends_on(closed, [v]) == [bool(row[column]) for row in expected]
    assert depends_on(closed, closed.jaxpr.invars) == [any(row) for row in expected]
    assert depends_on(closed, []) == [False] * 3
    for row, wanted in zip(expected, np.eye(3, dtype=bool).tolist(), strict=True):
        assert uses(closed, wanted) == [bool(entry) for entry in row]


def test_what_depends_and_what_is_used_through_a_loop():
    """`depends_on` takes a loop as a whole, `uses` follows each carry: two that don't meet."""

    def run(x, y, unused):
        turn = lambda c, _: ((c[0] * x, c[1] + 1), c[0])
        return *jax.lax.scan(turn, (y, x), length=3)[0], unused * 0 + 1

    closed = jax.make_jaxpr(run)(1.0, 2.0, 3.0)
    x, y, _ = closed.jaxpr.invars
    assert depends_on(closed, [x]) == depends_on(closed, [y]) == [True, True, False]
    assert uses(closed, [True, False, False]) == [True, True, False]
    assert uses(closed, [False, True, False]) == [True, False, False]
    assert uses(closed, [False, False, True]) == [False, False, True]


@pytest.mark.parametrize(
    ("dtype", "mantissa_bits", "stays"), [(np.float32, 23, False), (np.float32, 7, True), (jnp.bfloat16, 7, True)]
)
def test_without_roundings(dtype, mantissa_bits, stays):
    """Only those that round nothing go, and of wide numbers alone; results stay what they were, to the bit."""
    values = jnp.asarray([1 / 3, 1e-4, 6e4, -7.1], dtype)
    rounded = lambda x: jax.lax.reduce_precision(x, 8, mantissa_bits)
    closed = jax.make_jaxpr(lambda x: (rounded(x), jax.lax.cond(x[0] > 0, rounded, jnp.sin, x)))(values)
    found = unrounded(closed)
    assert names(found).count("reduce_precision") == (2 if stays else 0)
    for got, want in zip(jaxpr_as_fun(found)(values), jaxpr_as_fun(closed)(values), strict=True):
        np.testing.assert_array_equal(got, want)


def test_the_roundings_of_checkpoint_go():
    """They are why `unrounded` is there."""
    weights = np.random.default_rng(0).standard_normal((6, 6)).astype(np.float32)
    function = lambda x: jnp.sin(jnp.sin(x) @ weights)
    saving = jax.checkpoint(function, policy=jax.checkpoint_policies.dots_saveable)
    closed = jax.make_jaxpr(jax.grad(lambda x: saving(x).sum()))(X)
    assert "reduce_precision" in names(closed)
    found = unrounded(closed)
    assert "reduce_precision" not in names(found)
    expected = np.cos(X) * (weights @ np.cos(np.sin(X) @ weights))
    np.testing.assert_allclose(jaxpr_as_fun(found)(X)[0], expected, rtol=1e-4, atol=1e-5)


# --- functions as traced ----------------------------------------------------------------------------------------------


BATCH = {"inputs": np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)}


def make(layers, num_stages=2):
    loss = lambda outputs, batch: jnp.mean(jnp.square(outputs))
    return jpipe.Pipeline(layers, loss, num_stages=num_stages, num_microbatches=2, balance="even")


# --- traces and replays -----------------------------------------------------------------------------------------------


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
    "value", [lambda: jnp.asarray(0.1), lambda: jnp.full((), 0.1), lambda: 2.0], ids=["asarray", "full", "Python"]
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


def test_another_default_implementation():
    """A regression: `init` passed, and the step failed in XLA's verifier: keys were traced as the default ones."""
    with jax.default_prng_impl("rbg"):
        pipe = make([Drop(), lambda rngs: NnxDrop(rngs)])
        state = pipe.create_state(jax.random.key(0), BATCH, optax.sgd(0.1))
        state, _ = pipe.train_step(state, BATCH)
        pipe.value_and_grad(state.variables, BATCH, jax.random.key(0, impl="threefry2x32"))


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


@pytest.mark.parametrize("layer", [Scanned(), pytest.param(RematScanned(), marks=pytest.mark.slow)])
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
