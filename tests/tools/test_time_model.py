from dataclasses import replace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import jpipe
import small_pipeline
from jpipe.tools.chips import CHIPS, Chip, parse_topology
from jpipe.tools.communication import BACKWARD, ENDS, FORWARD, STEP
from jpipe.tools.memory_model import predict_memory
from jpipe.tools.time_model import predict_time, roofline

# --- the time of a step -----------------------------------------------------------------------------------------------


V5E, BATCH = CHIPS["v5e"], jax.ShapeDtypeStruct((64, 128), jnp.float32)


pytestmark = pytest.mark.filterwarnings("ignore:offload= moves nothing on CPUs")


def make(**options):
    layers = [nn.Dense(128, use_bias=False) for _ in range(8)]
    options = {"num_microbatches": 8, "remat": "none"} | options
    return small_pipeline.make(layers, lambda y, _: jnp.mean(y**2), **options)


def test_parts_add_up_and_the_bubble_is_the_schedules():
    fast = replace(V5E, link_bandwidth=1e30)
    found = predict_time(make().planner, BATCH, fast)
    assert found.step == pytest.approx(sum(found.seconds.values()))
    assert found.seconds["computation"] + found.seconds["bubble"] == pytest.approx(found.timeline.makespan)
    # (K-1) of M+K-1, and what the first stage waits more: its first layer has no cotangent to give.
    assert 1 / 9 < found.timeline.bubble_fraction < 0.2


def test_between_hosts_the_network_counts():
    """Stages, and data axes, that are on two hosts sent as fast as those of one."""
    h100, gpus = CHIPS["h100"], parse_topology("h100:2x2").stand_ins()
    meshes = (
        jpipe.make_mesh(stage=2, data=2, devices=parse_topology("h100:4").stand_ins()),
        jpipe.make_mesh(stage=2, data=2, devices=gpus),
        Mesh(np.reshape(gpus, (2, 2)).T, ("stage", "data")),
    )
    one, stages, data = (predict_time(make(mesh=mesh).planner, BATCH, h100).seconds for mesh in meshes)
    assert one["computation"] == stages["computation"] == data["computation"]
    assert stages["bubble"] > one["bubble"] == data["bubble"]
    assert stages["collectives"] == one["collectives"]
    ratio = h100.link_bandwidth / h100.network_bandwidth
    assert data["collectives"] == pytest.approx(ratio * one["collectives"])


def test_an_optimisers_state_is_read_and_written():
    pipe = make()
    without, adam = (predict_time(pipe.planner, BATCH, V5E, tx=tx).seconds["update"] for tx in (None, optax.adam(1e-3)))
    # Zeros, a norm, p, g and p out: 1 + 1 + 1 + 1 + 2 + 1; and two moments in and out.
    assert adam / without == pytest.approx(11 / 7, rel=1e-3)


def test_a_data_axis_shares_the_work_and_sends_gradients():
    large = jax.ShapeDtypeStruct((2**20, 128), jnp.float32)  # a weight is nothing beside an activation
    one = predict_time(make().planner, large, V5E)
    mesh = jpipe.make_mesh(stage=2, data=2, devices=jax.devices()[:4])
    two = predict_time(make(mesh=mesh).planner, large, V5E)
    assert two.seconds["computation"] == pytest.approx(one.seconds["computation"] / 2, rel=0.01)
    assert one.seconds["collectives"] == 0
    assert two.seconds["collectives"] > 4 * 128**2 * 4 / V5E.link_bandwidth * 0.9  # a stage's gradients


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"axes": {"data": 2}, "shard_over": "data"},
        {"axes": {"tensor": 2}},
        {"ends": "spread", "axes": {"data": 2}},
        {"ends": "shared", "axes": {"data": 2}},
        {"tied": True},
    ],
    ids=str,
)
def test_what_is_sent_once_a_step_is_what_the_program_sends(options):
    """Spread ends were sent for nothing."""
    options = {"axes": {}, "tied": False} | options
    axes, tied = {"stage": 2} | options.pop("axes"), options.pop("tied")
    kernel = nn.with_partitioning(nn.initializers.zeros, (None, "tensor"))
    words = jpipe.Shared(nn.Embed(64, 32))
    head = words.using("attend") if tied else nn.Dense(64)
    layers = [words if tied else nn.Embed(64, 32), nn.Dense(48, kernel_init=kernel), nn.Dense(32), head]
    mesh = jpipe.make_mesh(**axes, devices=jax.devices()[: 2 ** len(axes)])
    loss_fn = lambda y, batch: optax.softmax_cross_entropy_with_integer_labels(y, batch["targets"]).mean()
    pipe = small_pipeline.make(layers, loss_fn, num_microbatches=4, mesh=mesh, **options)
    batch = {name: jax.ShapeDtypeStruct((16, 8), jnp.int32) for name in ("inputs", "targets")}
    sent = pipe.communication(batch)
    twice = 16 // 4 // 2 * 8 * 32 * 4 if "shared" in options.values() else 0  # of the table, which isn't needed again
    found = predict_time(pipe.planner, batch, replace(V5E, link_bandwidth=1.0)).seconds["collectives"]
    of_layers = 4 * (sent.bytes(FORWARD) + sent.bytes(BACKWARD)) / 2  # of a stage on average
    # But for the sums of the loss.
    assert found == pytest.approx(sent.bytes(STEP) + 4 * (sent.bytes(ENDS) - twice) + of_layers, abs=64)


def with_link(bandwidth):
    return replace(V5E, host=replace(V5E.host, bandwidth=bandwidth))


def test_moves_beside_work_take_no_time():
    """Rows leave beside B and come back beside F: what exceeds these is waited for, in ticks with both."""
    pipe, own = make(num_stages=4, offload="residuals"), make(num_stages=4)
    base = predict_time(own.planner, BATCH, V5E)
    assert "host" not in base.seconds
    fast = predict_time(pipe.planner, BATCH, with_link(1e30))
    assert fast.seconds["host"] == pytest.approx(0) and fast.step == pytest.approx(base.step)
    row = next(iter(pipe.planner.training_step(pipe.planner.for_training(BATCH)).kept.away.values()))
    size = sum(a.size * a.dtype.itemsize for a in jax.eval_shape(row.empty_row).values())
    shortest = min(span.end - span.start for span in base.timeline.spans)
    found = predict_time(pipe.planner, BATCH, with_link(size / (0.5 * shortest)))
    # Where no stage has an action in a slot, half of the shortest action is waited for: K-1 ticks at each end.
    assert found.seconds["host"] <= 2 * 3 * 0.5 * shortest * 1.001
    slow = predict_time(pipe.planner, BATCH, with_link(size / (100 * shortest)))
    ticks = pipe.schedule.ticks.num_ticks
    moves = 2 * ticks * 100 * shortest
    assert slow.seconds["host"] + base.timeline.makespan == pytest.approx(moves, rel=0.1), "nothing but moves counts"
    assert {**slow.seconds, "host": 0} == pytest.approx({**base.seconds, "host": 0})


def test_an_optimisers_state_is_waited_for_as_far_as_it_takes_longer_than_the_update():
    tx, plain = optax.adam(1e-3), predict_time(make().planner, BATCH, V5E, tx=optax.adam(1e-3)).seconds
    there = parse_topology("v5e:1x2").stand_ins()
    pipe = make(offload="optimizer", mesh=jpipe.make_mesh(stage=2, devices=there))
    found = predict_time(pipe.planner, BATCH, V5E, tx=tx).seconds
    gone = predict_memory(pipe.planner, BATCH, tx, V5E)[1]["optimizer"]
    assert found["update"] == plain["update"]
    assert found["host"] == pytest.approx(gone / V5E.host.bandwidth - plain["update"])
    assert predict_time(pipe.planner, BATCH, with_link(1e30), tx=tx).seconds["host"] == 0


# --- kernels ----------------------------------------------------------------------------------------------------------


CHIP = replace(V5E, start=0.0)  # of kernels' starts there is a test of its own
CPU = Chip("cpu", 50e9, 2**34, 10e9, 10e9, None)


def traced(function, *shapes, dtype=jnp.float32):
    return jax.make_jaxpr(function)(*[jax.ShapeDtypeStruct(shape, dtype) for shape in shapes])


def one_pass(size, chip=CHIP):
    return 8 * size / chip.pass_bandwidth


def test_a_product_takes_its_flops_and_its_bytes():
    product = traced(lambda x, y: x @ y, (1024, 2048), (2048, 512))
    flops, read, written = 2 * 1024 * 2048 * 512, 4 * (1024 * 2048 + 2048 * 512), 4 * 1024 * 512
    found = roofline(product, CPU)
    assert found == pytest.approx(flops / CPU.flops + (read + 3 * written) / CPU.memory_bandwidth)
    stays = roofline(product, CHIP)  # on the chip, but for the result's own pass
    assert stays == pytest.approx(flops / CHIP.flops + read / CHIP.pass_bandwidth + one_pass(1024 * 512))


def test_loops_take_their_trips_and_branches_the_longest():
    once = lambda x: x @ x
    single = roofline(traced(once, (64, 64)), CHIP)
    looped = traced(lambda x: jax.lax.scan(lambda x, _: (once(x), None), x, length=5)[0], (64, 64))
    either = traced(lambda x: jax.lax.cond(x[0, 0] > 0, once, lambda x: x, x), (64, 64))
    result = one_pass(64**2)
    assert roofline(looped, CHIP) == pytest.approx(5 * single + result)
    assert roofline(either, CHIP) == pytest.approx(single + result)
