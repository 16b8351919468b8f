"""Running averages: the rate that a layer's code implies, and moments of a mini-batch out of micro-batches."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jpipe
from jpipe.layers.adapt import as_layers
from jpipe.model.layer_function import LayerFunction
from jpipe.model.random_keys import key_shape
from jpipe.model.remat import as_remat
from jpipe.model.running_averages import RunningAverages, find_rates, mean_variance_pairs
from jpipe.model.trace import trace_model

X = jax.ShapeDtypeStruct((4, 3), jnp.float32)


class InScan(nn.Module):
    """Two layers with statistics of their own in `nn.scan`, under `nn.remat`."""

    @nn.compact
    def __call__(self, x, train: bool):
        class Cell(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return nn.BatchNorm(not train, momentum=0.75)(nn.Dense(3)(x)), None

        cells = nn.scan(
            nn.remat(Cell, prevent_cse=False),
            variable_axes={"params": 0, "batch_stats": 0},
            split_rngs={"params": True},
            length=2,
        )
        return cells()(x, None)[0]


LAYERS = {
    "linen": (nn.BatchNorm(momentum=0.9), 0.1),
    "nnx": (lambda rngs: nnx.BatchNorm(3, momentum=0.8, rngs=rngs), 0.2),
    "scan": (InScan(), 0.25),
    "frozen": (nn.BatchNorm(momentum=1.0), 0.0),
}


@pytest.mark.parametrize("name", LAYERS)
def test_rates(name):
    layer, rate = LAYERS[name]
    model = trace_model(as_layers([layer, nn.relu]), lambda batch: batch, X)
    function = LayerFunction(model.groups[0], key_shape(), as_remat("layer"), X)
    pairs = mean_variance_pairs(jax.tree_util.tree_leaves_with_path(model.groups[0].variables["batch_stats"]))
    (found,) = find_rates(function, [mean for mean, _ in pairs])
    np.testing.assert_allclose(found, rate, atol=1e-6)
    traced = jax.jit(lambda: jnp.asarray(find_rates(function, [pairs[0][0]])[0]))
    np.testing.assert_allclose(traced(), rate, atol=1e-6)


class Moving(nn.Module):
    """Running averages that move at a rate of `how`."""

    how: str

    @nn.compact
    def __call__(self, x, train: bool):
        mean = self.variable("batch_stats", "mean", lambda: jnp.zeros(3))
        var = self.variable("batch_stats", "var", lambda: jnp.ones(3))
        count = self.variable("batch_stats", "count", lambda: jnp.ones(()))
        raw = self.param("rate", nn.initializers.ones, ())
        if train:
            rate = {
                "count": 1 / (count.value + 1),
                "parameter": jax.lax.stop_gradient(nn.sigmoid(raw)),
                "inputs": jnp.where(jnp.sum(jnp.abs(x)) > 0, 0.5, 0.0),
            }[self.how]
            mean.value += rate * (x.mean(0) - mean.value)
            var.value += rate * (x.var(0) - var.value)
            count.value += 1
        return x - mean.value


@pytest.mark.parametrize("how", ["count", "parameter", "inputs"])
def test_a_rate_that_is_no_number_of_the_code_is_refused(how):
    """A regression: it was taken as what it is where everything is zero, and variances were silently off."""
    options = {"num_stages": 2, "num_microbatches": 2, "balance": "even"}
    pipe = jpipe.Pipeline([Moving(how), nn.Dense(2)], lambda y, _: jnp.mean(y), **options)
    batch = np.ones((8, 3), np.float32)
    variables = pipe.init(jax.random.key(0), batch)
    with pytest.raises(ValueError, match=r"layer 0 \(Moving\) keeps a running mean .* pass merge="):
        pipe.value_and_grad(variables, batch)
    pipe = jpipe.Pipeline(
        [Moving(how), nn.Dense(2)], lambda y, _: jnp.mean(y), merge={"batch_stats": "mean"}, **options
    )
    jax.eval_shape(pipe.value_and_grad, variables, batch)


class Frozen(nn.Module):
    """BatchNorm on its running averages, and behind it what has no derivative."""

    @nn.compact
    def __call__(self, x):
        y = nn.BatchNorm(use_running_average=True)(x)
        shape = jax.ShapeDtypeStruct(y.shape, y.dtype)
        return y + jax.pure_callback(np.sign, shape, jax.lax.stop_gradient(y), vmap_method="sequential")


def test_what_a_layer_does_besides_needs_no_derivative():
    """A regression: the whole layer was differentiated, its stopped gradients too."""
    model = trace_model(as_layers([Frozen(), nn.relu]), lambda batch: batch, X)
    function = LayerFunction(model.groups[0], key_shape(), as_remat("layer"), X)
    (rate,) = find_rates(function, [0])
    np.testing.assert_array_equal(rate, np.zeros(3))


def test_pairs_lie_side_by_side():
    tree = {"a": {"mean": X, "var": X}, "b": {"mean": X}, "var": X, "c": {"mean": X, "var": jnp.zeros(2)}}
    paths_and_leaves = jax.tree_util.tree_leaves_with_path(tree)
    (pair,) = mean_variance_pairs(paths_and_leaves)
    assert [jax.tree_util.keystr(paths_and_leaves[i][0]) for i in pair] == ["['a']['mean']", "['a']['var']"]


@pytest.mark.parametrize("rates", [[0.1, 0.1], [0.5, 0.0]], ids=["one rate", "a rate a feature"])
def test_moments_of_a_mini_batch(rates):
    """Three micro-batches, each moving averages from the same start, are as one step with all examples."""
    rate, rng = np.asarray(rates, np.float32), np.random.default_rng(0)
    x = (rng.standard_normal((3, 5, 2)) + np.arange(3)[:, None, None]).astype(np.float32)
    old = [rng.standard_normal(2).astype(np.float32), rng.uniform(1, 2, 2).astype(np.float32)]
    averages = RunningAverages(((0, 1),), (rate,), ((),))
    moved = lambda a, to: a + rate * (to - a)
    micro = [[moved(old[0], part.mean(0)), moved(old[1], part.var(0))] for part in x]
    total = [sum(leaves) / 3 for leaves in zip(*[averages.spread(old, new, 1) for new in micro], strict=True)]
    mean, variance = averages.spread(old, total, -1)
    whole = x.reshape(-1, 2)
    np.testing.assert_allclose(mean, moved(old[0], whole.mean(0)), rtol=1e-5)
    np.testing.assert_allclose(variance, moved(old[1], whole.var(0)), rtol=1e-5)
