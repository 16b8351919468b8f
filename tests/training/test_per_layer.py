"""`per_layer`: a transformation sees each layer's own tree, whatever else lies in the buffers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import jpipe
from cases import model, pipeline
from updates import check_updates, check_updates_of, is_kernel, is_matrix, labels, one_by_one, params


@pytest.fixture(autouse=True)
def standard_promotion():
    """Optax itself mixes dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


BY_PARAMETER = {
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4, momentum=0.5),
    "lamb": lambda: optax.lamb(1e-2, weight_decay=0.1, mask=is_matrix),
    "lars": lambda: optax.lars(1e-2, weight_decay=0.1),
    "masked by path": lambda: optax.masked(optax.adamw(1e-2), is_kernel),
    "multi_transform": lambda: optax.multi_transform({"matrices": optax.adamw(1e-2), "rest": optax.sgd(0.1)}, labels),
    "clipped by block": lambda: optax.chain(optax.clip_by_block_rms(0.01), optax.add_decayed_weights(0.1, is_matrix)),
}


@pytest.fixture(scope="module")
def pipe():
    with jax.enable_x64(True):
        truth = model("mixed")
        return pipeline(truth, "1f1b", 3, 4, balance="even")


@pytest.mark.parametrize(
    "tx", [pytest.param(name, marks=[pytest.mark.slow] * (name in ("lamb", "lars"))) for name in BY_PARAMETER]
)
def test_per_layer_shows_each_layer_its_own_tree(pipe, tx):
    with jax.enable_x64(True):
        check_updates(pipe, jpipe.per_layer(BY_PARAMETER[tx]()), one_by_one(BY_PARAMETER[tx]()))


def test_muon_turns_each_layers_own_matrices():
    with jax.enable_x64(True):
        truth, tx = model("plain"), optax.contrib.muon(1e-2, weight_decay=0.1)
        check_updates(pipeline(truth, "1f1b", 2, 3, balance="even"), jpipe.per_layer(tx), one_by_one(tx), truth)


def test_per_layer_passes_extra_arguments_on(pipe):
    def update(updates, state, params=None, *, factor):
        return jax.tree.map(lambda u: u * factor, updates), state

    with jax.enable_x64(True):
        truth = model("mixed")
        variables = pipe.from_layer_variables(truth.trees, truth.batch)["params"]
        tx = jpipe.per_layer(optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update))
        doubled, _ = tx.update(variables, tx.init(variables), factor=jnp.asarray(2.0))
        found = pipe.layer_variables({"params": doubled})
    for tree, expected in zip(found, params(truth), strict=True):
        for leaf, want in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(leaf, 2 * want)


def test_a_transformation_that_sees_stacked_layers_differs():
    """Why `per_layer` is there: the norm of a stack of parameters is not the norm of one."""
    with jax.enable_x64(True):
        truth = model("plain")
        pipe = pipeline(truth, "1f1b", 2, 3, balance="even")
        with pytest.raises(AssertionError):
            check_updates_of(truth, pipe, optax.lars(1e-2), one_by_one(optax.lars(1e-2)))
        check_updates_of(truth, pipe, jpipe.per_layer(optax.lars(1e-2)), one_by_one(optax.lars(1e-2)))
