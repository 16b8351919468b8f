import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

import jpipe
from jpipe.forecasting.memory_model import predict_memory

WIDTH = 16


def dense_pipeline(num_layers, num_stages, num_microbatches, **options):
    return jpipe.Pipeline(
        [nn.Dense(WIDTH) for _ in range(num_layers)],
        lambda outputs, batch: jnp.mean(outputs**2),
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        balance=[num_layers // num_stages] * num_stages,
        **options,
    )


def rows(count):
    return {"inputs": jax.ShapeDtypeStruct((count, WIDTH), "float32")}


@pytest.mark.parametrize("remat", ["layer", "full"])
def test_parts_by_hand(remat):
    parts = predict_memory(dense_pipeline(4, 2, 2, remat=remat), rows(8), optax.adam(1e-3))
    stage = 2 * (WIDTH + 1) * WIDTH * 4  # two layers, in float32
    assert parts.parameters == parts.gradients == stage
    assert parts.optimizer == 2 * stage + 4  # and a step count
    assert (parts.batch, parts.other_variables, parts.casts) == (8 * WIDTH * 4, 0, 0)
    assert parts.total == sum(vars(parts).values())


def test_narrow_copies_of_weights_are_counted_where_they_are_made_once_a_step():
    layers = [nn.Dense(WIDTH, dtype=jnp.bfloat16) for _ in range(4)]
    make = lambda cast: jpipe.Pipeline(
        layers, lambda y, _: jnp.mean(y**2), num_stages=2, num_microbatches=2, balance=[2, 2], cast=cast
    )
    casts = {cast: predict_memory(make(cast), rows(8), optax.sgd(1e-3)).casts for cast in ("step", "use")}
    assert casts == {"step": 2 * (WIDTH + 1) * WIDTH * 2, "use": 0}


@pytest.mark.parametrize("remat", ["none", "layer", "stage", "full"])
def test_arguments_are_the_compilers(remat):
    pipe, tx = dense_pipeline(4, 2, 2, remat=remat), optax.sgd(1e-3, momentum=0.9)
    compiled = jax.jit(pipe.train_step, donate_argnums=0).lower(pipe.abstract_state(rows(8), tx), rows(8)).compile()
    parts = predict_memory(pipe, rows(8), tx)
    small = 64  # the step's number and its random key
    found = compiled.memory_analysis().argument_size_in_bytes
    assert abs(parts.parameters + parts.optimizer + parts.batch - found) < small


def test_the_papers_example():
    """40 layers, 128 examples: N + L/K * N/M = 128 + 160 activations on 4 stages with 8 micro-batches, not 10 * 128."""
    activation = WIDTH * 4
    of = lambda remat: predict_memory(
        dense_pipeline(40, 4, 8, remat=remat, schedule="gpipe"), rows(128), optax.sgd(1e-3)
    )
    full, layer = of("full"), of("layer")
    assert full.residuals == 160 * activation
    assert layer.residuals == 1280 * activation
    # On the boundary all 128 wait; two rows of cotangents; one of each under way through the layers, one on its way.
    assert full.boundaries == (128 + 2 * 16 + 4 * 16) * activation
