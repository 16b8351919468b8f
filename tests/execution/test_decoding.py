"""Generation equals Flax's own loop on one device, token by token, however the model is cut."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from jax.sharding import PartitionSpec as P

import jpipe
from cases import compilations
from jpipe.execution.generator import Generator

TOKENS_WIDTH, LENGTH = 8, 6


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.MultiHeadDotProductAttention(2)(x, mask=nn.make_causal_mask(x[..., 0]))


class Positions(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + self.param("table", nn.initializers.normal(), (16, TOKENS_WIDTH))[: x.shape[1]]


class Experts(nn.Module):
    """Each token is weighed by itself, though all are one array in between."""

    @nn.compact
    def __call__(self, x):
        weights, _ = jax.lax.top_k(jax.nn.softmax(nn.Dense(4)(x)), 2)
        return x + weights[..., :1] * nn.Dense(TOKENS_WIDTH)(x.reshape(-1, TOKENS_WIDTH)).reshape(x.shape)


class Split(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jax.lax.with_sharding_constraint(nn.Dense(TOKENS_WIDTH)(x), PartitionSpec(None, None, "model"))


ALONE = {
    "Dense": nn.Dense(TOKENS_WIDTH),
    "LayerNorm": nn.LayerNorm(),
    "RMSNorm": nn.RMSNorm(),
    "Sequential": nn.Sequential([nn.Dense(16), nn.gelu, nn.Dense(TOKENS_WIDTH)]),
    "experts": Experts(),
    "function": lambda x: jnp.cumsum(x, -1),
    "dropout": nn.Dropout(0.5, deterministic=True),
}
TOGETHER = {
    "attention": (Attention(), r"looks at other tokens \(\w+\.py:\d+\)"),
    "convolution": (nn.Conv(TOKENS_WIDTH, (3,), padding="CAUSAL"), "looks at other tokens"),
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


def mean_loss(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def generate(layer, **options):
    """Two tokens of a model with this layer and one with a cache; of what has no tokens only the cache is asked for."""
    layers = [nn.Embed(11, TOKENS_WIDTH), layer, Cached(), nn.Dense(11)]
    pipe = jpipe.Pipeline(layers, mean_loss, num_stages=1, num_microbatches=2, balance="even", **options)
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
        return double(nn.Dense(TOKENS_WIDTH)(x))


def test_programs_of_single_devices_say_nothing_of_tokens(make_mesh):
    mesh = make_mesh((1, 2), ("stage", "model"))
    generate(Mapped(mesh), mesh=mesh)


def test_inputs_that_are_cut_out_of_a_longer_batch_say_nothing_of_tokens():
    layers = [nn.Embed(11, TOKENS_WIDTH), Cached(), nn.Dense(11)]
    loss = lambda logits, tokens: optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
    pipe = jpipe.Pipeline(layers, loss, num_stages=1, num_microbatches=2, inputs=lambda tokens: tokens[:, :-1])
    pipe.init(jax.random.key(0), np.zeros((4, LENGTH + 1), np.int32))
    Generator(pipe.planner).decoding(2, 4, 1)


VOCABULARY, WIDTH, TRAINED = 18, 8, 6


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
        init = nn.initializers.normal(1.0)
        return nn.Embed(VOCABULARY, WIDTH, param_dtype=jnp.float64, embedding_init=init)(tokens) + places


class Block(nn.Module):
    decode: bool = False

    @nn.compact
    def __call__(self, x):
        mask = None if self.decode else nn.make_causal_mask(x[..., 0])
        attention = nn.MultiHeadDotProductAttention(2, decode=self.decode, param_dtype=jnp.float64)
        x = x + attention(nn.LayerNorm(param_dtype=jnp.float64)(x), mask=mask)
        init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        return x + nn.Dense(WIDTH, kernel_init=init, param_dtype=jnp.float64)(nn.gelu(x))


def linen(num_blocks: int = 4, **options) -> list:
    return [
        Embed(**options),
        *(Block(**options) for _ in range(num_blocks)),
        nn.Dense(VOCABULARY, param_dtype=jnp.float64),
    ]


def loss_fn(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def batch_of(rows: int = 8) -> dict:
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (rows, TRAINED + 1)).astype(np.int32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


def chosen(logits, place, key, temperature):
    """The next token of each row, as documented."""
    if not temperature:
        return jnp.argmax(logits, -1)
    own = lambda row, logits: jax.random.categorical(
        jax.random.fold_in(jax.random.fold_in(key, row), place), logits / temperature
    )
    return jax.vmap(own)(jnp.arange(len(logits)), logits)


def without_cache(apply, prompts, num_tokens, key=None, temperature=0.0) -> np.ndarray:
    """The whole sequence through the model for each token: the slowest way, and the plainest."""
    length = prompts.shape[1] + num_tokens
    tokens, apply = np.pad(prompts, ((0, 0), (0, num_tokens))), jax.jit(apply)
    for place in range(prompts.shape[1], length):
        tokens[:, place] = chosen(apply(tokens)[:, place - 1], place, key, temperature)  # what follows isn't looked at
    return tokens


def sequential(layers, trees):
    def apply(x):
        for layer, tree in zip(layers, trees, strict=True):
            x = layer.apply(tree, x)
        return x

    return apply


def trees_of(pipe, variables):
    """The layers' own variables, on the host."""
    return jax.device_get(pipe.layer_variables(variables))


PLACES = {
    "K=1": {"num_stages": 1},
    "K=2": {"num_stages": 2},
    "K=4": {"num_stages": 4},
    "K=1, V=2": {"num_stages": 1, "num_chunks": 2, "schedule": "interleaved"},
    "K=2, V=2": {"num_stages": 2, "num_chunks": 2, "schedule": "interleaved"},
    "v": {"num_stages": 3, "num_chunks": 2, "schedule": "v"},
    "spread": {"num_stages": 2, "ends": "spread"},
    "shared": {"num_stages": 2, "ends": "shared"},
    "shared by one": {"num_stages": 1, "ends": "shared"},
}


@pytest.fixture(scope="module", autouse=True)
def float64():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize("temperature", [0.0, pytest.param(0.7, marks=pytest.mark.slow)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", PLACES)
def test_equals_the_model_without_a_cache(name, temperature, monkeypatch):
    monkeypatch.setattr("jpipe.memory.layout.SMALLEST", 1)  # ends of any size are split
    layers, batch = linen(), batch_of()
    pipe = jpipe.Pipeline(layers, loss_fn, num_microbatches=4, balance="even", **PLACES[name])
    variables = pipe.init(jax.random.key(1), batch)
    apply = sequential(layers, jax.device_get(pipe.layer_variables(variables)))
    prompts = np.random.default_rng(1).integers(0, VOCABULARY, (200, 5)).astype(np.int32)
    key = jax.random.key(2) if temperature else None
    found = pipe.generate(variables, prompts, 7, key, temperature)
    np.testing.assert_array_equal(found, without_cache(apply, prompts, 7, key, temperature))


class Causal(nn.Module):
    """Attention that takes any number of tokens at a time in decode mode, as Flax's doesn't."""

    decode: bool = False

    @nn.compact
    def __call__(self, x):
        query, key, value = jnp.split(nn.Dense(3 * WIDTH, param_dtype=jnp.float64)(x), 3, axis=-1)
        first = 0
        if self.decode:
            ready = self.has_variable("cache", "place")
            place = self.variable("cache", "place", lambda: jnp.zeros((), jnp.int32))
            kept = [self.variable("cache", name, jnp.zeros, x.shape, x.dtype) for name in ("key", "value")]
            if ready:
                first, place.value = place.value, place.value + x.shape[1]
                for leaf, new in zip(kept, (key, value), strict=True):
                    leaf.value = jax.lax.dynamic_update_slice_in_dim(leaf.value, new, first, axis=1)
            key, value = (leaf.value for leaf in kept)
        seen = jnp.arange(key.shape[1]) <= first + jnp.arange(x.shape[1])[:, None]
        scores = jnp.where(seen, jnp.einsum("bqd,bkd->bqk", query, key), -jnp.inf)
        return x + jax.nn.softmax(scores) @ value


def causal_layers() -> list:
    embed = nn.Embed(VOCABULARY, WIDTH, param_dtype=jnp.float64, embedding_init=nn.initializers.normal(1.0))
    return [embed, Causal(), Causal(), Causal(), nn.Dense(VOCABULARY, param_dtype=jnp.float64)]


@pytest.mark.parametrize("name", ["K=2", *(pytest.param(n, marks=pytest.mark.slow) for n in ("K=1", "v", "shared"))])
@pytest.mark.parametrize(("prefill", "num_tokens"), [(6, 4), (3, 1), (2, 5)])
def test_prompts_are_fed_several_tokens_at_a_time(name, prefill, num_tokens, monkeypatch):
    monkeypatch.setattr("jpipe.memory.layout.SMALLEST", 1)
    layers, options = causal_layers(), PLACES[name] | ({"num_stages": 2} if name == "v" else {})
    pipe = jpipe.Pipeline(layers, loss_fn, num_microbatches=2, **options)
    variables = pipe.init(jax.random.key(1), batch_of())
    apply = sequential(layers, jax.device_get(pipe.layer_variables(variables)))
    prompts = np.random.default_rng(4).integers(0, VOCABULARY, (7, 6)).astype(np.int32)
    key = jax.random.key(3)
    found = pipe.generate(variables, prompts, num_tokens, key, 0.8, prefill=prefill)
    np.testing.assert_array_equal(found, without_cache(apply, prompts, num_tokens, key, 0.8))


def test_layers_that_take_one_token_at_a_time_are_named():
    pipe = jpipe.Pipeline(linen(), loss_fn, num_stages=2, num_microbatches=2)
    variables = pipe.init(jax.random.key(1), batch_of())
    message = r"prefill=5, but in decode mode layer 1 \(Block\)(.|\n)*Use prefill=1"
    with pytest.raises(ValueError, match=message):
        pipe.generate(variables, TOKENS, 3, prefill=5)


def test_equals_flax_s_own_loop():
    """One token at a time through Flax's modules, with the caches that they keep."""
    batch, prompts = batch_of(), np.random.default_rng(2).integers(0, VOCABULARY, (5, 4)).astype(np.int32)
    pipe = jpipe.Pipeline(linen(), loss_fn, num_stages=2, num_microbatches=2)
    variables = pipe.init(jax.random.key(1), batch)
    found = pipe.generate(variables, prompts, 6)  # five prompts in two micro-batches

    trees = jax.device_get(pipe.layer_variables(variables))
    layers, caches, x = linen(decode=True), [], jnp.zeros((5, 9), jnp.int32)
    for layer, tree in zip(layers, trees, strict=True):
        x, made = layer.init_with_output(jax.random.key(0), x)
        caches.append({name: tree for name, tree in made.items() if name == "cache"})
    tokens = list(prompts.T)
    for place in range(9):
        x = tokens[place][:, None]
        for i, (layer, tree) in enumerate(zip(layers, trees, strict=True)):
            x, new = layer.apply({**tree, **caches[i]}, x, mutable=["cache"])
            caches[i] = {"cache": new["cache"]} if "cache" in new else {}
        if place >= 3:
            tokens.append(np.asarray(jnp.argmax(x[:, 0], -1)))
    np.testing.assert_array_equal(found, np.stack(tokens, axis=1))


class NnxEmbed(nnx.Module):
    def __init__(self, rngs):
        init = nnx.initializers.normal(1.0)
        self.table = nnx.Embed(VOCABULARY, WIDTH, param_dtype=jnp.float64, embedding_init=init, rngs=rngs)

    def __call__(self, tokens):
        return self.table(tokens)


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        options = {"param_dtype": jnp.float64, "rngs": rngs}
        self.norm = nnx.LayerNorm(WIDTH, **options)
        self.attention = nnx.MultiHeadAttention(2, WIDTH, decode=False, **options)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.linear = nnx.Linear(WIDTH, WIDTH, **options)

    def __call__(self, x):
        mask = None if self.attention.decode else nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.norm(x), mask=mask)
        return x + self.linear(self.dropout(nnx.gelu(x)))


def nnx_layers(*, ready: bool) -> list:
    made = [NnxEmbed, *[NnxBlock] * 3, lambda rngs: nnx.Linear(WIDTH, VOCABULARY, param_dtype=jnp.float64, rngs=rngs)]
    factories = [lambda rngs, make=make: make(rngs) for make in made]
    return [make(nnx.Rngs(i)) for i, make in enumerate(factories)] if ready else factories


@pytest.mark.parametrize("ready", [False, True], ids=["factories", "ready"])
def test_nnx(ready):
    batch, prompts = batch_of(), np.random.default_rng(3).integers(0, VOCABULARY, (6, 5)).astype(np.int32)
    pipe = jpipe.Pipeline(nnx_layers(ready=ready), loss_fn, num_stages=2, num_microbatches=2)
    variables = pipe.init(jax.random.key(1), batch)
    modules = pipe.modules(jax.device_get(variables))

    def apply(x):
        for module in modules:
            x = module(x)
        return x

    found = pipe.generate(variables, prompts, 5)
    np.testing.assert_array_equal(found, without_cache(apply, prompts, 5))


class Deep(nn.Module):
    """A block with a scale and a rate of dropout, which leaves nothing to do in training where it is zero."""

    scale: float
    rate: float
    decode: bool = False

    @nn.compact
    def __call__(self, x, deterministic: bool = True):
        return x + self.scale * nn.Dropout(self.rate)(Block(self.decode)(x), deterministic=deterministic)


@pytest.mark.parametrize(
    ("numbers", "groups"),
    [
        ([(1.0, 0.0), (0.5, 0.1), (0.3, 0.2)], (0, 1, 2, 2, 3)),  # a rate of zero leaves dropout out
        ([(1.0, 0.1), (1.0, 0.2), (1.0, 0.3)], (0, 1, 1, 1, 2)),  # rates that do nothing in decode mode
    ],
)
def test_blocks_with_numbers_of_their_own(numbers, groups):
    """Blocks that are one group in training are one in decode mode."""
    batch = batch_of()
    layers = [linen()[0], *(Deep(*own) for own in numbers), linen()[-1]]
    pipe = jpipe.Pipeline(layers, loss_fn, num_stages=2, num_microbatches=2, balance="even")
    variables = pipe.init(jax.random.key(1), batch)
    assert pipe.planner.known_plan().model.group_of == groups
    apply = sequential(layers, jax.device_get(pipe.layer_variables(variables)))
    prompts = np.random.default_rng(1).integers(0, VOCABULARY, (7, 5)).astype(np.int32)
    np.testing.assert_array_equal(pipe.generate(variables, prompts, 5), without_cache(apply, prompts, 5))


@pytest.mark.parametrize("axes", [{"data": 2}, {"model": 2, "data": 2}, {"fsdp": 2}])
def test_other_axes(axes, make_mesh):
    """Prompts and their caches are split over data axes."""
    layers, batch = linen(), batch_of()
    mesh = make_mesh((2, *axes.values()), ("stage", *axes), explicit="data" in axes)
    over = {"shard_over": ("fsdp",), "gather": "use"} if "fsdp" in axes else {}
    pipe = jpipe.Pipeline(layers, loss_fn, num_stages=2, num_microbatches=2, mesh=mesh, **over)
    variables = pipe.init(jax.random.key(1), batch)
    apply = sequential(layers, jax.device_get(pipe.layer_variables(variables)))
    prompts = np.random.default_rng(1).integers(0, VOCABULARY, (7, 5)).astype(np.int32)
    key = jax.random.key(5)
    found = pipe.generate(variables, prompts, 4, key, 1.3)
    np.testing.assert_array_equal(found, without_cache(apply, prompts, 4, key, 1.3))


def test_inside_of_jit():
    pipe = jpipe.Pipeline(linen(), loss_fn, num_stages=2, num_microbatches=2)
    variables, prompts = pipe.init(jax.random.key(1), batch_of()), np.zeros((2, 3), np.int32)
    found = jax.jit(lambda variables, prompts: pipe.generate(variables, prompts, 3))(variables, prompts)
    np.testing.assert_array_equal(found, pipe.generate(variables, prompts, 3))
    # A regression: JAX's integers pass the checks, and were handed on as static arguments, which they can't be.
    again = pipe.generate(variables, prompts, jnp.int32(3), prefill=jnp.int32(1))
    np.testing.assert_array_equal(found, again)


def test_no_layer_is_computed_to_find_what_caches_start_from():
    """A regression: layers were initialised and run on whole sequences, operation by operation, on one device."""
    given = []

    class Seen(Block):
        def __call__(self, x):
            given.append(x)
            return super().__call__(x)

    pipe = jpipe.Pipeline([Embed(), Seen(), nn.Dense(VOCABULARY)], loss_fn, num_stages=1, num_microbatches=1)
    variables = pipe.init(jax.random.key(1), batch_of())
    given.clear()
    pipe.generate(variables, np.zeros((2, 3), np.int32), 3)
    assert given and all(isinstance(x, jax.core.Tracer) for x in given)


def test_without_jit():
    pipe = jpipe.Pipeline(linen(1), loss_fn, num_stages=1, num_microbatches=1)
    variables, prompts = pipe.init(jax.random.key(1), batch_of()), np.zeros((2, 3), np.int32)
    expected = pipe.generate(variables, prompts, 2)
    again = jpipe.Pipeline(linen(1), loss_fn, num_stages=1, num_microbatches=1)
    again.init(jax.random.key(1), batch_of())
    with jax.disable_jit():
        found = again.generate(variables, prompts, 2)
    np.testing.assert_array_equal(found, expected)


class Constrained(Block):
    """A block that says how its activations lie."""

    def __call__(self, x):
        return super().__call__(jax.lax.with_sharding_constraint(x, P("data")))


def test_layers_with_caches_may_constrain_what_they_take(make_mesh):
    layers = [Embed(), Constrained(), nn.Dense(VOCABULARY, param_dtype=jnp.float64)]
    mesh = make_mesh((1, 2, 2), ("stage", "data", "model"))
    pipe = jpipe.Pipeline(layers, loss_fn, num_stages=1, num_microbatches=1, mesh=mesh)
    variables, prompts = pipe.init(jax.random.key(1), batch_of()), np.zeros((2, 3), np.int32)
    plain = [Embed(), Block(), layers[-1]]
    expected = without_cache(sequential(plain, trees_of(pipe, variables)), prompts, 2)
    np.testing.assert_array_equal(pipe.generate(variables, prompts, 2), expected)


class Complex(nn.Module):
    decode: bool = False

    @nn.compact
    def __call__(self, x):
        if self.decode:
            self.variable("cache", "state", lambda: jnp.full((x.shape[0], WIDTH), 1j))
        return x


def test_a_cache_that_starts_from_complex_numbers_is_refused():
    pipe = jpipe.Pipeline([Embed(), Complex(), nn.Dense(VOCABULARY)], loss_fn, num_stages=1, num_microbatches=1)
    variables = pipe.init(jax.random.key(1), batch_of())
    with pytest.raises(ValueError, match=r"cache of layer 1 \(Complex\) starts from different numbers, or complex"):
        pipe.generate(variables, np.zeros((2, 3), np.int32), 2)


def equals_the_model(layers, prompts, num_tokens, **options):
    """Whether what is generated is what the plain model says without a cache."""
    pipe = jpipe.Pipeline(layers, loss_fn, num_stages=2, num_microbatches=2, balance="even", **options)
    variables = pipe.init(jax.random.key(1), batch_of())
    modules = [layer.layer if isinstance(layer, jpipe.Shared) else layer for layer in layers]
    apply = sequential(modules, jax.device_get(pipe.layer_variables(variables)))
    found = pipe.generate(variables, prompts, num_tokens)
    np.testing.assert_array_equal(found, without_cache(apply, prompts, num_tokens))


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int64"])
@pytest.mark.parametrize("length", [1, 4])
def test_prompts_of_any_integers(dtype, length):
    """Others than the model was trained on were an error of MLIR's."""
    equals_the_model(linen(2), np.random.default_rng(4).integers(0, VOCABULARY, (5, length)).astype(dtype), 3)


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


def test_layers_without_parameters_keep_caches():
    """These once counted as layers with variables, so that others' were looked for in their place."""
    prompts = np.random.default_rng(5).integers(0, VOCABULARY, (4, 3)).astype(np.int32)
    embed, *blocks, head = linen(2)
    equals_the_model([embed, Shift(), blocks[0], Shift(start=1.0), blocks[1], head], prompts, 4)


def test_each_use_of_a_shared_layer_has_a_cache_of_its_own():
    prompts = np.random.default_rng(6).integers(0, VOCABULARY, (4, 3)).astype(np.int32)
    embed, block, head = linen(1)
    shared = jpipe.Shared(block)
    equals_the_model([embed, shared, shared, shared, head], prompts, 4)


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
WITH_SHORT = [SMALL[0], Short(), SMALL[2]]
TOKENS = np.zeros((4, 5), np.int32)


@pytest.mark.parametrize(
    ("layers", "num_tokens", "message"),
    [
        (SMALL, 3, r"no layer keeps a cache \(Embed, Dense\)"),
        (WITH_SHORT, 5, r"9 tokens exceed the cache of layer 1 \(Short\), float64\[2,8,16,2\]; make it longer"),
    ],
)
def test_bad_layers(layers, num_tokens, message):
    pipe = jpipe.Pipeline(layers, loss_fn, num_stages=2, num_microbatches=2, balance="even")
    variables = pipe.init(jax.random.key(0), batch_of())
    with pytest.raises(ValueError, match=message):
        pipe.generate(variables, TOKENS, num_tokens)


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
    expected = without_cache(sequential(words, trees_of(pipe, variables)), TOKENS, 3)
    for ends in ("own", "spread"):  # as the error proposes
        other = jpipe.Pipeline(words, loss_fn, num_stages=2, num_microbatches=2, mesh=mesh, ends=ends, balance="even")
        brought = other.from_layer_variables(pipe.layer_variables(variables), batch_of())
        np.testing.assert_array_equal(other.generate(brought, TOKENS, 3), expected)


def test_models_without_tokens():
    pipe = jpipe.Pipeline([nn.Dense(4), nn.Dense(4)], lambda y, _: y.mean(), num_stages=2, num_microbatches=2)
    variables = pipe.init(jax.random.key(0), {"inputs": np.zeros((4, 4), np.float32)})
    with pytest.raises(ValueError, match=r"takes float32\[2,4\] and gives float32\[2,4\]"):
        pipe.generate(variables, TOKENS, 3)


class Sequences(nn.Module):
    """A layer whose tokens are split over devices, which single ones can't be."""

    split: bool = True

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(WIDTH)(x)
        return jax.lax.with_sharding_constraint(x, jax.P(None, "model", None)) if self.split else x


def test_layers_that_split_sequences(make_mesh):
    """Whole sequences are split over devices, a token isn't: what is one group then was refused where it is several."""
    mesh = make_mesh((2, 2), ("stage", "model"), explicit=False)
    layers = [SMALL[0], Short(), Sequences(), Sequences(), Sequences(), SMALL[2]]
    pipe = jpipe.Pipeline(layers, loss_fn, num_stages=2, num_microbatches=2, mesh=mesh)
    variables = pipe.init(jax.random.key(0), batch_of())
    plain = [SMALL[0], Short(), *[Sequences(split=False)] * 3, SMALL[2]]
    expected = without_cache(sequential(plain, trees_of(pipe, variables)), TOKENS[:, :2], 2)
    np.testing.assert_array_equal(pipe.generate(variables, TOKENS[:, :2], 2), expected)


@pytest.mark.parametrize("axes", [{}, {"data": 2}], ids=str)
def test_the_logits_among_several_outputs(axes):
    """Of a pipeline without a loss, which has seen prompts alone."""
    mesh = jpipe.make_mesh(stage=2, **axes, devices=jax.devices()[: 4 if axes else 2])
    body, split = linen(2), lambda x: {"value": x.mean(-1), "logits": x}
    pipe = jpipe.Pipeline([*body, split], None, num_stages=2, num_microbatches=2, mesh=mesh, balance="even")
    prompts = np.random.default_rng(7).integers(0, VOCABULARY, (4, 3)).astype(np.int32)
    variables = pipe.init(jax.random.key(0), prompts)
    with pytest.raises(ValueError, match=r"Say which are logits: pipe\.generate\(\.\.\., logits=lambda outputs"):
        pipe.generate(variables, prompts, 3)
    with pytest.raises(ValueError, match=r"logits raised KeyError\('logit'\); return one of the outputs"):
        pipe.generate(variables, prompts, 3, logits=lambda outputs: outputs["logit"])
    expected = without_cache(sequential(body, trees_of(pipe, variables)[:-1]), prompts, 3)
    logits_of = lambda name: lambda outputs: outputs[name]
    np.testing.assert_array_equal(pipe.generate(variables, prompts, 3, logits=logits_of("logits")), expected)
    with compilations() as count:
        pipe.generate(variables, prompts, 3, logits=logits_of("logits"))
    assert count() == 0, "a function made anew"
