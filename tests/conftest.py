"""Settings for every test: eight simulated CPU devices, quick compilation, strict dtype promotion.

Warnings are errors by pyproject.toml.
"""

import gc
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import quick

# Eight devices and quick compilation. What the caller has set stays: XLA_FLAGS=--xla_backend_optimization_level=3 gives
# the usual machine code.
_SET = os.environ.get("XLA_FLAGS", "")
_WANTED = {"xla_force_host_platform_device_count": "8"} | quick.CODE
_LASTING = f"{_SET} {quick.in_words({name: value for name, value in _WANTED.items() if name not in _SET})}"
# Read when the first backend starts, so they are set before jax is imported. What the TPU's compiler doesn't know is
# taken back then.
os.environ["XLA_FLAGS"] = f"{_LASTING} {quick.in_words(quick.READ_ONCE)}"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
import pytest
from hypothesis import settings
from jax.sharding import AxisType, Mesh

import compiled_once

jax.config.update("jax_platforms", "cpu")
jax.devices()
os.environ["XLA_FLAGS"] = _LASTING
compiled_once.install()
# Traces are many small objects that live long; to look through all of them took a tenth of the time.
gc.set_threshold(100_000, 50, 100)
jax.config.update("jax_numpy_dtype_promotion", "strict")

# Compilation makes the first example slow, and a run has to be repeatable.
settings.register_profile("jpipe", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("jpipe")

pytest_plugins = ["terminals"]
# The folders of scripts that are tested, after tests/helpers, which has some of the same names.
sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("examples", "benchmarks", "benchmarks/peers")]
MakeMesh = Callable[..., Mesh]


@pytest.fixture(autouse=True)
def room():
    yield
    compiled_once.make_room()


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


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


def pytest_collection_modifyitems(items):
    """Puts tests of several processes first: at the end, one of those would keep the other workers waiting."""
    items.sort(key=lambda item: item.path.name != "test_processes.py")
