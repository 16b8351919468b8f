"""A step as plain data: what is laid out for training, and what forward only leaves out."""

from types import SimpleNamespace

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jpipe
import jpipe.planning.planner
from cases import VOCABULARY, WIDTH, check_step, make_model, pipeline, tokens, weighted_cross_entropy
from collectives import axes_of, in_loop, read
from jpipe.memory.storage import build_storage
from jpipe.partitioner.shardings import PARTIAL, REPLICATED, Axis, Shard
from jpipe.planning.step import make_gradient_sums

DATA, CONTEXT = Axis(("data", "fsdp"), (2, 2), is_data=True), Axis(("context",), (2,))


def test_gradients_of_one_buffer_are_alike():
    """Two sets of one shape, of which one's gradients are partial along `context`; a third has a buffer of its own."""
    square, other = jax.ShapeDtypeStruct((4, 4), jnp.float32), jax.ShapeDtypeStruct((64, 2), jnp.float32)
    specs = [[P()], [P()], [P("context")]]
    storage = build_storage([[square], [square], [other]], [[0, 1], [0], [1]], device_of=range(2), specs=specs)
    apart, whole, split = (PARTIAL, PARTIAL), (PARTIAL, REPLICATED), (PARTIAL, Shard(0))
    groups = [SimpleNamespace(variable_set=v) for v in (None, 0, 1, 2)]
    layers = [SimpleNamespace(gradients_at=at) for at in ([], [apart], [whole], [split])]
    sums = make_gradient_sums(SimpleNamespace(groups=groups), layers, storage, (DATA, CONTEXT))
    (first,), second, (third,) = (known.buffers for known in storage.record_types)
    assert second == (first,)
    assert sums.partial == {first: (True, True), third: (True, False)}
    assert sums.partial_along == {first: ("data", "fsdp", "context"), third: ("data", "fsdp")}


def test_without_layers_nothing_is_summed():
    sums = make_gradient_sums(SimpleNamespace(groups=[]), [], build_storage([], [], device_of=[0]), ())
    assert sums.partial == sums.partial_along == {}


class Dense(nn.Module):
    """A residual block, on positions that `context` splits or on all of them: their kernels share a buffer."""

    splits: bool

    @nn.compact
    def __call__(self, x):
        over = P(None, "context", None) if self.splits else P(None, None, None)
        constrain = lambda x: x if jax.sharding.get_abstract_mesh().empty else jax.lax.with_sharding_constraint(x, over)
        return x + constrain(nn.tanh(nn.Dense(WIDTH, param_dtype=jnp.float64)(constrain(x))))


@pytest.fixture(scope="module")
def sequences():
    with jax.enable_x64(True):
        embed = nn.Embed(VOCABULARY, WIDTH, param_dtype=jnp.float64, dtype=jnp.float64)
        layers = [embed, *map(Dense, (True, False, True, False)), nn.Dense(VOCABULARY, param_dtype=jnp.float64)]
        return make_model(layers, weighted_cross_entropy, {name: array[:, :4] for name, array in tokens().items()})


def test_sums_over_an_axis_that_splits_no_parameter_are_taken_once(make_mesh, sequences):
    with jax.enable_x64(True):
        mesh = make_mesh((2, 2, 2), ("stage", "data", "context"))
        pipe = pipeline(sequences, "1f1b", 2, 3, mesh=mesh, balance="even")
        variables, _ = check_step(pipe, sequences)
        text = jax.jit(pipe.value_and_grad).lower(variables, sequences.batch).compile().as_text()
    kernel = 8 * WIDTH * WIDTH
    sums = [
        c for c in read(text) if c.kind == "all-reduce" and "context" in (axes_of(c, mesh) or ()) and c.bytes >= kernel
    ]
    assert sums and not any(map(in_loop, sums))
    np.testing.assert_equal([axes_of(c, mesh) for c in sums], [("data", "context")] * len(sums))


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


def tanh_pipeline(**options):
    layer = jpipe.Layer(lambda key, x: jnp.ones((4, 4)), lambda w, x: jnp.tanh(x @ w))
    pipe = jpipe.Pipeline([layer] * 6, loss_fn, num_stages=2, num_microbatches=4, balance="even", **options)
    return pipe, jax.eval_shape(pipe.init, jax.random.key(0), BATCH)


@pytest.mark.parametrize(("remat", "rows"), [("none", (3, 1)), ("layer", (3, 1)), ("full", (1, 1))])
def test_a_training_step(steps, remat, rows):
    pipe, variables = tanh_pipeline(remat=remat)
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
    pipe, variables = tanh_pipeline()
    jax.eval_shape(pipe.apply, variables, BATCH)
    (step,) = steps
    assert (step.layers, step.kept.storages["residual"].named_buffers, step.mergings) == ((), (), ())
    assert not any(function.train for function in step.functions)
    assert [leaf.shape for leaf in step.outputs] == [(2, 4)]
    assert set(step.storages) == {"params"}


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
