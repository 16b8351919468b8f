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
