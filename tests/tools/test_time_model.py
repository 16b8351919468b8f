from dataclasses import replace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import jpipe
from jpipe.tools.chips import CHIPS, Chip, parse_topology
from jpipe.tools.communication import BACKWARD, ENDS, FORWARD, STEP
from jpipe.tools.memory_model import predict_memory
from jpipe.tools.time_model import layer_seconds, predict_time, roofline

# --- the time of a step -----------------------------------------------------------------------------------------------


V5E, BATCH = CHIPS["v5e"], jax.ShapeDtypeStruct((64, 128), jnp.float32)


pytestmark = pytest.mark.filterwarnings("ignore:offload= moves nothing on CPUs")


def make(**options):
    options = {"num_stages": 2, "num_microbatches": 8, "balance": "even", "remat": "none"} | options
    layers = [nn.Dense(128, use_bias=False) for _ in range(8)]
    return jpipe.Pipeline(layers, lambda y, _: jnp.mean(y**2), **options)


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


def test_layers_that_send_between_hosts_take_longer():
    kernel = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "tensor"))
    layers = [nn.Dense(128, kernel_init=kernel) for _ in range(4)]
    seconds = []
    for name in ("h100:2", "h100:2x1"):
        mesh = jpipe.make_mesh(stage=1, tensor=2, devices=parse_topology(name).stand_ins())
        pipe = jpipe.Pipeline(layers, lambda y, _: jnp.mean(y**2), num_stages=1, num_microbatches=2, mesh=mesh)
        seconds.append(sum(layer_seconds(pipe.planner, BATCH, CHIPS["h100"])))
    assert seconds[1] > 2 * seconds[0]


def test_remat_computes_again():
    none, stage = (
        predict_time(make(remat=remat).planner, BATCH, V5E).seconds["computation"] for remat in ("none", "stage")
    )
    assert 1.2 < stage / none < 1.5


def test_an_optimisers_state_is_read_and_written():
    pipe = make()
    without, adam = (predict_time(pipe.planner, BATCH, V5E, tx=tx).seconds["update"] for tx in (None, optax.adam(1e-3)))
    # Zeros, a norm, p, g and p out: 1 + 1 + 1 + 1 + 2 + 1; and two moments in and out.
    assert adam / without == pytest.approx(11 / 7, rel=1e-3)


def test_weight_gradients_that_wait_are_those_that_only_parameters_need():
    spans = predict_time(make(schedule="zero_bubble").planner, BATCH, V5E).timeline.spans
    whole = predict_time(make().planner, BATCH, V5E).timeline.spans
    longest = lambda spans, kind: max(span.end - span.start for span in spans if span.action.kind == kind)
    assert longest(spans, "I") + longest(spans, "W") == pytest.approx(longest(whole, "B"), rel=0.3)
    assert longest(spans, "W") > 0


def test_a_data_axis_shares_the_work_and_sends_gradients():
    large = jax.ShapeDtypeStruct((2**20, 128), jnp.float32)  # a weight is nothing beside an activation
    one = predict_time(make().planner, large, V5E)
    mesh = jpipe.make_mesh(stage=2, data=2, devices=jax.devices()[:4])
    two = predict_time(make(mesh=mesh).planner, large, V5E)
    assert two.seconds["computation"] == pytest.approx(one.seconds["computation"] / 2, rel=0.01)
    assert one.seconds["collectives"] == 0
    assert two.seconds["collectives"] > 4 * 128**2 * 4 / V5E.link_bandwidth * 0.9  # a stage's gradients


def test_devices_that_each_need_whole_weights_read_them_whole():
    """The time of whole layers over the number of devices was half as long."""
    few = jax.ShapeDtypeStruct((16, 1024), jnp.float32)
    layers = [nn.Dense(1024, use_bias=False) for _ in range(4)]
    sizes = {"num_stages": 1, "num_microbatches": 1, "remat": "none"}
    one, two = (
        predict_time(jpipe.Pipeline(layers, lambda y, _: jnp.mean(y**2), mesh=mesh, **sizes).planner, few, V5E).seconds[
            "computation"
        ]
        for mesh in (None, jpipe.make_mesh(stage=1, data=2, devices=jax.devices()[:2]))
    )
    assert two > 0.9 * one


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"axes": {"data": 2}},
        {"axes": {"data": 2}, "shard_over": "data"},
        {"axes": {"tensor": 2}},
        {"ends": "spread"},
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
    given = {"num_stages": 2, "num_microbatches": 4, "mesh": mesh, "balance": "even"} | options
    loss_fn = lambda y, batch: optax.softmax_cross_entropy_with_integer_labels(y, batch["targets"]).mean()
    pipe = jpipe.Pipeline(layers, loss_fn, **given)
    batch = {name: jax.ShapeDtypeStruct((16, 8), jnp.int32) for name in ("inputs", "targets")}
    sent = pipe.communication(batch)
    twice = 16 // 4 // 2 * 8 * 32 * 4 if "shared" in given.values() else 0  # of the table, which isn't needed again
    found = predict_time(pipe.planner, batch, replace(V5E, link_bandwidth=1.0)).seconds["collectives"]
    of_layers = 4 * (sent.bytes(FORWARD) + sent.bytes(BACKWARD)) / 2  # of a stage on average
    # But for the sums of the loss.
    assert found == pytest.approx(sent.bytes(STEP) + 4 * (sent.bytes(ENDS) - twice) + of_layers, abs=64)


def test_of_unequal_chunks_the_longest_counts():
    """In lockstep four chunks of 1, 1, 1 and 5 layers are no faster than two of 4 each have to be."""
    options = {"schedule": "interleaved", "num_chunks": 2}
    fast = replace(V5E, link_bandwidth=1e30)
    even, uneven = (
        predict_time(make(**options, balance=balance).planner, BATCH, fast) for balance in ([2, 2, 2, 2], [1, 1, 1, 5])
    )
    assert uneven.seconds["computation"] == pytest.approx(even.seconds["computation"])
    assert uneven.seconds["bubble"] > 2 * even.seconds["bubble"]


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
ENDLESS = replace(CHIP, counted=1e30)  # nothing but FLOPs


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


@pytest.mark.parametrize(("rows", "depth", "columns", "padded"), [(1024, 64, 1024, 2), (64, 1024, 1024, 1)])
def test_what_the_matrix_unit_holds_is_padded(rows, depth, columns, padded):
    product = traced(lambda x, y: x @ y, (rows, depth), (depth, columns))
    assert roofline(product, ENDLESS) == pytest.approx(padded * 2 * rows * depth * columns / CHIP.flops)


def test_a_reduction_on_a_gpu_reads_its_operand_and_writes_next_to_nothing():
    """It took as long as a copy: predicted steps were a fifth longer than their kernels' bytes and FLOPs take."""
    h100, size = CHIPS["h100"], 2048 * 2048
    found = roofline(traced(lambda x: x.sum(axis=1), (2048, 2048)), h100)
    assert found == pytest.approx(4 * size / h100.memory_bandwidth, rel=0.01)


def test_elementwise_operations_are_free_where_products_take_them_in():
    plain, more = (traced(f, (512, 512)) for f in (lambda x: x @ x, lambda x: jnp.tanh(x) @ x))
    assert roofline(more, CHIP) == pytest.approx(roofline(plain, CHIP))
    assert roofline(more, CPU) == pytest.approx(roofline(plain, CPU) + one_pass(512**2, CPU))


def test_a_reduction_is_a_pass_but_of_what_a_product_makes():
    alone, twice, made = (
        traced(f, (512, 512)) for f in (jnp.sum, lambda x: (jnp.sum(x), jnp.sum(x * x)), lambda x: jnp.sum(x @ x))
    )
    small = one_pass(2)
    assert roofline(alone, CHIP) == pytest.approx(one_pass(512**2), abs=small)
    assert roofline(twice, CHIP) == pytest.approx(one_pass(512**2), abs=small)
    flops = 2 * 512**3 / CHIP.flops
    assert roofline(made, CHIP) == pytest.approx(flops + 2 * 4 * 512**2 / CHIP.pass_bandwidth, abs=small)


def test_loops_take_their_trips_and_branches_the_longest():
    once = lambda x: x @ x
    single = roofline(traced(once, (64, 64)), CHIP)
    looped = traced(lambda x: jax.lax.scan(lambda x, _: (once(x), None), x, length=5)[0], (64, 64))
    either = traced(lambda x: jax.lax.cond(x[0, 0] > 0, once, lambda x: x, x), (64, 64))
    result = one_pass(64**2)
    assert roofline(looped, CHIP) == pytest.approx(5 * single + result)
    assert roofline(either, CHIP) == pytest.approx(single + result)


def test_operations_on_whole_arrays_read_and_write_them():
    """They took nothing: the backward of a max-pool, Fourier transforms, the largest of a row."""
    size = 64 * 64 * 8
    pool = lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    pooled = traced(jax.grad(lambda x: pool(x).sum()), (1, 64, 64, 8))
    assert roofline(pooled, CHIP) > one_pass(size) + one_pass(size)  # the gradient is a result
    assert roofline(
        traced(lambda x: jnp.fft.ifft(jnp.fft.fft(x)), (64, 512), dtype=jnp.complex64), CHIP
    ) > 2 * one_pass(size)
    assert roofline(traced(lambda x: jax.lax.top_k(x, 4)[1], (64, 512)), CHIP) > one_pass(size)


def test_each_product_and_each_reduction_has_to_start():
    started = replace(CHIP, start=1.0)
    for count, function in (
        (1, lambda x: x @ x),
        (2, lambda x: x @ x @ x),
        (1, jnp.sum),
        (2, lambda x: jnp.exp(x - jnp.max(x)) @ x),
    ):
        jaxpr = traced(function, (8, 8))
        assert roofline(jaxpr, started) - roofline(jaxpr, CHIP) == pytest.approx(count)


CHANNELS = {"dimension_numbers": ("NHWC", "HWIO", "NHWC"), "window_strides": (1, 1), "padding": "SAME"}


@pytest.mark.parametrize("batch, channels", [(8, (128, 256)), (2, (32, 8)), (12, (200, 96))])
def test_images_are_padded_to_lanes_and_sublanes(batch, channels):
    """FLOPs and bytes of forward, and of the backward by its three products, as if all channels were there."""
    convolve = lambda x, w: jax.lax.conv_general_dilated(x, w, **CHANNELS)
    shapes = (batch, 14, 14, channels[0]), (1, 1, *channels)
    padded = lambda n, tile: -(-n // tile) * tile
    examples, read, given = padded(batch, 8), padded(channels[0], 128), padded(channels[1], 128)
    flops = 2 * examples * 14 * 14 * read * given / CHIP.flops
    image = lambda size: 4 * examples * 14 * 14 * size
    weights = 4 * channels[0] * channels[1]
    once = (image(read) + image(given) + weights) / CHIP.memory_bandwidth
    jaxpr = traced(lambda x, w: jnp.sum(convolve(x, w)), *shapes)
    assert roofline(jaxpr, CHIP) == pytest.approx(flops + once, abs=one_pass(2))

    backward = traced(lambda x, w, g: jax.vjp(convolve, x, w)[1](g), *shapes, (batch, 14, 14, channels[1]))
    results = one_pass(examples * 14 * 14 * read + channels[0] * channels[1])
    assert roofline(backward, CHIP) == pytest.approx(2 * (flops + once) + results)
