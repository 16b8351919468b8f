"""A table of chips (speeds, memory, links), and slices of them, by names such as "v5e:4x4".

GPUs are described to their compiler, which compiles for a GPU whether or not it is there. The description is a
`GpuTargetConfigProto` as text. The numbers are those of OpenXLA's own files, at `xla/backends/gpu/target_config/specs`
in its repository: a device says them of itself.
"""

import importlib.util
import itertools
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from jpipe.processes.runtime import register_gpu_compiler
from jpipe.types import Device

ABSENT: dict[str, str | bool] = {"xla_gpu_autotune_level": "0"}
"""The compiler's option for a GPU that isn't there: it would time kernels on it."""
RESERVED = 1024
"""The bytes of a multiprocessor's shared memory that the system keeps for each block."""


@dataclass(frozen=True)
class Gpu:
    """The properties of a GPU that its compiler asks for, as the device says them of itself.

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
      tile: rows and columns of a matrix unit, to which products are padded; 1 of others than TPUs. As
        `jax.experimental.pallas.tpu.get_tpu_info` has it.
      vector_memory: bytes of a TPU core's vector memory, by `get_tpu_info`; 0 of others.
      on_chip: bytes up to which an array that is made and read in between stays in the vector memory: half of it, by
        `get_tpu_info`; 0 of two cores that are one device (v4, v5p), since each has its own.
      counted: bytes/s of a pass over an array as the TPU compiler estimates it for `x * 2 + 1` alone, by
        `benchmarks/time_model.py rates`, or as it was measured; None: the memory's.
      start: seconds that any kernel takes, however small: the same estimate for an array of 8x128.
      config: options of JAX's `get_topology_desc` for such chips.
      gpu: of a GPU, what its compiler asks; None of TPUs.
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
        """Whether elementwise operations become part of the products that read them, as on a TPU."""
        return self.tile > 1


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
"""SXM modules by what JAX calls them: of a PCIe or NVL card, or of a part of a GPU, memory and links are others."""
CLOSED_AT = {"v2": 16, "v3": 32, "v4": 4, "v5e": 16, "v5p": 4, "v6e": 16}
"""By version of TPUs, the chips along a dimension of the torus whose ends are linked: a multiple of as many. By How to
Scale Your Model, 'TPU networking', and of v2 and v3 their pods (IEEE Micro 2021)."""
TPUS = {"v5 lite": "v5e", "v5e": "v5e", "v6 lite": "v6e", "v5": "v5p"} | {name: name for name in CLOSED_AT}
"""TPUs by a part of what JAX calls them, those first that begin like others, and JAX's own before others."""
IN_CUBES = ("v4", "v5p")
"""TPUs whose ends are linked only in slices of whole cubes of as many chips along each dimension."""
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
        if self.chip.gpu is not None:
            if not _cuda_versions():
                remedy = "pip install 'jpipe[gpu-compiler]' (Linux)"
                raise ImportError(f"topology='{self}' needs the GPU compiler; {remedy}")
            hosts, number = (1, *self.shape)[-2:]
            where = {"platform": "cuda", "target_config": self.chip.gpu.description, "topology": f"1x{hosts}x{number}"}
        else:
            if importlib.util.find_spec("libtpu") is None:
                raise ImportError(f"topology='{self}' needs the TPU compiler; pip install 'jpipe[tpu]' (Linux, x86-64)")
            os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
            os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
            where = {"platform": "tpu", "topology_name": str(self), **dict(self.chip.config)}
        try:
            return _devices(**where)
        except Exception as error:  # its type differs by what is wrong
            compiler, why = "TPU" if self.chip.gpu is None else "GPU", str(error).splitlines()[0]
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
    kind = device.device_kind.lower()
    return CHIPS.get(GPUS.get(kind) or next((name for word, name in TPUS.items() if word in kind), ""))
