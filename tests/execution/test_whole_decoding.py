"""A model that is one module generates, in stages, as its plain self without a cache does."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jpipe
from decoders import VOCABULARY, WIDTH, Block, NnxBlock, batch_of, embed, loss_fn, prompts_of, without_cache


class Decoder(nn.Module):
    """A decoder with learned positions, which it counts in decode mode."""

    scanned: bool = False
    tied: bool = False
    decode: bool = False

    @nn.compact
    def __call__(self, tokens):
        table, length = embed(name="table"), tokens.shape[1]
        positions = self.param("positions", nn.initializers.normal(0.5), (32, WIDTH), jnp.float64)
        first = 0
        if self.decode:
            ready = self.has_variable("cache", "index")
            index = self.variable("cache", "index", lambda: jnp.zeros((), jnp.int32))
            first, index.value = index.value, index.value + length * ready
        x = table(tokens) + jax.lax.dynamic_slice_in_dim(positions, first, length)
        if self.scanned:
            axes = {"variable_axes": {"params": 0, "cache": 0}, "split_rngs": {"params": True}, "length": 3}
            axes["metadata_params"] = {nn.PARTITION_NAME: None}
            x, _ = nn.scan(lambda block, x, _: (block(x), None), **axes)(Block(self.decode, name="blocks"), x, None)
        else:
            for i in range(3):
                x = Block(self.decode, name=f"h_{i}")(x)
        return table.attend(x) if self.tied else nn.Dense(VOCABULARY, param_dtype=jnp.float64, name="head")(x)


class NnxDecoder(nnx.Module):
    """A decoder in nnx, without positions."""

    def __init__(self, rngs):
        options = {"param_dtype": jnp.float64, "rngs": rngs}
        self.table = nnx.Embed(VOCABULARY, WIDTH, embedding_init=nnx.initializers.normal(1.0), **options)
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(3)])
        self.head = nnx.Linear(WIDTH, VOCABULARY, **options)

    def __call__(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


MODELS = {
    "loop": Decoder,
    "scan": lambda: Decoder(scanned=True),
    "tied": lambda: Decoder(tied=True),
    "frozen": lambda: jpipe.freeze(Decoder(), lambda path: "table" in path),
    "nnx": lambda: lambda rngs: NnxDecoder(rngs),
    "nnx, ready": lambda: NnxDecoder(nnx.Rngs(0)),
}
PLACES = {
    "K=2": {"num_stages": 2},
    "K=1": {"num_stages": 1},
    "v": {"num_stages": 2, "num_chunks": 2, "schedule": "v"},
    "shared": {"num_stages": 2, "ends": "shared"},
}
BY_DEFAULT = {("scan", "K=2"), ("loop", "v"), ("nnx", "K=2")}
CASES = [
    pytest.param(model, place, marks=() if (model, place) in BY_DEFAULT else pytest.mark.slow)
    for model in MODELS
    for place in PLACES
]


@pytest.fixture(scope="module", autouse=True)
def float64():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


def plain(name, tree):
    """The model as a function of tokens."""
    if "nnx" not in name:
        model = MODELS["loop" if name == "frozen" else name]()
        return lambda tokens: model.apply(tree, tokens)
    module = NnxDecoder(nnx.Rngs(0))
    nnx.update(module, tree["params"])
    module.eval()
    return module


@pytest.mark.parametrize(("model", "place"), CASES)
def test_equals_the_model_without_a_cache(model, place, monkeypatch):
    monkeypatch.setattr("jpipe.memory.layout.SMALLEST", 1)  # ends of any size are split
    pipe = jpipe.Pipeline(MODELS[model](), loss_fn, num_microbatches=4, **PLACES[place])
    variables = pipe.init(jax.random.key(1), batch_of())
    tree = jax.device_get(pipe.model_variables(variables))
    prompts = prompts_of(40, 5)
    expected = without_cache(plain(model, tree), prompts, 7)
    np.testing.assert_array_equal(pipe.generate(variables, prompts, 7), expected)


class Taught(nn.Module):
    """A decoder with a parameter that only training has, which gives the values behind its blocks, too."""

    decode: bool = False

    @nn.compact
    def __call__(self, tokens, train: bool = False):
        x, seen = embed()(tokens), []
        for _ in range(3):
            x = Block(self.decode)(x)
            seen.append(x)
        x = x * self.param("scale", nn.initializers.ones, (), jnp.float64) if train else x
        return nn.Dense(VOCABULARY, param_dtype=jnp.float64)(x), seen


def test_what_only_training_has_and_outputs_that_the_loss_does_not_read():
    """The latter stay where they are."""
    loss, batch, prompts = lambda pair, batch: loss_fn(pair[0], batch), batch_of(), prompts_of(6, 5)
    pipe = jpipe.Pipeline(Taught(), loss, num_stages=2, num_microbatches=4)
    variables = pipe.init(jax.random.key(1), batch)
    assert pipe.apply(variables, batch)[1] == [None] * 3
    tree = jax.device_get(pipe.model_variables(variables))
    assert "scale" in tree["params"]
    expected = without_cache(lambda tokens: Taught().apply(tree, tokens)[0], prompts, 4)
    np.testing.assert_array_equal(pipe.generate(variables, prompts, 4, logits=lambda pair: pair[0]), expected)
