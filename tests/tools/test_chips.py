import importlib.util
import math
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from gpu_program import needs_gpu_compiler
from jpipe.partitioner.users_mesh import Torus, make_mesh
from jpipe.tools.chips import CHIPS, HOSTS, Network, chip_of, measure_chip, parse_topology, stand_ins_of
from tpu_program import needs_tpu_compiler


@needs_gpu_compiler
@pytest.mark.parametrize("name", [name for name, chip in CHIPS.items() if chip.gpu])
def test_a_product_compiles_for_every_gpu(name):
    (device,) = parse_topology(f"{name}:1").devices()
    x = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16, sharding=SingleDeviceSharding(device))
    compiled = jax.jit(lambda x: x @ x).lower(x).compile({"xla_gpu_autotune_level": 0})
    assert compiled.memory_analysis().argument_size_in_bytes == 2 * 256**2


# --- chips ------------------------------------------------------------------------------------------------------------


PAGE = (Path(__file__).parents[2] / "benchmarks" / "results" / "time_model.md").read_text()


@pytest.mark.parametrize("name", ["v5x:2x2", "v5p:4x4", "v5e", "v5e:0x2", "v5e:2x", ""])
def test_unknown_topologies_are_told_the_known(name):
    with pytest.raises(ValueError, match=r"is unknown; pass a chip and a shape such as one of v2:2x2, .*h200:8"):
        parse_topology(name)


@pytest.mark.parametrize(("name", "products"), [("v2", 1), ("v3", 2), ("v4", 8), ("v5e", 4), ("v5p", 8)])
def test_peaks_are_those_of_clock_and_matrix_units(name, products):
    """Units of 128x128 products and sums a cycle: two a core of v3, eight in the two cores of v5p."""
    assert CHIPS[name].flops == pytest.approx(products * 2 * 128**2 * CHIPS[name].clock, rel=0.01)


def test_the_page_has_the_hosts():
    rows = re.findall(r"^\| (\w+) \| ([\d.]+) \| ([\d.]+) \| (\d+) GB of (\d+) ", PAGE, re.MULTILINE)
    assert {name: (float(speed) * 1e9, float(memory) * 1e9) for name, speed, memory, *_ in rows} == {
        name: (host.bandwidth, host.memory) for name, host in HOSTS.items()
    }
    for _, _, memory, whole, devices in rows:
        assert float(memory) == int(whole) / int(devices)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *[("TPU v2", "v2"), ("TPU v3", "v3"), ("TPU v4", "v4"), ("TPU v5 lite", "v5e"), ("TPU v5p", "v5p")],
        *[("TPU v5", "v5p"), ("TPU v6 lite", "v6e"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200")],
        *[("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA B200", "b200")],
        *[(f"NVIDIA {kind}", None) for kind in ("H100 PCIe", "H100 NVL", "H200 NVL", "GH200 480GB", "A100-SXM4-40GB")],
        *[("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None), ("cpu", None)],
    ],
)
def test_a_device_is_known_by_its_kind_and_not_taken_for_another(kind, name):
    """Any H100 was taken for the SXM module."""
    assert chip_of(SimpleNamespace(device_kind=kind)) == (CHIPS[name] if name else None)


def test_hosts_of_gpus():
    assert parse_topology("h100:4x8").num_devices == 32
    assert [device.process_index for device in parse_topology("h100:2x3").stand_ins()] == [0, 0, 0, 1, 1, 1]
    with pytest.raises(ValueError, match=r"topology='h200:16' has 16 GPUs in a host, .*; pass .* such as h200:2x8"):
        parse_topology("h200:16")


@needs_tpu_compiler
@pytest.mark.parametrize("name", ["v2:2x2", "v5e:2x4", "v5p:2x2x2", "v3:2x2", "v6e:4x4", "v4:2x2x4"])
def test_what_stands_in_for_tpus_lies_and_is_called_as_they_are(name):
    there = parse_topology(name).devices()
    for devices in (parse_topology(name).stand_ins(), stand_ins_of(there)):
        facts = lambda d: (tuple(d.coords), d.core_on_chip, d.device_kind, d.platform)
        assert sorted(map(facts, devices)) == sorted(map(facts, there))
        meshes = [make_mesh(stage=2, model=len(there) // 2, devices=each) for each in (devices, there)]
        assert np.array_equal(*([[d.coords for d in mesh.devices.flat] for mesh in meshes]))


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'jpipe\[tpu\]'"):
        parse_topology("v5e:2x2").devices()
    with pytest.raises(ImportError, match=r"pip install 'jpipe\[gpu-compiler\]'"):
        parse_topology("h100:8").devices()


@needs_tpu_compiler
def test_a_shape_that_the_compiler_refuses_is_told():
    with pytest.raises(ValueError, match="the TPU compiler refuses topology='v5e:3x5'"):
        parse_topology("v5e:3x5").devices()


# --- networks ---------------------------------------------------------------------------------------------------------


LINKS, ADAPTER = CHIPS["h100"].link_bandwidth, CHIPS["h100"].network_bandwidth


def network(topology, **sizes):
    parsed = parse_topology(topology)
    return Network.of(parsed.chip, make_mesh(devices=parsed.stand_ins(), **sizes))


def hop_of(network):
    return network.bandwidth(["stage"], "permute")


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
    return Network(CHIPS[chip], Torus(chip, tuple(sizes.items()), coordinates))


@pytest.mark.parametrize(
    ("chip", "shape", "links"),
    [("v5p", (2, 1, 1), 1), ("v5e", (4, 1), 1), ("v5e", (2, 2), 2), ("v5e", (2, 4), 2), ("v5p", (4, 4, 4), 6)],
)
def test_a_collective_has_the_links_of_the_torus(chip, shape, links):
    """In a line the device at an end has one; a cube of v5p has all six."""
    found = on_torus(chip, *shape, model=math.prod(shape))
    assert found.bandwidth(["model"]) == links * CHIPS[chip].link_bandwidth


# --- measured chip ----------------------------------------------------------------------------------------------------


def test_a_device_is_measured():
    """Bounds that any machine keeps, and no figure that is forgotten (0) or infinite does."""
    chip = measure_chip(jax.devices()[:2])
    assert 1e8 < chip.flops < 1e15
    assert 1e7 < chip.memory_bandwidth < 1e13
    assert 2**20 < chip.memory < 2**50
    assert chip.clock is None and chip.name == jax.devices()[0].device_kind
