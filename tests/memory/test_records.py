"""Records: one layer's arrays out of the buffers of all stages, split over these, and into them again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases import assert_equal, model, pipeline
from jpipe.memory.records import Records


@pytest.fixture(scope="module")
def found():
    """Records of parameters and of moments in float16, and the buffers of both."""
    truth = model("mixed", "float32")
    pipe = pipeline(truth, "1f1b", 4, 2, balance="even")
    params = pipe.from_layer_variables(truth.trees, truth.batch)["params"]
    records = Records({"params": params.layout, "moments": params.layout})
    moments = {name: jnp.full_like(array, 3, jnp.float16) for name, array in params.items()}
    return records, {"params": dict(params), "moments": moments}


def test_what_is_put_is_taken_and_nothing_else_changes(found):
    records, arrays = found
    for v, j, _ in records.places:
        taken = records.take(arrays, v, j)
        assert {a.dtype for a in jax.tree.leaves(taken.get("moments"))} <= {jnp.dtype("float16")}, "as the arrays"
        more = {name: [np.asarray(a) + np.ones_like(a) for a in own] for name, own in taken.items()}
        changed = records.put(jax.tree.map(jnp.copy, arrays), v, j, more)
        assert_equal(jax.device_get(records.take(changed, v, j)), more)
        assert_equal(records.put(changed, v, j, taken), arrays)


def test_trees_that_are_missing_stay(found):
    records, arrays = found
    v, j = next((v, j) for v, j, _ in records.places if records.leaves(v)["params"])
    zeros = [np.zeros(known.leaf.shape, known.leaf.dtype) for known in records.leaves(v)["params"]]
    changed = records.put(jax.tree.map(jnp.copy, arrays), v, j, {"params": zeros})
    assert_equal(changed["moments"], arrays["moments"])
    assert_equal(jax.device_get(records.take(changed, v, j)["params"]), zeros)
