"""Layers that differ in numbers alone are one function, and each computes with its own numbers."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jpipe
import sequential
from cases import assert_close
from jpipe.jax.flat_jaxpr import flatten
from jpipe.jax.primitives import PLAIN_CALLS
from jpipe.layers.adapt import as_layers
from jpipe.model.alike import Kinds
from jpipe.model.random_keys import layer_key
from jpipe.model.trace import trace_model

wide = functools.partial(nn.Dense, param_dtype=jnp.float64)
X = jax.ShapeDtypeStruct((2, 8), jnp.float32)
KEY = 3


def group_of(layers, x=X):
    """The groups of layers between two of one function, which are alone in theirs as they are the model's ends."""
    model = trace_model(as_layers([jnp.sin, *layers, jnp.sin]), lambda batch: batch, x)
    first, *groups, last = model.group_of
    assert {first, last} == {0, max(groups) + 1} and model.num_layers == len(groups) + 2
    for g, group in enumerate(model.groups):
        assert [*group.indices] == [i for i, own in enumerate(model.group_of) if own == g]
    return tuple(g - 1 for g in groups)


# --- what is one function ---------------------------------------------------------------------------------------------


def drop_path(x, rate, key):
    """Stochastic depth: a branch is left out for some examples."""
    keep = jax.random.bernoulli(key, 1 - rate, (len(x), 1))
    return jnp.where(keep, x / (1 - rate), 0)


class Block(nn.Module):
    """A residual block with three numbers that papers choose by depth."""

    rate: float
    scale: float
    gamma: float

    @nn.compact
    def __call__(self, x, train: bool):
        h = wide(8)(nn.relu(wide(5)(x)))
        h = h * self.param("gamma", nn.initializers.constant(self.gamma), (8,), jnp.float64)
        h = drop_path(h, self.rate, self.make_rng("dropout")) if train else h
        return x + self.scale * h


class NnxBlock(nnx.Module):
    def __init__(self, rate, scale, gamma, *, rngs):
        self.up = nnx.Linear(8, 5, param_dtype=jnp.float64, rngs=rngs)
        self.down = nnx.Linear(5, 8, param_dtype=jnp.float64, rngs=rngs)
        self.gamma = nnx.Param(jnp.full(8, gamma, jnp.float64))
        self.dropout = nnx.Dropout(rate, broadcast_dims=(1,), rngs=rngs)
        self.scale = scale

    def __call__(self, x):
        return x + self.scale * self.dropout(self.down(nnx.relu(self.up(x))) * self.gamma.get_value())


def plain_block(rate, scale, gamma):
    def init(key, x):
        up, down = jax.random.normal(key, (2, 8, 8))
        return {"up": up / 3, "down": down / 3, "gamma": jnp.full(8, gamma, jnp.float64)}

    def apply(params, x, key):
        h = nn.relu(x @ params["up"]) @ params["down"] * params["gamma"]
        return x + scale * (h if key is None else drop_path(h, rate, key))

    return jpipe.Layer(init, apply, "Block")


MAKE = {"linen": Block, "nnx": lambda *numbers: lambda rngs: NnxBlock(*numbers, rngs=rngs), "plain": plain_block}
NUMBERS = [(0.1 * (i + 1), 1 / (i + 1), 10.0**-i) for i in range(4)]


class Drops(nn.Module):
    rate: float

    def __call__(self, x, train: bool):
        return x if self.rate == 0 or not train else drop_path(x, self.rate, self.make_rng("dropout"))


class Normed(nn.Module):
    """Running averages, a number that is the rate at which they move, and one that isn't."""

    momentum: float = 0.9
    scale: float = 1.0

    @nn.compact
    def __call__(self, x, train: bool):
        return self.scale * nn.BatchNorm(not train, momentum=self.momentum)(x)


class Hidden(nn.Module):
    width: int
    scale: float

    @nn.compact
    def __call__(self, x):
        return self.scale * nn.Dense(8)(nn.Dense(self.width)(x))


def scaled(scale):
    return lambda x: scale * x


def each(function, *values):
    """A layer for each value, which is the function's first argument."""
    return [functools.partial(function, value) for value in values]


def looped(scale, x):
    return jax.lax.fori_loop(0, 2, lambda _, y: scale * y, x)


def recomputed(scale, x):
    return jax.checkpoint(lambda x: jnp.sin(scale * x))(x)


def flipped(scale, x):
    """The identity, whose gradient is multiplied by a number, as where domains are told apart."""

    @jax.custom_vjp
    def identity(x):
        return x * 1.0

    identity.defvjp(lambda x: (identity(x), None), lambda _, dy: (-scale * dy,))
    return identity(x)


CASES = {
    "rates": ([nn.Dropout(rate, deterministic=False) for rate in (0.1, 0.2, 0.1)], (0, 0, 0)),
    "closures": ([scaled(0.5), scaled(2.0)], (0, 0)),
    "arguments": (each(jnp.multiply, 0.5, 2.0), (0, 0)),
    "integers as data": (each(lambda n, x: jnp.where(jnp.arange(8) < n, x, 0), 3, 5), (0, 0)),
    "frozen": ([jpipe.freeze(nn.Dense(8, kernel_init=nn.initializers.normal(s))) for s in (0.1, 0.2)], (0, 0)),
    "a rate of averages": ([Normed(momentum=m) for m in (0.9, 0.8)], (0, 1)),
    "Python's branches": ([Drops(rate) for rate in (0.0, 0.1, 0.2, 0.0)], (0, 1, 1, 0)),
    "NumPy's types": (each(lambda s, x: s.astype("float32") * x, np.float32(2), np.float64(2)), (0, 1)),
    "other functions": ([lambda x: 2.0 * x, lambda y: y * 1.0 * 3.0, lambda z: 3.0 * z], (0, 1, 0)),
    "other makers": ([lambda x: jnp.tanh(0.5 * x), jax.jit(lambda y: jnp.tanh(0.25 * y))], (0, 0)),
    "widths and scales": ([Hidden(*made) for made in [(4, 0.1), (6, 0.1), (4, 0.2), (6, 0.2)]], (0, 1, 0, 1)),
    "widths": ([lambda x: x, nn.Dense(8), nn.Dense(6), nn.Dense(8), nn.Dense(8)], (0, 1, 2, 3, 1)),
    "nnx modules": ([nnx.Linear(8, 8, rngs=nnx.Rngs(seed)) for seed in range(3)], (0, 0, 0)),
    "and a factory": ([nnx.Linear(8, 8, rngs=nnx.Rngs(0)), lambda rngs: nnx.Linear(8, 8, rngs=rngs)], (0, 1)),
    "trips": (each(lambda count, x: jax.lax.fori_loop(0, count, lambda _, y: jnp.sin(y), x), 2, 3), (0, 1)),
    "in a loop": (each(looped, 0.5, 2.0), (0, 1)),
    "in a derivative": (each(flipped, 0.5, 2.0), (0, 1)),
    "in jax.checkpoint": (each(recomputed, 0.5, 2.0), (0, 1)),
    "arrays": (each(jnp.multiply, np.full(8, 0.5, np.float32), np.full(8, 2.0, np.float32)), (0, 1)),
}


@pytest.mark.parametrize("name", CASES)
def test_groups(name):
    layers, expected = CASES[name]
    assert group_of(layers) == expected


def test_groups_at_other_shapes():
    """Numbers that do nothing may do something at other shapes; and what was apart of one shape stays apart of others.

    Layers were joined at rows of 3, where `n` does nothing, and evaluation of rows of 8 was refused. Variables lie as
    the first batch had it.
    """
    nothing = as_layers([jnp.sin, *each(lambda n, x: x + x[:, :n].sum(1, keepdims=True), 4, 6), jnp.cos])
    scaled = as_layers([jnp.sin, *each(lambda n, x: n * x + x[:, :n].sum(1, keepdims=True), 4, 6), jnp.cos])
    trace = lambda layers, width, like=None: trace_model(
        layers, lambda batch: batch, jax.ShapeDtypeStruct((2, width), jnp.float32), like=like
    )
    assert trace(nothing, 3).group_of == trace(nothing, 8).group_of == trace(scaled, 8).group_of == (0, 1, 2, 3)
    assert trace(scaled, 3).group_of == (0, 1, 1, 2)
    assert trace(scaled, 3, trace(scaled, 8)).group_of == (0, 1, 2, 3)


def test_equal_layers_are_traced_once_and_others_once_each():
    calls = []

    def layer(scale, x):
        calls.append(scale)
        return scale * x

    layers = as_layers([jnp.sin, *each(layer, *[2.0] * 4), jnp.cos])
    trace_model(layers, lambda batch: batch, X)
    assert calls == [2.0]
    calls.clear()
    layers = as_layers([jnp.sin, *each(layer, 2.0, 2.0, 3.0, 3.0, 2.0, 3.0), jnp.cos])
    trace_model(layers, lambda batch: batch, X)
    assert calls == [2.0, 3.0, 2.0, 3.0], "in training, and to be compared in evaluation"


# --- with the right numbers -------------------------------------------------------------------------------------------


def squares(outputs, batch):
    return jnp.mean((outputs - batch["targets"]) ** 2)


@functools.cache
def case(kind):
    """(layers, variables, batch, what plain JAX makes of them in 4 micro-batches, in evaluation)."""
    rng = np.random.default_rng(0)
    layers = [wide(8), *[MAKE[kind](*numbers) for numbers in NUMBERS], wide(3)]
    batch = {"inputs": rng.normal(size=(16, 5)), "targets": rng.normal(size=(16, 3))}
    items = sequential.random_items(layers, batch, 1)
    step = sequential.truth(layers, items, squares, batch, key=jax.random.key(KEY), m=4, rate=0.1)
    return layers, items, batch, step, sequential.evaluation(layers, items, squares, batch)


def gradients_of(pipe, grads):
    """By layer, bare parameters."""
    trees = pipe.layer_variables({"params": grads})
    return [tree["params"] if set(tree) == {"params"} else tree for tree in trees]


@pytest.mark.parametrize(
    ("kind", "data", "options"),
    [
        ("linen", 2, {"schedule": "1f1b"}),
        ("nnx", 1, {"schedule": "zero_bubble", "remat": "none"}),
        pytest.param("plain", 1, {"schedule": "interleaved", "num_chunks": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_step_and_evaluation_equal_the_sequential_model(kind, data, options, make_mesh):
    """Blocks with other numbers at each depth are one function, and initial values are the layers' own, too."""
    with jax.enable_x64(True):
        layers, items, batch, (loss, grads, _), (outputs, evaluated) = case(kind)
        sizes = {"num_stages": 2, "num_microbatches": 4, "balance": "even"}
        mesh = make_mesh((2, data), ("stage", "data"))
        pipe = jpipe.Pipeline(layers, squares, mesh=mesh, **sizes, **options)
        variables = pipe.from_layer_variables(items, batch)
        assert (1, 2, 3, 4) in [group.indices for group in pipe.plan.model.groups]
        (found, _), gradients = pipe.value_and_grad(variables, batch, jax.random.key(KEY))
        assert_close(found, loss, "loss")
        assert_close(gradients_of(pipe, gradients), grads, "gradients")
        assert_close(pipe.evaluate(variables, batch), evaluated, "evaluation")
        assert_close(pipe.apply(variables, batch), outputs, "outputs")
        if kind != "linen":
            return
        initial = pipe.layer_variables(pipe.init(jax.random.key(KEY), batch))
        for index in range(1, 5):
            key, x = sequential.init_key(jax.random.key(KEY), index), jnp.zeros((4, 8), jnp.float64)
            own = layers[index].init({"params": key, "dropout": jax.random.fold_in(key, 1)}, x, train=False)
            assert_close(initial[index], own, f"layer {index}")


def test_what_is_drawn_in_evaluation_has_the_right_numbers():
    """Blocks are one function, and evaluation with a key is compared when it is asked for."""

    def drawing(scale):
        init = lambda key, x: jnp.ones((), x.dtype)
        noise = lambda key, x: 0 if key is None else scale * jax.random.normal(key, x.shape, x.dtype)
        return jpipe.Layer(init, lambda p, x, key, train: p * scale * x if train else x + noise(key, x))

    scales, x, key = (0.1, 0.2, 0.3), np.ones((2, 8), np.float32), jax.random.key(KEY)
    layers = [jnp.sin, *map(drawing, scales), jnp.cos]
    pipe = jpipe.Pipeline(layers, lambda y, _: jnp.mean(y), num_stages=1, num_microbatches=2)
    variables = pipe.init(key, x)
    assert (1, 2, 3) in [group.indices for group in pipe.plan.model.groups]
    expected = []
    for m, part in enumerate(np.split(x, 2)):
        part = jnp.sin(part)
        for index, scale in enumerate(scales, start=1):
            part = part + scale * jax.random.normal(layer_key(key, index, m), part.shape)
        expected.append(jnp.cos(part))
    np.testing.assert_allclose(pipe.apply(variables, x, key), np.concatenate(expected), rtol=1e-6)
    np.testing.assert_allclose(pipe.apply(variables, x), jnp.cos(jnp.sin(x)), rtol=1e-6)


def test_several_functions_in_evaluation_with_a_key():
    """Layers that draw by other distributions there, where they are one function otherwise."""

    def layer(scale, draw):
        noise = lambda key, x: 0 if key is None else draw(key, x.shape, x.dtype)
        return jpipe.Layer(lambda key, x: (), lambda p, x, key, train: scale * x if train else x + noise(key, x))

    x, draws = np.ones((2, 8), np.float32), (jax.random.normal, jax.random.uniform)
    pipe = jpipe.Pipeline([jnp.sin, *map(layer, (2.0, 3.0), draws), jnp.cos], None, num_stages=1, num_microbatches=2)
    variables = pipe.init(jax.random.key(KEY), x)
    np.testing.assert_allclose(pipe.apply(variables, x), jnp.cos(jnp.sin(x)), rtol=1e-6)
    with pytest.raises(
        ValueError, match="layers 1, 2 are one function without a random key in evaluation, and several"
    ):
        pipe.apply(variables, x, jax.random.key(KEY))


# --- kinds of parts of a trace ----------------------------------------------------------------------------------------


def with_rule(rule: float, rate: float):
    """`sin(x * rate)`, with a derivative of its own."""

    @jax.custom_vjp
    def call(x):
        return jnp.sin(x)

    call.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * rule,))
    return lambda x: call(x * jnp.float32(rate))


ONES = np.ones(5000, np.float32)
TWO_PARTS = {
    "numbers": (lambda x: 2.0 * x, lambda x: 3.0 * x, True),
    "names": (jax.jit(lambda x: 2.0 * x), lambda y: 2.0 * y, True),
    "types": (lambda x: jnp.int32(x), lambda x: jnp.int8(x), False),
    "operands": (lambda x: x - jnp.sin(x), lambda x: jnp.sin(x) - x, False),
    "parameters": (lambda x: x.reshape(4, 4), lambda x: x.reshape(8, 2), False),
    "large arrays": (lambda x: x[0, 0] * ONES, lambda x: x[0, 0] * np.r_[ONES[1:], np.float32(2)], False),
    "order of results": (lambda x: (x, 2.0 * x), lambda x: (2.0 * x, x), False),
    "rates": (with_rule(1.0, 2.0), with_rule(1.0, 3.0), True),
    "rules": (with_rule(1.0, 2.0), with_rule(0.5, 2.0), False),
}


@pytest.mark.parametrize("name", TWO_PARTS)
def test_parts_are_of_one_kind_if_they_differ_in_numbers_alone(name):
    *functions, same = TWO_PARTS[name]
    kinds, parts = Kinds(), []
    for function in functions:
        flat = flatten(jax.make_jaxpr(function)(X), calls=PLAIN_CALLS)
        parts.append(kinds.part(flat, flat.equations, flat.arguments, flat.results))
    assert (parts[0].kind == parts[1].kind) is same
