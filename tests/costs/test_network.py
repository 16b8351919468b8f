import math
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jpipe
from jpipe.costs.chips import CHIPS, parse_topology
from jpipe.costs.network import Network, rings_of
from jpipe.mesh.users_mesh import make_mesh
from jpipe.partitioner.conversions import Sent
from jpipe.partitioner.rings import HIDDEN
from tpu_program import needs_tpu_compiler, tpu_devices

LINKS, ADAPTER = CHIPS["h100"].link_bandwidth, CHIPS["h100"].network_bandwidth


def network(topology, **sizes):
    parsed = parse_topology(topology)
    return Network.of(parsed.chip, make_mesh(devices=parsed.stand_ins(), **sizes))


def test_within_a_host_all_axes_have_links():
    found = network("h100:8", stage=2, data=2, tensor=2)
    assert {found.hop, *map(found.bandwidth, ([axis] for axis in ("stage", "data", "tensor")))} == {LINKS}


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
    assert (found.hop, found.bandwidth(["data"]), found.bandwidth(["tensor"])) == (hop, data, tensor)
    assert found.bandwidth(["data"], "all_to_all") == min(data, ADAPTER if data < LINKS else LINKS)


def test_a_ring_along_several_axes_has_the_adapters_of_all_its_devices_on_a_host():
    found = network("h100:2x8", stage=1, data=4, tensor=4)
    assert found.bandwidth(["data"]) == 2 * ADAPTER
    assert found.bandwidth(["data", "tensor"]) == 8 * ADAPTER


def test_no_ring_is_faster_than_links():
    wide = Network(CHIPS["h100"], (("data", 32),), (0,) * 16 + (1,) * 16)
    assert wide.bandwidth(["data"]) == LINKS < 16 * ADAPTER


def test_devices_at_hand_that_are_no_slices_are_one_host():
    mesh = make_mesh(stage=2, data=2, devices=jax.devices()[:4])
    assert Network.of(CHIPS["v5e"], mesh).hop == CHIPS["v5e"].link_bandwidth
    assert Network.of(CHIPS["h100"], mesh).hop == LINKS


def test_seconds_are_those_of_each_collective_along_its_axes():
    found = network("h100:2x8", stage=2, data=8)
    one = SimpleNamespace(bytes=5e9, loops=(3,), axes=("data",), collective="all_reduce")
    hop = SimpleNamespace(bytes=5e9, loops=(), axes=("stage",), collective="permute")
    assert found.seconds([one, hop]) == pytest.approx(15e9 / LINKS + 5e9 / ADAPTER)


# --- TPUs: links along the axes of a torus ---


def on_torus(chip, *shape, **sizes):
    """The network of TPUs in a slice of this shape, in the order of their coordinates."""
    places = np.stack(np.unravel_index(np.arange(math.prod(shape)), shape), -1)
    return Network(CHIPS[chip], tuple(sizes.items()), coordinates=tuple(tuple(map(int, place)) for place in places))


@pytest.mark.parametrize(
    ("chip", "shape", "links"),
    [("v5p", (2, 1, 1), 1), ("v5e", (4, 1), 1), ("v5e", (2, 2), 2), ("v5e", (2, 4), 2), ("v5p", (4, 4, 4), 6)],
)
def test_a_collective_has_the_links_of_the_torus(chip, shape, links):
    """In a line the device at an end has one; a cube of v5p has all six."""
    found = on_torus(chip, *shape, model=math.prod(shape))
    assert found.bandwidth(["model"]) == links * CHIPS[chip].link_bandwidth


@pytest.mark.parametrize(
    ("chip", "shape"), [("v5p", (2, 1, 1)), ("v5e", (2, 2)), ("v5e", (2, 4)), ("v5p", (2, 2, 2)), ("v5e", (3, 2))]
)
def test_neighbours_on_a_ring_have_a_link(chip, shape):
    found = on_torus(chip, *shape, stage=1, model=math.prod(shape))
    order = found.ring("model")
    assert sorted(order) == list(range(math.prod(shape)))
    places = np.asarray(found.coordinates)[[*order, order[0]]]
    assert (np.abs(np.diff(places, axis=0)).sum(1) == 1).all()


def test_a_ring_goes_round_the_torus():
    cube = on_torus("v5p", 4, 4, 4, stage=16, model=4)
    assert cube.ring("model") == (0, 1, 2, 3) and cube.ring("stage") == ()


@pytest.mark.parametrize(("chip", "shape"), [("v5e", (4, 1)), ("v5e", (3, 3)), ("v5e", (4, 4)), ("h100", (4,))])
def test_no_ring(chip, shape):
    """A line, devices of which one is left over, too many; and GPUs."""
    found = on_torus(chip, *shape, model=math.prod(shape))
    assert (replace(found, coordinates=()) if chip == "h100" else found).ring("model") == ()


def test_what_goes_by_a_ring_is_mostly_hidden():
    found = on_torus("v5e", 2, 2, stage=1, model=4)
    (permuted, gathered) = (
        Sent(kind, ("model",), 4, (), "float32", 1e9, (3,), (), "") for kind in ("permute", "all_gather")
    )
    assert found.seconds([permuted]) == pytest.approx((1 - HIDDEN) * found.seconds([gathered]))


def test_rings_are_those_of_tpus():
    assert rings_of(make_mesh(stage=2, model=4)) == ()


@needs_tpu_compiler
def test_a_pipeline_has_rings_along_axes_that_split_weights():
    mesh = make_mesh(stage=2, data=1, model=4, devices=tpu_devices("v5p:2x2x2"))

    def rings(**options):
        layers = [jnp.sin, jnp.cos]
        pipe = jpipe.Pipeline(layers, None, num_stages=2, num_microbatches=2, mesh=mesh, **options)
        return dict(pipe.planner.request.splits.rings)

    assert rings().keys() == {"model"} and sorted(rings()["model"]) == [0, 1, 2, 3]
    assert rings(rings=False) == {}
