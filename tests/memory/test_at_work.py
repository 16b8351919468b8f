"""Weights at work: what lies split over all stages at rest is brought to who uses it, and its gradients go back."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn

import jpipe
from cases import (
    VOCABULARY,
    WIDTH,
    Block,
    assert_close,
    check_step,
    make_model,
    model,
    pipeline,
    tokens,
    weighted_cross_entropy,
)

WIDE = jnp.float64


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Leaves as small as those of tests are split too."""
    monkeypatch.setattr("jpipe.memory.layout.SMALLEST", 1)
    with jax.numpy_dtype_promotion("standard"):  # optax itself mixes dtypes
        yield


def split_ends():
    """A table and a head that metadata splits over `fsdp` and `model`; blocks between."""
    init = nn.initializers.normal(0.3)
    split = lambda *names: nn.with_partitioning(init, names)
    table = nn.Embed(VOCABULARY + 1, WIDTH, param_dtype=WIDE, dtype=WIDE, embedding_init=split("model", "fsdp"))
    head = nn.Dense(VOCABULARY + 1, param_dtype=WIDE, kernel_init=split("fsdp", "model"))
    return make_model([table, *[Block(dtype=WIDE) for _ in range(3)], head], weighted_cross_entropy, tokens())


def trained(pipe, trees, batch, tx):
    """Each layer's own variables, and the metrics, after two steps."""
    state = pipe.create_state(jax.random.key(0), batch, tx, pipe.from_layer_variables(trees, batch))
    for _ in range(2):
        state, metrics = pipe.train_step(state, batch)
    return jax.device_get((metrics, pipe.layer_variables(state.variables))), state


def part(leaf):
    """The share of an array that a device has."""
    return leaf.addressable_shards[0].data.size / leaf.size


def test_a_table_and_a_head_lie_on_all_stages_and_the_step_stays_that_of_the_sequential_model():
    with jax.enable_x64(True):
        truth = model("linen", "float64")
        pipe = pipeline(truth, "1f1b", 4, 4, balance="even", ends="spread")
        variables, gradients = check_step(pipe, truth)
        for tree in (pipe.plan.layouts["params"].shapes, variables["params"], gradients):
            table = tree["float64_11x8_none_stage"]
            assert table.shape == (1, 2, 11, 8), "the head [8, 11] lies turned, beside the table [11, 8]"
            assert table.sharding.shard_shape(table.shape) == (1, 2, 11, 2)
        at_work = pipe.plan.at_work["params"].storage
        assert at_work.buffers["ends_float64_11x8"].shape == (1, 11, 8), "each stage has room for one of them"
        first, *_, last = at_work.record_types
        assert "ends_float64_11x8" in first.buffers
        assert "ends_float64_11x8" in last.buffers


@pytest.mark.parametrize("tx", ["adamw", pytest.param("per layer", marks=pytest.mark.slow)])
def test_what_is_trained_and_its_moments_are_as_with_ends_of_their_own(tx):
    """`per_layer` shows each layer whole arrays: adafactor's state is of rows and columns."""
    make = {
        "adamw": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, eps=1e-4)),
        "per layer": lambda: jpipe.per_layer(optax.adafactor(1e-2, min_dim_size_to_factor=4, momentum=0.5)),
    }[tx]
    with jax.enable_x64(True):
        truth, found = model("linen", "float64"), []
        for options in ({"ends": "own"}, {"ends": "spread"}):
            pipe = pipeline(truth, "1f1b", 4, 2, balance="even", **options)
            values, state = trained(pipe, truth.trees, truth.batch, make())
            found.append(values)
        assert_close(found[1], found[0], "after two steps")
    split = [a for a in jax.tree.leaves(state.opt_state) if a.ndim > 3 and a.shape[0] == 1]
    assert split
    assert {part(a) for a in split} == {1 / 4}


def test_a_device_initialises_its_parts_and_holds_no_more():
    own, spread = (
        pipeline(model("mixed", "float32"), "gpipe", 2, 2, balance="even", ends=e) for e in ("own", "spread")
    )
    key, batch = jax.random.key(3), model("mixed", "float32").batch
    made = [pipe.layer_variables(pipe.init(key, batch)) for pipe in (own, spread)]
    assert_close(*jax.device_get(made), "the same values")
    assert "each device holds 863" in str(own)
    assert "each device holds 590" in str(spread)


GRID = [
    ("linen", "interleaved", 2, 4, 2, {}, {}),
    ("mixed", "v", 2, 4, 2, {"remat": "none"}, {}),
    ("linen", "zero_bubble", 4, 4, 1, {}, {}),
    ("linen", "1f1b", 2, 3, 1, {"shard_over": ("data",), "gather": "use"}, {"data": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", GRID, ids=str)
def test_the_step_is_that_of_the_sequential_model(make_mesh, case):
    kind, schedule, k, m, v, options, axes = case
    with jax.enable_x64(True):
        mesh = make_mesh((k, axes["data"]), ("stage", "data")) if axes else None
        pipe = pipeline(model(kind), schedule, k, m, v, mesh=mesh, balance="even", ends="spread", **options)
        check_step(pipe, model(kind))


@pytest.mark.slow
@pytest.mark.parametrize(("gather", "explicit"), [("step", True), ("use", False)])
def test_what_metadata_splits_is_split_over_stages_too(make_mesh, gather, explicit):
    with jax.enable_x64(True):
        mesh, truth = make_mesh((2, 2, 2), ("stage", "fsdp", "model"), explicit=explicit), split_ends()
        pipe = pipeline(truth, "1f1b", 2, 2, mesh=mesh, balance="even", gather=gather, ends="spread")
        variables, gradients = check_step(pipe, truth)
        for tree in (variables["params"], gradients):
            (table,) = (leaf for name, leaf in tree.items() if "model" in name)
            assert part(table) == 1 / 8
