"""Settings for every test: eight simulated CPU devices, quick compilation, strict dtype promotion.

Warnings are errors by pyproject.toml.
"""

import gc
import math
import os
from collections.abc import Callable, Sequence
from importlib.metadata import version

# Eight devices; and machine code that is made sooner, though it runs slower, as most of the time goes into compiling:
# what becomes of a program before that, partitioning and collectives included, is the same. What the caller has set
# stays: XLA_FLAGS=--xla_backend_optimization_level=3 gives the usual machine code.
_FLAGS = {
    "xla_force_host_platform_device_count": "8",
    "xla_backend_optimization_level": "0",
    "xla_llvm_disable_expensive_passes": "true",
}
# The older way to write machine code for fusions takes half the time. The newest JAX has lost it, and the TPU's
# compiler ends the process for a flag that it doesn't know: so it is taken back as soon as JAX has read it.
_READ_ONCE = {"xla_cpu_use_fusion_emitters": "false"} if version("jaxlib").startswith("0.10.") else {}
# Read when the first backend starts, so they are set before jax is imported.
_SET = os.environ.get("XLA_FLAGS", "")
_LASTING = " ".join([_SET, *[f"--{name}={value}" for name, value in _FLAGS.items() if name not in _SET]])
os.environ["XLA_FLAGS"] = " ".join([_LASTING, *[f"--{name}={value}" for name, value in _READ_ONCE.items()]])
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
import pytest
from hypothesis import settings
from jax.sharding import AxisType, Mesh

import whole_grids

jax.config.update("jax_platforms", "cpu")
jax.devices()
os.environ["XLA_FLAGS"] = _LASTING
# Traces are many small objects that live long; to look through all of them took a tenth of the time.
gc.set_threshold(100_000, 50, 100)
jax.config.update("jax_numpy_dtype_promotion", "strict")

# Compilation makes the first example slow, and a run has to be repeatable.
settings.register_profile("jpipe", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("jpipe")

pytest_plugins = ["terminals"]
MakeMesh = Callable[..., Mesh]


@pytest.fixture(scope="session")
def make_mesh() -> MakeMesh:
    """`make_mesh((2, 2), ("stage", "data"), explicit=False)`: a mesh of the first devices, Auto axes by default."""

    def make(shape: Sequence[int], names: Sequence[str] = ("stage",), *, explicit: bool = False) -> Mesh:
        size = math.prod(shape)
        assert size <= len(jax.devices()), f"{size} devices wanted, {len(jax.devices())} simulated"
        kind = AxisType.Explicit if explicit else AxisType.Auto
        devices = np.asarray(jax.devices()[:size]).reshape(shape)
        return Mesh(devices, tuple(names), axis_types=(kind,) * len(names))

    return make


@pytest.hookimpl(tryfirst=True)  # before `-m` selects by the marks
def pytest_collection_modifyitems(items):
    """Marks the cases of `whole_grids`, and puts tests of several processes first.

    At the end, one of those would keep the other workers waiting.
    """
    for item in items:
        call = getattr(item, "callspec", None)
        if call and whole_grids.is_moved(item.path.name, item.originalname, call.id):
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: item.path.name != "test_processes.py")
