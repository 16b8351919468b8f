"""What users do with a pipeline: initialise, train, evaluate, take the variables out and put them back."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state
from hypothesis import given, settings
from hypothesis import strategies as st

import collectives
import jpipe
from any_schedule import schedules
from cases import (
    assert_close,
    assert_equal,
    check_step,
    compilations,
    model,
    pipeline,
    run_layers,
)
from sequential import init_key, layer_key
from small_pipeline import make as small

KEY = 7


# --- training steps ---------------------------------------------------------------------------------------------------


def data(size=8, seed=0):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal((size, 4)).astype(np.float32) for name in ("inputs", "targets")}


def test_train_step():
    pipe, batch = small(), data()
    state = pipe.create_state(jax.random.key(KEY), batch, optax.sgd(0.1))
    assert int(state.step) == 0
    (loss, updates), grads = pipe.value_and_grad(state.variables, batch)
    assert updates == {}
    expected = jax.device_get(jax.tree.map(lambda p, g: p - 0.1 * g, state.variables["params"], grads))
    donated = jax.tree.leaves(state.variables)

    state, metrics = pipe.train_step(state, batch)
    assert all(leaf.is_deleted() for leaf in donated), "the old state's memory is used again"
    assert int(state.step) == 1
    assert set(metrics) >= {"loss", "grad_norm"}
    assert_close(metrics["loss"], loss, "loss")
    assert_close(metrics["grad_norm"], optax.tree.norm(grads), "gradient norm")
    assert_close(jax.device_get(state.variables["params"]), expected, "parameters")

    with compilations() as count:
        state, _ = pipe.train_step(state, data(seed=1))
        assert count() == 0, "the second step compiled something"
    with compilations() as count:
        state, metrics = pipe.train_step(state, data(12))
        assert count() > 0
    assert int(state.step) == 3
    trees = pipe.layer_variables(state.variables)
    _, again = pipe.train_step(state, data(12))
    truth = jnp.mean(jnp.square(run_layers([nn.Dense(4)] * 4, trees, data(12)["inputs"]) - data(12)["targets"]))
    assert_close(again["loss"], truth, "loss of a batch of another size")


def test_in_ones_own_jitted_step_with_a_flax_train_state():
    pipe, batch, tx = small(), data(), optax.sgd(0.1)
    variables = pipe.init(jax.random.key(KEY), batch)
    expected = pipe.create_state(jax.random.key(KEY), batch, tx)
    state = train_state.TrainState.create(apply_fn=pipe.apply, params=variables["params"], tx=tx)

    @jax.jit
    def step(state, batch):
        (loss, _), grads = pipe.value_and_grad({"params": state.params}, batch)
        return state.apply_gradients(grads=grads), loss, state.apply_fn({"params": state.params}, batch)

    for seed in range(2):
        state, loss, outputs = step(state, data(seed=seed))
        expected, metrics = pipe.train_step(expected, data(seed=seed))
        assert_close(loss, metrics["loss"], "loss")
        assert outputs.shape == (8, 4)
    assert int(state.step) == 2
    assert_close(state.params, expected.variables["params"], "parameters")


# --- variables --------------------------------------------------------------------------------------------------------


def test_variables_travel_between_pipelines_and_into_modules(x64):
    truth = model("mixed")
    pipes = [pipeline(truth, "gpipe", 1, 1), pipeline(truth, "interleaved", 2, 4, 3), pipeline(truth, "1f1b", 4, 3)]
    trees = truth.trees
    for pipe in pipes:
        variables = pipe.from_layer_variables(trees, truth.batch)
        trees = pipe.layer_variables(variables)
        assert_equal(trees, truth.trees, "variables")
        assert_equal(pipe.from_layer_variables(trees), variables)
    x = truth.batch["inputs"]
    for module in pipe.modules(variables):
        x = module(*x) if type(x) is tuple else module(x)
    assert_close(x, truth.truth[1], "outputs")


def test_layers_take_weights_of_another_dtype_if_all_have_it(x64):
    bare = jpipe.Layer(lambda key, x: {"w": jnp.eye(4, dtype=jnp.float32)}, lambda p, x: jnp.tanh(x @ p["w"]))
    layers = [nn.Dense(4), lambda rngs: nnx.Linear(4, 4, rngs=rngs), bare, nn.Dense(4), nn.Dense(4)]
    pipe, batch = small(layers, num_microbatches=4), jax.tree.map(np.float64, data())
    truth = lambda trees: jnp.mean(jnp.square(run_layers(layers, trees, batch["inputs"]) - batch["targets"]))
    with jax.numpy_dtype_promotion("standard"):
        single = pipe.layer_variables(pipe.init(jax.random.key(KEY), batch))
        trees = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), single)
        with pytest.raises(ValueError, match=r"trees\[1\].* has the dtype float64, not float32 as at init"):
            pipe.from_layer_variables([single[0], *trees[1:]])
        (found, _), grads = pipe.value_and_grad(pipe.from_layer_variables(trees), batch)
    loss, gradients = jax.value_and_grad(truth)(trees)
    assert found.dtype == jnp.float64
    assert_close(found, loss, "loss")
    assert_close(pipe.layer_variables({"params": grads}), gradients, "gradients")


def test_a_dtype_that_layers_do_not_take_changes_nothing():
    """JAX promotes nothing here, and so the error is the layer's."""
    product = jpipe.Layer(lambda key, x: jax.random.normal(key, (4, 4)), lambda w, x: jnp.tanh(x @ w))
    pipe, batch = small([product] * 4), data()
    variables = pipe.init(jax.random.key(KEY), batch)
    trees, loss = pipe.layer_variables(variables), pipe.evaluate(variables, batch)
    with pytest.raises(ValueError, match=r"layer 0 .* raised TypePromotionError"):
        pipe.from_layer_variables([tree.astype(jnp.bfloat16) for tree in trees])
    assert_equal(pipe.from_layer_variables(trees), variables)
    assert pipe.evaluate(variables, batch) == loss


def test_initial_values_do_not_depend_on_the_pipeline(x64):
    truth = model("mixed")
    values = []
    for order, k, m, v in [("1f1b", 4, 3, 1), ("interleaved", 2, 6, 2), ("gpipe", 1, 1, 1)]:
        pipe = pipeline(truth, order, k, m, v)
        values.append(jax.device_get(pipe.layer_variables(pipe.init(jax.random.key(KEY), truth.batch))))
    assert_equal(values[1], values[0])
    assert_equal(values[2], values[0])
    blocks = [tree["params"]["Dense_0"]["kernel"] for tree in values[0][2:5]]
    assert not np.array_equal(blocks[0], blocks[1]), "equal layers start from different values"


def test_initial_values_follow_from_the_key_and_the_layers_place():
    """Equal layers in one loop, and one between them that has nothing to draw, but is counted."""
    layer = jpipe.Layer(lambda key, x: jax.random.normal(key, (4, 4), x.dtype), lambda w, x: x @ w)
    pipe = small([layer, layer, jnp.tanh, layer])
    trees = pipe.layer_variables(pipe.init(jax.random.key(KEY), data()))
    for i in (0, 1, 3):
        assert_equal(trees[i], jax.random.normal(init_key(jax.random.key(KEY), i), (4, 4), jnp.float32))


@pytest.mark.parametrize(
    ("inputs", "wrap"),
    [
        pytest.param(None, lambda x, t: (x, t), marks=pytest.mark.slow),
        (lambda batch: batch["image"], lambda x, t: {"image": x, "label": t}),
        (None, lambda x, t: x),
    ],
)
def test_where_the_inputs_come_from(inputs, wrap):
    loss = lambda y, batch: jnp.mean(y**2)
    pipe = jpipe.Pipeline([nn.Dense(4)] * 2, loss, num_stages=2, num_microbatches=2, balance="even", inputs=inputs)
    x, t = data()["inputs"], data()["targets"]
    variables = pipe.init(jax.random.key(0), wrap(x, t))
    outputs = run_layers([nn.Dense(4)] * 2, pipe.layer_variables(variables), x)
    assert_close(pipe.apply(variables, wrap(x, t)), outputs, "outputs")
    assert_close(pipe.evaluate(variables, wrap(x, t)), jnp.mean(outputs**2), "loss")


# --- training and evaluation mode -------------------------------------------------------------------------------------


class Modes(nn.Module):
    """Adds one in training for each argument that tells it so."""

    @nn.compact
    def __call__(self, x, train, deterministic, use_running_average):
        told = [train, not deterministic, not use_running_average]
        return x + sum(told)


class NnxModes(nnx.Module):
    def __init__(self, rngs):
        self.deterministic = False
        self.use_running_average = False

    def __call__(self, x, train):
        return x + sum([train, not self.deterministic, not self.use_running_average])


def plain_modes(params, x, key, train, deterministic):
    drawn = 0 if key is None else jnp.ceil(jax.random.uniform(key, minval=0.1))
    return x + sum([train, not deterministic]) + drawn


@pytest.mark.parametrize(
    "layer",
    [
        Modes(),
        lambda rngs: NnxModes(rngs),
        jpipe.Layer(lambda key, x: (), plain_modes),
        lambda x, train, training, is_training: x + sum([train, training, is_training]),
    ],
    ids=["linen", "nnx", "plain", "function"],
)
def test_layers_are_told_the_mode(layer):
    loss = lambda y, _: jnp.mean(y)
    pipe = jpipe.Pipeline([layer, lambda x: x], loss, num_stages=2, num_microbatches=2, balance="even")
    batch = np.zeros((4, 2), np.float32)
    variables = pipe.init(jax.random.key(0), batch)
    (loss, _), _ = pipe.value_and_grad(variables, batch, jax.random.key(1))
    assert float(loss) == 3, "training"
    assert float(pipe.evaluate(variables, batch)) == 0, "evaluation"
    assert_equal(pipe.apply(variables, batch), jnp.zeros((4, 2), jnp.float32), "evaluation")
    drawn = isinstance(layer, jpipe.Layer)
    assert float(pipe.evaluate(variables, batch, jax.random.key(1))) == drawn, "evaluation with a key"


class Learned(nn.Module):
    """Learns the scale of its noise, which only training has."""

    noisy: bool = False

    @nn.compact
    def __call__(self, x, train: bool):
        x = jnp.tanh(nn.Dense(4, param_dtype=jnp.float64)(x))
        if train or self.noisy:
            scale = self.param("scale", nn.initializers.ones, (), jnp.float64) if train else 1
            x = x + scale * jax.random.normal(self.make_rng("dropout"), x.shape)
        return x


def test_what_only_training_has_and_draws_in_evaluation(x64):
    """Layers of a list, too; initial values are those of the layer's own `init` in training mode."""
    layers, batch = [Learned(), Learned(), Learned(noisy=True), Learned()], np.random.default_rng(0).normal(size=(8, 4))
    pipe = jpipe.Pipeline(layers, lambda y, _: jnp.mean(y**2), num_stages=2, num_microbatches=4)
    key = jax.random.key(3)
    variables = pipe.init(key, batch)
    trees = jax.device_get(pipe.layer_variables(variables))
    for index, layer in enumerate(layers):
        own = init_key(key, index)
        own = layer.init({"params": own, "dropout": jax.random.fold_in(own, 1)}, batch, train=True)
        assert_close(trees[index], own, f"layer {index}")

    def loss(trees, train):
        losses = []
        for m, x in enumerate(np.split(batch, 4)):
            for index, (layer, tree) in enumerate(zip(layers, trees, strict=True)):
                x = layer.apply(tree, x, train=train, rngs={"dropout": layer_key(key, index, m)})
            losses.append(jnp.mean(x**2))
        return sum(losses) / 4

    (found, _), grads = pipe.value_and_grad(variables, batch, key)
    assert_close((found, pipe.layer_variables({"params": grads})), jax.value_and_grad(loss)(trees, True))
    assert_close(pipe.evaluate(variables, batch, key), loss(trees, False))
    with pytest.raises(ValueError, match=r"^Learned draws random numbers in evaluation mode.* key\)"):
        pipe.evaluate(variables, batch)


# --- random numbers ---------------------------------------------------------------------------------------------------


class LinenDrop(nn.Module):
    @nn.compact
    def __call__(self, x, deterministic):
        x = nn.Dense(x.shape[-1], param_dtype=jnp.float64)(x)
        return nn.Dropout(0.3)(jnp.tanh(x), deterministic=deterministic)


class NnxDrop(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(4, 4, param_dtype=jnp.float64, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        return self.dropout(jnp.tanh(self.dense(x)))


def noisy(params, x, key):
    return x if key is None else x * params * jax.random.uniform(key, x.shape, x.dtype)


noise = jpipe.Layer(lambda key, x: jnp.full((), 1.5, x.dtype), noisy, name="noise")
DROPS = [LinenDrop(), LinenDrop(), *[lambda rngs: NnxDrop(rngs=rngs) for _ in range(2)], noise, noise]


def trajectory(order, k, v, remat):
    batch = jax.tree.map(np.float64, data())
    pipe = small(DROPS, schedule=order, num_stages=k, num_microbatches=4, num_chunks=v, remat=remat)
    state = pipe.create_state(jax.random.key(KEY), batch, optax.sgd(0.5))
    evaluation = float(pipe.evaluate(state.variables, batch)), float(pipe.evaluate(state.variables, batch))
    losses = []
    for _ in range(3):
        state, metrics = pipe.train_step(state, batch)
        losses.append(float(metrics["loss"]))
    return evaluation, losses


@functools.cache
def sequential_trajectory():
    return trajectory("1f1b", 1, 1, "none")


@pytest.mark.parametrize(
    ("order", "k", "v", "remat"),
    [
        ("1f1b", 3, 1, "none"),
        pytest.param("interleaved", 3, 2, "full", marks=pytest.mark.slow),
        pytest.param("1f1b", 4, 1, jax.checkpoint_policies.dots_saveable, marks=pytest.mark.slow),
    ],
)
def test_dropout_is_the_same_for_every_pipeline(x64, order, k, v, remat):
    (first, second), losses = trajectory(order, k, v, remat)
    assert first == second, "evaluation is deterministic"
    expected = sequential_trajectory()
    np.testing.assert_allclose(first, expected[0][0], rtol=1e-12)
    np.testing.assert_allclose(losses, expected[1], rtol=1e-12)
    assert len({round(loss, 6) for loss in losses}) == 3


def test_random_numbers_differ_between_steps_layers_and_micro_batches(x64):
    ones = np.ones((8, 4))
    layers = [jpipe.Layer(lambda key, x: jnp.ones((), x.dtype), noisy) for _ in range(2)]
    # each layer on its own: the other one is switched off by its parameter
    loss = lambda y, batch: jnp.sum(y * batch["weights"])
    pipe = jpipe.Pipeline(layers, loss, num_stages=2, num_microbatches=2, balance="even")

    def value(seed, weights):
        batch = {"inputs": ones, "weights": weights}
        variables = pipe.from_layer_variables([jnp.ones((), jnp.float64)] * 2, batch)
        return float(pipe.value_and_grad(variables, batch, jax.random.key(seed))[0][0])

    halves = [np.repeat([[1.0], [0.0]], 4, axis=0) * ones, np.repeat([[0.0], [1.0]], 4, axis=0) * ones]
    values = [value(seed, half) for seed in (0, 1) for half in halves]
    assert len(set(values)) == 4
    key = jax.random.key(0)
    for m, half in enumerate(halves):
        both = [jax.random.uniform(layer_key(key, layer, m), (4, 4), jnp.float64) for layer in (0, 1)]
        np.testing.assert_allclose(value(0, half), np.sum(both[0] * both[1]), rtol=1e-12)


# --- the compiled program ---------------------------------------------------------------------------------------------


def test_boundaries_cross_by_permutation_alone(x64):
    truth = model("linen")
    pipe = pipeline(truth, "1f1b", 4, 4, remat="layer")
    variables = pipe.from_layer_variables(truth.trees, truth.batch)
    step = jax.jit(pipe.value_and_grad).lower(variables, truth.batch).compile()
    in_loops = lambda program: [c.kind for c in collectives.read(program.as_text()) if collectives.in_loop(c)]
    assert in_loops(step) == ["collective-permute"] * 2
    apply = jax.jit(pipe.apply).lower(variables, truth.batch).compile()
    assert in_loops(apply) == ["collective-permute"]


# --- schedules of one's own -------------------------------------------------------------------------------------------


def can_run(schedule: jpipe.Schedule) -> bool:
    """Whether it trains, by one way of `remat`, in stages of some layers, and its micro-batches divide the batch."""
    suits = schedule.placement.num_virtual_stages <= 7 and schedule.num_microbatches in (2, 3, 4)
    return suits and schedule.trains and not {*"RW"} <= schedule.kinds


def check_schedule(schedule: jpipe.Schedule, remat: str) -> None:
    """By `remat`, but where a backward in two parts or an action R wants another."""
    remat = "stage" if "R" in schedule.kinds else "none" if schedule.splits else remat
    with jax.enable_x64(True):
        truth = model("plain")
        options = {"schedule": schedule, "remat": remat, "balance": "even"}
        check_step(jpipe.Pipeline(truth.layers, truth.loss_fn, **schedule.sizes, **options), truth)


@pytest.mark.slow
@settings(max_examples=24)
@given(schedules().filter(can_run), st.sampled_from(["none", "layer", "stage", "full"]))
def test_any_valid_schedule_gives_the_same_gradients(schedule, remat):
    check_schedule(schedule, remat)


def test_an_order_of_ones_own_gives_the_same_gradients():
    orders = [["F0", "F2", "F1", "B2", "B0", "B1"], ["F0", "F2", "B2", "B0", "F1", "B1"]]
    check_schedule(jpipe.Schedule(orders, slots=("FB",)), "layer")
