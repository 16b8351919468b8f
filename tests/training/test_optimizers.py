"""Optimisers: any optax transformation does to the stages' buffers what it does to the sequential model's tree."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpipe
from cases import assert_close, model, pipeline, run_layers, take_microbatch, tokens
from updates import check_updates, filled, is_kernel, is_matrix, params


@pytest.fixture(autouse=True)
def standard_promotion():
    """Optax itself mixes dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


# --- five steps -------------------------------------------------------------------------------------------------------

SCHEDULE = functools.partial(optax.warmup_cosine_decay_schedule, 0.0, 0.03, 2, 6)


def chain(inner):
    return optax.chain(optax.clip_by_global_norm(0.05), inner)


@pytest.mark.parametrize(
    ("kind", "order", "k", "m", "v", "remat", "mask"),
    [
        ("linen", "1f1b", 4, 3, 1, "layer", is_matrix),
        pytest.param("nn.Sequential", "interleaved", 2, 4, 2, "none", is_kernel, marks=pytest.mark.slow),
        pytest.param("alternating", "gpipe", 3, 4, 1, "full", is_kernel, marks=pytest.mark.slow),
    ],
)
def test_five_steps_equal_the_sequential_ones(kind, order, k, m, v, remat, mask):
    with jax.enable_x64(True):
        truth = model(kind)
        batches = [truth.batch | {"targets": tokens(seed=seed)["targets"]} for seed in range(5)]
        adamw = lambda: optax.adamw(SCHEDULE(), weight_decay=0.1, mask=mask)

        pipe = pipeline(truth, order, k, m, v, remat=remat)
        state = pipe.create_state(jax.random.key(0), truth.batch, chain(jpipe.per_layer(adamw())))
        state = state.replace(variables=pipe.from_layer_variables(truth.trees))

        tx, trees = chain(adamw()), params(truth)
        opt_state = tx.init(trees)

        @jax.jit
        def step(trees, opt_state, batch):
            loss, grads = jax.value_and_grad(lambda t: truth.loss_of(filled(truth, t), batch))(trees)
            updates, opt_state = tx.update(grads, opt_state, trees)
            return optax.apply_updates(trees, updates), opt_state, loss, optax.tree.norm(grads)

        for number, batch in enumerate(batches):
            trees, opt_state, loss, norm = step(trees, opt_state, batch)
            state, metrics = pipe.train_step(state, batch)
            assert_close(metrics["loss"], loss, f"loss of step {number}")
            assert_close(metrics["grad_norm"], norm, f"gradient norm of step {number}")
            assert norm > 0.05, "the norm has to be clipped for this to show anything"
        assert int(state.step) == 5
        assert_close(pipe.layer_variables({"params": state.variables["params"]}), trees, "parameters")


# --- single updates ---------------------------------------------------------------------------------------------------

ELEMENTWISE = {
    "sgd with momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw": lambda: optax.adamw(1e-2, weight_decay=0.1),
    "global norm": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.scale(-1.0)),
    "accumulation": lambda: optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2).gradient_transformation(),
}


@pytest.fixture(scope="module")
def pipe():
    with jax.enable_x64(True):
        truth = model("mixed")
        return pipeline(truth, "1f1b", 3, 4, balance="even")


@pytest.mark.parametrize("tx", ELEMENTWISE)
def test_elementwise_transformations_need_nothing(pipe, tx):
    with jax.enable_x64(True):
        check_updates(pipe, ELEMENTWISE[tx](), ELEMENTWISE[tx]())


# --- precision --------------------------------------------------------------------------------------------------------


def test_gradients_of_bfloat16_parameters_accumulate_in_float32():
    """In bfloat16, 256 + 0.5 = 256: micro-batches after the first would be lost."""
    size = 9
    steps = np.where(np.arange(size) == 0, 256.0, 0.5).astype(np.float32)
    batch = {"inputs": np.ones((size, 4), np.float32) * steps[:, None]}
    weight = jpipe.Layer(lambda key, x: jnp.ones(4, jnp.bfloat16), lambda w, x: x.astype(jnp.bfloat16) * w, name="w")
    layers = [weight, weight, lambda y: y]
    loss = lambda y, _: (jnp.sum(y.astype(jnp.float32)), 1 / size)
    pipe = jpipe.Pipeline(layers, loss, num_stages=2, num_microbatches=size, balance="even")
    (_, _), grads = pipe.value_and_grad(pipe.init(jax.random.key(0), batch), batch)
    for tree in pipe.layer_variables({"params": grads})[:2]:
        assert tree.dtype == jnp.bfloat16
        np.testing.assert_array_equal(tree.astype(np.float32), np.full(4, 256 + 0.5 * (size - 1), np.float32))
    low = functools.reduce(lambda a, b: a + b, [jnp.asarray(step, jnp.bfloat16) for step in steps])
    assert float(low) == 256.0, "accumulated in bfloat16"


def test_loss_of_a_bfloat16_model_accumulates_in_float32():
    size = 8
    values = np.where(np.arange(size) == 0, 256.0, 0.5).astype(np.float32)
    layers = [lambda x: x.astype(jnp.bfloat16), lambda x: x]
    pipe = jpipe.Pipeline(
        layers, lambda y, _: (jnp.sum(y), jnp.ones((), y.dtype)), num_stages=2, num_microbatches=size, balance="even"
    )
    batch = {"inputs": values[:, None]}
    loss = pipe.evaluate(pipe.init(jax.random.key(0), batch), batch)
    assert loss.dtype == jnp.float32
    assert float(loss) == (256 + 0.5 * (size - 1)) / size


def test_bfloat16_gradients_equal_the_float32_sum_of_those_of_the_micro_batches():
    truth, m = model("plain", "bfloat16"), 6
    pipe = pipeline(truth, "1f1b", 3, m)
    (_, _), grads = pipe.value_and_grad(pipe.from_layer_variables(truth.trees, truth.batch), truth.batch)
    weight = truth.loss_fn(truth.truth[1], truth.batch)[1]

    def part(trees, batch):
        """A micro-batch's part of the mean over the mini-batch."""
        total, _ = truth.loss_fn(run_layers(truth.sequence, trees, batch["inputs"]), batch)
        return total / weight.astype(total.dtype)

    parts = [jax.jit(jax.grad(part))(truth.trees, take_microbatch(truth.batch, i, m)) for i in range(m)]
    expected = jax.tree.map(lambda *g: sum(a.astype(np.float32) for a in g), *parts)
    found = pipe.layer_variables({"params": grads})
    for (path, got), want in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        assert got.dtype == jnp.bfloat16
        # one rounding of the result, and those inside of the layers, which fusion may leave out
        got, largest = np.asarray(got, np.float32), np.max(np.abs(want))
        np.testing.assert_allclose(got, want, rtol=2**-8, atol=2**-8 * largest, err_msg=jax.tree_util.keystr(path))
