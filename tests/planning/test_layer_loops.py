"""Loops over layers: each virtual stage runs its own, idle stages run along and nothing counts."""

import contextlib
import functools
import random
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jpipe
import sequential
from cases import (
    VOCABULARY,
    WIDTH,
    assert_close,
    assert_step_equals,
    make_model,
    pipeline,
    tokens,
    weighted_cross_entropy,
)
from device_programs import DEVICES, anything, programs_for
from jpipe.planning import layer_loops
from jpipe.planning.layer_loops import IdleWork, make_ranges
from split_model import SplitBlock


def model_of(group_of):
    groups = [
        SimpleNamespace(indices=tuple(i for i, g in enumerate(group_of) if g == c)) for c in range(max(group_of) + 1)
    ]
    return SimpleNamespace(groups=groups, group_of=group_of)


def walk(model, ranges, virtual_stage):
    """The indices of the layers that a virtual stage runs."""
    found = []
    for p in range(ranges.passes_of[virtual_stage]):
        for g, group in enumerate(model.groups):
            found += group.indices[ranges.start[virtual_stage, p, g] : ranges.stop[virtual_stage, p, g]]
    return found


@pytest.mark.parametrize("seed", range(15))
def test_any_model_and_cuts(seed):
    draw = random.Random(seed)
    count = draw.randint(1, 12)
    group_of, most = [], -1
    for _ in range(count):  # groups are numbered in the order of their first layers
        group_of.append(draw.randint(0, most + 1))
        most = max(most, group_of[-1])
    cuts = sorted(draw.sample(range(1, count), min(draw.randint(0, 4), count - 1)))
    bounds = list(zip([0, *cuts], [*cuts, count], strict=True))
    model = model_of(group_of)
    ranges = make_ranges(model, bounds)
    assert ranges.start.dtype == ranges.stop.dtype == np.int32
    for s, (first, last) in enumerate(bounds):
        assert walk(model, ranges, s) == list(range(first, last))


BATCH = {"x": np.arange(64.0, dtype=np.float32).reshape(8, 8) / 64}


def product(width=8, *, apply=lambda w, x: jnp.tanh(x @ w), dtype="float32"):
    return jpipe.Layer(lambda key, x: jax.random.normal(key, (x.shape[-1], width), dtype), apply)


def products(layers, counts, **options):
    options = {"num_stages": 2, "num_microbatches": 4, "balance": counts, "inputs": lambda batch: batch["x"], **options}
    return jpipe.Pipeline(layers, lambda y, _: jnp.mean(y**2), **options)


def step_of(pipe, batch=BATCH):
    return pipe.planner.training_step(pipe.planner.for_training(batch))


@pytest.mark.parametrize("devices", DEVICES)
def test_tpus_have_idle_work_where_layers_send_and_only_gpus_elsewhere(make_mesh, devices):
    layers = [nn.Embed(VOCABULARY, WIDTH), *[SplitBlock() for _ in range(4)], nn.Dense(VOCABULARY)]
    sizes = {"num_stages": 2, "num_microbatches": 4, "mesh": make_mesh((2, 2), ("stage", "model"))}
    with programs_for(devices):
        sending = step_of(jpipe.Pipeline(layers, weighted_cross_entropy, **sizes, balance=[3, 3]), tokens())
        step = step_of(products([product()] * 4, [2, 2]))
    assert bool(sending.idle_work.trips) == (devices != "cpu")
    assert bool(step.idle_work.trips) == (len(step.table.runs) > 1) == (devices == "gpu")


@pytest.mark.parametrize(
    ("ends", "counts", "expected"),
    [
        ((1, 1), [3, 3], ({1: 2, 0: 1, 2: 1}, [0, 2])),
        # The last stage takes longer with its end, and the first one waits for it: it may as well compute the same.
        ((1, 256), [3, 3], ({1: 2, 0: 1, 2: 1}, [0, 2])),
        ((256, 256), [3, 3], ({1: 2}, [])),
        ((1, 1), [4, 2], ({}, [])),
    ],
)
def test_layers_that_all_stages_have_equally_many_of_and_small_ends(ends, counts, expected):
    first = jpipe.Layer(lambda key, x: jnp.ones((ends[0], 256)), lambda w, x: jnp.tile(x, 32)[:, : ends[0]] @ w)
    last = jpipe.Layer(lambda key, x: jnp.ones((256, ends[1])), lambda w, x: x @ w)
    with programs_for("gpu"):
        found = step_of(products([first, *[product(256)] * 4, last], counts)).idle_work
    assert (found.trips, sorted(found.uneven)) == expected


@pytest.mark.parametrize(("schedule", "counts", "remat"), [("1f1b", [4, 3], "stage"), ("zero_bubble", [4, 3], "layer")])
def test_layers_that_send_are_computed_along_up_to_the_fullest_stage(make_mesh, monkeypatch, schedule, counts, remat):
    """What they keep and add where a stage has no such layer is dropped, whatever lies there."""
    monkeypatch.setattr(layer_loops, "MORE", 3)  # the ends of so small a model are as large as its blocks
    with jax.enable_x64(True), programs_for("gpu"):
        truth = blocks_model(5)
        options = {"mesh": make_mesh((2, 2), ("stage", "model")), "balance": counts, "remat": remat}
        pipe = pipeline(truth, schedule, 2, 4, 1, **options)
        step, most = step_of(pipe, truth.batch), max(counts) - 1
        assert step.idle_work.trips == {0: 1, 1: most, 2: 1} and 1 in step.idle_work.uneven
        variables = pipe.from_layer_variables(truth.trees, truth.batch)
        monkeypatch.setattr(jax.lax, "empty", anything)
        (loss, _), gradients = pipe.value_and_grad(variables, truth.batch)
        assert_close(loss, truth.truth[0], "loss")
        assert_close(pipe.layer_variables({"params": gradients}), truth.truth[2], "gradients")


SENT = r"layer 1 \(SplitBlock\): all_reduce over model .* skip:"


@pytest.mark.parametrize(
    ("counts", "schedule", "message"),
    [
        ([3, 4], "1f1b", f"{SENT} stages have unequally many"),
        ([3, 3], "zb-h1", f"{SENT} actions of several kinds"),
        ([3, 3], "v", None),
    ],
)
def test_a_warning_names_what_is_sent_in_a_loop_that_other_stages_skip(
    make_mesh, monkeypatch, counts, schedule, message
):
    monkeypatch.setattr(layer_loops, "MORE", 0.5)
    chunks = 2 if schedule == "v" else 1
    with jax.enable_x64(True), programs_for("tpu"):
        truth = blocks_model(sum(counts) * chunks - 2 * chunks)
        counts = [counts[0], *[counts[0] - 1] * (2 * chunks - 2), counts[1]]
        options = {"mesh": make_mesh((2, 2), ("stage", "model")), "balance": counts, "remat": "none"}
        pipe = pipeline(truth, schedule, 2, 4, chunks, **options)
        with pytest.warns(UserWarning, match=message) if message else contextlib.nullcontext():
            step_of(pipe, truth.batch)


def until_small(w, x):
    return jax.lax.while_loop(lambda x: jnp.abs(x).max() > 0.1, lambda x: x / 2, jax.lax.stop_gradient(x)) + x @ w


def shown(w, x):
    jax.debug.print("{}", x.sum())
    return x @ w


@pytest.mark.parametrize("apply", [until_small, shown])
def test_what_may_never_end_or_calls_back_is_not_computed_of_anything(apply):
    layers = [product(apply=apply), product(), product(apply=apply), product()]
    with programs_for("gpu"):
        assert step_of(products(layers, [2, 2])).idle_work == IdleWork()
        layers = [lambda x: x, *[product(), product(apply=apply)] * 2, lambda x: x]
        assert step_of(products(layers, [3, 3])).idle_work.trips == {1: 1}, "the others are"


@pytest.mark.parametrize(("ends", "schedule"), [("own", "v"), ("shared", "zero_bubble")])
def test_nothing_counts_that_idle_stages_compute_of_whatever_lies_there(schedule, ends, monkeypatch):
    """In float64: such weights make rounding errors grow from layer to layer."""
    chunks = 2 if schedule == "v" else 1
    layer = product(128, dtype="float64")
    layers, batch = [layer, *[layer] * (4 * chunks), layer], {"x": BATCH["x"].astype(np.float64)}
    counts = [3] + [2] * (2 * chunks - 2) + [3]
    outputs_of = lambda trees: functools.reduce(lambda x, w: jnp.tanh(x @ w), trees, batch["x"])
    with programs_for("gpu"), jax.enable_x64(True):
        pipe = products(layers, counts, schedule=schedule, num_chunks=chunks, ends=ends, remat="none")
        variables = pipe.init(jax.random.key(0), batch)
        assert len(step_of(pipe, batch).table.runs) > 1
        trees = jax.device_get(pipe.layer_variables(variables))
        expected = jax.jit(jax.value_and_grad(lambda trees: jnp.mean(outputs_of(trees) ** 2)))(trees)
        monkeypatch.setattr(jax.lax, "empty", anything)
        (loss, _), gradients = pipe.value_and_grad(variables, batch)
        outputs = pipe.apply(variables, batch)
        found = (loss, pipe.layer_variables({"params": gradients})), outputs
        close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)
        jax.tree.map(close, found, (expected, outputs_of(trees)))


wide = {"param_dtype": jnp.float64}


def blocks_model(count):
    """An embedding, blocks that are split over `model`, and a head."""
    embed = nn.Embed(VOCABULARY, WIDTH, **wide, dtype=jnp.float64)
    layers = [embed, *[SplitBlock(jnp.float64) for _ in range(count)], nn.Dense(VOCABULARY, **wide)]
    return make_model(layers, weighted_cross_entropy, tokens())


def test_state_and_random_numbers_are_the_sequential_models(make_mesh):
    """BatchNorm's statistics are summed over the data axis."""
    with jax.enable_x64(True), programs_for("gpu"):
        layers, items, batch, expected = sequential.cells(6)
        sizes = {"num_stages": 2, "num_microbatches": 6, "balance": [3, 3]}
        mesh = make_mesh((2, 2), ("stage", "data"))
        pipe = jpipe.Pipeline(layers, sequential.squares, **sizes, mesh=mesh)
        assert step_of(pipe, batch).idle_work.trips
        assert_step_equals(pipe, items, batch, jax.random.key(sequential.CELLS_KEY), expected)
