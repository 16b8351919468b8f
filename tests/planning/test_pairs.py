"""A forward and a backward in one loop: when it is done, and that values and gradients are the sequential model's."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import jpipe
import sequential
from cases import (
    VOCABULARY,
    WIDTH,
    Block,
    assert_close,
    assert_step_equals,
    make_model,
    pipeline,
    tokens,
    weighted_cross_entropy,
)
from device_programs import anything, programs_for
from split_model import SplitBlock

wide = {"param_dtype": jnp.float64}


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


def test_state_and_random_numbers_are_the_sequential_models(make_mesh):
    """BatchNorm's statistics are summed over the data axis."""
    with jax.enable_x64(True), programs_for("gpu"):
        layers, items, batch, expected = sequential.cells(6)
        sizes = {"num_stages": 2, "num_microbatches": 6, "balance": [3, 3]}
        mesh = make_mesh((2, 2), ("stage", "data"))
        pipe = jpipe.Pipeline(layers, sequential.squares, **sizes, mesh=mesh, schedule="overlapped")
        assert step_of(pipe, batch).paired_group == 1
        assert_step_equals(pipe, items, batch, jax.random.key(sequential.CELLS_KEY), expected)


@pytest.mark.parametrize(
    ("why", "devices", "shape", "options", "expected"),
    [
        ("it is done", "gpu", (2, 2), {}, 1),
        ("on one stage too", "gpu", (1, 2), {"num_stages": 1, "balance": [6]}, 1),
        ("one tick of many has a pair", "gpu", (2, 2), {"schedule": "gpipe"}, None),
        ("other devices have none", "tpu", (2, 2), {}, None),
        ("layers send nothing", "gpu", (2, 1), {}, None),
        ("B needs the F of its tick", "gpu", (2, 2), {"schedule": "1f1b"}, None),
        ("a backward computes its forward anew", "gpu", (2, 2), {"remat": "stage"}, None),
        ("rows come back from the host", "gpu", (2, 2), {"remat": "none", "offload": "residuals"}, None),
        ("no loop", "gpu", (2, 2), {"unroll": True}, None),
    ],
)
def test_it_is_done_where_it_pays(make_mesh, why, devices, shape, options, expected):
    layers = [nn.Embed(VOCABULARY, WIDTH), *[SplitBlock() for _ in range(4)], nn.Dense(VOCABULARY)]
    sizes = {"num_stages": 2, "num_microbatches": 6, "balance": [3, 3], "mesh": make_mesh(shape, ("stage", "model"))}
    with programs_for(devices):
        pipe = jpipe.Pipeline(layers, weighted_cross_entropy, **{"schedule": "overlapped", **sizes, **options})
        assert step_of(pipe, tokens()).paired_group == expected, why


def test_of_several_groups_one_that_sends_is_taken(make_mesh):
    half = lambda: [SplitBlock(), SplitBlock(), *[Block() for _ in range(3)]]
    layers = [nn.Embed(VOCABULARY, WIDTH), *half(), *half(), nn.Dense(VOCABULARY)]
    sizes = {"num_stages": 2, "num_microbatches": 6, "balance": [6, 6], "mesh": make_mesh((2, 2), ("stage", "model"))}
    with programs_for("gpu"):
        step = step_of(jpipe.Pipeline(layers, weighted_cross_entropy, **sizes, schedule="overlapped"), tokens())
    assert step.idle_work.trips == {1: 2, 2: 3} and step.paired_group == 1


@pytest.mark.parametrize(("num_chunks", "instead"), [(1, "1f1b"), (2, "interleaved")])
def test_shared_ends_need_the_backward_right_after_the_forward(num_chunks, instead):
    sizes = {"num_stages": 2, "num_microbatches": 4, "num_chunks": num_chunks}
    make = lambda schedule: jpipe.Pipeline(
        [nn.Dense(4)] * 4, sequential.squares, **sizes, schedule=schedule, ends="shared"
    )
    with pytest.raises(ValueError, match=f"'overlapped' has .* before the backward of .*: use schedule='{instead}'"):
        make("overlapped")
    make(instead)
