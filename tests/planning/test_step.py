"""A step as plain data: what is laid out for training, and what forward only leaves out."""

import chex
import jax
import jax.numpy as jnp
import pytest

import jpipe
import jpipe.planning.planner

BATCH = {"inputs": jax.ShapeDtypeStruct((8, 4), jnp.float32)}


def loss_fn(outputs, batch):
    return jnp.sum(outputs), jnp.float32(1), {"hits": jnp.sum(outputs > 0)}


@pytest.fixture
def steps(monkeypatch):
    """The steps that were built since."""
    found, build = [], jpipe.planning.planner.build_step

    def noted(*arguments, **options):
        found.append(build(*arguments, **options))
        return found[-1]

    monkeypatch.setattr(jpipe.planning.planner, "build_step", noted)
    return found


def pipeline(**options):
    layer = jpipe.Layer(lambda key, x: jnp.ones((4, 4)), lambda w, x: jnp.tanh(x @ w))
    pipe = jpipe.Pipeline([layer] * 6, loss_fn, num_stages=2, num_microbatches=4, balance="even", **options)
    return pipe, jax.eval_shape(pipe.init, jax.random.key(0), BATCH)


@pytest.mark.parametrize(("remat", "rows"), [("none", (3, 1)), ("layer", (3, 1)), ("full", (1, 1))])
def test_a_training_step(steps, remat, rows):
    pipe, variables = pipeline(remat=remat)
    jax.eval_shape(pipe.value_and_grad, variables, BATCH)
    (step,) = steps
    assert step.schedule.num_microbatches == 4
    assert pipe.planner.loss(pipe.planner.for_training(BATCH)).metrics == ("hits",)
    assert [(leaf.shape, leaf.dtype.name) for leaf in step.outputs] == [((), "float32")] * 3
    assert len(step.functions) == len(step.forwards) == len(step.layers) == len(step.mergings) == 3
    kept = [forward is layer.forward for forward, layer in zip(step.forwards, step.layers, strict=True)]
    assert kept == [remat != "full"] * 3, "where inputs are kept, a forward action makes no residuals"
    (buffer,) = {buffer.strides: buffer for buffer in step.kept.storages["residual"].buffers.values()}.values()
    sizes = [stride * count for stride, count in zip(buffer.strides, rows, strict=True)]
    assert buffer.size == max(sizes)


def test_forward_only(steps):
    pipe, variables = pipeline()
    jax.eval_shape(pipe.apply, variables, BATCH)
    (step,) = steps
    assert (step.layers, step.kept.storages["residual"].named_buffers, step.mergings) == ((), (), ())
    assert not any(function.train for function in step.functions)
    assert [leaf.shape for leaf in step.outputs] == [(2, 4)]
    assert set(step.storages) == {"params"}


def test_equal_layers_of_an_unrolled_model_are_traced_once(steps):
    pipe, variables = pipeline(unroll=True)
    jax.eval_shape(pipe.value_and_grad, variables, BATCH)
    (step,) = steps
    assert len(step.layers) > 3
    assert len({id(layer) for layer in step.layers}) == 3


def test_a_group_without_layers_where_backwards_are_split():
    """A regression: of the layers of stage 0, which never splits, W was traced too, and read buffers without rows."""
    dense = lambda rows, columns: jpipe.Layer(
        lambda key, x: jnp.full((rows, columns), 0.1), lambda w, x: jnp.tanh(x @ w)
    )
    layers, options = [*[dense(4, 4)] * 4, dense(4, 9)], {"num_microbatches": 4, "balance": [4, 1], "remat": "none"}
    loss = lambda y, batch: jnp.mean((y - batch["inputs"].sum(-1, keepdims=True)) ** 2)
    pipe = jpipe.Pipeline(layers, loss, num_stages=2, schedule="zero_bubble", **options)
    batch = {"inputs": jax.random.normal(jax.random.key(1), (8, 4))}
    variables = pipe.init(jax.random.key(0), batch)
    step = pipe.planner.training_step(pipe.planner.for_training(batch))
    assert [step.groups_in(kind) for kind in "BIW"] == [[0, 1, 2], [2], [2]]

    def whole(weights):
        x = batch["inputs"]
        for w in weights:
            x = jnp.tanh(x @ w)
        return loss(x, batch)

    (value, _), grads = pipe.value_and_grad(variables, batch)
    expected, wanted = jax.jit(jax.value_and_grad(whole))(pipe.layer_variables(variables))
    chex.assert_trees_all_close(value, expected, rtol=1e-6)
    chex.assert_trees_all_close(pipe.layer_variables({"params": grads}), wanted, rtol=1e-5)
