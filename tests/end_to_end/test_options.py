"""Options that change what a step takes change nothing of what it computes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpipe
from cases import assert_close, model, pipeline

# model, schedule, K, M, V, remat, options
CASES = [
    ("linen", "1f1b", 2, 4, 1, "none", {"unroll": True}),
    ("mixed", "1f1b", 3, 4, 1, "stage", {"unroll": True}),
    ("alternating", "interleaved", 2, 4, 2, "layer", {"unroll": True}),
    ("plain", "1f1b", 1, 3, 1, "full", {"unroll": True}),
    ("linen", "one slot", 4, 4, 1, "none", {"unroll": True}),
]


def check(kind, order, k, m, v, remat, options):
    """Loss, gradients and outputs are those of the sequential model in float64."""
    with jax.enable_x64(True):
        truth = model(kind, "float64")
        pipe = pipeline(truth, order, k, m, v, remat=remat, **options)
        variables = pipe.from_layer_variables(truth.trees, truth.batch)
        loss, outputs, grads = truth.truth
        (found, _), gradients = pipe.value_and_grad(variables, truth.batch)
        assert_close(found, loss, "loss")
        assert_close(pipe.layer_variables({"params": gradients}), grads, "gradients")
        assert_close(pipe.apply(variables, truth.batch), outputs, "outputs")


SLOW = (1, 2, 4)
PARAMS = [pytest.param(case, marks=[pytest.mark.slow] * (i in SLOW)) for i, case in enumerate(CASES)]


@pytest.mark.parametrize("case", PARAMS, ids=lambda case: "-".join(map(str, case[:-1])))
def test_the_step_stays_that_of_the_sequential_model(case):
    check(*case)


def not_a_number(shape, dtype):
    """What memory may hold that nothing was written to."""
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.full(shape, jnp.iinfo(dtype).max, dtype)
    return jnp.full(shape, jnp.nan if jnp.issubdtype(dtype, jnp.inexact) else True, dtype)


@pytest.mark.parametrize(
    "case",
    [
        ("mixed", "interleaved", 2, 4, 2, "none"),
        pytest.param(("mixed", "1f1b", 3, 3, 1, "stage"), marks=pytest.mark.slow),
        pytest.param(("linen", "one slot", 2, 4, 1, "layer"), marks=pytest.mark.slow),
        pytest.param(("alternating", "gpipe", 4, 4, 1, "full"), marks=pytest.mark.slow),
    ],
)
def test_nothing_is_read_that_was_not_written(case, monkeypatch):
    """A CPU gives zeros for an empty array, an accelerator whatever lies there."""
    monkeypatch.setattr(jax.lax, "empty", not_a_number)
    check(*case, {})


def square(key, x):
    return jax.random.normal(key, (16, 16), jnp.float32)


def chain(**options):
    """Four equal layers on each of two stages, between ends that are unlike them."""
    equal = [jpipe.Layer(square, lambda w, x: jnp.sin(x @ w)) for _ in range(8)]
    layers = [lambda x: x, *equal, lambda y: y]
    sizes = {"num_stages": 2, "num_microbatches": 4, "balance": [5, 5]}
    return jpipe.Pipeline(layers, lambda y, _: jnp.mean(y**2), **sizes, **options)


BATCH = np.ones((8, 16), np.float32)


def test_unrolled_layers_have_arrays_of_their_own_and_no_loop():
    looped, unrolled = chain(), chain(unroll=True)
    shapes = [jax.eval_shape(pipe.init, jax.random.key(0), BATCH)["params"] for pipe in (looped, unrolled)]
    assert [leaf.shape for leaf in shapes[0].values()] == [(2, 4, 16, 16)]
    assert [leaf.shape for leaf in shapes[1].values()] == [(2, 1, 16, 16)] * 4
    texts = [
        jax.jit(p.value_and_grad).lower({"params": s}, BATCH).as_text()
        for p, s in zip((looped, unrolled), shapes, strict=True)
    ]
    loops = [len(re.findall("stablehlo.while", text)) for text in texts]
    assert loops[0] - loops[1] == 2, "over the layers forward, and backward"


def test_an_unrolled_pipeline_takes_the_variables_of_a_looped_one_and_trains_the_same():
    losses = []
    trees = None
    for pipe in (chain(), chain(unroll=True)):
        state = pipe.create_state(jax.random.key(0), BATCH, optax.sgd(1e-2))
        trees = trees or pipe.layer_variables(state.variables)
        state = state.replace(variables=pipe.from_layer_variables(trees, BATCH))
        found = []
        for _ in range(3):
            state, metrics = pipe.train_step(state, BATCH)
            found.append(metrics["loss"])
        losses.append(found)
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


def test_parameters_that_are_not_a_number_stay_so():
    pipe = chain()
    variables = pipe.init(jax.random.key(0), BATCH)
    trees = pipe.layer_variables(variables)
    trees[3] = {"params": jnp.full((16, 16), jnp.nan)} if isinstance(trees[3], dict) else jnp.full((16, 16), jnp.nan)
    assert np.isnan(pipe.evaluate(pipe.from_layer_variables(trees, BATCH), BATCH))
