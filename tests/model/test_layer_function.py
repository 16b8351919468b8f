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
from jpipe.model.random_keys import init_key

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
    "first of a list": ([ActNorm(), nn.Dense(4)], "layer 0 (ActNorm) makes variables['params']['bias']"),
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


class Narrower(nn.Module):
    """Gives other shapes in evaluation."""

    @nn.compact
    def __call__(self, x, train=True):
        y = nn.Dense(4)(x)
        return y if train else y[:, :2]


def test_shapes_that_differ_in_evaluation_are_an_error():
    pipe = pipeline([Narrower(), nn.Dense(3)])
    variables = pipe.init(jax.random.key(0), ROWS)
    with pytest.raises(ValueError, match=r"gives float32\[4,2\] in evaluation, not float32\[4,4\] as it was traced"):
        pipe.evaluate(variables, ROWS)


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
