"""Ends that all stages compute together, and residuals that go to the host: the step is the sequential model's."""

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest

import collectives
import jpipe
from cases import assert_close, assert_equal, model
from cases import pipeline as model_pipeline
from device_programs import programs_for
from published import schedule_of
from vocabulary import WIDTH, WORDS, Block, Head, batch_of, cross_entropy, pipeline, tied, untied, wide


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def sequential(layers, trees, batch):
    """((loss, logits), gradients) of plain Flax, for each layer's own variables; None for those of a tied head."""

    def loss(trees):
        x = batch["inputs"]
        for layer, tree in zip(layers[:-1], trees, strict=False):
            x = (layer.layer if isinstance(layer, jpipe.Shared) else layer).apply(tree, x)
        if isinstance(layers[0], jpipe.Shared):
            x = layers[0].layer.apply(trees[0], x, method="attend")
        else:
            x = layers[-1].apply(trees[-1], x)
        total, weight = cross_entropy(x, batch)
        return total / weight, x

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(trees)


def wide_at_the_ends():
    """The ends give and take wider values than those that cross from stage to stage."""
    dense = [nn.Dense(width, **wide) for width in (WIDTH, 3 * WIDTH)]
    return [nn.Embed(WORDS, 2 * WIDTH, **wide), dense[0], Block(), Block(), dense[1], Head()]


CASES = [
    (untied, 2, 2, {"schedule": "zero_bubble"}, {"data": 2}),
    (tied, 4, 4, {}, {}),
    (untied, 4, 8, {"remat": "layer"}, {}),
    (untied, 2, 4, {"remat": "stage"}, {}),
    (untied, 2, 4, {"schedule": "naive", "remat": "full"}, {}),
    (tied, 2, 4, {"schedule": "interleaved", "num_chunks": 2}, {}),
    (untied, 2, 4, {"schedule": "v", "num_chunks": 2}, {}),
    (untied, 2, 4, {"schedule": schedule_of("zb-h1", 2, 4)}, {}),
    (untied, 2, 2, {"shard_over": "fsdp"}, {"fsdp": 4}),
    (tied, 2, 2, {"shard_over": "fsdp", "gather": "use"}, {"fsdp": 4}),
    (wide_at_the_ends, 2, 4, {"remat": "stage"}, {}),
]


@pytest.mark.parametrize(
    ("make", "k", "m", "options", "axes"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (i > 0)) for i, case in enumerate(CASES)],
)
def test_equals_the_sequential_model(make, k, m, options, axes):
    layers, batch = make(), batch_of()
    size = k * int(np.prod(list(axes.values())))
    mesh = jpipe.make_mesh(stage=k, **axes, devices=jax.devices()[:size])
    pipe = pipeline(layers, k, m, mesh=mesh, **options)
    variables = pipe.init(jax.random.key(0), batch)
    trees = jax.device_get(pipe.layer_variables(variables))
    (loss, outputs), gradients = sequential(layers, trees, batch)
    (found, _), grads = pipe.value_and_grad(variables, batch)
    assert_close(found, loss, "loss")
    count = len(layers) - (make is tied)  # a tied head has the table's
    assert_close(pipe.layer_variables({"params": grads})[:count], gradients[:count], "gradients")
    assert_close(pipe.evaluate(variables, batch), loss, "evaluation")
    assert_close(pipe.apply(variables, batch), outputs, "outputs")


def test_each_stage_has_its_part_of_the_vocabulary_and_computes_that_alone():
    batch = batch_of()
    pipe = pipeline(untied(), 4, 4)
    state = pipe.abstract_state(batch, optax.adam(1e-3))
    tables = [a for a in jax.tree.leaves(state) if hasattr(a, "shape") and a.shape[-2:] == (WORDS, WIDTH)]
    assert [a.shape[:-2] for a in tables] == [(1, 2)] * 3, "table and head, of parameters and of two moments"
    assert all(a.sharding.shard_shape(a.shape) == (1, 2, WORDS // 4, WIDTH) for a in tables)
    text = jax.jit(pipe.value_and_grad).lower(state.variables, batch, state.key).as_text()
    products = [line.rpartition("->")[2] for line in text.splitlines() if "dot_general" in line]
    assert any(f"x{WORDS // 4}xf64" in line for line in products), "logits of its words"
    assert not any(f"x{WORDS}xf64" in line for line in products), "and of no others"


def test_no_compiler_moves_them_out_of_their_loops():
    """All that a turn sends is sent in the turn's own loop, which has no trip where there is no turn."""
    batch = batch_of()
    pipe = pipeline(untied(), 2, 2)
    state = pipe.abstract_state(batch, optax.sgd(0.1))
    text = jax.jit(pipe.value_and_grad).lower(state.variables, batch, state.key).compile().as_text()
    for turn in ("enter", "leave", "back"):
        sent = [c for c in collectives.read(text) if turn in c.op_name.split("/")]
        assert sent, turn
        outside = [c for c in sent if not any(turn in scope.split("/") for scope in c.scopes)]
        assert not outside, [*map(str, outside)]


def gradients(truth, case, **options):
    """(loss, gradients by layer, the step) of a pipeline."""
    pipe = model_pipeline(truth, *case, **options)
    variables = pipe.from_layer_variables(truth.trees, truth.batch)
    (loss, _), grads = pipe.value_and_grad(variables, truth.batch)
    step = pipe.planner.training_step(pipe.planner.for_training(truth.batch))
    return loss, pipe.layer_variables({"params": grads}), step


@pytest.mark.filterwarnings("ignore:offload= moves nothing on CPUs")
@pytest.mark.parametrize(
    ("kind", "case", "remat", "offload", "devices"),
    [
        ("linen", ("1f1b", 3, 4), "none", {"residuals": 0.5}, "gpu"),
        ("mixed", ("interleaved", 2, 4, 2), "none", "residuals", "tpu"),
        pytest.param("mixed", ("v", 2, 4, 2), "none", "residuals", "gpu", marks=pytest.mark.slow),
        pytest.param("alternating", ("gpipe", 3, 4), "layer", "boundaries", "cpu", marks=pytest.mark.slow),
        pytest.param("linen", ("one slot", 3, 6), "none", "residuals", "cpu", marks=pytest.mark.slow),
        pytest.param("linen", ("zb-v", 2, 6, 2), "none", "residuals", "gpu", marks=pytest.mark.slow),
        pytest.param("nnx factories", ("dualpipe-v", 2, 4, 2), "layer", "boundaries", "tpu", marks=pytest.mark.slow),
        pytest.param("mixed", ("zb-h2", 3, 6), "none", "residuals", "cpu", marks=pytest.mark.slow),
    ],
)
def test_a_step_is_the_same_to_the_bit(kind, case, remat, offload, devices):
    with jax.enable_x64(True), programs_for(devices):
        truth = model(kind, "float64")
        loss, grads, _ = gradients(truth, case, remat=remat)
        found, found_grads, step = gradients(truth, case, remat=remat, offload=offload)
        assert step.kept.away, "nothing goes"
        assert_equal(found_grads, grads)
        assert found == loss
        assert_close(found_grads, truth.truth[2], "gradients")
