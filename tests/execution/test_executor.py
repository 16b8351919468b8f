"""The scan over ticks: what crosses when, ends that all stages compute together, residuals that go to the host."""

import itertools
import json
import re
from functools import partial, reduce

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import collectives
import jpipe
from cases import assert_close, assert_equal, check_by_hand, model, names
from cases import pipeline as model_pipeline
from device_programs import programs_for
from jpipe.execution.executor import _flows
from jpipe.schedules.actions import FLOWS
from jpipe.schedules.ticks import lower
from published import schedule_of
from sequential import evaluation, truth
from vocabulary import WIDTH, WORDS, Block, Head, batch_of, cross_entropy, pipeline, tied, untied, wide


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_in_each_run_all_is_sent_that_an_action_left(num_chunks):
    for name in names(chunks=num_chunks, split=None):
        schedule = jpipe.make_schedule(name, num_stages=3, num_microbatches=6, num_chunks=num_chunks)
        table = lower(schedule, idle_work=True)
        run_of = [run for run in table.runs for _ in range(run.start, run.stop)]
        for tick, (i, slot) in itertools.product(range(table.num_ticks - 1), enumerate(table.slots)):
            kinds = {slot.kinds[code - 1] for code in slot.kind[tick] if code}
            following = (tick, i + 1) if i + 1 < len(table.slots) else (tick + 1, 0)
            for flow in (flow for flow, sending in FLOWS.items() if kinds & {*sending}):
                assert flow in _flows(table.slots, run_of[tick], i)
                assert flow in _flows(table.slots, run_of[following[0]], following[1] - 1)


@pytest.mark.parametrize(("num_stages", "permutes"), [(1, 0), (2, 2)])
@pytest.mark.parametrize("remat", ["none", "full"])
def test_actions_are_loops_and_two_permutes_cross(num_stages, permutes, remat):
    layer = jpipe.Layer(lambda key, x: jnp.ones((4, 4)), lambda w, x: jnp.tanh(x @ w))
    options = {"num_stages": num_stages, "num_microbatches": 4, "balance": "even", "remat": remat}
    pipe = jpipe.Pipeline([layer] * 6, lambda y, _: jnp.mean(y), **options)
    batch = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    variables = jax.eval_shape(pipe.init, jax.random.key(0), batch)
    program = jax.jit(pipe.value_and_grad).lower(variables, batch).as_text()
    assert "stablehlo.while" in program
    assert "stablehlo.case" not in program
    assert program.count("stablehlo.collective_permute") == permutes


@pytest.mark.parametrize("schedule", ["interleaved", pytest.param("v", marks=pytest.mark.slow)])
def test_no_permute_has_a_ring_on_gpus(make_mesh, monkeypatch, schedule):
    """XLA splits rings itself under some flags, and then gave zeros to devices at which they close.

    A permute whose pairs all go up, or all go down, has none. The values that arrive are the same.
    """
    layer = jpipe.Layer(lambda key, x: jax.random.normal(key, (4, 4)), lambda w, x: jnp.tanh(x @ w))
    mesh, sizes = make_mesh((4, 2), ("stage", "data")), {"num_stages": 4, "num_microbatches": 4, "num_chunks": 2}
    make = partial(jpipe.Pipeline, [layer] * 8, lambda y, _: jnp.mean(y**2), schedule=schedule, mesh=mesh, **sizes)
    batch = jax.random.normal(jax.random.key(1), (8, 4))
    sequential = lambda trees: jnp.mean(reduce(lambda x, w: jnp.tanh(x @ w), trees, batch) ** 2)

    def has_rings(pipe, platform):
        traced = jax.jit(pipe.value_and_grad).trace(variables, batch)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        pairs = re.findall(r"source_target_pairs = dense<(\[\[.*?\]\])>", text)
        directions = [{sender < receiver for sender, receiver in json.loads(one)} for one in pairs]
        assert directions
        return any(len(found) > 1 for found in directions)

    pipe = make()
    variables = pipe.init(jax.random.key(0), batch)
    rings = {platform: has_rings(pipe, platform) for platform in ("cpu", "tpu", "cuda")}
    assert rings == {"cpu": schedule == "interleaved", "tpu": schedule == "interleaved", "cuda": False}

    monkeypatch.setattr(jax.lax, "platform_dependent", lambda leaf, *, default, cuda, rocm: cuda(leaf))
    pipe = make()  # its program on a CPU is now that for GPUs
    assert not has_rings(pipe, "cpu")
    check_by_hand(pipe, batch, sequential, variables)


def test_in_a_v_what_turns_may_wait(make_mesh):
    """On the last stage other actions come between, so that activations and cotangents wait there for their turn."""
    orders = [
        ["F0", "F1", "F2", "F0.1", "F1.1", "F2.1", "B0.1", "B1.1", "B2.1", "B0", "B1", "B2"],
        ["F0", "F1", "F0.1", "F2", "F1.1", "F2.1", "B0.1", "B1.1", "B0", "B2.1", "B1", "B2"],
    ]
    schedule = jpipe.Schedule(orders, slots=("F", "B"), style="v")
    assert all(len(waiting[-1]) == 2 for waiting in schedule.ticks.waiting.values()), "two wait for their turn"
    layer = jpipe.Layer(lambda key, x: jax.random.normal(key, (4, 4)), lambda w, x: jnp.tanh(x @ w))
    mesh, sizes = make_mesh((2,), ("stage",)), {"num_stages": 2, "num_microbatches": 3, "num_chunks": 2}
    pipe = jpipe.Pipeline([layer] * 4, lambda y, _: jnp.mean(y**2), schedule=schedule, mesh=mesh, **sizes)
    batch = jax.random.normal(jax.random.key(1), (6, 4))
    check_by_hand(pipe, batch, lambda trees: jnp.mean(reduce(lambda x, w: jnp.tanh(x @ w), trees, batch) ** 2))


# --- ends that all stages compute together, and rows that go to the host ----------------------------------------------


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


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


@pytest.mark.usefixtures("float64")
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
    outputs, loss = evaluation(layers, trees, cross_entropy, batch)
    expected = truth(layers, trees, cross_entropy, batch, key=jax.random.key(0), m=1, rate=1.0)
    (found, _), grads = pipe.value_and_grad(variables, batch)
    assert_close(found, expected[0], "loss")
    count = len(layers) - (make is tied)  # a tied head has the table's
    gradients = [tree["params"] for tree in pipe.layer_variables({"params": grads})[:count]]
    assert_close(gradients, expected[1][:count], "gradients")
    assert_close(pipe.evaluate(variables, batch), loss, "evaluation")
    assert_close(pipe.apply(variables, batch), outputs, "outputs")


@pytest.mark.usefixtures("float64")
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


@pytest.mark.usefixtures("float64")
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


def gradients(known, case, **options):
    """(loss, gradients by layer, the step) of a pipeline."""
    pipe = model_pipeline(known, *case, **options)
    variables = pipe.from_layer_variables(known.trees, known.batch)
    (loss, _), grads = pipe.value_and_grad(variables, known.batch)
    step = pipe.planner.training_step(pipe.planner.for_training(known.batch))
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
        known = model(kind, "float64")
        loss, grads, _ = gradients(known, case, remat=remat)
        found, found_grads, step = gradients(known, case, remat=remat, offload=offload)
        assert step.kept.away, "nothing goes"
        assert_equal(found_grads, grads)
        assert found == loss
        assert_close(found_grads, known.truth[2], "gradients")
