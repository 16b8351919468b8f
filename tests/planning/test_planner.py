"""From a batch to a step, each value made from the one before, and once."""

import re
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import jpipe
from cases import compilations
from jpipe.tools.chips import mesh_of_nowhere

BATCH = {"inputs": np.ones((8, 4), np.float32), "targets": np.zeros((8, 4), np.float32)}


def make(layers=None, **options):
    """A pipeline's planner."""
    layers = layers or [nn.Dense(4) for _ in range(4)]
    loss = lambda y, batch: jnp.mean(jnp.square(y - batch["targets"]))
    options = {"num_stages": 2, "num_microbatches": 2, "balance": "even"} | options
    return jpipe.Pipeline(layers, loss, **options).planner


def halved(batch):
    return jax.tree.map(lambda a: a[:4], batch)


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


@pytest.mark.parametrize("in_parts", ["", "forward", "backward"])
def test_layers_are_traced_once_for_all_meshes_that_split_them_alike(in_parts):
    """But for those whose own code is of one device's parts, whose shapes follow from the mesh."""
    calls = []

    def count(x):
        calls.append(x.shape)
        return x

    def count_in_parts(x):
        spec = PartitionSpec("data")
        return jax.shard_map(count, in_specs=spec, out_specs=spec, axis_names={"data"})(x)

    @jax.custom_vjp
    def count_backward(x):
        return x

    count_backward.defvjp(lambda x: (x, None), lambda _, cotangent: (count_in_parts(cotangent),))
    layer = {"": count, "forward": count_in_parts, "backward": count_backward}[in_parts]
    one, other = (
        make([jnp.sin, layer, nn.Dense(4)], num_stages=K, mesh=mesh_of_nowhere(sizes))
        for K, sizes in ((2, {"stage": 2, "data": 2}), (1, {"stage": 1, "data": 4}))
    )
    one.training_step(one.for_training(BATCH))
    of_first = list(calls)
    assert (2, 4) in of_first if in_parts else {*of_first} == {(4, 4)}
    other.known = one.known  # as a search does
    other.training_step(other.for_training(BATCH))
    assert ((1, 4) in calls) == bool(in_parts) and (calls == of_first) != bool(in_parts)
    assert len([key for key in one.known if key[0] == "programs"]) == 2


def test_a_planner_that_forgets_leaves_others_what_they_share():
    """A regression: ends that can't be shared had all settings of their mesh traced again."""
    one, other = make(), make()
    one.plan_for(BATCH)
    micro = one.for_training(BATCH)
    other.known = one.known
    model, layers = one.model(micro), one.training_step(micro).layers
    other.clear_cache()
    assert one.model(micro) is model and one.training_step(micro).layers is layers


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
    """A model that is one module with a memory, in a scan over its blocks or not."""

    shape: Callable
    scans: bool = False

    @nn.compact
    def __call__(self, x, train: bool = False):
        x = nn.Dense(4)(x)
        if self.scans:
            step = lambda memory, x, _: (memory(x, train), None)
            axes = {"variable_axes": {"memory": 0}, "split_rngs": {}, "length": 2}
            x, _ = nn.scan(step, **axes)(Memory(self.shape), x, None)
        else:
            x = Memory(self.shape)(x, train)
        return nn.Dense(4)(jnp.tanh(x))


def by_example(x):
    return x.shape


BY_EXAMPLE = {
    "a list": ([nn.Dense(4), *[Memory(by_example)] * 2, nn.Dense(4)], "layer 1 (Memory)']['memory']['last']"),
    "the first layer": ([Memory(by_example), nn.Dense(4)], "layer 0 (Memory)']['memory']['last']"),
    "examples come second": ([Memory(lambda x: (3, x.shape[0])), nn.Dense(4)], "float32[3,4], float32[3,8] for"),
    "examples beside others": ([Memory(lambda x: (3 * x.shape[0],)), nn.Dense(4)], "float32[12], float32[24] for"),
    "one module": (Model(by_example), "variables['memory']['Memory_0']['last'] is float32[4,4], float32[8,4] for"),
    "a scan": (Model(by_example, scans=True), "['last'] is float32[2,4,4], float32[2,8,4] for twice as many"),
}
NOT_BY_EXAMPLE = {
    "a shape of features": ([Memory(lambda x: x.shape[1:]), nn.Dense(4)], {}),
    "one module": (Model(lambda x: x.shape[1:]), {}),
    "a model that takes micro-batches of one size": ([Memory(by_example, size=4), nn.Dense(4)], {}),
    "BatchNorm": ([nn.BatchNorm(use_running_average=False), nn.Dense(4)], {}),
    "nnx": ([lambda rngs: nnx.BatchNorm(4, rngs=rngs), nn.Dense(4)], {}),
    "a single micro-batch": ([Memory(by_example), nn.Dense(4)], {"num_microbatches": 1}),
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
    layers, options = NOT_BY_EXAMPLE[name]
    make(layers, **options).plan_for(BATCH)
