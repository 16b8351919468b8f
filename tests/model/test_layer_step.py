"""One layer's forward and backward: the gradients of `jax.vjp`, from no more than what is stored."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jpipe
from helpers import assert_close, take_microbatch
from jpipe.execution.batches import default_inputs
from jpipe.execution.program import given_shapes
from jpipe.jax_tools.random_keys import key_shape
from jpipe.layers.adapt import as_layers
from jpipe.model.layer_step import Given, LayerStep
from jpipe.model.loss import loss_sums
from jpipe.model.remat import MODES, as_remat
from jpipe.model.trace import trace_kinds

REMATS = [*MODES, jax.checkpoint_policies.dots_saveable]
BATCH = {"inputs": np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)}


def loss_fn(outputs, batch):
    return jnp.sum(outputs**2) + jnp.sum(batch["inputs"]), jnp.float32(3)


def cast(params, x):
    """A layer whose kernel is cast: the cast kernel follows from the parameters alone."""
    return jnp.sin(x @ params.astype(jnp.float32))


MIDDLE = {
    "dense": nn.Dense(4),
    "dropout": nn.Dropout(0.5, deterministic=False),
    "cast": jpipe.Layer(lambda key, x: jnp.ones((4, 4), jnp.bfloat16), cast),
    "function": jnp.tanh,
    "gelu": nn.gelu,
}


def step_of(layer, remat):
    layers = as_layers([lambda x: x, layer, lambda y: y * 2])
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), BATCH)
    model = trace_kinds(layers, shapes["inputs"], shapes)
    steps = [LayerStep(kind, key_shape(), default_inputs, loss_fn, as_remat(remat)) for kind in model.kinds]
    return model, steps, shapes


@pytest.mark.parametrize("remat", REMATS, ids=str)
@pytest.mark.parametrize("name", MIDDLE)
def test_backward_equals_vjp(name, remat):
    model, steps, shapes = step_of(MIDDLE[name], remat)
    kind, step = model.kinds[1], steps[1]
    tape = step.tape(given_shapes(step, shapes))
    rng = np.random.default_rng(0)
    params = [jnp.asarray(rng.standard_normal(a.shape).astype(a.dtype)) for a in jax.tree.leaves(kind.variables)]
    key = jax.random.key(0)
    given, x, dy = Given(params, [], key, None), [jnp.asarray(BATCH["inputs"])], [jnp.asarray(BATCH["inputs"] + 1)]

    @jax.jit
    def both(given, x, dy):
        outcome, stored = tape.forward(given, x)
        assert [(a.shape, a.dtype) for a in stored] == [(a.shape, a.dtype) for a in tape.stored]
        return outcome.outputs, tape.backward(given, stored, dy)

    run = lambda p, x: step.forward(Given(p, [], key, None), x).outputs
    expected, vjp = jax.vjp(run, params, x)
    outputs, gradients = both(given, x, dy)
    assert_close(outputs, expected, "outputs")
    for found, want in zip(jax.tree.leaves(gradients), jax.tree.leaves(vjp(dy)), strict=True):
        assert found.dtype == want.dtype
        assert_close(found.astype(jnp.float32), want.astype(jnp.float32), "gradient")


def test_what_is_stored():
    sizes = lambda name, remat: [a.shape for a in stored(name, remat)]
    assert sizes("dense", "layer") == [(2, 4)], "its input"
    assert sizes("dense", "none") == [(2, 4)], "its input; the kernel is at hand"
    assert set(sizes("function", "none")) == {(2, 4)}
    assert (4, 4) not in sizes("cast", "none"), "the cast kernel is made again"
    assert sizes("cast", "layer") == [(2, 4)]


def test_what_elementwise_operations_give_is_made_again():
    assert [(a.shape, a.dtype) for a in stored("gelu", "none")] == [((2, 4), np.float32)]
    assert len(stored("gelu", jax.checkpoint_policies.everything_saveable)) > 3
    kept = {(a.shape, a.dtype.name) for a in stored("dropout", "none")}
    assert kept == {((2, 4), "bool")}, "a mask takes a byte, its random bits four, and time"


def test_a_layer_prints_once_in_its_forward(capfd):
    """Its mask follows from nothing and is made again in the backward, where the layer isn't run a second time."""

    def chatty(x):
        jax.debug.print("ran")
        return jnp.where(jnp.arange(4) > 1, x, 0) * x

    pipe = jpipe.Pipeline(
        [chatty, nn.Dense(4)],
        lambda y, _: jnp.mean(y),
        num_stages=1,
        num_microbatches=2,
        remat="none",
        balance="even",
    )
    variables = pipe.init(jax.random.key(0), BATCH["inputs"])
    jax.block_until_ready(pipe.value_and_grad(variables, BATCH["inputs"]))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("ran") == 2, "once a micro-batch"


def stored(name, remat):
    _, steps, shapes = step_of(MIDDLE[name], remat)
    return steps[1].tape(given_shapes(steps[1], shapes)).stored


def test_final_layer_returns_the_loss():
    _, steps, _ = step_of(nn.Dense(4), "none")
    given, x = Given([], [], None, BATCH), [jnp.asarray(BATCH["inputs"])]
    loss, weight = steps[2].forward(given, x).outputs
    assert_close(loss, jnp.sum((2 * BATCH["inputs"]) ** 2) + jnp.sum(BATCH["inputs"]))
    assert float(weight) == 3


def test_loss_sums():
    numbers = lambda loss: [float(part) for part in loss_sums(loss)]
    assert numbers(jnp.float32(2)) == [2, 1]
    assert numbers((jnp.float32(2), jnp.int32(3))) == [2, 3]
    assert {part.dtype for part in loss_sums((jnp.bfloat16(2), 3, {"hits": jnp.int32(300)}))[1:]} == {
        np.dtype("float32")
    }
    assert numbers((jnp.float32(2), 3.0, {"b": (jnp.int32(4), 5), "a": jnp.bool_(True)})) == [2, 3, 1, 1, 4, 5]
    grad = jax.grad(lambda w: sum(loss_sums((w, w, {"a": w}))[1:]))(2.0)
    assert float(grad) == 0, "weights and metrics are constants"


def test_microbatches_are_runs_of_examples():
    assert_close(take_microbatch(np.arange(6.0, dtype=np.float32), 1, 3), np.asarray([2, 3], np.float32))
