from dataclasses import replace
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import memory_model as against_compilers
import numpy as np
import optax
import pytest

import jpipe
import small_pipeline
from jpipe.tools.chips import CHIPS, parse_topology
from jpipe.tools.memory_model import held_by_device, held_by_stages, predict_memory, working_bytes
from tpu_program import needs_tpu_compiler

pytestmark = pytest.mark.filterwarnings("ignore:offload= moves nothing on CPUs")


X = jax.ShapeDtypeStruct((8, 8), "float32")
ARRAY = 8 * 8 * 4


def of(function, *shapes, **options):
    return working_bytes(jax.make_jaxpr(function)(*shapes), **options)


TPU, GPU = replace(CHIPS["v5e"], vector_memory=0), CHIPS["h100"]
TURNED = (((0,), (1,)), ((), ()))


@pytest.mark.parametrize(
    ("function", "options", "needed"),
    [
        (lambda x: jnp.where(x > 0, x + 1, x) * 2, {}, 0),  # elementwise
        (lambda x: jnp.sum(x * x), {}, 4),
        (lambda x: x @ x, {}, ARRAY),  # lives until its last reader
        (lambda x: (x @ x) @ x, {}, 2 * ARRAY),
        (lambda x: x @ x, {"copied": [0]}, 2 * ARRAY),  # reads a copy of a slice, which an elementwise one fuses
        (lambda x: x + x, {"copied": [0]}, 0),
        (lambda x: (x @ x.T, x @ x), {"copied": [0]}, 4 * ARRAY),  # each reads it once; and two results
        # A TPU's products read and give what is elementwise.
        (lambda x: jnp.sum(jnp.tanh(x @ x) @ x, 0) @ x, {"chip": TPU}, 2 * ARRAY),
        (lambda x: (x @ x).astype("bfloat16"), {"chip": TPU}, 0),  # added to a sum elsewhere
        (lambda x: x @ x, {"copied": [0], "chip": TPU}, 0),
        # A GPU's elementwise results take the place of what they read, and its products turn nothing. Two arrays of
        # logits were counted as three: predicted steps with a large vocabulary were a sixth too large.
        (lambda x: jnp.tanh(x @ x) @ x[0], {}, 2 * ARRAY),
        (lambda x: jnp.tanh(x @ x) @ x[0], {"chip": GPU}, ARRAY + 2 * 8 * 4),  # and x[0], and the result
        (lambda x: jax.lax.dot_general(x, x, TURNED), {}, 2 * ARRAY),
        (lambda x: jax.lax.dot_general(x, x, TURNED), {"chip": GPU}, ARRAY),
    ],
)
def test_what_operations_need(function, options, needed):
    assert of(function, X, **options) == needed


def test_arrays_lie_on_the_chip_while_there_is_room():
    products = lambda x: ((x @ x) @ x) @ x
    most = lambda near: of(products, X, chip=replace(TPU, vector_memory=2 * near))
    assert [most(near * ARRAY) for near in (0, 1, 2)] == [2 * ARRAY, ARRAY, 0]


# --- what stages have -----------------------------------------------------------------------------------------


TOKENS = np.ones((8, 5), np.int32)


class Block(nn.Module):
    """Kernels split over `fsdp` and `tp`, and running averages."""

    @nn.compact
    def __call__(self, x):
        split = nn.with_partitioning(nn.initializers.lecun_normal(), ("fsdp", "tp"))
        x = nn.Dense(16, kernel_init=split)(x)
        return nn.BatchNorm(use_running_average=False)(x)


def make(**options) -> jpipe.Pipeline:
    table = jpipe.Shared(nn.Embed(32, 16))
    layers = [table, Block(), Block(), nn.Dense(16), Block(), table.using("attend")]
    return jpipe.Pipeline(layers, lambda y, _: jnp.mean(y**2), num_microbatches=2, **options)


def sizes(trees) -> tuple[int, int]:
    leaves = jax.tree.leaves(trees)
    return sum(leaf.size for leaf in leaves), sum(leaf.nbytes for leaf in leaves)


@pytest.mark.parametrize(
    ("axes", "options"),
    [
        pytest.param({"stage": 2}, {"balance": [1, 5]}, marks=pytest.mark.slow),
        ({"stage": 2}, {"balance": [1, 2, 1, 2], "num_chunks": 2, "schedule": "interleaved"}),
        pytest.param({"stage": 2, "fsdp": 2, "tp": 2}, {"balance": [4, 2]}, marks=pytest.mark.slow),
        ({"stage": 2, "data": 2, "tp": 2}, {"balance": [3, 3], "shard_over": ["data"]}),
    ],
)
def test_own_and_held_are_what_arrays_have(make_mesh, axes, options):
    pipe = make(num_stages=2, mesh=make_mesh(tuple(axes.values()), tuple(axes)), **options)
    variables = pipe.init(jax.random.key(0), TOKENS)
    held = held_by_device(pipe.plan)
    assert set(held) == {"params", "batch_stats"}
    for name, tree in variables.items():
        for device in pipe.mesh.devices.flat:
            parts = [s.data for a in tree.values() for s in a.addressable_shards if s.device == device]
            assert held[name] == sizes(parts), f"{name} on {device}"
    # The layers' own trees, the table once though layers 0 and 5 use it.
    trees = pipe.layer_variables(variables)
    for s, (start, stop) in enumerate(pipe.partition.bounds):
        for name in variables:
            own = [tree[name] for tree in trees[start : min(stop, 5)] if name in tree]
            assert held_by_stages(pipe.plan, name)[s] == sizes(own), f"{name} of virtual stage {s}"


# --- predicted and compiled ------------------------------------------------------------------------------------------


WIDTH = 16
KEPT = against_compilers.kept()
ON_HOSTS = {point: row for point, row in KEPT.items() if against_compilers.on_host(row)[1]}
PAGE = (Path(__file__).parents[2] / "benchmarks" / "results" / "memory_model.md").read_text()


def dense_pipeline(num_layers, num_stages, num_microbatches, **options):
    layers, loss_fn = [nn.Dense(WIDTH) for _ in range(num_layers)], lambda outputs, batch: jnp.mean(outputs**2)
    return small_pipeline.make(layers, loss_fn, num_stages=num_stages, num_microbatches=num_microbatches, **options)


def rows(count):
    return {"inputs": jax.ShapeDtypeStruct((count, WIDTH), "float32")}


@pytest.mark.parametrize("remat", ["layer", "full"])
def test_parts_by_hand(remat):
    parts = predict_memory(dense_pipeline(4, 2, 2, remat=remat).planner, rows(8), optax.adam(1e-3))[0]
    stage = 2 * (WIDTH + 1) * WIDTH * 4  # two layers, in float32
    assert parts["parameters"] == parts["gradients"] == stage
    assert parts["optimizer"] == 2 * stage + 4  # and a step count
    assert (parts["batch"], parts["other_variables"], parts["casts"]) == (8 * WIDTH * 4, 0, 0)
    assert parts.total == sum(parts.values())


def test_arguments_are_the_compilers():
    pipe, tx = dense_pipeline(4, 2, 2, remat="layer"), optax.sgd(1e-3, momentum=0.9)
    compiled = jax.jit(pipe.train_step, donate_argnums=0).lower(pipe.abstract_state(rows(8), tx), rows(8)).compile()
    parts = predict_memory(pipe.planner, rows(8), tx)[0]
    small = 64  # the step's number and its random key
    found = compiled.memory_analysis().argument_size_in_bytes
    assert abs(parts["parameters"] + parts["optimizer"] + parts["batch"] - found) < small


ACTIVATION = WIDTH * 4


def papers_parts(num_stages, num_microbatches, remat):
    """What is predicted for 40 equal layers and 128 examples, on a TPU."""
    pipe = dense_pipeline(40, num_stages, num_microbatches, remat=remat, schedule="gpipe")
    return predict_memory(pipe.planner, rows(128), optax.sgd(1e-3), CHIPS["v5e"])[0]


def test_the_papers_example():
    """L=40, N=128, K=4, M=8: N L = 5120 activations with neither, N + L/K N/M = 128 + 160 with both."""
    neither, stages, remat = papers_parts(1, 1, "layer"), papers_parts(4, 8, "layer"), papers_parts(1, 8, "full")
    # The first layer's input is the batch itself.
    assert neither["residuals"] + neither["batch"] == 5120 * ACTIVATION
    assert stages["residuals"] == 1280 * ACTIVATION  # N L / K
    assert remat["residuals"] == (640 - 16) * ACTIVATION  # L N/M, the first of them of the batch
    both = papers_parts(4, 8, "full")
    assert both["residuals"] == 160 * ACTIVATION
    # On the boundary all 128 wait; two rows of cotangents; one of each under way through the layers, one on its way.
    assert both["boundaries"] == (128 + 2 * 16 + 4 * 16) * ACTIVATION


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(2, 4), (4, 4), (4, 16), (8, 8)])
def test_activations_follow_the_papers_formula(num_stages, num_microbatches):
    """With re-materialisation O(N + L/K N/M), without O(N L) over K stages (GPipe, section 2.3)."""
    of = lambda remat: papers_parts(num_stages, num_microbatches, remat)["residuals"]
    examples = 128 // num_microbatches
    assert of("full") == 40 // num_stages * examples * ACTIVATION
    assert of("layer") == of("full") * num_microbatches
    waiting = papers_parts(num_stages, num_microbatches, "full")["boundaries"] // ACTIVATION
    assert 128 <= waiting <= 128 + 6 * examples  # all inputs, and a few micro-batches on their way, whatever M is


def test_the_page_shows_what_is_kept():
    lines = [f"| {' | '.join(against_compilers.shown(*row))} |" for row in KEPT.items()]
    lines += [f"| {' | '.join(row)} |" for row in against_compilers.summary(KEPT)]
    lines += [f"| {' | '.join(against_compilers.hosted(*row))} |" for row in ON_HOSTS.items()]
    assert [line for line in lines if line not in PAGE] == []
    assert len(KEPT) >= 60


def test_what_lies_on_the_hosts_is_within_a_tenth():
    """Of residuals under four schedules, on meshes with data, tensor and FSDP axes."""
    assert len(ON_HOSTS) >= 12
    for point, row in ON_HOSTS.items():
        predicted, compiled = against_compilers.on_host(row)
        assert predicted == pytest.approx(compiled, rel=0.1), point


V5E, ADAM = CHIPS["v5e"], optax.adam(1e-3)


def tpus(count):
    return jpipe.make_mesh(stage=count, devices=parse_topology(f"v5e:1x{count}").stand_ins())


def test_rows_that_wait_are_on_the_host():
    """1F1B on four stages of two layers: by hand, in inputs of a layer for one example; the first input is the batch's.

    Without, the second stage has most: five micro-batches. With, all stages have room for a row of two that is written
    and one that comes back, six on the host, and what the last layer keeps, its input and its output.
    """
    held, hosted = {}, {}
    for offload in ((), "residuals"):
        planner = dense_pipeline(8, 4, 8, remat="none", offload=offload, mesh=tpus(4)).planner
        held[offload] = predict_memory(planner, rows(8), ADAM, V5E)[0]
        hosted[offload] = predict_memory(planner, rows(8), ADAM, V5E)[1]
    assert held[()]["residuals"] == 5 * 2 * ACTIVATION and hosted[()] == {}
    assert held["residuals"]["residuals"] == (2 + 2 + 2) * ACTIVATION
    assert hosted["residuals"] == {"residuals": 6 * 2 * ACTIVATION}
    assert {**held[()], "residuals": 0} == {**held["residuals"], "residuals": 0}


def test_an_optimisers_state_is_on_the_host_but_for_its_count():
    own, gone = (dense_pipeline(4, 2, 2, offload=offload, mesh=tpus(2)).planner for offload in ((), "optimizer"))
    assert predict_memory(gone, rows(8), ADAM, V5E)[0]["optimizer"] == 4
    moments = predict_memory(own, rows(8), ADAM, V5E)[0]["optimizer"] - 4
    assert predict_memory(gone, rows(8), ADAM, V5E)[1] == {"optimizer": moments}


CHECKED = [point for where in ("v5e:2x4", "cpu") for point in [kept for kept in KEPT if kept.where == where][:3]]


@pytest.mark.parametrize(
    "point",
    [CHECKED[3], *(pytest.param(point, marks=pytest.mark.slow) for point in KEPT if point != CHECKED[3])],
    ids=str,
)
def test_kept_predictions_are_made_again(point):
    with jax.numpy_dtype_promotion("standard"):
        assert point.predicted().items() <= KEPT[point].items()


@pytest.mark.slow
@needs_tpu_compiler
@pytest.mark.parametrize("point", CHECKED, ids=str)
def test_compiled_steps_take_what_is_predicted(point):
    with jax.numpy_dtype_promotion("standard"):
        predicted, compiled = against_compilers.totals(point.predicted() | point.compiled())
    assert predicted == pytest.approx(compiled, rel=0.1)
