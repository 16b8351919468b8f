"""A table of chips (speeds, memory, links), slices of them by names such as "v5e:4x4", and the networks of meshes.

GPUs are described to their compiler, which compiles for a GPU whether or not it is there. The description is a
`GpuTargetConfigProto` as text. The numbers are those of OpenXLA's own files, at `xla/backends/gpu/target_config/specs`
in its repository, and the same that a device reports.
"""

import importlib.util
import itertools
import math
import os
import re
import timeit
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpipe.partitioner.axes import AXIS
from jpipe.partitioner.conversions import Sent
from jpipe.partitioner.users_mesh import TPUS, Torus, tpu_of
from jpipe.processes.runtime import register_gpu_compiler
from jpipe.types import Device

ABSENT: dict[str, str | bool] = {"xla_gpu_autotune_level": "0"}
"""The compiler's option for a GPU that isn't there: it would time kernels on it."""
RESERVED = 1024
"""The bytes of a multiprocessor's shared memory that the system keeps for each block."""


@dataclass(frozen=True)
class Gpu:
    """The properties of a GPU that its compiler asks for, as the device reports them.

    Attributes:
      kind: what JAX calls it.
      capability: its CUDA compute capability, (major, minor).
      multiprocessors: streaming multiprocessors.
      cores: CUDA cores of a multiprocessor.
      clock: cycles/s.
      memory: bytes.
      memory_bandwidth: bytes/s.
      cache: bytes of the L2 cache.
      shared_memory: bytes of a multiprocessor's shared memory; a block may have all but `RESERVED`.
    """

    kind: str
    capability: tuple[int, int]
    multiprocessors: int
    cores: int
    clock: float
    memory: int
    memory_bandwidth: int
    cache: int
    shared_memory: int

    @property
    def description(self) -> str:
        """The description, as the compiler reads it."""
        major, minor = self.capability
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
              shared_memory_per_block: 49152 shared_memory_per_core: {self.shared_memory}
              shared_memory_per_block_optin: {self.shared_memory - RESERVED}
              core_count: {self.multiprocessors} fpus_per_core: {self.cores} clock_rate_ghz: {self.clock / 1e9}
              block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
              device_memory_size: {self.memory} memory_bandwidth: {self.memory_bandwidth} l2_cache_size: {self.cache}
              cuda_compute_capability {{ major: {major} minor: {minor} }}
              registers_per_core_limit: 65536 registers_per_block_limit: 65536
            }}
            platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 8 }} device_description_str: "{self.kind}"
        """


A100 = Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 1.41e9, 85100068864, 2039040000000, 41943040, 167936)
H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 1.98e9, 84942979072, 3352320000000, 52428800, 233472)
H200 = Gpu("NVIDIA H200", (9, 0), 132, 128, 1.98e9, 151397597184, 4800000000000, 52428800, 233472)
B200 = Gpu("NVIDIA B200", (10, 0), 148, 128, 1.965e9, 191514411008, 7672320000000, 132644864, 233472)

# --- chips ------------------------------------------------------------------------------------------------------------


GIB, MIB, GB = 2**30, 2**20, 10**9
FRACTION, DEFAULT, MOST = "XLA_PYTHON_CLIENT_MEM_FRACTION", 0.75, 0.9
"""The variable that says which part of a GPU's memory JAX takes, its default, and the most that is commonly set."""


@dataclass(frozen=True)
class Host:
    """The memory of a host, as one of its devices has it while the others use it as much.

    Attributes:
      bandwidth: bytes/s one way, of the device's link or its part of a chip's; the other way has as much besides.
      memory: bytes: the host's memory over the number of its devices. Programs get less: by default JAX pins at most
        64 GiB a process on GPUs (`XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB`).
    """

    bandwidth: float = 0.0
    memory: int = 0


@dataclass(frozen=True)
class Chip:
    """The hardware of one device of JAX. On TPU v2 and v3 that is a core, half of a chip.

    Attributes:
      name: its name, such as "v5e".
      flops: its peak in bfloat16, FLOP/s.
      memory: its bytes. Programs get a little less.
      memory_bandwidth: bytes/s.
      link_bandwidth: bytes/s one way, of one link between TPUs, of all links of a GPU.
      clock: cycles/s that a TPU compiler's estimates count; None for others.
      example: a shape of a slice, which has as many numbers as all its shapes; empty if it has no slices.
      cores: the number of JAX's devices that one chip is.
      tile: rows and columns of a matrix unit, to which products are padded; 1 for others than TPUs. As
        `jax.experimental.pallas.tpu.get_tpu_info` has it.
      vector_memory: bytes of a TPU core's vector memory, by `get_tpu_info`; 0 for others.
      on_chip: bytes up to which an array that is made and read in between stays in the vector memory: half of it, by
        `get_tpu_info`; 0 of two cores that are one device (v4, v5p), since each has its own.
      counted: bytes/s of a pass over an array as the TPU compiler estimates it for `x * 2 + 1` alone, by
        `benchmarks/time_model.py rates`, or as it was measured; None: the memory's.
      start: seconds that any kernel takes, however small: the same estimate for an array of 8x128.
      config: options of JAX's `get_topology_desc` for such chips.
      gpu: what a GPU's compiler asks for; None for TPUs.
      network_bandwidth: bytes/s one way that one GPU has to other hosts; 0 of TPUs, which have links to all neighbours.
      host: what the device has of its host's memory; all zero if that isn't known (`measure_chip`).
    """

    name: str
    flops: float
    memory: int
    memory_bandwidth: float
    link_bandwidth: float
    clock: float | None
    example: str = ""
    cores: int = 1
    tile: int = 1
    vector_memory: int = 0
    on_chip: int = 0
    counted: float | None = None
    start: float = 0.0
    config: tuple[tuple[str, str], ...] = ()
    gpu: Gpu | None = None
    network_bandwidth: float = 0.0
    host: Host = Host()

    @property
    def room(self) -> int:
        """The bytes that a step may take: on a GPU those that JAX may be given, as CUDA and NCCL need some, too."""
        return self.memory if self.gpu is None else int(MOST * self.gpu.memory)

    @property
    def pass_bandwidth(self) -> float:
        """bytes/s of what goes over an array once."""
        return self.counted or self.memory_bandwidth

    @property
    def fuses(self) -> bool:
        """Whether elementwise operations become part of the products that read them, as on a TPU.

        Such products read slices as they lie, and one that nothing else reads is added to the sum that it is for.
        """
        return self.tile > 1

    @property
    def in_place(self) -> bool:
        """Whether elementwise results take the place of what they read last, and products read operands as they lie."""
        return self.fuses or self.gpu is not None


UNKNOWN = Chip("unknown", 1.0, 0, 1.0, 1.0, None)
"""A device of which nothing is known; its compiler is taken for a CPU's."""

# "How to Scale Your Model", 'TPU specs', has the links of TPUs: typically 15 GB/s a chip (two cores of v2 and v3; v2 is
# assumed to be as v3), of v6e 32 GB/s. Those of GPUs are the peaks of PCI Express x16, generations 4 and 5. Memory by
# gpuhunt (dstack) for v2 and v3; MLPerf training 0.7 (tpu-v4-16) for v4, of which no VM type was found; the Cloud TPU
# documentation for v5e (ct5lp-hightpu-4t) and v5p; MLPerf inference 4.1 for v6e (tpu-v6-4) and NVIDIA's DGX systems;
# the user guide of DGX B200. The host of 8 A100s has four switches, so that they may get less.
HOSTS = {
    **dict.fromkeys(("v2", "v3"), Host(7.5e9, 334 * GB // 8)),
    "v4": Host(15e9, 512 * GB // 8),
    "v5e": Host(15e9, 192 * GB // 4),
    "v5p": Host(15e9, 448 * GB // 4),
    "v6e": Host(32e9, 720 * GB // 4),
    "a100": Host(31.5e9, 2000 * GB // 8),
    **dict.fromkeys(("h100", "h200", "b200"), Host(63e9, 2000 * GB // 8)),
}
"""The hosts of the chips."""
PAIR = (("chip_config_name", "megacore"),)  # both cores of a v4 are one device
# FLOP/s and memory of TPUs are by the Cloud TPU documentation, "system architecture" of the version; clock and links of
# v2 and v3 by Norrie et al., IEEE Micro 2021; links of others by "How to Scale Your Model", 'TPU specs'. A clock that
# no source has is the peak over the products a cycle. GPUs are NVIDIA's SXM modules by its data sheets, without
# sparsity, and have the network of their DGX or HGX host.
CHIPS = {
    chip.name: replace(chip, host=HOSTS[chip.name])
    for chip in [
        Chip("v2", 23e12, 8 * GIB, 350e9, 62e9, 0.7e9, "2x2", 2, 128, 16 * MIB, 8 * MIB, 309e9, 0.29e-6),
        Chip("v3", 61.5e12, 16 * GIB, 450e9, 82e9, 0.94e9, "2x2", 2, 128, 16 * MIB, 8 * MIB, 418e9, 0.28e-6),
        Chip("v4", 275e12, 32 * GIB, 1.2e12, 45e9, 1.05e9, "2x2x2", 1, 128, 16 * MIB, 0, 925e9, 0.59e-6, PAIR),
        Chip("v5e", 197e12, 16 * GIB, 819e9, 45e9, 1.5e9, "2x4", 1, 128, 128 * MIB, 64 * MIB, 664e9, 1.22e-6),
        Chip("v5p", 459e12, 95 * GIB, 2765e9, 90e9, 1.75e9, "2x2x2", 1, 128, 64 * MIB, 0, 1988e9, 1.22e-6),
        Chip("v6e", 918e12, 32 * GIB, 1640e9, 90e9, 1.75e9, "2x4", 1, 256, 128 * MIB, 64 * MIB, 1316e9, 1.21e-6),
        Chip("a100", 312e12, 80 * GB, 2.04e12, 300e9, None, "8", gpu=A100, network_bandwidth=25e9),
        Chip("h100", 989e12, 80 * GB, 3.35e12, 450e9, None, "8", gpu=H100, network_bandwidth=50e9),
        Chip("h200", 989e12, 141 * GB, 4.8e12, 450e9, None, "8", gpu=H200, network_bandwidth=50e9),
        Chip("b200", 2250e12, 180 * GB, 8e12, 900e9, None, "8", gpu=B200, network_bandwidth=50e9),
    ]
}
"""The chips by name."""

GPUS = {chip.gpu.kind.lower(): name for name, chip in CHIPS.items() if chip.gpu}
"""SXM modules by JAX's name for them. A PCIe or NVL card, or a part of a GPU, has other memory and links."""
MOST_GPUS = 8
"""The GPUs of one host, whose links are those of the table."""
CUDA = (12, 13)
"""The versions of CUDA for which JAX has a compiler."""


@dataclass(frozen=True)
class Topology:
    """A slice of chips, such as "v5e:2x4", or hosts of GPUs, such as "h100:8" and "h100:4x8".

    Attributes:
      chip: the kind of its chips.
      shape: the chips along each dimension of their network; of GPUs those of a host, or hosts and those of each.
    """

    chip: Chip
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"

    @property
    def num_devices(self) -> int:
        """Devices of JAX; two a chip on TPU v2 and v3."""
        return math.prod(self.shape) * self.chip.cores

    def stand_ins(self) -> list[Device]:
        """Devices to plan for, in place of `devices`."""
        chip, number = self.chip, self.shape[-1]
        if chip.gpu is not None:
            return [StandIn(i, i // number, chip.gpu.kind) for i in range(self.num_devices)]
        places = itertools.product(*map(range, (*reversed(self.shape), chip.cores)))  # the first dimension first
        where = [((*reversed(chips), *[0] * (3 - len(chips))), core) for *chips, core in places]
        kind = "TPU " + next(word for word, name in TPUS.items() if name == chip.name)
        return [StandIn(i, 0, kind, "tpu", *place) for i, place in enumerate(where)]

    def devices(self) -> list[Device]:
        """Devices for which programs compile, whether or not they are there.

        Raises:
          ImportError: the compiler for TPUs, or that for GPUs, is not installed.
          ValueError: the compiler knows no slice of this shape.
        """
        gpu = self.chip.gpu
        if gpu is None:
            compiler, is_there, remedy = "TPU", importlib.util.find_spec("libtpu"), "jpipe[tpu]' (Linux, x86-64)"
            os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
            os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
            where = {"platform": "tpu", "topology_name": str(self), **dict(self.chip.config)}
        else:
            compiler, is_there, remedy = "GPU", _cuda_versions(), "jpipe[gpu-compiler]' (Linux)"
            hosts, number = (1, *self.shape)[-2:]
            where = {"platform": "cuda", "target_config": gpu.description, "topology": f"1x{hosts}x{number}"}
        if not is_there:
            raise ImportError(f"topology='{self}' needs the {compiler} compiler; pip install '{remedy}")
        try:
            return _devices(**where)
        except Exception as error:  # its type differs by what is wrong
            why = str(error).splitlines()[0]
            raise ValueError(f"the {compiler} compiler refuses topology='{self}': {why}") from error


def _devices(platform: str, **where: str) -> list[Device]:
    """The devices that JAX describes to a compiler."""
    from jax.experimental import topologies

    describe = partial(topologies.get_topology_desc, platform=platform, **where)
    try:
        return list(describe().devices)
    except NotImplementedError:
        if platform != "cuda":
            raise
    register_gpu_compiler(_cuda_versions()[0])
    return list(describe().devices)


def _cuda_versions() -> list[int]:
    """The versions of CUDA for which JAX's plugin is installed."""
    return [version for version in CUDA if importlib.util.find_spec(f"jax_cuda{version}_plugin")]


def parse_topology(name: str) -> Topology:
    """The slice of a name.

    Args:
      name: chip and shape, such as "v5p:4x4x8", "h100:8" (GPUs of one host), "h100:4x8" (four hosts of eight).

    Raises:
      ValueError: no chip is called so, the shape isn't one of its slices, or has more GPUs a host than a host has.

    >>> [parse_topology(name).num_devices for name in ("v5p:4x4x8", "v3:2x2", "h100:4x8")]
    [128, 8, 32]
    """
    match = re.fullmatch(r"(\w+):([1-9]\d*(?:x[1-9]\d*)*)", name.lower())
    chip = CHIPS.get(match[1]) if match else None
    shape = [int(number) for number in match[2].split("x")] if match else []
    dimensions = chip.example.count("x") + 1 if chip else 0
    if chip is None or len(shape) not in ((1, 2) if chip.gpu else (dimensions,)):
        names = ", ".join(f"{name}:{chip.example}" for name, chip in CHIPS.items())
        raise ValueError(f"topology={name!r} is unknown; pass a chip and a shape such as one of {names}")
    if chip.gpu and shape[-1] > MOST_GPUS:
        hosts = math.ceil(math.prod(shape) / MOST_GPUS)
        raise ValueError(
            f"topology={name!r} has {shape[-1]} GPUs in a host, which has at most {MOST_GPUS}; pass hosts and the "
            f"GPUs of each, such as {chip.name}:{hosts}x{MOST_GPUS}"
        )
    return Topology(chip, tuple(shape))


@dataclass(frozen=True)
class StandIn:
    """As much of a device as planning looks at: a mesh of such needs neither the devices nor their compiler.

    Attributes:
      id: its number.
      process_index: the number of its host.
      device_kind: what JAX calls it.
      platform: "gpu" or "tpu".
      coords: of a TPU, its chip's place on the torus.
      core_on_chip: of a TPU, its number on its chip.
      slice_index: the number of its slice, if there are several.
    """

    id: int
    process_index: int
    device_kind: str
    platform: str = "gpu"
    coords: tuple[int, ...] = ()
    core_on_chip: int = 0
    slice_index: int | None = None


def stand_ins_of(devices: Sequence[Device]) -> list[Device]:
    """Devices at hand to plan for: GPUs, and what stands in for TPUs, for which nothing is compiled then; not CPUs."""
    place = lambda d: (tuple(d.coords), d.core_on_chip, getattr(d, "slice_index", None))
    tpus = [StandIn(d.id, 0, d.device_kind, "tpu", *place(d)) for d in devices if d.platform == "tpu"]
    return [*tpus, *(device for device in devices if device.platform == "gpu")]


def chip_of(device: Device) -> Chip | None:
    """The chip of a device of JAX; None if it isn't known."""
    return CHIPS.get(GPUS.get(device.device_kind.lower()) or tpu_of(device))


def check_one(topology: str | None, devices: Sequence[Device] | None) -> None:
    """Refuses a topology beside devices."""
    if topology is not None and devices is not None:
        raise ValueError(f"topology={topology!r} and devices are both given; pass one of them")


def mesh_of_nowhere(axes: Mapping[str, int]) -> Mesh:
    """A mesh of these sizes on devices that aren't there: one CPU stands for all of them. Nothing can run on it."""
    shape = tuple(axes.values())
    return Mesh(np.full(shape, jax.local_devices(backend="cpu")[0]), tuple(axes))


# --- networks ---------------------------------------------------------------------------------------------------------


ALONE = frozenset(["permute", "all_to_all"])
"""Collectives in which each device sends to others by itself: nothing goes round a ring of all."""


@dataclass(frozen=True)
class Network:
    """The links between the devices of a mesh, and the network between hosts.

    GPUs of a host are joined by links. A TPU has a link to each neighbour on a torus. A collective goes both ways round
    a ring, so it sends over two links at once where the devices of an axis lie on a ring:

        2 in a line                   o-o             1 link
        4 in a line, no wraparound    o-o-o-o         1 link     the device at an end has no other
        4 in a square                 o-o             2 links
                                      o-o
        4 or more, wraparound         (o-o-o-o)       2 links

    Attributes:
      chip: the kind of the devices.
      torus: the axes of the mesh; of TPUs, where they are on their torus.
      hosts: the number of each device's host, in the order of the mesh; empty if links join all devices.
    """

    chip: Chip
    torus: Torus
    hosts: tuple[int, ...] = ()

    @classmethod
    def of(cls, chip: Chip, mesh: Mesh) -> "Network":
        """The network of a mesh of such chips.

        JAX calls a host of GPUs that are at hand a slice, and takes one process for each host of GPUs that aren't.
        """
        devices, torus = mesh.devices.flatten().tolist(), Torus.of(chip.name, mesh)
        if not chip.network_bandwidth:
            return cls(chip, torus)
        at_hand = devices[0] in jax.devices()
        hosts = (getattr(device, "slice_index", 0) if at_hand else device.process_index for device in devices)
        return cls(chip, torus, tuple(hosts))

    def bandwidth(self, axes: Collection[str], collective: str = "all_reduce") -> float:
        """bytes/s one way that a device has along mesh axes: those of its links, if all devices along them share one.

        Else they are the network's. A ring leaves a host over the adapters of all the devices that it has there.
        """
        links = self.chip.link_bandwidth
        if not self.chip.network_bandwidth:
            return links * (1 if AXIS in axes and collective == "permute" else self.torus.links(axes))
        groups = self.torus.groups(axes)
        hosts = np.broadcast_to(self.hosts or 0, groups.size)[groups]
        counts = [np.unique(of_group, return_counts=True)[1] for of_group in hosts]
        adapters = min((int(count.min()) for count in counts if len(count) > 1), default=0)
        if not adapters:
            return links
        return min(links, (1 if collective in ALONE else adapters) * self.chip.network_bandwidth)

    def seconds(self, sent: Iterable[Sent]) -> float:
        """Seconds in which a device waits for what a program's collectives send, one after the other."""
        return sum(math.prod(one.loops) * one.bytes / self.bandwidth(one.axes, one.collective) for one in sent)


# --- a chip that isn't in the table -----------------------------------------------------------------------------------


WIDTH, COPIED, ROUNDS = 1024, 2**24, 3


def measure_chip(devices: Sequence[Device]) -> Chip:
    """Measures one of several equal devices: the best times of float32 matrix products, of copies and of passes.

    A pass is one that takes an exponential of each number, as those of softmax and activations do. All devices work at
    the same time, as in a pipeline: those that a host simulates have its cores in common, and its memory. A transfer
    is taken to go at the speed of a copy.
    """
    product = _seconds(lambda x: x @ x, WIDTH, devices)
    copied, passed = (_seconds(function, COPIED // WIDTH, devices) for function in (lambda x: x + 1, jnp.exp))
    reported = (devices[0].memory_stats() or {}).get("bytes_limit")
    memory = reported or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(devices)
    flops, speed, counted = 2 * WIDTH**3 / product, 8 * COPIED / copied, 8 * COPIED / passed
    return Chip(devices[0].device_kind, flops, memory, speed, speed, clock=None, counted=counted)


def _seconds(function: Callable[[jax.Array], jax.Array], rows: int, devices: Sequence[Device]) -> float:
    """Times a function of an array `[rows, WIDTH]` a device, in place; the least of some rounds after the first counts.

    Outputs that are allocated anew would be timed with what their pages take.
    """
    place = NamedSharding(Mesh(np.asarray(devices), ("device",)), PartitionSpec("device"))
    run = jax.jit(jax.vmap(function), donate_argnums=0, out_shardings=place)
    x = jax.device_put(jnp.zeros((len(devices), rows, WIDTH), jnp.float32), place)

    def turn() -> None:
        nonlocal x
        x = jax.block_until_ready(run(x))

    return min(timeit.repeat(turn, repeat=ROUNDS + 1, number=1)[1:])
