"""Costs of layers, by which stages are balanced."""

import warnings
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import jpipe
import jpipe.planning.costs as costs_module
import small_pipeline
from jpipe.model.random_keys import key_shape
from jpipe.planning.costs import unsplit_in
from jpipe.processes.progress import warn_once

BATCH = np.ones((8, 16), np.float32)


def costs(layers, balance):
    pipe = small_pipeline.make(layers, lambda y, _: jnp.mean(y), balance=balance)
    jax.eval_shape(pipe.init, jax.random.key(0), BATCH)
    return pipe.partition


def product(w, x):
    """Recomputed by "layer" too, since its derivative needs the result."""
    return jnp.sin(x @ w)


def test_size_is_bytes_of_what_training_holds():
    """Four copies of the parameters; the layer's input, which waits for the backward; the first one's is the batch."""
    found = costs([nn.Dense(8), nn.Dense(4, use_bias=False)], "size").layer_costs
    assert found == (4 * (16 * 8 + 8) * 4, (4 * 8 * 4 + 4 * 8) * 4)


class Clock:
    """A clock that stands still but for what is added to it, so that times are exact on any machine."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    def layer(self, forward, inputs, weights):
        """A layer `[b, 16] -> [b, 16]` that takes so many seconds forward, and backward for each kind of gradient."""

        def after(seconds, x):
            def pass_on(x):
                self.now += seconds
                return x

            return jax.pure_callback(pass_on, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

        @jax.custom_vjp
        def run(w, x):
            return after(forward, x * w)

        def run_forward(w, x):
            return run(w, x), (w, x)

        def run_backward(kept, g):
            w, x = kept
            return jnp.sum(after(weights, g * x)), after(inputs, g * w)

        run.defvjp(run_forward, run_backward)
        return jpipe.Layer(lambda key, x: jnp.ones((), x.dtype), run)


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(costs_module, "time", found)
    return found


@pytest.mark.parametrize(("remat", "again", "traced"), [("none", 0, False), ("stage", 1, True)])
def test_time_is_what_a_clock_shows(clock, remat, again, traced):
    """Measured, not traced, whoever calls; the backward is the input's gradient and the weights'."""
    short, long = clock.layer(1, 2, 4), clock.layer(2, 8, 9)
    layers = [lambda x: x, short, short, long, short]
    pipe = small_pipeline.make(layers, lambda y, _: jnp.mean(y), balance="time", remat=remat)
    if traced:
        jax.eval_shape(pipe.init, jax.random.key(0), BATCH)
    else:
        pipe.init(jax.random.key(0), BATCH)
    found = [(cost.forward, cost.backward) for cost in pipe.planner.known_plan().costs]
    assert found == [(0, 0), *[(1, 2 + 4 + again)] * 2, (2, 8 + 9 + 2 * again), (1, 2 + 4 + again)]
    assert pipe.partition.layer_costs == tuple(map(sum, found))
    assert pipe.partition.cuts == (3,), "the long layer is on the second stage"


def test_a_heavy_head_gets_a_stage_of_its_own_and_a_warning():
    layers = [nn.Dense(16), nn.Dense(16), nn.Dense(16), nn.Dense(4096)]
    with pytest.warns(UserWarning, match=r"3 \(Dense\) alone takes \d+% of the model's cost, more than the share"):
        assert costs(layers, "flops").cuts == (3,)
    with pytest.warns(UserWarning, match=r"layer 0 .* alone takes 60% .* 2 stages \(50%\).* 1\.20 times the mean"):
        costs(layers, [6.0, 1.0, 1.0, 2.0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        costs(layers, [1, 3])  # the user's own decision
        costs(layers, [1.0, 1.0, 1.0, 3.0])
        for balance in ("flops", "size"):  # a model that takes next to nothing: every toy model was warned of
            costs([nn.Dense(2), nn.Dense(2), nn.Dense(2), nn.Dense(32)], balance)


def test_time_needs_a_device_like_those_of_the_mesh():
    """A layer was measured on whatever device was there, a CPU for a mesh of TPUs."""
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("stage",))
    assert costs_module._device_like(mesh) is jax.devices()[0]
    absent = SimpleNamespace(platform="tpu", device_kind="TPU v5 lite", id=0, process_index=0)  # of a topology
    with pytest.raises(ValueError, match=r'balance="time" measures on .*no TPU v5 lite is present here; use'):
        costs_module._device_like(SimpleNamespace(devices=np.asarray([absent])))


@pytest.mark.parametrize(("remat", "again"), [("none", 0), ("layer", 1), ("full", 2)])
def test_a_cost_is_kept_in_its_parts(remat, again):
    """One product forward; one for the input and one for the weights backward, and what remat computes again."""
    layers = [lambda x: x, *[jpipe.Layer(lambda key, x: jnp.ones((16, 16), x.dtype), product)] * 3, nn.relu]
    pipe = jpipe.Pipeline(layers, lambda y, _: jnp.mean(y), num_stages=2, num_microbatches=2, remat=remat)
    jax.eval_shape(pipe.init, jax.random.key(0), BATCH)
    found, size = pipe.planner.known_plan().costs[2], 2 * 4 * 16 * 16
    parts = found.forward, found.backward
    for part, products in zip(parts, (1, 2 + again), strict=True):
        assert products * size <= part < products * size + 0.15 * size * (1 + again)
    assert found.total == sum(parts) == pipe.partition.layer_costs[2] == pipe.partition.layer_costs[1]
    residuals = 2 if remat in ("none", "stage") else 1
    assert found.size == 4 * (16 * 16 * 4) + residuals * 4 * 16 * 4


def windows(x):
    x = jax.lax.with_sharding_constraint(x, PartitionSpec(None, "model"))
    kernel = jnp.ones((3, 1, 1), x.dtype)
    return jax.lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC"))


def test_a_small_layer_of_a_large_model_is_no_warning(make_mesh):
    """Half of a convolution is done whole: forward; backward its cotangent is whole anyway, and takes as much.

    It does 6 operations an element, where another layer does 6 * 2048 of each.
    """
    mesh = make_mesh((2, 2), ("stage", "model"))
    batch, loss = np.ones((8, 65536, 1), np.float32), lambda y, _: jnp.mean(jnp.square(y))
    weights = jnp.ones((2048, 2048), jnp.float32)

    def product(x):
        return (x.reshape(x.shape[0], -1, 2048) @ weights).reshape(x.shape)

    for layers, warns in (([jnp.tanh, windows, product], False), ([jnp.tanh, windows, jnp.tanh], True)):
        planner = small_pipeline.make(layers, loss, mesh=mesh).planner
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            warn_once.cache_clear()
            planner.plan_for(batch)
            micro = planner.for_training(batch)
            traced, on_device = planner.layers(micro, key_shape()), planner.training_step(micro).layers
        found = unsplit_in(traced[1], on_device[1])
        ((operation, line),) = found
        assert (operation, line.split(":")[0]) == ("conv_general_dilated", "test_costs.py")
        assert sum(found.values()) == pytest.approx(0.5, abs=0.01)
        assert ["has to see whole arrays" in str(warning.message) for warning in given] == [True] * warns
