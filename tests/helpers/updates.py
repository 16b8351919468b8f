"""Updates of an optimiser on a pipeline's parameters, compared with those on the layers' own trees."""

import jax
import numpy as np
import optax
import pytest

from cases import Model, assert_close, model, params_of


@pytest.fixture(autouse=True)
def standard_promotion():
    """Optax itself mixes dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def is_kernel(tree):
    return jax.tree_util.tree_map_with_path(lambda path, _: "kernel" in jax.tree_util.keystr(path), tree)


def is_matrix(tree):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, tree)


def labels(tree):
    return jax.tree.map(lambda leaf: "matrices" if leaf.ndim > 1 else "rest", tree)


def params(truth: Model) -> list:
    return [params_of(layer, tree) for layer, tree in zip(truth.sequence, truth.trees, strict=True)]


def filled(truth: Model, trees: list) -> list:
    """Variables of the sequential model with other parameters."""
    pairs = zip(truth.trees, trees, strict=True)
    return [old | tree if isinstance(old, dict) and "params" in old else tree for old, tree in pairs]


def random_like(trees: list, seed: int) -> list:
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda a: rng.standard_normal(a.shape).astype(a.dtype), trees)


def check_updates(pipe, found, expected, truth=None):
    """Three updates under both transformations, from the same parameters and gradients, of "mixed" or of another."""
    truth = truth or model("mixed")
    trees, variables = params(truth), pipe.from_layer_variables(truth.trees, truth.batch)["params"]
    state, found_state = jax.jit(expected.init)(trees), jax.jit(found.init)(variables)
    expected_update, update = jax.jit(expected.update), jax.jit(found.update)
    for seed in range(3):
        grads = random_like(trees, seed)
        laid_out = pipe.from_layer_variables(filled(truth, grads))["params"]
        updates, state = expected_update(grads, state, trees)
        changes, found_state = update(laid_out, found_state, variables)
        assert_close(pipe.layer_variables({"params": changes}), updates, f"update {seed}")
        trees, variables = jax.jit(optax.apply_updates)((trees, variables), (updates, changes))


def one_by_one(tx):
    """The transformation applied to the tree of each layer."""

    def update(grads, state, trees):
        pairs = [tx.update(*given) for given in zip(grads, state, trees, strict=True)]
        return [update for update, _ in pairs], [state for _, state in pairs]

    return optax.GradientTransformation(lambda trees: [tx.init(tree) for tree in trees], update)
