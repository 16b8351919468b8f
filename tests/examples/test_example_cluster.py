"""What the examples set before a backend starts."""

import glob
import os
import subprocess
import sys
from pathlib import Path

import cluster
import jax
import pytest

EXAMPLES = Path(cluster.__file__).parent
SAID_BY_IMPORTS = ("before absl::InitializeLog()", "Could not find cuda drivers")
"""What JAX's plugin for GPUs, which the test extra brings for its compiler, says at `import jax` without a driver."""


@pytest.fixture
def settings(monkeypatch):
    """What is set, by name, as of a process in which nothing is."""
    found = {}
    monkeypatch.setattr(jax.config, "update", found.__setitem__)
    monkeypatch.setattr(type(jax.config), "jax_platforms", None, raising=False)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    return found


def test_accelerators_are_left_to_jax(settings, monkeypatch, tmp_path):
    monkeypatch.setattr(cluster, "ACCELERATORS", (str(tmp_path / "accel*"),))
    cluster.simulate_devices(4)
    assert settings == {"jax_num_cpu_devices": 4, "jax_platforms": "cpu"}
    settings.clear()
    (tmp_path / "accel0").touch()
    cluster.simulate_devices(4)
    assert settings == {"jax_num_cpu_devices": 4}


@pytest.mark.skipif(any(map(glob.glob, cluster.ACCELERATORS)), reason="this machine has an accelerator")
def test_nothing_is_said_of_a_tpu_that_is_not_there():
    """libtpu, which the test extra brings, said "Failed to find host bounds" and more, in the demo's first lines."""
    code = "import cluster, jax; cluster.simulate_devices(2); print(jax.devices())"
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    environment["PYTHONPATH"] = os.pathsep.join([str(EXAMPLES), str(EXAMPLES.parent)])
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100)
    said = [line for line in found.stderr.splitlines() if not any(words in line for words in SAID_BY_IMPORTS)]
    assert (found.stdout, said) == ("[CpuDevice(id=0), CpuDevice(id=1)]\n", [])
