"""What a pipeline shows: what is compiled, its first runs, checkpoints; nothing of later steps."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jpipe
from jpipe.terminal import progress
from jpipe.terminal.first_calls import compiles, first_call
from terminals import lines_on

BATCH = np.ones((8, 4), np.float32)
LAYERS = [nn.Dense(4), nn.Dense(4), nn.Dense(4), nn.Dense(2)]


def make_pipe(**options):
    return jpipe.Pipeline(LAYERS, lambda y, _: jnp.mean(y**2), num_stages=2, num_microbatches=2, **options)


def test_a_pipeline_shows_what_takes_long_and_nothing_else(terminal, soon, tasks):
    pipe, tx = make_pipe(balance="time"), optax.sgd(0.1)
    state = pipe.create_state(jax.random.key(0), BATCH, tx)
    state, _ = pipe.train_step(state, BATCH)
    shape = "(3 groups of layers, 1f1b, K=2, M=2)"
    assert lines_on(terminal) == [
        "planning 4 layers",
        "compiling the initialisation (3 groups of layers)",
        "first run of the initialisation",
        "initialising the optimiser's state",
        f"compiling the training step {shape}",
        "first run of the training step",
    ]
    inner = {task.description: task for task in tasks}
    assert inner["measuring costs"].completed == inner["measuring costs"].total == 3
    assert {"tracing 4 layers", "tracing forward and backward"} <= set(inner)
    assert all(task.total in (None, task.completed) for task in tasks)

    tasks.clear()
    state, _ = pipe.train_step(state, BATCH)  # warm: no task begins
    assert not tasks
    pipe.train_step(state, np.ones((4, 4), np.float32))
    assert f"compiling the training step {shape}" in [task.description for task in tasks]

    tasks.clear()
    variables = pipe.init(jax.random.key(0), BATCH)
    pipe.evaluate(variables, BATCH)
    pipe.apply(variables, BATCH)
    pipe.value_and_grad(variables, BATCH)
    found = [task.description for task in tasks if task.description.startswith("compiling")]
    forward = "(3 groups of layers, forward, K=2, M=2)"
    whats = [f"the loss {forward}", f"the forward pass {forward}", f"loss and gradients {shape}"]
    assert found == [f"compiling {what}" for what in whats]


def test_nothing_compiles_under_a_jit_of_the_users(terminal, soon, tasks):
    pipe = make_pipe()
    variables = pipe.init(jax.random.key(0), BATCH)
    tasks.clear()
    outputs = jax.jit(pipe.apply)(variables, BATCH)
    jax.jit(pipe.value_and_grad).lower(variables, BATCH)
    assert not [
        task.description for task in tasks if "compiling" in task.description or "first run" in task.description
    ]
    np.testing.assert_array_equal(outputs, pipe.apply(variables, BATCH))


def test_without_a_terminal_nothing_waits_for_the_first_step(monkeypatch):
    waited = []
    monkeypatch.setattr(jax, "block_until_ready", waited.append)
    with first_call("the step", BATCH) as done:
        jax.jit(lambda x: (progress.is_shown(), x)[1])(BATCH)
        compiles("a test")
        assert done(BATCH) is BATCH
    assert not waited


def test_checkpoints_show_their_bytes(terminal, soon, tasks, tmp_path):
    pipe, tx = make_pipe(), optax.sgd(0.1, momentum=0.9)
    state = pipe.create_state(jax.random.key(0), BATCH, tx)
    state, _ = pipe.train_step(state, BATCH)
    terminal.truncate(0)
    tasks.clear()
    with jpipe.Checkpointer(tmp_path) as saved:
        saved.save(pipe, state)
        saved.wait()
        saved.restore(pipe, BATCH, tx)
        jpipe.load_layers(tmp_path)
    size = f"{2 * 4 * (3 * (16 + 4) + 8 + 2)} bytes"  # parameters and momentum
    assert lines_on(terminal)[:4] == [
        f"saving step 1 ({size})",
        f"waiting until step 1 ({size}) is on disk",
        f"waiting until step 1 ({size}) is on disk",
        f"restoring step 1 ({size})",
    ]
    assert "reading the layers of step 1" in lines_on(terminal)
    bars = [task for task in tasks if task.fields["unit"] == "bytes"]
    assert len(bars) == 2 and all(task.completed == task.total for task in bars)


def test_who_follows_calls_holds_a_metric_and_no_state(monkeypatch):
    """What a step gives is in use afterwards, or donated; of what is traced nobody is told."""
    calls, scalar = [], lambda value: jnp.asarray(value)
    monkeypatch.setattr("jpipe.terminal.first_calls.followers", [calls.append])
    state = {"key": jax.random.key(0), "kernel": jnp.ones((4, 4)), "step": scalar(1)}
    metrics = {"loss": scalar(2.0)}
    with first_call("the step", BATCH) as done:
        assert [(call.what, call.has_returned, call.is_compiling) for call in calls] == [("the step", False, False)]
        compiles("a test")
        assert calls[0].is_compiling
        done((state, metrics))
        assert not calls[0].is_compiling
    assert calls[0].has_returned and calls[0].result is metrics["loss"]
    with first_call("keys", BATCH) as done:
        done((state["key"], np.ones(3)))
    assert calls[1].has_returned and calls[1].result is None
    jax.eval_shape(make_pipe().init, jax.random.key(0), BATCH)
    assert len(calls) == 2
