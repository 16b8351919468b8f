"""From a batch to a step, each value made from the one before, and once."""

import re
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jpipe
import small_pipeline
from cases import compilations
from jpipe.partitioner import examples

BATCH = {"inputs": np.ones((8, 4), np.float32), "targets": np.zeros((8, 4), np.float32)}


def make(*layers, **options):
    """A pipeline's planner."""
    return small_pipeline.make(*layers, **options).planner


def halved(batch):
    return jax.tree.map(lambda a: a[:4], batch)


class Causal(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x, mask = nn.Embed(8, 4)(tokens), nn.make_causal_mask(tokens)
        for _ in range(4):
            x = x + nn.MultiHeadDotProductAttention(2)(x, mask=mask)
        return x


def test_masks_are_not_computed(monkeypatch):
    """A regression: to look for masks by examples' places, a causal mask was made for all examples and heads."""
    monkeypatch.setattr(examples, "interpret", lambda _: pytest.fail("constants are computed"))
    batch = {"inputs": jax.ShapeDtypeStruct((64, 2048), jnp.int32)}
    pipe = jpipe.Pipeline(Causal(), lambda y, _: jnp.mean(y), num_stages=2, num_microbatches=4)
    assert pipe.planner.examples(pipe.planner.for_training(batch)).is_certain


def test_values_are_made_once():
    planner = make()
    plan = planner.plan_for(BATCH)
    assert plan is planner.plan_for(halved(BATCH)) is planner.known_plan()
    micro = planner.for_training(BATCH)
    assert planner.model(micro) is plan.model and planner.loss(micro) is plan.loss
    step = planner.training_step(micro)
    assert step is planner.training_step(planner.for_training(BATCH), jax.random.key(1))
    assert step is not planner.training_step(micro, jax.random.key(1, impl="rbg"))
    assert step is not planner.training_step(planner.for_training(halved(BATCH)))
    evaluation = planner.evaluation_step(planner.for_evaluation(BATCH), with_loss=True)
    assert evaluation is planner.evaluation_step(planner.for_evaluation(BATCH), with_loss=True)


def test_no_layer_is_traced_again():
    calls = []

    def count(x):
        calls.append(x.shape)
        return x

    planner = make([count, nn.Dense(4)])
    planner.plan_for(BATCH)
    planner.model(planner.for_training(BATCH))
    planner.model(planner.for_evaluation(BATCH))
    assert calls == [(4, 4)]
    planner.model(planner.for_evaluation(halved(BATCH)))
    assert calls == [(4, 4), (2, 4)]


def test_what_is_not_known_before_a_batch():
    planner = make(balance="flops")
    assert planner.plan is None
    with pytest.raises(ValueError, match="has seen no batch yet"):
        planner.known_plan()
    with pytest.raises(ValueError, match="balance='flops' follows from the batch's shapes"):
        _ = planner.partition
    assert make().partition.counts == (2, 2)


def test_a_batch_that_fails_decides_nothing():
    planner = make()
    with pytest.raises(ValueError, match="KeyError: 'targets'"):
        planner.plan_for({"inputs": BATCH["inputs"]})
    assert planner.plan is None
    assert planner.plan_for(BATCH) is planner.plan


def test_batches_that_are_not_like_the_first():
    planner = make()
    planner.plan_for(BATCH)
    example, short = jax.tree.map(lambda a: a[0], BATCH), {"inputs": BATCH["inputs"]}
    for door in (planner.for_training, planner.for_evaluation):
        assert door(halved(BATCH)).size == 2
        with pytest.raises(ValueError, match=r"another structure than at init: it lacks batch\['targets'\]"):
            door(short)
        with pytest.raises(ValueError, match=r"batch\['inputs'\] has the shape \(4,\), that of one example at init"):
            door(example)


def test_outputs_of_a_batch_or_of_bare_inputs():
    planner = make([nn.Dense(4), jpipe.reads(lambda x, t: x + t, lambda batch: batch["targets"])])
    assert not planner.for_outputs(BATCH).bare
    with pytest.raises(ValueError, match=r"layer 1 .* reads a side input; pass the whole batch, not its inputs"):
        planner.for_outputs(BATCH["inputs"])
    with pytest.raises(TypeError, match="bare=1 is no bool"):
        planner.for_outputs(BATCH, bare=1)


def test_what_needs_a_loss_says_so():
    planner = jpipe.Pipeline([nn.Dense(4)] * 2, None, num_stages=2, num_microbatches=2).planner
    with pytest.raises(ValueError, match="this pipeline has no loss"):
        planner.for_training(BATCH)
    micro = planner.for_evaluation(BATCH)
    planner.evaluation_step(micro, with_loss=False)
    with pytest.raises(ValueError, match="this pipeline has no loss"):
        planner.evaluation_step(micro, with_loss=True)


# --- state with rows for examples -------------------------------------------------------------------------------------


class Memory(nn.Module):
    """Keeps something of a shape that follows from `shape(x)`."""

    shape: Callable
    size: int | None = None

    @nn.compact
    def __call__(self, x, train: bool = False):
        if self.size is not None and x.shape[0] != self.size:
            raise ValueError(f"{self.size} examples at a time")
        last = self.variable("memory", "last", lambda: jnp.zeros(self.shape(x)))
        if train and not self.is_initializing():
            last.value = last.value + 1
        return x + jnp.mean(last.value)


class Model(nn.Module):
    """A model that is one module with a memory."""

    shape: Callable

    @nn.compact
    def __call__(self, x, train: bool = False):
        return nn.Dense(4)(jnp.tanh(Memory(self.shape)(nn.Dense(4)(x), train)))


def by_example(x):
    return x.shape


BY_EXAMPLE = {
    "a list": ([nn.Dense(4), *[Memory(by_example)] * 2, nn.Dense(4)], "layer 1 (Memory)']['memory']['last']"),
    "examples come second": ([Memory(lambda x: (3, x.shape[0])), nn.Dense(4)], "float32[3,4], float32[3,8] for"),
    "one module": (Model(by_example), "variables['memory']['Memory_0']['last'] is float32[4,4], float32[8,4] for"),
}
NOT_BY_EXAMPLE = {
    "a shape of features": [Memory(lambda x: x.shape[1:]), nn.Dense(4)],
    "one module": Model(lambda x: x.shape[1:]),
    "a model that takes micro-batches of one size": [Memory(by_example, size=4), nn.Dense(4)],
    "BatchNorm": [nn.BatchNorm(use_running_average=False), nn.Dense(4)],
}


@pytest.mark.parametrize("name", BY_EXAMPLE)
def test_state_with_rows_for_examples_is_refused(name):
    """A regression: micro-batches' rows were merged by their mean, so that examples got others' state."""
    layers, fault = BY_EXAMPLE[name]
    planner = make(layers)
    with compilations() as count, pytest.raises(ValueError, match=re.escape(fault)):
        planner.plan_for(BATCH)
    assert count() == 0


@pytest.mark.parametrize("name", NOT_BY_EXAMPLE)
def test_other_state_is_not_refused(name):
    make(NOT_BY_EXAMPLE[name]).plan_for(BATCH)
