"""The pieces' variables are the model's, in parts."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import whole_models
from jpipe.cutting.module import make_whole
from jpipe.cutting.whole import cut_model
from jpipe.layers.adapt import as_whole

read = lambda batch: batch["inputs"]


@pytest.fixture(scope="module")
def scanned():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        batch = jax.tree.map(lambda a: jax.ShapeDtypeStruct((2, *a.shape[1:]), a.dtype), whole_models.tokens("inputs"))
        model = whole_models.Transformer(style="scan")
        whole = make_whole(as_whole(model), read, batch)
        yield model, cut_model(*whole.read_by(None, whole.trace(read, batch), batch), 1), batch


def test_variables_are_named_below_their_block(scanned):
    _, cut, _ = scanned
    mlp = {"Dense_0": {"bias": 2, "kernel": 3}, "Dense_1": {"bias": 4, "kernel": 5}}
    assert jax.tree.structure(cut.trees[2]["params"]["mlp"]) == jax.tree.structure(mlp)
    assert cut.trees[2] == cut.trees[4] == cut.trees[6]
    assert cut.parameter_names(0) == ["table/embedding", "positions"]


def test_there_and_back(scanned):
    model, cut, batch = scanned
    with jax.enable_x64(True):
        variables = nn.unbox(dict(jax.jit(model.init)(jax.random.key(0), jnp.zeros(batch["inputs"].shape, jnp.int32))))
        trees = cut.from_model(variables, {})
        kernel = variables["params"]["blocks"]["mlp"]["Dense_0"]["kernel"]
        np.testing.assert_array_equal(trees[4]["params"]["mlp"]["Dense_0"]["kernel"], kernel[1])
        jax.tree.map(np.testing.assert_array_equal, nn.unbox(cut.to_model(trees)), variables)
