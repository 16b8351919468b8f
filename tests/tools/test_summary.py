"""A pipeline as a table: before a batch was seen and after, in text and in HTML."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpipe
from html_tables import cells
from jpipe.processes.tables import bytes_in_words
from jpipe.tools.chips import parse_topology
from jpipe.tools.memory_model import predict_memory

BATCH = {"inputs": np.ones((4, 3), np.float32)}


def make(**options) -> jpipe.Pipeline:
    layers = [nn.Dense(4), nn.Dense(4), nn.Dense(4), lambda x: jnp.tanh(x)]
    return jpipe.Pipeline(layers, lambda y, _: jnp.mean(y**2), num_stages=2, num_microbatches=2, **options)


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_a_pipeline_before_and_after_a_batch(num_chunks):
    schedule = "interleaved" if num_chunks > 1 else "1f1b"
    pipe = make(num_chunks=num_chunks, schedule=schedule)
    header = ["stage", "chunk"][:num_chunks]
    before = cells(pipe._repr_html_())
    assert before[0] == [*header, "in flight", "devices"]
    assert [row[0] for row in before[1:]] == ["0", "1"] * num_chunks
    assert "the layers are cut when a batch is seen (balance='flops')" in str(pipe)
    pipe.abstract_state(BATCH, tx=optax.sgd(0.1))
    after = cells(pipe._repr_html_())
    assert after[0] == [*header, "layers", "what", "cost", "parameters", "in flight", "devices"]
    assert len(after) == 1 + 2 * num_chunks
    column = {name: [row[i] for row in after[1:]] for i, name in enumerate(after[0])}
    assert sum(int(number.replace(",", "")) for number in column["parameters"]) == 16 + 20 + 20
    assert column["devices"] == ["cpu:0", "cpu:1"] * num_chunks
    assert column["in flight"] == list(map(str, jpipe.simulate(pipe.schedule).peak_in_flight)) * num_chunks
    assert "\nbubble: " in str(pipe) and "% by the layers' FLOPs; " in str(pipe)
    for line, row in zip(str(pipe).splitlines()[1:], after, strict=False):
        assert line.split() == " ".join(row).split()
    assert repr(pipe) == str(pipe).splitlines()[0] and "\n" not in repr(pipe)


def test_names_are_escaped():
    pipe = make(balance="even")
    html = pipe._repr_html_()
    assert "lambda" in html and "<lambda>" not in html and "&lt;lambda&gt;" in html
    assert "<lambda>" in str(pipe)
    assert cells(html)[0] == ["stage", "layers", "what", "in flight", "devices"]


def test_devices_of_a_stage_are_counted():
    mesh = jax.make_mesh((4, 2), ("data", "stage"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rows = cells(make(mesh=mesh)._repr_html_())
    assert [row[-1] for row in rows[1:]] == ["cpu:0 cpu:2 cpu:4 cpu:6", "cpu:1 cpu:3 cpu:5 cpu:7"]


def test_what_a_device_holds_and_what_is_shared():
    """In words what `jpipe.tools.memory_model` counts; the bubble is the simulator's, of these costs."""
    table = jpipe.Shared(nn.Embed(32, 4))
    layers = [table, *[nn.Dense(4) for _ in range(5)], table.using("attend")]
    costs, sizes = [1.0, 2, 2, 1, 2, 1, 2.5], {"num_stages": 2, "num_microbatches": 4}
    pipe = jpipe.Pipeline(layers, lambda y, _: jnp.mean(y**2), balance=costs, **sizes)
    variables = pipe.init(jax.random.key(0), np.ones((4, 3), np.int32))
    assert pipe.partition.counts == (4, 3)
    device = pipe.mesh.devices.flat[1]
    held = [s.data for a in jax.tree.leaves(variables) for s in a.addressable_shards if s.device == device]
    words = " ".join(str(pipe).split())
    assert f"each device holds {sum(a.size for a in held)} parameters ({sum(a.nbytes for a in held)} bytes): " in words
    memory = predict_memory(pipe.planner, np.ones((4, 3), np.int32), optax.sgd(1.0))
    assert f"a training step holds {bytes_in_words(memory.total)} a device (predicted, without the" in words
    assert f"gradients {bytes_in_words(memory.gradients)}" in words
    assert "layers 0, 6 share parameters, which lie on stage 0 and count there alone" in words
    after = cells(pipe._repr_html_())
    parameters = [row[after[0].index("parameters")] for row in after[1:]]
    assert parameters == [str(32 * 4 + 3 * 20), f"{2 * 20} + shared"]
    bubble = jpipe.simulate(pipe.schedule, [2.0, 5.5 / 3], [4.0, 11 / 3]).bubble_fraction
    assert f"bubble: {bubble:.1%} by the costs given; 20.0% if stages take equally long" in words


def test_what_lies_on_the_hosts_is_told():
    mesh = jpipe.make_mesh(stage=4, devices=parse_topology("h100:4").stand_ins())
    batch = jax.ShapeDtypeStruct((8, 64), np.float32)

    def words(offload):
        sizes = {"num_stages": 4, "num_microbatches": 8, "remat": "none", "balance": [2] * 4}
        pipe = jpipe.Pipeline(
            [nn.Dense(64) for _ in range(8)], lambda y, _: jnp.mean(y**2), mesh=mesh, offload=offload, **sizes
        )
        pipe.planner.plan_for(batch)
        return " ".join(str(pipe).split())

    row = 2 * 64 * 4  # of two layers, for one example
    assert f"a training step holds {6 * row / 1024:.1f} KiB of the host for each device" in words("residuals")
    assert "of the host" not in words(())


def test_the_part_that_a_device_holds():
    mesh = jax.make_mesh((2, 4), ("stage", "data"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    layers = [nn.Dense(64) for _ in range(4)]
    sizes = {"num_stages": 2, "num_microbatches": 2, "shard_over": ["data"]}
    pipe = jpipe.Pipeline(layers, lambda y, _: jnp.mean(y**2), balance="even", mesh=mesh, **sizes)
    jax.eval_shape(pipe.init, jax.random.key(0), np.ones((8, 64), np.float32))
    words = " ".join(str(pipe).split())
    held, whole = 2 * (16 * 64 + 64), 2 * 65 * 64
    assert f"each device holds {held:,} parameters (8.5 KiB, its part of {whole:,}): of each type" in words
    assert "bubble: 33.3% if layers take equally long; 33.3% if stages take equally long" in words


def test_ends_that_all_stages_compute_are_told():
    """They were told to lie on stage 0."""
    table = jpipe.Shared(nn.Embed(128, 8))
    layers = [table, nn.Dense(8), nn.Dense(8), table.using("attend")]
    for ends, lies in (("shared", "count on stage 0 alone"), ("own", "lie on stage 0 and count there alone")):
        pipe = jpipe.Pipeline(
            layers, lambda y, _: jax.nn.logsumexp(y, -1).mean(), num_stages=2, num_microbatches=2, ends=ends
        )
        pipe.abstract_state({"inputs": np.ones((4,), np.int32)}, tx=optax.sgd(0.1))
        assert f"layers 0, 3 share parameters, which {lies}" in str(pipe)
        assert ("ends='shared': all stages compute layers 0 and 3" in str(pipe)) == (ends == "shared")
