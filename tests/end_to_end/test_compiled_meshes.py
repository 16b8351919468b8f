"""What is sent in loops, by every kind of model on every kind of mesh.

A loop over layers turns on some stages more often than on others, so what a stage's devices send there may only go to
each other, and a permute has to be jpipe's own. What is as large as a gradient is sent once a step.
"""

import pytest

from recipes import MESHES, MODELS
from timed import FAST, Worker

QUICK = [
    ("plain layers", "data"),
    ("unbatched leaf in a flat buffer", "data"),
    ("BatchNorm", "data"),
    ("fused attention", "model"),
    ("split", "model"),
    ("tied", "fsdp and tp"),
]
SLOW = [(name, mesh) for mesh in MESHES for name in MODELS if (name, mesh) not in QUICK]


@pytest.fixture(scope="module")
def worker():
    with Worker(flags=FAST) as worker:
        yield worker


def check(worker, name, mesh):
    found = worker.value("recipes", "inspect", name, mesh)
    assert found["sent"] and found["intruders"] == []
    assert found["largest"] < found["gradient"]


@pytest.mark.parametrize(("name", "mesh"), QUICK)
def test_what_loops_send(worker, name, mesh):
    check(worker, name, mesh)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), SLOW)
def test_what_loops_of_every_model_send(worker, name, mesh):
    check(worker, name, mesh)
