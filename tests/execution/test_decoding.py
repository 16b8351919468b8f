"""Generation equals Flax's own loop on one device, token by token, however the model is cut."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jpipe
from cases import compilations, run_layers
from decoders import (
    VOCABULARY,
    WIDTH,
    Block,
    Causal,
    Counting,
    NnxBlock,
    batch_of,
    check_generated,
    embed,
    loss_fn,
    prompts_of,
    without_cache,
)
from jpipe.execution.decoding import make_decoding

TOKENS = np.zeros((4, 5), np.int32)


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.MultiHeadDotProductAttention(2)(x, mask=nn.make_causal_mask(x[..., 0]))


class Experts(nn.Module):
    """Each token is weighed by itself, though all are one array in between."""

    @nn.compact
    def __call__(self, x):
        weights, _ = jax.lax.top_k(jax.nn.softmax(nn.Dense(4)(x)), 2)
        return x + weights[..., :1] * nn.Dense(WIDTH)(x.reshape(-1, WIDTH)).reshape(x.shape)


class Split(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jax.lax.with_sharding_constraint(nn.Dense(WIDTH)(x), P(None, None, "model"))


ALONE = {
    "Dense": nn.Dense(WIDTH),
    "LayerNorm": nn.LayerNorm(),
    "experts": Experts(),
    "function": lambda x: jnp.cumsum(x, -1),
}
TOGETHER = {
    "attention": (Attention(), r"looks at other tokens \(\w+\.py:\d+\)"),
    "convolution": (nn.Conv(WIDTH, (3,), padding="CAUSAL"), "looks at other tokens"),
    "rotations": (lambda x: x * jnp.cos(jnp.arange(x.shape[1]))[:, None], "looks at the places of tokens"),
    "sums": (lambda x: jnp.cumsum(x, 1), "looks at other tokens"),
}


def ask(layers, **options):
    """Has a pipeline look at its layers as for two tokens; of what has no tokens only the cache is asked for."""
    pipe = jpipe.Pipeline(layers, loss_fn, num_stages=1, num_microbatches=2, balance="even", **options)
    pipe.init(jax.random.key(0), batch_of(4))
    with pipe.planner.tracing():
        make_decoding(pipe.plan, 2, 4, 1, 0)


def around(layer):
    """A model with this layer and one with a cache."""
    return [nn.Embed(VOCABULARY, WIDTH), layer, Counting(), nn.Dense(VOCABULARY)]


@pytest.mark.parametrize("name", ALONE)
def test_what_treats_each_token_by_itself_is_called_with_one(name):
    ask(around(ALONE[name]))


@pytest.mark.parametrize("name", TOGETHER)
def test_what_looks_further_without_a_cache_is_named(name):
    layer, words = TOGETHER[name]
    with pytest.warns(UserWarning, match=rf"generate: layer 1 \(.*\) {words}.*, but keeps no cache in decode mode"):
        ask(around(layer))


def mapped(x):
    """A program of single devices, over an axis that isn't one of tokens."""
    spec = P(None, None, "model")
    return jax.shard_map(lambda x: 2 * x, in_specs=spec, out_specs=spec, check_vma=False)(x)


@pytest.mark.parametrize("layer", [Split(), mapped], ids=["constraint", "shard_map"])
def test_other_axes_say_nothing_of_tokens(make_mesh, layer):
    ask(around(layer), mesh=make_mesh((1, 2), ("stage", "model")))


class Embed(nn.Module):
    """Tokens and their positions, which in decode mode are counted in the cache."""

    decode: bool = False

    @nn.compact
    def __call__(self, tokens):
        table = self.param("positions", nn.initializers.normal(0.5), (32, WIDTH), jnp.float64)
        if self.decode:
            is_ready = self.has_variable("cache", "index")
            index = self.variable("cache", "index", lambda: jnp.zeros((), jnp.int32))
            places = jax.lax.dynamic_slice_in_dim(table, index.value, tokens.shape[1]) if is_ready else 0.0
            index.value += is_ready
        else:
            places = table[: tokens.shape[1]]
        return embed()(tokens) + places


def linen(num_blocks: int = 4, **options) -> list:
    head = nn.Dense(VOCABULARY, param_dtype=jnp.float64)
    return [Embed(**options), *(Block(**options) for _ in range(num_blocks)), head]


PLACES = {
    "K=1": {"num_stages": 1},
    "K=2": {"num_stages": 2},
    "K=2, V=2": {"num_stages": 2, "num_chunks": 2, "schedule": "interleaved"},
    "v": {"num_stages": 3, "num_chunks": 2, "schedule": "v"},
    "spread": {"num_stages": 2, "ends": "spread"},
    "shared": {"num_stages": 2, "ends": "shared"},
}


@pytest.fixture(scope="module", autouse=True)
def float64():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize("temperature", [0.0, pytest.param(0.7, marks=pytest.mark.slow)], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "name", [n if n in ("K=2, V=2", "shared") else pytest.param(n, marks=pytest.mark.slow) for n in PLACES]
)
def test_equals_the_model_without_a_cache(name, temperature, monkeypatch):
    monkeypatch.setattr("jpipe.memory.layout.SMALLEST", 1)  # ends of any size are split
    drawn = (jax.random.key(2), temperature) if temperature else ()
    check_generated(linen(), prompts_of(200, 5), 7, *drawn, **{"num_microbatches": 4, "balance": "even"} | PLACES[name])


@pytest.mark.parametrize("name", ["K=2", *(pytest.param(n, marks=pytest.mark.slow) for n in ("K=1", "v", "shared"))])
@pytest.mark.parametrize(("prefill", "num_tokens"), [(6, 4), (3, 1)])
def test_prompts_are_fed_several_tokens_at_a_time(name, prefill, num_tokens, monkeypatch):
    monkeypatch.setattr("jpipe.memory.layout.SMALLEST", 1)
    layers = [embed(), Causal(), Causal(), Causal(), nn.Dense(VOCABULARY, param_dtype=jnp.float64)]
    options = PLACES[name] | ({"num_stages": 2} if name == "v" else {})
    drawn = jax.random.key(3), 0.8
    check_generated(layers, prompts_of(7, 6, seed=4), num_tokens, *drawn, asked={"prefill": prefill}, **options)


def test_equals_flax_s_own_loop():
    """One token at a time through Flax's modules, with the caches that they keep."""
    batch, prompts = batch_of(), prompts_of(5, 4, seed=2)
    pipe = jpipe.Pipeline(linen(), loss_fn, num_stages=2, num_microbatches=2)
    variables = pipe.init(jax.random.key(1), batch)
    found = pipe.generate(variables, prompts, 6)  # five prompts in two micro-batches

    trees = jax.device_get(pipe.layer_variables(variables))
    layers, caches, x = linen(decode=True), [], jnp.zeros((5, 9), jnp.int32)
    for layer in layers:
        x, made = jax.jit(layer.init_with_output)(jax.random.key(0), x)
        caches.append({name: tree for name, tree in made.items() if name == "cache"})
    calls = [jax.jit(functools.partial(layer.apply, mutable=["cache"])) for layer in layers]
    tokens = list(prompts.T)
    for place in range(9):
        x = tokens[place][:, None]
        for i, (call, tree) in enumerate(zip(calls, trees, strict=True)):
            x, new = call({**tree, **caches[i]}, x)
            caches[i] = {"cache": new["cache"]} if "cache" in new else {}
        if place >= 3:
            tokens.append(np.asarray(jnp.argmax(x[:, 0], -1)))
    np.testing.assert_array_equal(found, np.stack(tokens, axis=1))


def nnx_layers(*, ready: bool) -> list:
    wide = {"param_dtype": jnp.float64}
    table = lambda rngs: nnx.Embed(VOCABULARY, WIDTH, embedding_init=nnx.initializers.normal(1.0), **wide, rngs=rngs)
    head = lambda rngs: nnx.Linear(WIDTH, VOCABULARY, **wide, rngs=rngs)
    factories = [table, *[lambda rngs: NnxBlock(rngs) for _ in range(3)], head]
    return [make(nnx.Rngs(i)) for i, make in enumerate(factories)] if ready else factories


@pytest.mark.parametrize("ready", [False, True], ids=["factories", "ready"])
def test_nnx(ready):
    prompts = prompts_of(6, 5, seed=3)
    pipe = jpipe.Pipeline(nnx_layers(ready=ready), loss_fn, num_stages=2, num_microbatches=2)
    variables = pipe.init(jax.random.key(1), batch_of())
    modules = pipe.modules(jax.device_get(variables))
    apply = lambda x: functools.reduce(lambda x, module: module(x), modules, x)
    np.testing.assert_array_equal(pipe.generate(variables, prompts, 5), without_cache(apply, prompts, 5))


@pytest.mark.parametrize(
    "axes", [{"model": 2, "data": 2}, *(pytest.param({name: 2}, marks=pytest.mark.slow) for name in ("data", "fsdp"))]
)
def test_other_axes(axes, make_mesh):
    """Prompts and their caches are split over data axes."""
    mesh = make_mesh((2, *axes.values()), ("stage", *axes), explicit="data" in axes)
    over = {"shard_over": ("fsdp",), "gather": "use"} if "fsdp" in axes else {}
    check_generated(linen(), prompts_of(7, 5), 4, jax.random.key(5), 1.3, mesh=mesh, **over)


def test_inside_of_jit():
    pipe = jpipe.Pipeline(linen(1), loss_fn, num_stages=2, num_microbatches=2)
    variables, prompts = pipe.init(jax.random.key(1), batch_of()), np.zeros((2, 3), np.int32)
    found = jax.jit(lambda variables, prompts: pipe.generate(variables, prompts, 3))(variables, prompts)
    np.testing.assert_array_equal(found, pipe.generate(variables, prompts, 3))
    # A regression: JAX's integers pass the checks, and were handed on as static arguments, which they can't be.
    again = pipe.generate(variables, prompts, jnp.int32(3), prefill=jnp.int32(1))
    np.testing.assert_array_equal(found, again)


class Shift(nn.Module):
    """What the token before was; a layer without parameters, whose cache starts from a number of its own."""

    decode: bool = False
    start: float = 0.0

    @nn.compact
    def __call__(self, x):
        before = jnp.full_like(x[:, :1], self.start)
        if not self.decode:
            return x + 0.5 * jnp.concatenate([before, x[:, :-1]], 1)
        ready = self.has_variable("cache", "last")
        last = self.variable("cache", "last", lambda: before)
        y = x + 0.5 * last.value if ready else x
        last.value = x if ready else before
        return y


def test_layers_without_parameters_and_each_use_of_a_shared_layer_keep_caches():
    """The former once counted as layers with variables, so that others' were looked for in their place.

    A regression: prompts of other integers than the model was trained on were an error of MLIR's.
    """
    first, *blocks, head = linen(2)
    layers = [first, Shift(), blocks[0], Shift(start=1.0), blocks[1], head]
    check_generated(layers, prompts_of(4, 3, seed=5), 4, balance="even")
    check_generated([first, *[jpipe.Shared(blocks[0])] * 3, head], prompts_of(4, 3, 6, "uint8"), 4, balance="even")


class Short(nn.Module):
    """A cache that is as long as its author says, of more heads than that."""

    decode: bool = False

    @nn.compact
    def __call__(self, x):
        if self.decode:
            self.variable("cache", "keys", jnp.zeros, (x.shape[0], 8, 16, 2))
            self.variable("cache", "index", lambda: jnp.zeros((), jnp.int32))
        return x


SMALL = [nn.Embed(VOCABULARY, WIDTH), nn.Dense(WIDTH), nn.Dense(VOCABULARY)]
FLOATS = {"inputs": np.zeros((4, 4), np.float32)}


@pytest.mark.parametrize(
    ("layers", "batch", "asked", "message"),
    [
        (SMALL, batch_of(), {"num_tokens": 3}, r"no layer keeps a cache \(Embed, Dense\)"),
        (
            [SMALL[0], Short(), SMALL[2]],
            batch_of(),
            {"num_tokens": 5},
            r"9 tokens exceed the cache of layer 1 \(Short\), float64\[2,8,16,2\]; make it longer",
        ),
        (
            linen(),
            batch_of(),
            {"num_tokens": 3, "prefill": 5},
            r"prefill=5, but in decode mode layer 1 \(Block\)(.|\n)*Use prefill=1",
        ),
        ([nn.Dense(4)] * 2, FLOATS, {"num_tokens": 3}, r"takes float32\[2,4\] and gives float32\[2,4\]"),
    ],
)
def test_what_can_not_generate_is_named(layers, batch, asked, message):
    loss = loss_fn if "targets" in batch else lambda y, _: y.mean()
    pipe = jpipe.Pipeline(layers, loss, num_stages=2, num_microbatches=2, balance="even")
    variables = pipe.init(jax.random.key(0), batch)
    with pytest.raises(ValueError, match=message):
        pipe.generate(variables, TOKENS, **asked)


def test_shared_ends_that_another_axis_splits_too_are_refused(make_mesh):
    """Of a vocabulary in parts of stages, each in parts of `model`, a stage would get back every other run."""
    layers = linen(1)[:-1]
    init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
    layers += [nn.Dense(512, kernel_init=init, param_dtype=jnp.float64)]
    mesh = make_mesh((2, 2), ("stage", "model"), explicit=False)
    words = [nn.Embed(512, WIDTH, param_dtype=jnp.float64), *layers[1:]]
    pipe = jpipe.Pipeline(words, loss_fn, num_stages=2, num_microbatches=2, mesh=mesh, ends="shared")
    variables = pipe.init(jax.random.key(0), batch_of())
    with pytest.raises(ValueError, match=r"another mesh axis along one dimension.*ends='own' or 'spread', and pass"):
        pipe.generate(variables, TOKENS, 3)
    trees = jax.device_get(pipe.layer_variables(variables))
    expected = without_cache(functools.partial(run_layers, words, trees), TOKENS, 3)
    for ends in ("own", "spread"):  # as the error proposes
        other = jpipe.Pipeline(words, loss_fn, num_stages=2, num_microbatches=2, mesh=mesh, ends=ends, balance="even")
        brought = other.from_layer_variables(pipe.layer_variables(variables), batch_of())
        np.testing.assert_array_equal(other.generate(brought, TOKENS, 3), expected)


def test_the_logits_among_several_outputs():
    """Of a pipeline without a loss, which has seen prompts alone."""
    body, split = linen(2), lambda x: {"value": x.mean(-1), "logits": x}
    pipe = jpipe.Pipeline([*body, split], None, num_stages=2, num_microbatches=2, balance="even")
    prompts = prompts_of(4, 3, seed=7)
    variables = pipe.init(jax.random.key(0), prompts)
    with pytest.raises(ValueError, match=r"Say which are logits: pipe\.generate\(\.\.\., logits=lambda outputs"):
        pipe.generate(variables, prompts, 3)
    with pytest.raises(ValueError, match=r"logits raised KeyError\('logit'\); return one of the outputs"):
        pipe.generate(variables, prompts, 3, logits=lambda outputs: outputs["logit"])
    trees = jax.device_get(pipe.layer_variables(variables))[:-1]
    expected = without_cache(functools.partial(run_layers, body, trees), prompts, 3)
    logits_of = lambda name: lambda outputs: outputs[name]
    np.testing.assert_array_equal(pipe.generate(variables, prompts, 3, logits=logits_of("logits")), expected)
    with compilations() as count:
        pipe.generate(variables, prompts, 3, logits=logits_of("logits"))
    assert count() == 0, "a function made anew"
