"""What is sent in loops, by every kind of model on every kind of mesh.

A loop over layers turns on some stages more often than on others, so what a stage's devices send there may only go to
each other, and a permute has to be jpipe's own. What is as large as a gradient is sent once a step.
"""

import pytest

from recipes import MESHES, MODELS
from timed import FAST, Worker

QUICK = [
    ("unbatched leaf in a flat buffer", "data"),
    ("BatchNorm", "data"),
    ("tied", "fsdp and tp"),
]


@pytest.fixture(scope="module")
def worker():
    with Worker(flags=FAST) as worker:
        yield worker


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(name, mesh, marks=[] if (name, mesh) in QUICK else pytest.mark.slow)
        for mesh in MESHES
        for name in MODELS
    ],
)
def test_what_loops_send(worker, name, mesh):
    found = worker.value("recipes", "inspect", name, mesh)
    assert found["sent"] and found["intruders"] == []
    assert found["largest"] < found["gradient"]
