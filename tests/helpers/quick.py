"""XLA's flags for tests: machine code is made sooner, though it runs slower, as most of the time goes into compiling.

What becomes of a program before that, partitioning and collectives included, is the same.
"""

from importlib.metadata import version

CODE = {
    "xla_backend_optimization_level": "0",
    "xla_llvm_disable_expensive_passes": "true",
    "xla_disable_hlo_passes": "hlo-verifier",  # XLA's check of its own passes
}
READ_ONCE = (
    {"xla_cpu_use_fusion_emitters": "false", "xla_cpu_parallel_codegen_split_count": "1"}
    if version("jaxlib").startswith("0.10.")
    else {}
)
"""The older way to write machine code for fusions takes half the time. The newest JAX has lost it, and the TPU's
compiler ends the process for a flag that it doesn't know."""


def in_words(flags: dict[str, str]) -> str:
    """Flags as `XLA_FLAGS` has them."""
    return " ".join(f"--{name}={value}" for name, value in flags.items())


def flags_for(devices: int) -> str:
    """The flags of a process with so many simulated devices that doesn't use the TPU's compiler."""
    return in_words({"xla_force_host_platform_device_count": str(devices)} | CODE | READ_ONCE)
