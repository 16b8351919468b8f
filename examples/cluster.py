"""What the examples need to run in several processes: on TPU pods, under SLURM, or by an explicit coordinator."""

import argparse
import glob
import os
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from rich.console import Console

import jpipe

WHOLE = (0, 1)
"""The part of a batch that is all of it: the first of one."""

ACCELERATORS = ("/dev/accel*", "/dev/vfio/*", "/dev/nvidia*", "/dev/kfd", "/dev/dxg")
"""Device files of TPUs, by older and by newer drivers, and of GPUs: NVIDIA's, AMD's, those under WSL."""


def add_options(parser: argparse.ArgumentParser) -> None:
    cluster = parser.add_argument_group(
        "cluster", "Found by itself on TPU pods and under SLURM; elsewhere give all of:"
    )
    cluster.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens")
    cluster.add_argument("--processes", type=int, help="how many there are")
    cluster.add_argument("--process", type=int, help="which this one is, from 0")
    cluster.add_argument("--timeout", type=float, default=60, help="seconds to wait for others (default %(default)s)")
    cluster.add_argument(
        "--heartbeat", type=float, default=60, help="seconds until a lost process ends the others (default %(default)s)"
    )


def simulate_devices(count: int) -> None:
    """Splits the CPU into devices; has no effect on accelerators.

    Where there is no accelerator, JAX is told so: it starts all that it has a package for, and the TPU compiler, which
    `jpipe[test]` brings, complains at length of the TPU that isn't there. Whoever sets JAX_PLATFORMS is asked instead.
    """
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", count)
    if not jax.config.jax_platforms and not any(map(glob.glob, ACCELERATORS)):
        jax.config.update("jax_platforms", "cpu")


def join(options: argparse.Namespace, console: Console, num_devices: int | None = None) -> None:
    """Joins the cluster, if there is one; from then on the first process alone prints.

    On a CPU as many devices are simulated as all processes need together (default: one a stage).
    """
    simulate_devices(max(1, (num_devices or options.stages) // (options.processes or 1)))
    try:
        first = jpipe.initialize(
            options.coordinator,
            options.processes,
            options.process,
            timeout=options.timeout,
            heartbeat_timeout=options.heartbeat,
        )
    except (ValueError, RuntimeError) as error:
        raise SystemExit(str(error)) from error
    console.quiet = not first


def make_mesh(stages: int) -> Mesh | None:
    """In a cluster all devices, those beyond the stages along a data axis; else the pipeline's default."""
    if jax.process_count() == 1:
        return None
    return jpipe.make_mesh(stage=stages, data=max(1, jax.device_count() // stages))


def rows(num_rows: int, part: tuple[int, int]) -> slice:
    """The rows of a batch that are part `index` of `count`, as `pipe.data_shard` has them."""
    index, count = part
    return slice(index * num_rows // count, (index + 1) * num_rows // count)


def to_host(tree: Any) -> Any:
    """All values, in every process; only for what a host can hold."""
    return jax.tree.map(np.asarray, multihost_utils.process_allgather(tree, tiled=True))
