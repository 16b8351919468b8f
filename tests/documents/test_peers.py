"""`benchmarks/peers`: that the model is the same everywhere, how turns are taken, and what its pages say."""

import sys
from pathlib import Path

import chex
import compare
import jax
import jax.numpy as jnp
import jax_functions
import jpipe_peer
import numpy as np
import optax
import pytest
import results
from common import make_layers
from same_model import Sizes, make_tokens, make_weights, plain_loss
from turns import Step

ROOT = Path(__file__).parents[2]
PAGE = (Path(compare.__file__).parent / "README.md").read_text()
SMALL = Sizes(layers=4, width=16, heads=2, seq=8, vocab=11, batch=4, microbatches=2)


def in_float64(tree):
    return jax.tree.map(lambda a: a.astype(np.float64), tree)


@pytest.fixture
def float64():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


def reference(weights):
    """Loss by numpy, gradients by the same lines in `jax.numpy`, as Flax has them; both in float64."""
    loss = plain_loss(weights, *make_tokens(SMALL), SMALL.heads)
    loss_of = jax.jit(jax.grad(lambda weights: plain_loss(weights, *make_tokens(SMALL), SMALL.heads, jnp)))
    gradients = loss_of(weights)
    return loss, jpipe_peer.layer_trees(gradients, SMALL.heads)


def test_layers_are_the_model_that_numpy_has(float64):
    """In float64, but for the softmax inside of `jax.nn.dot_product_attention`, which is float32 always."""
    layers, batch = make_layers(jpipe_peer.size_of(SMALL, "float64")), jpipe_peer.make_batch(SMALL)

    def loss_of(trees):
        x = batch["inputs"]
        for layer, tree in zip(layers, trees, strict=True):
            x = layer.apply(tree, x)
        return optax.softmax_cross_entropy_with_integer_labels(x, batch["targets"]).mean()

    weights = in_float64(make_weights(SMALL))
    loss, gradients = jax.jit(jax.value_and_grad(loss_of))(jpipe_peer.layer_trees(weights, SMALL.heads))
    chex.assert_trees_all_close((loss, gradients), reference(weights), rtol=1e-5, atol=1e-8)


def test_pipelines_train_that_model():
    pipe, batch = jpipe_peer.make_pipeline(SMALL, ["none", "1f1b"]), jpipe_peer.make_batch(SMALL)
    variables = pipe.from_layer_variables(jpipe_peer.layer_trees(make_weights(SMALL), SMALL.heads), batch)
    (loss, _), gradients = pipe.value_and_grad(variables, batch)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        wanted = reference(in_float64(make_weights(SMALL)))
    found = loss, list(pipe.layer_variables({"params": gradients}))
    chex.assert_trees_all_close(found, jax.tree.map(np.float32, wanted), rtol=1e-4, atol=1e-6)


def test_functions_of_other_peers_are_the_model_that_numpy_has(float64):
    weights, tokens = in_float64(make_weights(SMALL)), make_tokens(SMALL)
    cuts = []
    cut = lambda x: cuts.append(x.shape) or x
    found = jax_functions.loss_of(weights, *tokens, SMALL.heads, cut, parts=2)
    np.testing.assert_allclose(found, plain_loss(weights, *tokens, SMALL.heads), rtol=1e-13)
    assert cuts == [(SMALL.batch, SMALL.seq, SMALL.width)]


ENTRIES = [compare.Entry("jpipe", "hand,scanned", [{0}]), compare.Entry("torch", "1f1b", [{0}, {1}])]


def steps_of(losses):
    return [Step(seconds=1.0 + i, processor=2.0, loss=loss, peak=3.0) for i, loss in enumerate(losses)]


def test_another_model_is_told_by_its_losses():
    losses = [6.0, 5.0, 4.0, 3.0]
    compare.check_losses(ENTRIES, [steps_of(losses), steps_of([*losses[:3], 3.00001])])
    with pytest.raises(SystemExit, match="torch 1f1b trains another model"):
        compare.check_losses(ENTRIES, [steps_of(losses), steps_of([*losses[:3], 3.001])])


@pytest.mark.slow
def test_variants_take_turns_and_train_alike():
    found = [compare.Entry("jpipe", variant, [{0}]) for variant in ("hand,scanned,accumulated", "one,none,1f1b")]
    steps = compare.take_turns(found, compare.Conditions(SMALL, {"jpipe": sys.executable}, turns=2, limit=60))
    compare.check_losses(found, steps)
    assert [len(taken) for taken in steps] == [compare.COUNTED + 2 * compare.A_TURN] * 2


@pytest.mark.parametrize("lines", results.tables(results.read()), ids=lambda lines: lines[0].split("|")[1].strip())
def test_the_page_says_what_was_kept(lines):
    assert "\n".join(lines) in PAGE


def test_the_comparison_says_the_same():
    assert "\n".join(results.summary(results.read())) in (ROOT / "benchmarks" / "results" / "peers.md").read_text()
