"""What a check of gradients says of right models and of wrong ones; its plain model equals Flax's under jax.grad."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import jpipe
from jpipe.tools import gradient_check
from small_pipeline import make


class Block(nn.Module):
    """With attention, whose key biases have the gradient zero: they add the same to all scores of a query."""

    rate: float = 0.0

    @nn.compact
    def __call__(self, x, deterministic):
        h = nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x))
        return x + nn.Dropout(self.rate)(nn.Dense(8)(nn.gelu(h)), deterministic=deterministic)


def masked_loss(logits, batch):
    each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return jnp.sum(each * batch["mask"]), jnp.sum(batch["mask"])


@pytest.fixture(autouse=True)
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


random = np.random.default_rng(0)
WORDS = {name: random.integers(0, 7, (8, 5)) for name in ("inputs", "targets")}
WORDS["mask"] = random.integers(0, 2, (8, 5)).astype(np.float32)


@pytest.fixture(scope="module")
def checked():
    """A Transformer in two stages: the pipeline, its variables, the report."""
    layers = [nn.Embed(7, 8), *[Block() for _ in range(3)], nn.Dense(7)]
    pipe = jpipe.Pipeline(layers, masked_loss, num_stages=2, num_microbatches=4)
    with jax.numpy_dtype_promotion("standard"):
        variables = pipe.init(jax.random.key(0), WORDS)
        return pipe, variables, pipe.check_gradients(variables, WORDS)


def plain_loss(trees, batch):
    x = nn.Embed(7, 8).apply(trees[0], batch["inputs"])
    for tree in trees[1:4]:
        x = Block().apply(tree, x, deterministic=True)
    total, weight = masked_loss(nn.Dense(7).apply(trees[4], x), batch)
    return total / weight


def sizes_of(trees):
    """By layer and path, the largest number of each leaf."""
    name = lambda path: (str(path[0].idx), jax.tree_util.keystr(path[2:], simple=True, separator="/"))
    return {name(path): np.max(np.abs(leaf)) for path, leaf in jax.tree_util.tree_leaves_with_path(trees)}


def test_a_right_model_agrees_and_its_plain_model_is_flax_differentiated_by_jax(checked):
    pipe, variables, report = checked
    assert report.agrees and report.differing == () and report.narrowest == "float32"
    loss, grads = jax.jit(jax.value_and_grad(plain_loss))(jax.device_get(pipe.layer_variables(variables)), WORDS)
    np.testing.assert_allclose(report.loss.size, loss, rtol=1e-6)
    wanted = sizes_of(grads)
    got = {(leaf.layer.split()[0], leaf.path): leaf for leaf in report.leaves}
    assert got.keys() == wanted.keys()
    for name, leaf in got.items():
        np.testing.assert_allclose(leaf.size, wanted[name], rtol=1e-4, atol=1e-6, err_msg=str(name))
        assert leaf.rounding < 1e-4 * max(leaf.size, 0.01)


def test_the_key_bias_of_attention_is_zero_and_no_false_alarm(checked):
    _, _, report = checked
    zero = [(leaf.layer, leaf.path) for leaf in report.leaves if leaf.is_zero]
    assert zero == [(f"{i} (Block)", "MultiHeadDotProductAttention_0/key/bias") for i in (1, 2, 3)]
    assert str(report).count("<- zero") == 3
    assert "equal the plain model's, but for rounding" in repr(report)


@pytest.mark.parametrize("factor", [1 + 1e-4, np.nan])
def test_what_is_off_is_named(checked, factor):
    pipe, variables, _ = checked
    (loss, _), grads = pipe.value_and_grad(variables, WORDS)
    trees, found = map(pipe._jit_to_layers, (variables, {"params": grads}))
    found[4]["params"]["kernel"] *= factor
    off = 1 + 1e-4 * np.isnan(factor)  # the loss too
    report = gradient_check.check_gradients(pipe.planner, trees, WORDS, None, (loss * off, found), None, "it")
    differing = [("4 (Dense)", "kernel"), ("", "loss")][: 2 if off > 1 else 1]
    assert [(leaf.layer, leaf.path) for leaf in report.differing] == differing
    assert not report.agrees
    words = f"{len(differing)} of {1 + len(report.leaves)} differ from the plain model's by more than rounding"
    assert words in str(report)


def test_a_model_of_ones_own_is_the_reference_and_what_it_does_otherwise_is_named(checked):
    pipe, variables, _ = checked
    assert pipe.check_gradients(variables, WORDS, reference=plain_loss).agrees

    def other(trees, batch):
        kernel = trees[4]["params"]["kernel"]
        halved = kernel / 2 + jax.lax.stop_gradient(kernel / 2)
        return plain_loss([*trees[:4], {"params": trees[4]["params"] | {"kernel": halved}}], batch)

    report = pipe.check_gradients(variables, WORDS, reference=other)
    assert [(leaf.layer, leaf.path) for leaf in report.differing] == [("4 (Dense)", "kernel")]
    assert report.loss.agrees
    lines = str(report).splitlines()
    assert [line.split()[:3] for line in lines if line.endswith("<- differs")] == [["4", "(Dense)", "kernel"]]


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.dense = nnx.BatchNorm(8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(jnp.tanh(self.dense(self.norm(x))))


class Split(nn.Module):
    """Names mesh axes, in its parameters and for its activations."""

    @nn.compact
    def __call__(self, x, side):
        h = nn.Dense(8, kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model")))(x)
        return jax.lax.with_sharding_constraint(h, PartitionSpec(None, None, "model")) * side[..., None]


def several_means(logits, batch):
    per_word = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return {"words": (jnp.sum(per_word * batch["mask"]), jnp.sum(batch["mask"])), "all": jnp.mean(logits**2)}


def test_layers_of_all_kinds_on_a_mesh_agree(make_mesh):
    table = jpipe.Shared(nn.Embed(7, 8))
    layers = [
        table,
        jpipe.stash(lambda rngs: NnxBlock(rngs), "kept"),
        jpipe.freeze(nn.Dense(8), lambda path: path == "bias"),
        jpipe.reads(Split(), lambda batch: batch["mask"]),
        jpipe.pop(lambda x, kept: x + kept, "kept"),
        jpipe.Layer(lambda key, x: jnp.ones(8), lambda params, x, key: x * params * jax.random.uniform(key)),
        table.using("attend"),
    ]
    mesh = make_mesh((2, 2, 2), ("stage", "data", "model"))
    pipe = jpipe.Pipeline(layers, several_means, num_stages=2, num_microbatches=2, mesh=mesh, balance="even")
    variables = pipe.init(jax.random.key(0), WORDS)
    report = pipe.check_gradients(variables, WORDS, jax.random.key(1))
    assert report.agrees, report
    names = [(leaf.layer.split()[0], leaf.path) for leaf in report.leaves]
    assert ("0", "embedding") in names and ("2", "kernel") in names
    assert ("2", "bias") not in names and "6" not in {layer for layer, _ in names}


def test_a_layer_that_needs_the_mesh_needs_a_reference(make_mesh):
    mesh = make_mesh((2, 2), ("stage", "data"))
    spec = PartitionSpec("data")
    squared = lambda x: jax.shard_map(lambda x: x**2, mesh=mesh, in_specs=spec, out_specs=spec)(x)
    pipe = make([nn.Dense(4), squared, nn.Dense(4)], lambda y, _: jnp.mean(y), mesh=mesh)
    batch = np.ones((8, 4), np.float32)
    variables = pipe.init(jax.random.key(0), batch)
    with pytest.raises(ValueError, match=r"calls jax\.shard_map, which needs the mesh.*pass reference="):
        pipe.check_gradients(variables, batch)
