"""Shared weights: from the stage that holds them to all, and their gradients back."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jpipe.execution.shared_weights import send_shared, sum_shared_gradients
from jpipe.memory.storage import build_storage
from jpipe.mesh.on_stages import on_stages
from jpipe.mesh.users_mesh import as_mesh
from jpipe.planning.ends import Ends

NUM_STAGES, OWNER = 3, 1
SHAPE = jax.ShapeDtypeStruct((2, 2), jnp.float32)


@pytest.fixture
def step():
    """A set of variables of its own on every stage, and a shared one, which stage 1 holds."""
    storage = build_storage([[SHAPE], [SHAPE]], [[0, 1, 2], [OWNER]], device_of=range(NUM_STAGES))
    sets = [SimpleNamespace(shared=False), SimpleNamespace(shared=True)]
    model = SimpleNamespace(variable_sets=sets)
    named = {"params": storage}
    return SimpleNamespace(storages=named, model=model, ends=Ends(), collections=lambda *roles: ["params"])


def on_each_stage(run):
    """What `run(k)` gives on stage k, stacked."""
    body = lambda: jax.tree.map(lambda a: a[None], run(jax.lax.axis_index("stage")))
    return jax.jit(on_stages(body, as_mesh(None, NUM_STAGES), (), PartitionSpec("stage")))()


def filled(storage, k):
    """A stage's buffers, where everything is its index plus one."""
    return {name: jnp.full(buffer.shape, k + 1, buffer.dtype) for name, buffer in storage.buffers.items()}


def test_all_stages_get_what_one_holds(step):
    def run(k):
        variables = {"params": filled(step.storages["params"], k)}
        return send_shared(step, variables, k)

    (found,) = on_each_stage(run)[1]["params"]
    np.testing.assert_array_equal(found, np.full((NUM_STAGES, 2, 2), OWNER + 1))


def test_gradients_of_all_uses_are_added_up_where_they_belong(step):
    storage = step.storages["params"]

    def run(k):
        own = jnp.full(SHAPE.shape, 100 * (k + 1), jnp.float32)
        work = SimpleNamespace(gradients=filled(storage, k), shared_gradients={1: [own]})
        gradients = sum_shared_gradients(SimpleNamespace(device=k, step=step), work)
        return storage.read(gradients, 0, k), storage.read(gradients, 1, 0)

    (apart,), (shared,) = on_each_stage(run)
    np.testing.assert_array_equal(apart[:, 0, 0], [1, 2, 3])
    assert shared[OWNER, 0, 0] == OWNER + 1 + 100 * (1 + 2 + 3)
