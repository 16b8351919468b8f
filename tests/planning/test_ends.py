"""When all stages compute the ends together, and what cannot be shared."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

import jpipe
from cases import assert_close
from jpipe.planning.ends import make_shared_ends
from jpipe.schedules.ticks import lower
from vocabulary import WORDS, batch_of, pipeline, untied, wide


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def test_the_first_layer_comes_before_its_slot_and_the_last_after_it():
    """As the docstring draws it, for K=2 and M=2."""
    pipe = pipeline(untied(), 2, 2)
    jax.eval_shape(pipe.init, jax.random.key(0), batch_of())
    model, table = pipe.plan.model, lower(pipe.schedule)
    forward, backward = make_shared_ends(model, pipe.schedule, table, keep_inputs=False).turns
    assert [column.tolist() for column in forward] == [[0, 1, -1, -1], [-1, 0, 1, -1], [-1] * 4]
    assert [column.tolist() for column in backward] == [[-1] * 4, [-1] * 4, [-1, -1, 0, 1]]
    again = make_shared_ends(model, pipe.schedule, table, keep_inputs=True).turns[1]
    assert again.enter.tolist() == [-1, -1, 0, 1], "its backward reads again what the first layer gave"


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        return nn.Dense(WORDS, **wide)(nn.BatchNorm(not train, force_float32_reductions=False, **wide)(x))


def of_singular_values(outputs, batch):
    """A loss by an operation without a rule for shards."""
    return jnp.mean(jnp.linalg.svd(outputs, compute_uv=False))


@pytest.mark.parametrize(
    ("layers", "options", "message"),
    [
        (untied(), {"schedule": "gpipe"}, "'gpipe' has F1 before the backward of F0: use schedule='1f1b'"),
        ([nn.Embed(127, 15, **wide), nn.Dense(15, **wide), nn.Dense(127, **wide)], {}, "has no weights to share"),
        (untied(), {"loss_fn": of_singular_values}, r"Head\): svd \(test_ends.py:\d+\) has to see whole arrays"),
    ],
)
def test_what_cannot_be_shared_is_refused(layers, options, message):
    batch = batch_of(127 if layers[0].num_embeddings == 127 else WORDS)
    with pytest.raises(ValueError, match=message):
        pipe = pipeline(layers, 2, 4, **options)
        jax.eval_shape(pipe.init, jax.random.key(0), batch)
    if "schedule" not in options:
        with pytest.raises(ValueError, match=message):  # it was refused with the first step, and has no plan since
            pipe.create_state(jax.random.key(0), batch, optax.sgd(0.1))


def with_accuracy(outputs, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(outputs, batch["targets"])
    return jnp.mean(losses), 1.0, {"accuracy": jnp.mean(outputs.argmax(-1) == batch["targets"])}


def test_the_largest_of_a_shared_vocabulary_is_found_by_its_parts(make_mesh):
    """With a data axis and an odd sequence nothing else could be split, and the loss was said to be at fault."""
    found, batch = [], {name: ids[:, :5] for name, ids in batch_of().items()}
    for ends in ("own", "shared"):
        pipe = pipeline(untied(), 2, 4, ends=ends, loss_fn=with_accuracy, mesh=make_mesh((2, 2), ("stage", "data")))
        state = pipe.create_state(jax.random.key(0), batch, optax.sgd(0.1))
        state, metrics = jax.jit(pipe.train_step)(state, batch)
        found.append((metrics, pipe.layer_variables(state.variables)))
    assert_close(*found)


class Scaled(nn.Module):
    @nn.compact
    def __call__(self, x):
        scale = self.variable("_overwrite_with_gradient", "scale", lambda: jnp.ones(()))
        return nn.Dense(WORDS, **wide)(x * scale.value)


@pytest.mark.parametrize(("head", "collection"), [(Normed(), "batch_stats"), (Scaled(), "_overwrite_with_gradient")])
def test_ends_with_state_are_refused_before_variables_are_made(head, collection):
    """The refusal came with the first step, when `create_state` had compiled, and filled the devices."""
    with pytest.raises(ValueError, match=rf"layer 5 \({type(head).__name__}\) has \['{collection}'\]"):
        jax.eval_shape(pipeline([*untied()[:-1], head], 2, 4).init, jax.random.key(0), batch_of())


@pytest.mark.parametrize("k", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_frozen_head_is_shared_too_and_one_stage_has_nothing_to_share(k):
    layers, batch = untied(), batch_of()
    layers[-1] = jpipe.freeze(layers[-1], lambda path: "Dense" in str(path))
    found = []
    for ends in ("own", "shared"):
        pipe = pipeline(layers, k, 2, ends=ends)
        variables = pipe.init(jax.random.key(0), batch)
        (loss, _), grads = pipe.value_and_grad(variables, batch)
        found.append((loss, pipe.layer_variables({"params": grads})))
    assert_close(*found)
