"""A table of chips (speeds, memory, links), and slices of them, by names such as "v5e:4x4"."""

from __future__ import annotations

import importlib.util
import math
import os
import re
from dataclasses import dataclass

from jpipe.types import Device

GIB, MIB = 2**30, 2**20
CLOUD = "Cloud TPU documentation, system architecture of the version: FLOP/s, memory"
BOOK = f"{CLOUD}; How to Scale Your Model, 'TPU specs': links"
PAPER = "Norrie et al., IEEE Micro 2021: clock, links"
BOTH = f"{CLOUD}; {PAPER}"
NVIDIA = "NVIDIA data sheet of the SXM module, without sparsity"
PAIR = (("chip_config_name", "megacore"),)  # both cores are a device


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
      source: where the numbers are written. The clock, if no source has it, is the peak over the products a cycle.
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
    """

    name: str
    flops: float
    memory: int
    memory_bandwidth: float
    link_bandwidth: float
    clock: float | None
    source: str
    example: str = ""
    cores: int = 1
    tile: int = 1
    vector_memory: int = 0
    on_chip: int = 0
    counted: float | None = None
    start: float = 0.0
    config: tuple[tuple[str, str], ...] = ()

    @property
    def pass_bandwidth(self) -> float:
        """bytes/s of what goes over an array once."""
        return self.counted or self.memory_bandwidth

    @property
    def fuses(self) -> bool:
        """Whether elementwise operations become part of the products that read them, as on a TPU."""
        return self.tile > 1


CHIPS = {
    chip.name: chip
    for chip in [
        Chip("v2", 23e12, 8 * GIB, 350e9, 62e9, 0.7e9, PAPER, "2x2", 2, 128, 16 * MIB, 8 * MIB, 309e9, 0.29e-6),
        Chip("v3", 61.5e12, 16 * GIB, 450e9, 82e9, 0.94e9, BOTH, "2x2", 2, 128, 16 * MIB, 8 * MIB, 418e9, 0.28e-6),
        Chip("v4", 275e12, 32 * GIB, 1.2e12, 45e9, 1.05e9, BOOK, "2x2x2", 1, 128, 16 * MIB, 0, 925e9, 0.59e-6, PAIR),
        Chip("v5e", 197e12, 16 * GIB, 819e9, 45e9, 1.5e9, BOOK, "2x4", 1, 128, 128 * MIB, 64 * MIB, 664e9, 1.22e-6),
        Chip("v5p", 459e12, 95 * GIB, 2765e9, 90e9, 1.75e9, BOOK, "2x2x2", 1, 128, 64 * MIB, 0, 1988e9, 1.22e-6),
        Chip("v6e", 918e12, 32 * GIB, 1640e9, 90e9, 1.75e9, BOOK, "2x4", 1, 256, 128 * MIB, 64 * MIB, 1316e9, 1.21e-6),
        Chip("h100", 989e12, 80 * 10**9, 3.35e12, 450e9, None, NVIDIA, "8"),
        Chip("h200", 989e12, 141 * 10**9, 4.8e12, 450e9, None, NVIDIA, "8"),
    ]
}
"""The chips by name."""

KINDS = {"v5 lite": "v5e", "v5e": "v5e", "v6 lite": "v6e", "v5p": "v5p", "v5": "v5p"} | {
    name: name for name, chip in CHIPS.items() if chip.clock
}
"""TPUs by a part of what JAX calls them, those first that begin like others."""
GPUS = {"nvidia h100 80gb hbm3": "h100", "nvidia h200": "h200"}
"""SXM modules by what JAX calls them: of a PCIe or NVL card, or of a part of a GPU, memory and links are others."""
MOST_GPUS = 8
"""The GPUs of one host, whose links are those of the table."""

EXAMPLES = {name: chip.example for name, chip in CHIPS.items()}
"""A shape of each."""


@dataclass(frozen=True)
class Topology:
    """A slice of chips, such as "v5e:2x4".

    Attributes:
      chip: the kind of its chips.
      shape: the chips along each dimension of their network.
    """

    chip: Chip
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"

    @property
    def num_devices(self) -> int:
        """Devices of JAX; two a chip on TPU v2 and v3."""
        return math.prod(self.shape) * self.chip.cores

    def devices(self) -> list[Device]:
        """Devices for which programs compile, whether or not they are there.

        Raises:
          ImportError: the TPU compiler is not installed.
          ValueError: these are GPUs, or the compiler knows no slice of this shape.
        """
        if self.chip.clock is None:
            raise ValueError(f"topology='{self}' is none of TPUs, which alone compile without a device; pass devices=")
        if importlib.util.find_spec("libtpu") is None:
            raise ImportError(f"topology='{self}' needs the TPU compiler; pip install 'jpipe[tpu]' (Linux, x86-64)")
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        from jax.experimental import topologies

        try:
            options = dict(self.chip.config)
            return list(topologies.get_topology_desc(platform="tpu", topology_name=str(self), **options).devices)
        except Exception as error:  # its type differs by what is wrong
            raise ValueError(f"the TPU compiler refuses topology='{self}': {str(error).splitlines()[0]}") from error


def parse_topology(name: str) -> Topology:
    """The slice of a name.

    Args:
      name: chip and shape, such as "v5p:4x4x8".

    Raises:
      ValueError: no chip is called so, the shape isn't one of its slices, or it has more GPUs than a host.

    >>> parse_topology("v5p:4x4x8").num_devices, parse_topology("v3:2x2").num_devices
    (128, 8)
    """
    match = re.fullmatch(r"(\w+):([1-9]\d*(?:x[1-9]\d*)*)", name.lower())
    example = EXAMPLES.get(match[1]) if match else None
    if match is None or example is None or match[2].count("x") != example.count("x"):
        names = ", ".join(f"{chip}:{shape}" for chip, shape in EXAMPLES.items())
        raise ValueError(f"topology={name!r} is unknown; pass a chip and a shape such as one of {names}")
    topology = Topology(CHIPS[match[1]], tuple(map(int, match[2].split("x"))))
    if topology.chip.clock is None and topology.num_devices > MOST_GPUS:
        raise ValueError(
            f"topology={name!r} has {topology.num_devices} GPUs, but their links are known within a host alone; "
            f"pass {topology.chip.name}:{MOST_GPUS} or less"
        )
    return topology


def chip_of(device: Device) -> Chip | None:
    """The chip of a device of JAX; None if it isn't known."""
    kind = device.device_kind.lower()
    names = (name for word, name in KINDS.items() if word in kind)
    return CHIPS.get(GPUS.get(kind) or next(names, ""))
