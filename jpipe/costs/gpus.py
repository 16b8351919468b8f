"""Describes GPUs to their compiler, which compiles for a GPU by such a description, whether or not it is there.

The description is a `GpuTargetConfigProto` as text. The numbers are those of OpenXLA's own files, at
`xla/backends/gpu/target_config/specs` in its repository: a device says them of itself.
"""

from __future__ import annotations

from dataclasses import dataclass

ABSENT: dict[str, str | bool] = {"xla_gpu_autotune_level": "0"}
"""The compiler's option for a GPU that isn't there: it would time kernels on it."""


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
      shared_memory: bytes of a multiprocessor's shared memory; a block may have all but `reserved`.
      reserved: bytes of it that the system keeps for each block.
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
    reserved: int = 1024

    @property
    def description(self) -> str:
        """The description, as the compiler reads it."""
        major, minor = self.capability
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024
              threads_per_warp: 32
              shared_memory_per_block: 49152
              shared_memory_per_block_optin: {self.shared_memory - self.reserved}
              shared_memory_per_core: {self.shared_memory}
              threads_per_core_limit: 2048
              core_count: {self.multiprocessors}
              fpus_per_core: {self.cores}
              block_dim_limit_x: 2147483647
              block_dim_limit_y: 65535
              block_dim_limit_z: 65535
              memory_bandwidth: {self.memory_bandwidth}
              l2_cache_size: {self.cache}
              clock_rate_ghz: {self.clock / 1e9}
              device_memory_size: {self.memory}
              cuda_compute_capability {{ major: {major} minor: {minor} }}
              registers_per_core_limit: 65536
              registers_per_block_limit: 65536
            }}
            platform_name: "CUDA"
            dnn_version_info {{ major: 9 minor: 8 }}
            device_description_str: "{self.kind}"
        """


_HOPPER = {"capability": (9, 0), "multiprocessors": 132, "cores": 128, "clock": 1.98e9, "cache": 52428800}

A100 = Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 1.41e9, 85100068864, 2039040000000, 41943040, 167936)
H100 = Gpu("NVIDIA H100 80GB HBM3", memory=84942979072, memory_bandwidth=3352320000000, shared_memory=233472, **_HOPPER)
H200 = Gpu("NVIDIA H200", memory=151397597184, memory_bandwidth=4800000000000, shared_memory=233472, **_HOPPER)
B200 = Gpu("NVIDIA B200", (10, 0), 148, 128, 1.965e9, 191514411008, 7672320000000, 132644864, 233472)
