"""What is published: wheel and sdist hold what they should, and work from outside of the checkout."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import jpipe

ROOT = Path(__file__).parents[2]
PROGRAM = """
import flax.linen as nn, jax, jax.numpy as jnp, optax
import jpipe
assert not jpipe.__file__.startswith({root!r}), jpipe.__file__
pipe = jpipe.Pipeline([nn.Dense(4)] * 3, lambda y, batch: jnp.mean(y**2), num_stages=2, num_microbatches=2)
batch = {{"inputs": jnp.ones((4, 4))}}
state = pipe.create_state(jax.random.key(0), batch, optax.sgd(0.1))
before = pipe.evaluate(state.variables, batch)
state, metrics = pipe.train_step(state, batch)
assert pipe.evaluate(state.variables, batch) < before
with jpipe.Checkpointer("run") as saved:
    saved.save(pipe, state)
assert len(jpipe.load_layers("run")) == 3
print("trained", jpipe.__version__)
"""


def test_one_version():
    assert f"version: {jpipe.__version__}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder with wheel and sdist."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return out


@pytest.mark.slow
def test_wheel_and_sdist_hold_what_they_should(built):
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
    package = {str(path.relative_to(ROOT)) for path in (ROOT / "jpipe").rglob("*") if path.is_file()}
    package = {name for name in package if "__pycache__" not in name}
    assert package <= names
    assert {name.split("/")[0] for name in names} == {"jpipe", f"jpipe-{jpipe.__version__}.dist-info"}
    with tarfile.open(next(built.glob("*.tar.gz"))) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert package <= names
    assert {
        "README.md",
        "LICENSE",
        "CITATION.cff",
        "tests/helpers/cases.py",
        "docs/index.md",
        "examples/lm.py",
    } <= names
    assert {f"notebooks/{path.name}" for path in (ROOT / "notebooks").glob("*.ipynb")} <= names


@pytest.mark.slow
def test_the_wheel_trains_from_outside_of_the_checkout(built, tmp_path):
    target, wheel = tmp_path / "installed", next(built.glob("*.whl"))
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(wheel)]
    subprocess.run(install, check=True)
    environment = {
        "PYTHONPATH": str(target),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "PATH": "/usr/bin:/bin",
    }
    program = [sys.executable, "-c", PROGRAM.format(root=str(ROOT))]
    done = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"trained {jpipe.__version__}" in done.stdout
