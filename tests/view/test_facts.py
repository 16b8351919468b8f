"""What the page is told of a pipeline: bytes as its arrays have them, times as its plan has them."""

import dataclasses
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpipe
from cases import compilations
from jpipe.costs.memory_model import predict_memory
from jpipe.view.facts import facts_of

BATCH = np.ones((8, 16), np.float32)


class Block(nn.Module):
    axes: tuple[str | None, ...] = (None, None)

    @nn.compact
    def __call__(self, x):
        split = nn.with_partitioning(nn.initializers.lecun_normal(), self.axes)
        return nn.BatchNorm(use_running_average=False)(
            nn.Dense(16, dtype=jnp.float32, kernel_init=split, param_dtype=jnp.bfloat16)(x)
        )


def make(axes=(None, None), layers=None, **options) -> jpipe.Pipeline:
    sizes = {"num_stages": 2, "num_microbatches": 4, "balance": [1, 3], "remat": "none"}
    layers = layers or [Block(axes), Block(axes), Block(axes), nn.Dense(8)]
    return jpipe.Pipeline(layers, lambda y, _: jnp.mean(y**2), **sizes | options)


def bytes_of(tree, device) -> int:
    return sum(s.data.nbytes for a in jax.tree.leaves(tree) for s in a.addressable_shards if s.device == device)


@pytest.mark.parametrize("axes", [{"stage": 2}, {"stage": 2, "fsdp": 2, "tp": 2}])
def test_bytes_are_those_of_the_arrays(make_mesh, axes):
    """With `fsdp` sums of gradients are as large as gathered kernels; those of bfloat16 are float32."""
    pipe = make(("fsdp", "tp") if "tp" in axes else (None, None), mesh=make_mesh(tuple(axes.values()), tuple(axes)))
    found = facts_of(pipe.planner, "", BATCH)
    state = pipe.create_state(jax.random.key(0), BATCH, optax.sgd(0.1))
    kernel, narrow = 16 * 16 // axes.get("tp", 1), 2 * 16  # elements; the second stage has two blocks
    for device in pipe.mesh.devices.flat:
        at_rest = bytes_of(state.variables["params"], device)
        gathered = at_rest + (2 * kernel if "fsdp" in axes else 0)
        assert found.parameters.room == at_rest
        assert found.gradients.room == gathered + 2 * (2 * kernel + narrow)
        statistics = bytes_of(state.variables["batch_stats"], device)
        casts, part = 4 * (2 * kernel + narrow), BATCH.nbytes // axes.get("fsdp", 1)
        assert found.other.room == 2 * statistics + casts + part
    own = np.sum(found.parameters.own) / found.parameters.room
    trees = [tree["params"] for tree in pipe.layer_variables(state.variables)]
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(trees))
    assert own == pytest.approx(whole / sum(a[0].nbytes for a in state.variables["params"].values()))


@pytest.mark.parametrize(
    "options", [{}, {"schedule": "gpipe"}, {"num_chunks": 2, "schedule": "interleaved", "balance": [1, 1, 1, 1]}]
)
def test_rows_of_residuals_are_those_of_the_step(options):
    pipe = make(**options)
    found, step = facts_of(pipe.planner, "", BATCH), pipe.planner.training_step(pipe.planner.for_training(BATCH))
    arrays = jax.eval_shape(step.kept.storages["residual"].empty).values()
    held = [b.bytes * max(np.multiply(b.strides, pipe.schedule.ticks.rows["residual"])) for b in found.residuals]
    assert held == [a.size * a.dtype.itemsize for a in arrays]
    assert found.activation == found.cotangent == 2 * 16 * 4, "two examples of 16 float32 values cross"


def test_rows_that_go_to_the_host_count_as_if_they_stayed():
    layers = [nn.Dense(16) for _ in range(8)]
    sizes = {"num_stages": 4, "num_microbatches": 8, "remat": "none", "balance": [2] * 4, "layers": layers}
    own, gone = (facts_of(make(**sizes, offload=offload).planner, "", BATCH).residuals for offload in ((), "residuals"))
    assert {rows.kind for rows in gone} == {"residual"} and {len(rows.strides) for rows in gone} == {4}
    of = lambda found, k: sum(rows.bytes * rows.strides[k] for rows in found)
    assert [of(gone, k) for k in (1, 2)] == [of(own, k) for k in (1, 2)]


@pytest.mark.parametrize("remat", ["none", "layer", "stage"])
@pytest.mark.parametrize("axes", [{"stage": 2}, {"stage": 2, "fsdp": 2, "tp": 2}])
def test_all_together_is_what_the_model_of_memory_says(make_mesh, axes, remat):
    """As the page adds it up: rows as the schedule's ticks need them."""
    names = ("fsdp", "tp") if "tp" in axes else (None, None)
    pipe = make(names, remat=remat, schedule="gpipe", mesh=make_mesh(tuple(axes.values()), tuple(axes)))
    found, table = facts_of(pipe.planner, "", BATCH), pipe.planner.training_step(pipe.planner.for_training(BATCH)).table
    rows = [1, 1] if found.keeps_inputs else table.rows["residual"]
    moving = sum(b.bytes * max(np.multiply(b.strides, rows)) for b in found.residuals) + found.work + found.passing
    moving += sum(getattr(found, name) * table.rows_written(name) for name in ("activation", "cotangent"))
    fixed = found.parameters.room + found.gradients.room + found.other.room
    assert fixed + moving == predict_memory(pipe.planner, BATCH, optax.sgd(0.1)).total


@pytest.mark.parametrize("remat", ["none", "stage"])
def test_other_schedules_and_micro_batches_have_the_bytes_that_the_page_scales(remat):
    """Entries in proportion to a micro-batch's examples, as many rows as are in flight; statistics would stay."""
    dense = [nn.Dense(16), nn.Dense(16), lambda x: jnp.tanh(x), nn.Dense(8)]

    def held(of, schedule, num_microbatches):
        rows = make(schedule=schedule, num_microbatches=num_microbatches).schedule.ticks.rows["residual"]
        rows = [1, 1] if of.keeps_inputs else rows
        share = of.num_microbatches / num_microbatches
        return [share * buffer.bytes * max(np.multiply(buffer.strides, rows)) for buffer in of.residuals]

    here = facts_of(make(layers=dense, remat=remat).planner, "", BATCH)
    for schedule, num_microbatches in (("gpipe", 4), ("gpipe", 2), ("1f1b", 8)):
        pipe = make(layers=dense, remat=remat, schedule=schedule, num_microbatches=num_microbatches)
        there = facts_of(pipe.planner, "", BATCH)
        assert sum(held(here, schedule, num_microbatches)) == sum(held(there, schedule, num_microbatches))
        assert here.activation * 4 / num_microbatches == there.activation


def test_the_first_batch_counts_unless_another_is_given_and_nothing_is_compiled(tmp_path):
    pipe = make()
    with pytest.raises(
        ValueError, match=r"seen no batch yet, so its stages and bytes aren't known; call pipe.view\(batch"
    ):
        pipe.view()
    with compilations() as compiled:
        of_shapes = facts_of(pipe.planner, "", jax.ShapeDtypeStruct(BATCH.shape, BATCH.dtype))
        assert facts_of(pipe.planner, "") == of_shapes
        twice = facts_of(pipe.planner, "", np.ones((16, 16), np.float32))
        assert not compiled()
    assert (of_shapes.batch, twice.batch, twice.activation) == (8, 16, 2 * of_shapes.activation)
    titled = dataclasses.replace(of_shapes, table=dataclasses.replace(of_shapes.table, title=repr(pipe)))
    data = json.dumps(dataclasses.asdict(titled))
    assert data in pipe.view(path=tmp_path / "pipe.html").path.read_text()


def test_times_are_the_plans_with_the_mean_forward_as_unit():
    pipe = make(balance=[1.0, 1.0, 1.0, 9.0])
    with pytest.warns(UserWarning, match="layer 3"):
        found = facts_of(pipe.planner, "", BATCH)
    assert (found.forward, found.backward) == ((0.5, 1.5), (1.0, 3.0))


def test_a_schedule_that_the_page_does_not_know_comes_with_its_orders():
    assert facts_of(make().planner, "", BATCH).orders is None
    actions = [["F0", "B0", "F1", "B1"]] * 2
    for name in ("mine", "1f1b"):
        schedule = jpipe.Schedule(actions, slots=("FB",), name=name)
        found = facts_of(make(schedule=schedule, num_microbatches=2).planner, "", BATCH)
        assert (found.orders, found.slots) == (actions, ("FB",))
