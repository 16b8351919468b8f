from types import SimpleNamespace

import jax
import pytest

from jpipe.costs.chips import CHIPS, parse_topology
from jpipe.costs.network import Network
from jpipe.mesh.users_mesh import make_mesh

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
