"""One layer as a function of leaves: what it is called with, what it gives, and how both lie."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpipe
from cases import assert_close, compilations
from jpipe.layers.adapt import as_layers
from jpipe.model.layer_function import LayerArguments, LayerFunction
from jpipe.model.loss import trace_loss
from jpipe.model.random_keys import init_key, key_shape
from jpipe.model.remat import as_remat
from jpipe.model.trace import trace_model
from jpipe.partitioner.splits import WHOLE

X = jax.ShapeDtypeStruct((2, 4), jnp.float32)
BATCH = {"inputs": X, "scale": jax.ShapeDtypeStruct((2,), jnp.float32)}


class Normed(nn.Module):
    """Has parameters and a batch statistic; `wrong` gives other shapes in evaluation."""

    wrong: bool = False

    @nn.compact
    def __call__(self, x, train=True):
        y = nn.BatchNorm(use_running_average=not train)(x)
        return y if train or not self.wrong else y[:, :2]


def loss_fn(outputs, batch):
    return jnp.sum(outputs * batch["scale"][:, None]), jnp.float32(3), {"largest": jnp.max(outputs)}


def functions_of(*layers, train=True):
    model = trace_model(as_layers([lambda x: x, *layers]), lambda batch: batch["inputs"], BATCH)
    traced = trace_loss(loss_fn, model.groups[-1].gives, BATCH)
    loss = lambda g: traced if g == model.last else None
    key = key_shape() if train else None
    return [LayerFunction(group, key, as_remat("none"), BATCH, loss(g)) for g, group in enumerate(model.groups)]


def test_arguments_hold_what_a_layer_looks_at():
    first, normed, last = functions_of(Normed(), nn.Dense(3))
    assert [leaf.shape for leaf in normed.arguments.params] == [(4,), (4,)]
    assert [leaf.shape for leaf in normed.arguments.state] == [(4,), (4,)]
    assert normed.arguments.batch is None
    assert first.arguments.batch == last.arguments.batch == BATCH
    assert normed.train and not functions_of(Normed(), nn.Dense(3), train=False)[1].train


def test_training_gives_new_state_and_evaluation_none():
    x = [jnp.arange(8.0).reshape(2, 4)]
    for train, count in [(True, 2), (False, 0)]:
        function = functions_of(Normed(), nn.Dense(3), train=train)[1]
        arguments = LayerArguments([jnp.zeros(4), jnp.ones(4)], [jnp.zeros(4), jnp.ones(4)], [], None, None)
        results = jax.eval_shape(lambda x, f=function, a=arguments: f.forward(a._replace(key=None), x), x)
        assert len(results.state) == count
        assert [leaf.shape for leaf in results.outputs] == [(2, 4)]


def test_the_loss_follows_the_last_layer():
    last = functions_of(lambda x: x * 2)[-1]
    x, batch = jnp.arange(8.0).reshape(2, 4), {"inputs": None, "scale": jnp.asarray([1.0, 10.0])}
    loss, largest, count = last.forward(LayerArguments([], [], [], None, batch), [x]).outputs
    np.testing.assert_allclose([loss, largest, count], [2 * (6 + 220) / 3, 14, 1], rtol=1e-6)
    assert last.differentiated([loss, largest, count]) == [loss]


def test_only_floating_point_outputs_are_differentiated():
    both = functions_of(lambda x: (x, x > 0), lambda x, positive: jnp.where(positive, x, 0))[1]
    y, positive = both.forward(LayerArguments([], [], [], None, None), [jnp.ones((2, 4))]).outputs
    assert both.differentiated([y, positive]) == [y]
    shardings = both.shardings(WHOLE)
    assert (len(shardings.outputs or ()), len(shardings.cotangents), len(shardings.gradients)) == (2, 1, 1)


def test_shapes_that_differ_in_evaluation_are_an_error():
    function = functions_of(Normed(wrong=True), nn.Dense(3), train=False)[1]
    arguments = LayerArguments(*[[np.zeros(4, np.float32)] * 2] * 2, [], None, None)
    with pytest.raises(ValueError, match=r"gives float32\[2,2\] in evaluation, not float32\[2,4\] as it was traced"):
        function.forward(arguments, [jnp.ones((2, 4))])


# --- initial values ---------------------------------------------------------------------------------------------------


class ActNorm(nn.Module):
    """Glow's: its bias and scale are those that normalise the first batch."""

    @nn.compact
    def __call__(self, x):
        bias = self.param("bias", lambda key: -jnp.mean(x, 0))
        scale = self.param("scale", lambda key: 1 / (jnp.std(x, 0) + 1e-6))
        return (x + bias) * scale


class Flow(nn.Module):
    """Blocks one after the other, or as a scan."""

    scans: bool = False

    @nn.compact
    def __call__(self, x):
        class Block(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return jnp.tanh(nn.Dense(4)(ActNorm()(x))), None

        if self.scans:
            return nn.Dense(4)(nn.scan(Block, {"params": 0}, split_rngs={"params": True}, length=3)()(x, None)[0])
        for _ in range(3):
            x, _ = Block()(x, None)
        return x


class WithState(nn.Module):
    """State that begins as a mean of what the layer sees."""

    @nn.compact
    def __call__(self, x):
        self.variable("seen", "mean", lambda: jnp.mean(x))
        return x


def read_scale(key, x, side):
    return jnp.mean(side) * jnp.ones(4)


FROM_VALUES = {
    "one module": (Flow(), "Flow makes variables['params']['Block_0']['ActNorm_0']['bias']"),
    "scan": (Flow(scans=True), "Flow makes variables['params']['ScanBlock_0']['ActNorm_0']['bias']"),
    "frozen": (jpipe.freeze(Flow(), lambda path: "scale" in path), "Flow makes variables['frozen']['Block_0']"),
    "first of a list": ([ActNorm(), nn.Dense(4)], "layer 0 (ActNorm) makes variables['params']['bias']"),
    "later in a list": ([nn.Dense(4), nn.Dense(4), ActNorm()], "layer 2 (ActNorm) makes variables['params']['bias']"),
    "Layer": ([nn.Dense(4), jpipe.Layer(lambda key, x: x.std(0), lambda p, x: x * p, name="own")], "layer 1 (own)"),
    "side input": (
        [nn.Dense(4), jpipe.reads(jpipe.Layer(read_scale, lambda p, x, side: x * p), lambda batch: batch["scale"])],
        "layer 1 (Layer) makes variables['params'] of the values of its inputs",
    ),
    "state": ([nn.Dense(4), WithState()], "layer 1 (WithState) makes variables['seen']['mean']"),
}
ROWS = {
    "inputs": np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32) * 3 + 1,
    "scale": np.ones(8, np.float32),
}


def pipeline(layers, **options):
    options = {"num_stages": 2, "num_microbatches": 2, "balance": "even"} | options
    return jpipe.Pipeline(layers, lambda y, _: jnp.mean(jnp.square(y)), **options)


@pytest.mark.parametrize("name", FROM_VALUES)
def test_initial_values_that_follow_from_the_batch_are_refused(name):
    """A regression: they were made of a batch of zeros, a scale of 1e6 for 0.3, without a word."""
    layers, fault = FROM_VALUES[name]
    pipe, key = pipeline(layers), jax.random.key(0)
    shapes = pipe.abstract_state(ROWS, optax.sgd(0.1))  # planning needs no values
    assert jax.tree.leaves(shapes.variables)
    with compilations() as count, pytest.raises(ValueError, match=re.escape(fault)):
        jax.eval_shape(pipe.init, key, ROWS)
    assert count() == 0
    for make in (pipe.init, lambda *given: pipe.create_state(*given, optax.sgd(0.1))):
        with pytest.raises(ValueError, match=re.escape(fault)):
            make(key, ROWS)


class Largest(nn.Module):
    """State that each step overwrites and nobody reads, written as the layer is initialised too."""

    @nn.compact
    def __call__(self, x):
        kept = self.variable("stats", "largest", jnp.zeros, ())
        if self.is_mutable_collection("stats"):
            kept.value = jnp.abs(x).max()
        return x


def test_initial_values_that_nobody_reads():
    pipe = pipeline([Largest(), nn.Dense(4)], merge={"stats": "last"})
    variables = pipe.init(jax.random.key(0), ROWS)
    updates = pipe.value_and_grad(variables, ROWS)[0][1]
    found = pipe.layer_variables({**variables, **updates})[0]["stats"]["largest"]
    assert_close(found, np.abs(ROWS["inputs"][4:]).max(), "the last micro-batch's")


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1, 1),))


class ByShapes(nn.Module):
    """A forward of all sorts, also as it initialises, and variables that follow from shapes alone."""

    @nn.compact
    def __call__(self, x, train: bool = False):
        class Cell(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return clipped(nn.Dense(4)(nn.LayerNorm()(x))), None

        self.variable("seen", "like", lambda: jnp.zeros_like(x[0]))
        place = self.param("place", lambda key: jax.random.normal(key, x.shape[1:]) / x.shape[-1])
        jax.debug.print("the largest is {}", jnp.max(x))
        cells = nn.scan(nn.remat(Cell, prevent_cse=False), {"params": 0}, split_rngs={"params": True}, length=2)
        x = jax.lax.cond(jnp.sum(x) > 0, lambda x: x, lambda x: 2 * x, cells()(x + place, None)[0])
        x = nn.BatchNorm(use_running_average=not train)(x)
        return nn.SpectralNorm(nn.Dense(4))(x, update_stats=False)


@pytest.mark.filterwarnings("ignore:.*look.* at several examples")
@pytest.mark.parametrize("is_list", [False, True])
def test_initial_values_that_follow_from_shapes(is_list):
    """They are those of `module.init`, whatever its forward computes besides; of a list under each layer's key."""
    pipe, key, x = pipeline([ByShapes(), nn.Dense(4)] if is_list else Behind()), jax.random.key(0), ROWS["inputs"]
    variables = pipe.init(key, ROWS)
    if is_list:
        found, key, module = pipe.layer_variables(variables)[0], init_key(key, 0, of_model=False), ByShapes()
    else:
        found, module = pipe.model_variables(variables), Behind()
    rngs = {"params": key, "dropout": jax.random.fold_in(key, 1)}
    assert_close(jax.device_get(found), jax.device_get(jax.jit(module.init)(rngs, x)), "variables")


class Behind(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = False):
        return nn.Dense(4)(jnp.tanh(nn.Dense(4)(ByShapes()(x, train))))
