"""The pieces of a model in decode mode have the caches that they use; models that can't decode in pieces are named."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from jpipe.cutting.module import make_whole
from jpipe.cutting.whole import CutModel, cut_model
from jpipe.execution.decoding import cut_decoder
from jpipe.layers.adapt import as_whole

TOKENS = jax.ShapeDtypeStruct((2, 6), jnp.int32)


def embed():
    return nn.Embed(18, 8)


def cut(model: nn.Module) -> CutModel:
    """A model, cut at the shapes of two sequences of six tokens."""
    layer, read = as_whole(model), lambda tokens: tokens
    whole = make_whole(layer, read, TOKENS)
    return cut_model(*whole.read_by(None, whole.trace(read, TOKENS), TOKENS), 2)


class Blocks(nn.Module):
    """Sums of all tokens before, by caches of their own, stacked or not; and a count that nothing uses."""

    scanned: bool
    decode: bool = False

    @nn.compact
    def __call__(self, tokens):
        x = embed()(tokens)
        if self.decode:
            self.variable("cache", "count", jnp.zeros, (), jnp.int32).value += 1
        if self.scanned:
            axes = {"params": 0, "cache": 0}
            x, _ = nn.scan(Sum, axes, split_rngs={"params": True}, length=2)(self.decode, name="sums")(x, None)
        else:
            for i in range(2):
                x, _ = Sum(self.decode, name=f"sums_{i}")(x, None)
        return nn.Dense(18)(x)


class Sum(nn.Module):
    """A running sum and a product."""

    decode: bool

    @nn.compact
    def __call__(self, x, _):
        y = jnp.cumsum(x, 1)
        if self.decode:
            total = self.variable("cache", "total", jnp.zeros, x[:, :1].shape, x.dtype)
            total.value += x.sum(1, keepdims=True)
            y = total.value
        return x + nn.Dense(8)(y), None


@pytest.mark.parametrize("scanned", [False, True])
def test_each_piece_has_the_caches_that_it_uses(scanned):
    model = cut(Blocks(scanned))
    decoder = cut_decoder(model, TOKENS, size=3, length=7)
    layers = decoder(jax.ShapeDtypeStruct((3, 1), jnp.int32))
    assert [layer.name for layer in layers] == model.names
    made = [jax.eval_shape(layer.init, jax.random.key(0), (), None) for layer in layers]
    caches = [jax.tree_util.tree_leaves_with_path(tree.get("cache", {})) for tree in made]
    shapes = [{path[-1].key: leaf.shape for path, leaf in leaves} for leaves in caches]
    assert shapes == [{"count": ()}, {"total": (3, 1, 8)}, {"total": (3, 1, 8)}, {}]


class Counted(nn.Module):
    """Blocks that add the place of a token, of one counter for all."""

    decode: bool = False
    masked: bool = False

    @nn.compact
    def __call__(self, tokens):
        x, index = embed()(tokens), 0
        if self.decode:
            counter = self.variable("cache", "index", lambda: jnp.zeros(()))
            index, counter.value = counter.value, counter.value + 1
        if self.masked:
            index = jnp.float32(tokens > 3)[..., None]
        for _ in range(4):
            x = x + nn.Dense(8)(x) * index
        return nn.Dense(18)(x)


class Other(nn.Module):
    """A model with other parameters in decode mode."""

    decode: bool = False

    @nn.compact
    def __call__(self, tokens):
        return nn.Dense(18, use_bias=not self.decode)(embed()(tokens))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Counted(), "uses its cache index in the pieces Dense_0 and Dense_1; give each block a cache of its own"),
        (Counted(masked=True), r"the piece Dense_\d of Counted reads the tokens in decode mode; .*leave out there"),
        (Other(), "Other has .* in decode mode and .* in training; give it the same in both"),
    ],
    ids=["one counter", "a mask", "other parameters"],
)
def test_bad_models(model, message):
    with pytest.raises(ValueError, match=message):
        cut_decoder(cut(model), TOKENS, size=2, length=8)(jax.ShapeDtypeStruct((2, 1), jnp.int32))
