import math
from dataclasses import replace
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import jpipe
from jpipe.mesh.users_mesh import make_mesh
from jpipe.tools.chips import CHIPS, parse_topology
from jpipe.tools.communication import BACKWARD, ENDS, FORWARD, STEP
from jpipe.tools.memory_model import predict_host_memory
from jpipe.tools.time_model import Network, bearable_share, layer_seconds, predict_time

LINKS, ADAPTER = CHIPS["h100"].link_bandwidth, CHIPS["h100"].network_bandwidth


def network(topology, **sizes):
    parsed = parse_topology(topology)
    return Network.of(parsed.chip, make_mesh(devices=parsed.stand_ins(), **sizes))


def hop_of(network):
    return network.bandwidth(["stage"], "permute")


def test_within_a_host_all_axes_have_links():
    found = network("h100:8", stage=2, data=2, tensor=2)
    assert {hop_of(found), *map(found.bandwidth, ([axis] for axis in ("stage", "data", "tensor")))} == {LINKS}


@pytest.mark.parametrize(
    ("sizes", "hop", "data", "tensor"),
    [
        ({"stage": 4, "data": 2, "tensor": 4}, ADAPTER, LINKS, LINKS),
        ({"stage": 8, "data": 2, "tensor": 2}, ADAPTER, LINKS, LINKS),  # two stages a host: one hop in two is fast
        ({"stage": 2, "data": 4, "tensor": 4}, ADAPTER, 2 * ADAPTER, LINKS),  # a ring of data has two of a host
        ({"stage": 2, "data": 16, "tensor": 1}, ADAPTER, 8 * ADAPTER, LINKS),
        ({"stage": 1, "data": 4, "tensor": 8}, LINKS, ADAPTER, LINKS),
    ],
)
def test_axes_that_leave_a_host_have_its_adapters(sizes, hop, data, tensor):
    """Transfers between hosts took as long as those within."""
    found = network("h100:4x8", **sizes)
    assert (hop_of(found), found.bandwidth(["data"]), found.bandwidth(["tensor"])) == (hop, data, tensor)
    assert found.bandwidth(["data"], "all_to_all") == min(data, ADAPTER if data < LINKS else LINKS)


def test_a_ring_along_several_axes_has_the_adapters_of_all_its_devices_on_a_host():
    found = network("h100:2x8", stage=1, data=4, tensor=4)
    assert found.bandwidth(["data"]) == 2 * ADAPTER
    assert found.bandwidth(["data", "tensor"]) == 8 * ADAPTER


def test_no_ring_is_faster_than_links():
    wide = Network(CHIPS["h100"], (("data", 32),), (), (0,) * 16 + (1,) * 16)
    assert wide.bandwidth(["data"]) == LINKS < 16 * ADAPTER


def test_devices_at_hand_that_are_no_slices_are_one_host():
    mesh = make_mesh(stage=2, data=2, devices=jax.devices()[:4])
    assert hop_of(Network.of(CHIPS["v5e"], mesh)) == CHIPS["v5e"].link_bandwidth
    assert hop_of(Network.of(CHIPS["h100"], mesh)) == LINKS


def test_seconds_are_those_of_each_collective_along_its_axes():
    found = network("h100:2x8", stage=2, data=8)
    one = SimpleNamespace(bytes=5e9, loops=(3,), axes=("data",), collective="all_reduce")
    hop = SimpleNamespace(bytes=5e9, loops=(), axes=("stage",), collective="permute")
    assert found.seconds([one, hop]) == pytest.approx(15e9 / LINKS + 5e9 / ADAPTER)


# --- TPUs: links along the axes of a torus ---


def on_torus(chip, *shape, **sizes):
    """The network of TPUs in a slice of this shape, in the order of their coordinates."""
    places = np.stack(np.unravel_index(np.arange(math.prod(shape)), shape), -1)
    coordinates = tuple(tuple(map(int, place)) for place in places)
    return Network(CHIPS[chip], tuple(sizes.items()), coordinates)


@pytest.mark.parametrize(
    ("chip", "shape", "links"),
    [("v5p", (2, 1, 1), 1), ("v5e", (4, 1), 1), ("v5e", (2, 2), 2), ("v5e", (2, 4), 2), ("v5p", (4, 4, 4), 6)],
)
def test_a_collective_has_the_links_of_the_torus(chip, shape, links):
    """In a line the device at an end has one; a cube of v5p has all six."""
    found = on_torus(chip, *shape, model=math.prod(shape))
    assert found.bandwidth(["model"]) == links * CHIPS[chip].link_bandwidth


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
    assert found.seconds.computation + found.seconds.bubble == pytest.approx(found.timeline.makespan)
    # (K-1) of M+K-1, and what the first stage waits more: its first layer has no cotangent to give.
    assert 1 / 9 < found.timeline.bubble_fraction < 0.2


def test_slower_links_and_memory_take_longer():
    base = predict_time(make().planner, BATCH, V5E)
    slow = predict_time(make().planner, BATCH, replace(V5E, link_bandwidth=V5E.link_bandwidth / 100))
    assert slow.seconds.bubble > base.seconds.bubble and slow.seconds.computation == base.seconds.computation


def test_between_hosts_the_network_counts():
    """Stages, and data axes, that are on two hosts sent as fast as those of one."""
    h100, gpus = CHIPS["h100"], parse_topology("h100:2x2").stand_ins()
    meshes = (
        jpipe.make_mesh(stage=2, data=2, devices=parse_topology("h100:4").stand_ins()),
        jpipe.make_mesh(stage=2, data=2, devices=gpus),
        Mesh(np.reshape(gpus, (2, 2)).T, ("stage", "data")),
    )
    one, stages, data = (predict_time(make(mesh=mesh).planner, BATCH, h100).seconds for mesh in meshes)
    assert one.computation == stages.computation == data.computation
    assert stages.bubble > one.bubble == data.bubble
    assert stages.collectives == one.collectives
    ratio = h100.link_bandwidth / h100.network_bandwidth
    assert data.collectives == pytest.approx(ratio * one.collectives)


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
        predict_time(make(remat=remat).planner, BATCH, V5E).seconds.computation for remat in ("none", "stage")
    )
    assert 1.2 < stage / none < 1.5


def test_an_optimisers_state_is_read_and_written():
    pipe = make()
    without, adam = (predict_time(pipe.planner, BATCH, V5E, tx=tx).seconds.update for tx in (None, optax.adam(1e-3)))
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
    assert two.seconds.computation == pytest.approx(one.seconds.computation / 2, rel=0.01)
    assert one.seconds.collectives == 0
    assert two.seconds.collectives > 4 * 128**2 * 4 / V5E.link_bandwidth * 0.9  # a stage's gradients


def test_devices_that_each_need_whole_weights_read_them_whole():
    """The time of whole layers over the number of devices was half as long."""
    few = jax.ShapeDtypeStruct((16, 1024), jnp.float32)
    layers = [nn.Dense(1024, use_bias=False) for _ in range(4)]
    sizes = {"num_stages": 1, "num_microbatches": 1, "remat": "none"}
    one, two = (
        predict_time(
            jpipe.Pipeline(layers, lambda y, _: jnp.mean(y**2), mesh=mesh, **sizes).planner, few, V5E
        ).seconds.computation
        for mesh in (None, jpipe.make_mesh(stage=1, data=2, devices=jax.devices()[:2]))
    )
    assert two > 0.9 * one


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"axes": {"data": 2}},
        {"axes": {"data": 2}, "shard_over": "data"},
        {"axes": {"tensor": 2}, "unroll": True},
        {"ends": "spread"},
        {"ends": "spread", "axes": {"data": 2}},
        {"ends": "shared", "axes": {"data": 2}},
        {"tied": True},
    ],
    ids=str,
)
def test_what_is_sent_once_a_step_is_what_the_program_sends(options):
    """Layers that differ, unrolled, with a tensor axis raised KeyError, and spread ends were sent for nothing."""
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
    found = predict_time(pipe.planner, batch, replace(V5E, link_bandwidth=1.0)).seconds.collectives
    of_layers = 4 * (sent.bytes(FORWARD) + sent.bytes(BACKWARD)) / 2  # of a stage on average
    # But for the sums of the loss.
    assert found == pytest.approx(sent.bytes(STEP) + 4 * (sent.bytes(ENDS) - twice) + of_layers, abs=64)


def test_shared_ends_are_computed_by_all():
    """Each stage a part of them, whose kernels all have to start."""
    at_once = replace(V5E, start=0.0)
    own, shared = (predict_time(make(ends=ends, remat="layer").planner, BATCH, at_once) for ends in ("own", "shared"))
    assert np.isfinite(shared.step) and shared.seconds.computation == pytest.approx(own.seconds.computation, rel=0.05)


def test_of_unequal_chunks_the_longest_counts():
    """In lockstep four chunks of 1, 1, 1 and 5 layers are no faster than two of 4 each have to be."""
    options = {"schedule": "interleaved", "num_chunks": 2}
    fast = replace(V5E, link_bandwidth=1e30)
    even, uneven = (
        predict_time(make(**options, balance=balance).planner, BATCH, fast) for balance in ([2, 2, 2, 2], [1, 1, 1, 5])
    )
    assert uneven.seconds.computation == pytest.approx(even.seconds.computation)
    assert uneven.seconds.bubble > 2 * even.seconds.bubble


def test_what_a_split_backward_stashes_takes_time():
    """All W of a stage take as long as what they leave out of I; W's inputs come on top."""
    split, whole = (
        predict_time(make(schedule=name).planner, BATCH, V5E).seconds.computation for name in ("zero_bubble", "1f1b")
    )
    assert whole < split < 1.5 * whole


def test_what_shared_ends_send_counts_for_each_micro_batch():
    fast, shared = replace(V5E, link_bandwidth=1e30), make(ends="shared", remat="layer")
    found = predict_time(shared.planner, BATCH, V5E).seconds.collectives
    assert found > 8 * 2 * 8 * 128 * 4 / V5E.link_bandwidth * 0.9  # activations in, cotangents out, of 8 micro-batches
    assert predict_time(shared.planner, BATCH, fast).seconds.collectives == pytest.approx(0, abs=1e-15)


def with_link(bandwidth):
    return replace(V5E, host=replace(V5E.host, bandwidth=bandwidth))


def test_moves_beside_work_take_no_time():
    """Rows leave beside B and come back beside F: what exceeds these is waited for, in ticks with both."""
    pipe, own = make(num_stages=4, offload="residuals"), make(num_stages=4)
    base = predict_time(own.planner, BATCH, V5E)
    assert "host" not in base.seconds and not base.notes
    fast = predict_time(pipe.planner, BATCH, with_link(1e30))
    assert fast.seconds.host == pytest.approx(0) and fast.step == pytest.approx(base.step)
    row = next(iter(pipe.planner.training_step(pipe.planner.for_training(BATCH)).kept.away.values()))
    size = sum(a.size * a.dtype.itemsize for a in jax.eval_shape(row.empty_row).values())
    shortest = min(span.end - span.start for span in base.timeline.spans)
    found = predict_time(pipe.planner, BATCH, with_link(size / (0.5 * shortest)))
    # Where no stage has an action in a slot, half of the shortest action is waited for: K-1 ticks at each end.
    assert found.seconds.host <= 2 * 3 * 0.5 * shortest * 1.001
    slow = predict_time(pipe.planner, BATCH, with_link(size / (100 * shortest)))
    ticks = pipe.schedule.ticks.num_ticks
    moves = 2 * ticks * 100 * shortest
    assert slow.seconds.host + base.timeline.makespan == pytest.approx(moves, rel=0.1), "nothing but moves counts"
    assert f"of {1e3 * moves:,.1f} ms of moves to and from the host {1e3 * slow.seconds.host:,.1f} are" in slow.notes[0]
    assert {**slow.seconds, "host": 0} == pytest.approx({**base.seconds, "host": 0})


def test_a_one_slot_schedule_waits_for_what_leaves():
    orders = jpipe.make_schedule("1f1b", num_stages=4, num_microbatches=8)
    one_slot = jpipe.Schedule([[str(a) for a in order] for order in orders.actions], slots=("FB",))
    pipe, own = (make(num_stages=4, schedule=one_slot, offload=offload) for offload in ("residuals", ()))
    step = pipe.planner.training_step(pipe.planner.for_training(BATCH))
    row = sum(a.size * 4 for a in jax.eval_shape(step.kept.away["residual_away"].empty_row).values())
    base, found = predict_time(own.planner, BATCH, V5E), predict_time(pipe.planner, BATCH, with_link(row / 1e-9))
    assert found.step - base.step == pytest.approx(step.table.num_ticks * 1e-9, rel=0.2)
    assert bearable_share(pipe.planner, BATCH, with_link(row / 1e-9)) == 0.0


def test_the_share_that_a_link_bears_makes_no_full_tick_longer():
    """In the steady ticks, nearly all of them; some of four residuals of a layer go, by their sizes."""

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(128)(nn.gelu(nn.Dense(512)(nn.tanh(nn.Dense(256)(x)))))

    def of(share, link):
        sizes = {"num_stages": 4, "num_microbatches": 64, "balance": "even", "remat": "none"}
        pipe = jpipe.Pipeline(
            [Block() for _ in range(8)], lambda y, _: jnp.mean(y**2), **sizes, offload={"residuals": share}
        )
        found = predict_time(pipe.planner, large, with_link(link))
        return bearable_share(pipe.planner, large, with_link(link)), found.seconds.get("host")

    large = jax.ShapeDtypeStruct((64 * 64, 128), jnp.float32)
    (at_once, _), bandwidth = of(1.0, 1e9), 1e9
    assert 0 < at_once < 0.5
    bandwidth *= 0.7 / at_once
    share, waits = of(1.0, bandwidth)
    assert share == pytest.approx(0.7)
    again, less = of(share, bandwidth)
    assert 0.9 < again <= 1.0 and 0 < less < waits / 3  # which of the residuals go follows from their sizes


def test_an_optimisers_state_is_waited_for_as_far_as_it_takes_longer_than_the_update():
    tx, plain = optax.adam(1e-3), predict_time(make().planner, BATCH, V5E, tx=optax.adam(1e-3)).seconds
    pipe = make(offload="optimizer")
    found = predict_time(pipe.planner, BATCH, V5E, tx=tx).seconds
    gone = predict_host_memory(pipe.planner, BATCH, tx, V5E).optimizer
    assert found.update == plain.update
    assert found.host == pytest.approx(gone / V5E.host.bandwidth - plain.update)
    assert predict_time(pipe.planner, BATCH, with_link(1e30), tx=tx).seconds.host == 0
