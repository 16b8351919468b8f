"""The programs, as the pipeline jits them; what they compute is held by tests/end_to_end/test_transparency.py."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jpipe
from cases import assert_close
from jpipe.execution import programs

BATCH = {"inputs": np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4), "targets": np.ones((8, 4), np.float32)}


@pytest.fixture(scope="module")
def pipe():
    loss = lambda y, batch: (jnp.sum(jnp.square(y - batch["targets"])), jnp.sum(batch["targets"]), {"top": jnp.max(y)})
    found = jpipe.Pipeline([nn.Dense(4) for _ in range(4)], loss, num_stages=2, num_microbatches=2, balance="even")
    found.planner.plan_for(BATCH)
    return found


@pytest.fixture(scope="module")
def variables(pipe):
    return jax.jit(lambda key: programs.init_variables(pipe.plan, key, {}))(jax.random.key(0))


def test_they_are_traceable_and_labelled(pipe, variables):
    assert {name: tree.layout for name, tree in variables.items()} == pipe.plan.layouts
    planner = pipe.planner
    step = planner.training_step(planner.for_training(BATCH))
    run = jax.jit(lambda v, batch: programs.value_and_grad(step, v, batch, None))
    (loss, updates, metrics), grads = run(variables, BATCH)
    assert updates == {} and set(metrics) == {"top"}
    assert grads.layout == pipe.plan.layouts["params"]
    forward = planner.evaluation_step(planner.for_outputs(BATCH["inputs"]), with_loss=False)
    outputs = jax.jit(lambda v, batch: programs.apply(forward, (0,), v, batch))(variables, BATCH["inputs"])
    assert outputs.shape == (8, 4)
    expected = np.sum(np.square(np.asarray(outputs) - BATCH["targets"])) / BATCH["targets"].sum()
    assert_close(loss, expected, "loss")
    forward = planner.evaluation_step(planner.for_evaluation(BATCH), with_loss=True)
    assert_close(jax.jit(lambda v, b: programs.evaluate(forward, v, b))(variables, BATCH), expected, "loss")
    assert_close(metrics["top"], np.mean([np.max(outputs[:4]), np.max(outputs[4:])]), "mean over micro-batches")


def test_they_can_not_be_differentiated(pipe, variables):
    step = pipe.planner.evaluation_step(pipe.planner.for_evaluation(BATCH), with_loss=True)
    with pytest.raises(TypeError, match=r"pipe\.apply and pipe\.evaluate are forward only"):
        jax.grad(lambda v: programs.evaluate(step, v, BATCH))(variables)
