"""NNX modules as layers, ready or made by factories."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jpipe
from cases import assert_close, assert_equal
from jpipe.layers.adapt import as_layers
from jpipe.layers.base import Context, is_same

X = np.ones((2, 4), np.float32)


@pytest.mark.parametrize("make", [lambda rngs: nnx.Linear(4, 3, rngs=rngs), functools.partial(nnx.Linear, 4, 3)])
def test_nnx_item_is_a_pure_dict(key, make):
    """A regression: a partial of a class, which is a factory, was called with the activations."""
    (layer,) = as_layers([make])
    assert layer.name == "Linear"
    variables = layer.init((X,), Context(key, False))
    module = nnx.Linear(4, 3, rngs=nnx.Rngs(key))
    assert_equal(variables, {"params": {"kernel": module.kernel[...], "bias": module.bias[...]}})
    assert_close(layer.bind(variables)(X), module(X))
    assert_close(layer.apply(variables, (X,), Context(None, True))[0], module(X))
    assert layer.ready is None


def test_ready_nnx_module_keeps_its_values(key):
    module = nnx.Linear(4, 3, rngs=nnx.Rngs(7))
    (layer,) = as_layers([module])
    assert_equal(layer.ready, {"params": {"kernel": module.kernel[...], "bias": module.bias[...]}})
    assert_equal(layer.init((X,), Context(key, False)), layer.ready)


def test_the_users_nnx_module_is_not_changed():
    module = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
    (layer,) = as_layers([module])
    before = np.asarray(module.mean[...])
    _, updates = layer.apply(layer.ready, (3 * X,), Context(None, True))
    assert not np.array_equal(updates["batch_stats"]["mean"], before)
    assert_equal(np.asarray(module.mean[...]), before)
    assert module.use_running_average is False


def test_two_nnx_streams_of_one_layer_differ(key):
    class Two(nnx.Module):
        def __init__(self, rngs):
            self.first, self.second = nnx.Dropout(0.5, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.first(x), self.second(x)

    (layer,) = as_layers([lambda rngs: Two(rngs)])
    (a, b), _ = layer.apply({}, (np.ones((20, 20), np.float32),), Context(key, True))
    assert not np.array_equal(a, b)


def test_parameters_of_types_of_their_own_are_parameters():
    """A regression: LoRA's were state, and never trained."""

    def make(rngs):
        return nnx.LoRA(4, 2, 4, base_module=nnx.Linear(4, 4, rngs=rngs), rngs=rngs)

    (layer,) = as_layers([make])
    variables = layer.init((jnp.ones((1, 4), jnp.float32),), Context(jax.random.key(0), False))
    assert set(variables) == {"params"}
    assert set(variables["params"]) == {"base_module", "lora_a", "lora_b"}
    outputs, _ = layer.apply(variables, (jnp.ones((1, 4), jnp.float32),), Context(None, True))
    expected = make(nnx.Rngs(jax.random.key(0)))(jnp.ones((1, 4), jnp.float32))
    np.testing.assert_allclose(outputs, expected, rtol=1e-6)


class Masked(nnx.Module):
    """Holds arrays that are no Variables, as masks and rotary tables are."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.mask = jnp.tril(jnp.ones((4, 4), jnp.float32))
        self.order = np.asarray([3, 2, 1, 0])
        self.tables = nnx.data((jnp.full(4, -jnp.inf), {"random": jax.random.normal(rngs.params(), (4,))}))

    def __call__(self, x):
        x = jnp.where(self.mask[0] > 0, self.linear(x) @ self.mask, 1.0)[:, self.order]
        return x * jnp.exp(self.tables[0]) + self.tables[1]["random"] * x


@pytest.mark.parametrize("ready", [False, True])
def test_arrays_in_nnx_modules(ready):
    """A regression: `init` of a factory passed, then UnexpectedTracerError; a ready module was refused."""
    modules = [Masked(nnx.Rngs(seed)) for seed in range(2)]
    layers = modules if ready else [lambda rngs: Masked(rngs) for _ in range(2)]
    pipe = jpipe.Pipeline(layers, lambda y, _: jnp.mean(y), num_stages=2, num_microbatches=2, balance="even")
    assert is_same(as_layers(layers)[0], as_layers(layers)[1])
    variables = pipe.init(jax.random.key(0), X)
    trees = pipe.layer_variables(variables)
    assert_equal(trees[1]["arrays"]["mask"], jnp.tril(jnp.ones((4, 4), jnp.float32)))
    assert not np.array_equal(*(tree["arrays"]["tables"][1]["random"] for tree in trees))
    (loss, updates), grads = pipe.value_and_grad(variables, X)
    assert_equal(updates["arrays"], variables["arrays"], "what isn't written stays")
    x = X
    for module in pipe.modules(variables):
        x = module(x)
    assert_close(pipe.apply(variables, X), x)
    assert_close(loss, jnp.mean(x))
    assert set(grads) == set(variables["params"])
    assert_equal(pipe.from_layer_variables(trees), variables)
    if ready:
        assert_equal(trees[1]["arrays"]["tables"][1]["random"], modules[1].tables[1]["random"])


def test_an_array_out_of_sight_in_an_nnx_factory():
    """A regression: an UnexpectedTracerError in the first step."""

    class Hidden(nnx.Module):
        def __init__(self, rngs):
            mask = jnp.ones(4)
            self.linear, self.function = nnx.Linear(4, 4, rngs=rngs), lambda x: x * mask

        def __call__(self, x):
            return self.function(self.linear(x))

    with pytest.raises(TypeError, match=r"layers\[0\] keeps an array where nnx doesn't see it"):
        as_layers([lambda rngs: Hidden(rngs)])


# --- recurrent modules ------------------------------------------------------------------------------------------------


class Recurrent(nnx.Module):
    def __init__(self, rngs, kind="gru", carry_init=None, given=False):
        floats = {"param_dtype": jnp.float64, "rngs": rngs}
        rnn = lambda cell: nnx.RNN(cell(4, 4, carry_init=carry_init, **floats))
        self.kind, self.given = kind, given
        self.before, self.after = nnx.Linear(4, 4, **floats), nnx.Linear(8 if kind == "both ways" else 4, 4, **floats)
        if kind == "both ways":
            self.rnn = nnx.Bidirectional(rnn(nnx.LSTMCell), rnn(nnx.GRUCell), rngs=rngs)
        elif kind == "stack":
            self.rnn = nnx.Sequential(rnn(nnx.OptimizedLSTMCell), rnn(nnx.LSTMCell))
        else:
            self.rnn = rnn(nnx.GRUCell)

    def __call__(self, x):
        given = {"initial_carry": jnp.ones((len(x), 4))} if self.given else {}
        return self.after(self.rnn(self.before(x), **given))


TIMES = np.random.default_rng(0).normal(size=(4, 3, 4))


@pytest.mark.parametrize(
    ("kind", "as_list"), [("gru", False), ("both ways", True), pytest.param("stack", False, marks=pytest.mark.slow)]
)
def test_recurrent_modules_draw_nothing(kind, as_list):
    """They were refused: an `nnx.RNN` draws a key for the zeros that it starts from, also in evaluation."""
    with jax.enable_x64(True):
        module = Recurrent(nnx.Rngs(0), kind)
        layers = [module, nnx.Linear(4, 4, param_dtype=jnp.float64, rngs=nnx.Rngs(1))] if as_list else module
        pipe = jpipe.Pipeline(layers, lambda y, _: jnp.mean(y**2), num_stages=2, num_microbatches=2)
        variables = pipe.init(jax.random.key(0), TIMES)
        modules = nnx.List(layers if as_list else [layers])

        def plain(modules):
            x = TIMES
            for module in modules:
                x = module(x)
            return x

        modules.eval()
        assert_close(pipe.apply(variables, TIMES), plain(modules))
        modules.train()
        expected, gradients = nnx.value_and_grad(lambda modules: jnp.mean(plain(modules) ** 2))(modules)
        (loss, _), grads = pipe.value_and_grad(variables, TIMES)
        assert_close(loss, expected)
        found = pipe.layer_variables({"params": grads}) if as_list else [pipe.model_variables({"params": grads})]
        for i, own in enumerate(found):
            assert_close(own["params"], nnx.to_pure_dict(gradients)[i])


@pytest.mark.filterwarnings("ignore:carry_init is provided")
def test_a_recurrent_module_that_draws_what_it_starts_from():
    normal, text = nnx.initializers.normal(), "or hand it what it would draw, such as the initial_carry of an nnx.RNN"
    make = lambda given: lambda rngs: Recurrent(rngs, carry_init=normal, given=given)
    with jax.enable_x64(True):
        for layers in (make(False), [make(False), lambda x: x]):
            pipe = jpipe.Pipeline(layers, lambda y, _: jnp.mean(y**2), num_stages=2, num_microbatches=2)
            with pytest.raises(ValueError, match=text):
                pipe.apply(pipe.init(jax.random.key(0), TIMES), TIMES)
        pipe = jpipe.Pipeline(make(True), lambda y, _: jnp.mean(y**2), num_stages=2, num_microbatches=2)
        pipe.apply(pipe.init(jax.random.key(0), TIMES), TIMES)
