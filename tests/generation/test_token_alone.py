"""Layers that need a cache are told from those that treat each token by itself."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import jpipe
from jpipe.generation.generator import Generator

WIDTH, LENGTH = 8, 6


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.MultiHeadDotProductAttention(2)(x, mask=nn.make_causal_mask(x[..., 0]))


class Positions(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + self.param("table", nn.initializers.normal(), (16, WIDTH))[: x.shape[1]]


class Experts(nn.Module):
    """Each token is weighed by itself, though all are one array in between."""

    @nn.compact
    def __call__(self, x):
        weights, _ = jax.lax.top_k(jax.nn.softmax(nn.Dense(4)(x)), 2)
        return x + weights[..., :1] * nn.Dense(WIDTH)(x.reshape(-1, WIDTH)).reshape(x.shape)


class Split(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jax.lax.with_sharding_constraint(nn.Dense(WIDTH)(x), PartitionSpec(None, None, "model"))


ALONE = {
    "Dense": nn.Dense(WIDTH),
    "LayerNorm": nn.LayerNorm(),
    "RMSNorm": nn.RMSNorm(),
    "Sequential": nn.Sequential([nn.Dense(16), nn.gelu, nn.Dense(WIDTH)]),
    "experts": Experts(),
    "function": lambda x: jnp.cumsum(x, -1),
    "dropout": nn.Dropout(0.5, deterministic=True),
}
TOGETHER = {
    "attention": (Attention(), r"looks at other tokens \(\w+\.py:\d+\)"),
    "convolution": (nn.Conv(WIDTH, (3,), padding="CAUSAL"), "looks at other tokens"),
    "positions": (Positions(), "looks at the places of tokens"),
    "rotations": (lambda x: x * jnp.cos(jnp.arange(x.shape[1]))[:, None], "looks at the places of tokens"),
    "sums": (lambda x: jnp.cumsum(x, 1), "looks at other tokens"),
    "over loops": (
        lambda x: jax.lax.scan(lambda c, _: (c + x.mean(1, keepdims=True), None), x, length=2)[0],
        "looks at other tokens",
    ),
}


class Cached(nn.Module):
    decode: bool = False

    @nn.compact
    def __call__(self, x):
        if self.decode:
            self.variable("cache", "count", lambda: jnp.zeros((), jnp.int32))
        return x


def loss_fn(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def generate(layer, **options):
    """Two tokens of a model with this layer and one with a cache; of what has no tokens only the cache is asked for."""
    layers = [nn.Embed(11, WIDTH), layer, Cached(), nn.Dense(11)]
    pipe = jpipe.Pipeline(layers, loss_fn, num_stages=1, num_microbatches=2, balance="even", **options)
    tokens = np.zeros((4, LENGTH), np.int32)
    pipe.init(jax.random.key(0), {"inputs": tokens, "targets": tokens})
    Generator(pipe.planner).decoding(2, 4, 1)


@pytest.mark.parametrize("name", ALONE)
def test_what_treats_each_token_by_itself_is_called_with_one(name):
    generate(ALONE[name])


@pytest.mark.parametrize("name", TOGETHER)
def test_what_looks_further_without_a_cache_is_named(name):
    layer, words = TOGETHER[name]
    with pytest.warns(UserWarning, match=rf"generate: layer 1 \(.*\) {words}.*, but keeps no cache in decode mode"):
        generate(layer)


def test_constraints_over_other_axes_say_nothing_of_tokens(make_mesh):
    generate(Split(), mesh=make_mesh((1, 2), ("stage", "model")))


class Mapped(nn.Module):
    """A program of single devices, over an axis that isn't one of tokens."""

    mesh: jax.sharding.Mesh

    @nn.compact
    def __call__(self, x):
        spec = PartitionSpec(None, None, "model")
        double = jax.shard_map(lambda x: 2 * x, mesh=self.mesh, in_specs=spec, out_specs=spec, check_vma=False)
        return double(nn.Dense(WIDTH)(x))


def test_programs_of_single_devices_say_nothing_of_tokens(make_mesh):
    mesh = make_mesh((1, 2), ("stage", "model"))
    generate(Mapped(mesh), mesh=mesh)


def test_inputs_that_are_cut_out_of_a_longer_batch_say_nothing_of_tokens():
    layers = [nn.Embed(11, WIDTH), Cached(), nn.Dense(11)]
    loss = lambda logits, tokens: optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
    pipe = jpipe.Pipeline(layers, loss, num_stages=1, num_microbatches=2, inputs=lambda tokens: tokens[:, :-1])
    pipe.init(jax.random.key(0), np.zeros((4, LENGTH + 1), np.int32))
    Generator(pipe.planner).decoding(2, 4, 1)
