"""A forward and a backward in one loop: when it is done, and that values and gradients are the sequential model's."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jpipe
import sequential
from cases import (
    VOCABULARY,
    WIDTH,
    assert_close,
    assert_step_equals,
    make_model,
    pipeline,
    tokens,
    weighted_cross_entropy,
)
from device_programs import programs_for
from split_model import SplitBlock

wide = {"param_dtype": jnp.float64}


def anything(shape, dtype=None, **_):
    """What an empty array may hold."""
    return jnp.full(shape, jnp.nan if jnp.issubdtype(dtype, jnp.inexact) else 1, dtype)


def blocks_model(count):
    """An embedding, blocks that are split over `model`, and a head."""
    embed = nn.Embed(VOCABULARY, WIDTH, **wide, dtype=jnp.float64)
    layers = [embed, *[SplitBlock(jnp.float64) for _ in range(count)], nn.Dense(VOCABULARY, **wide)]
    return make_model(layers, weighted_cross_entropy, tokens())


def step_of(pipe, batch):
    return pipe.planner.training_step(pipe.planner.for_training(batch))


@pytest.mark.parametrize(
    ("schedule", "num_chunks", "remat"),
    [
        ("overlapped", 1, "layer"),
        ("overlapped-v", 2, "none"),
        pytest.param("overlapped", 2, "none", marks=pytest.mark.slow),
        pytest.param("overlapped", 1, jax.checkpoint_policies.dots_saveable, marks=pytest.mark.slow),
    ],
)
def test_equals_the_sequential_model(make_mesh, monkeypatch, schedule, num_chunks, remat):
    """Also where an idle stage computes along, of whatever lies there."""
    with jax.enable_x64(True), programs_for("gpu"):
        truth, counts = blocks_model(4 * num_chunks), [3] + [2] * (2 * num_chunks - 2) + [3]
        options = {"mesh": make_mesh((2, 2), ("stage", "model")), "balance": counts, "remat": remat}
        pipe = pipeline(truth, schedule, 2, 6, num_chunks, **options)
        variables = pipe.from_layer_variables(truth.trees, truth.batch)
        assert step_of(pipe, truth.batch).paired_group == 1
        monkeypatch.setattr(jax.lax, "empty", anything)
        (loss, _), gradients = pipe.value_and_grad(variables, truth.batch)
        assert_close(loss, truth.truth[0], "loss")
        assert_close(pipe.layer_variables({"params": gradients}), truth.truth[2], "gradients")


class Cell(nn.Module):
    """Has state that is summed over data axes, and draws random numbers."""

    @nn.compact
    def __call__(self, x, train: bool):
        h = nn.Dense(x.shape[-1], use_bias=False, **wide)(x)
        norm = nn.BatchNorm(not train, momentum=0.9, param_dtype=jnp.float64, force_float32_reductions=False)
        return x + nn.Dropout(0.25, deterministic=not train)(nn.tanh(norm(h)))


def squares(outputs, batch):
    return jnp.mean((outputs - batch["targets"]) ** 2)


def test_state_and_random_numbers_are_the_sequential_models(make_mesh):
    rng, key = np.random.default_rng(0), jax.random.key(2)
    batch = {"inputs": rng.normal(size=(24, 5)), "targets": rng.normal(size=(24, 3))}
    with jax.enable_x64(True), programs_for("gpu"):
        layers = [nn.Dense(4, **wide), *[Cell() for _ in range(4)], nn.Dense(3, **wide)]
        items = sequential.random_items(layers, batch, 1)
        expected = sequential.truth(layers, items, squares, batch, key=key, m=6, rate=0.1)
        sizes = {
            "num_stages": 2,
            "num_microbatches": 6,
            "balance": [3, 3],
            "mesh": make_mesh((2, 2), ("stage", "data")),
        }
        pipe = jpipe.Pipeline(layers, squares, **sizes, schedule="overlapped")
        assert step_of(pipe, batch).paired_group == 1
        assert_step_equals(pipe, items, batch, key, expected)


@pytest.mark.parametrize(
    ("why", "devices", "shape", "options"),
    [
        ("it is done", "gpu", (2, 2), {}),
        ("other devices have none", "tpu", (2, 2), {}),
        ("layers send nothing", "gpu", (2, 1), {}),
        ("B needs the F of its tick", "gpu", (2, 2), {"schedule": "1f1b"}),
        ("with fewer than 2K micro-batches, too", "gpu", (2, 2), {"schedule": "overlapped-v", "num_chunks": 2}),
        ("a backward computes its forward anew", "gpu", (2, 2), {"remat": "stage"}),
        ("rows come back from the host between the two", "gpu", (2, 2), {"remat": "none", "offload": "residuals"}),
        ("no loop", "gpu", (2, 2), {"unroll": True}),
    ],
)
def test_it_is_done_where_it_pays(make_mesh, why, devices, shape, options):
    chunks = options.get("num_chunks", 1)
    microbatches = 3 if chunks > 1 else 6
    layers = [nn.Embed(VOCABULARY, WIDTH), *[SplitBlock() for _ in range(4 * chunks)], nn.Dense(VOCABULARY)]
    mesh, counts = make_mesh(shape, ("stage", "model")), [3] + [2] * (2 * chunks - 2) + [3]
    sizes = {"num_stages": 2, "num_microbatches": microbatches, "balance": counts, "mesh": mesh}
    with programs_for(devices):
        pipe = jpipe.Pipeline(layers, weighted_cross_entropy, **{"schedule": "overlapped", **sizes, **options})
        assert step_of(pipe, tokens()).paired_group == (1 if why == "it is done" else None), why
