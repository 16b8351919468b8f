"""Linen and NNX modules behind the interface of all layers."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import jpipe
from cases import NnxDrops, assert_close, assert_equal
from jpipe.layers.adapt import as_layers
from jpipe.layers.base import Context, LayerError, is_same
from jpipe.layers.flax import logical_rules

X = np.ones((2, 4), np.float32)


def adapt(layer):
    return as_layers([layer])[0]


def test_linen_item_is_what_init_returns(key):
    layer = adapt(nn.Dense(3))
    variables = layer.init(key, (X,), None)
    assert_equal(variables, nn.Dense(3).init(key, X))
    assert layer.to_item(variables) is variables
    outputs, updates = layer.apply(variables, (X,), Context(None, True))
    assert_close(outputs, nn.Dense(3).apply(variables, X))
    assert updates == {}
    assert_close(layer.bind(variables)(X), outputs)


def test_nnx_item_is_a_pure_dict(key):
    layer = adapt(lambda rngs: nnx.Linear(4, 3, rngs=rngs))
    variables = layer.init(key, (X,), None)
    module = nnx.Linear(4, 3, rngs=nnx.Rngs(key))
    assert_equal(variables, {"params": {"kernel": module.kernel[...], "bias": module.bias[...]}})
    assert_close(layer.bind(variables)(X), module(X))
    assert layer.ready is None


def test_ready_nnx_module_keeps_its_values(key):
    module = nnx.Linear(4, 3, rngs=nnx.Rngs(7))
    layer = adapt(module)
    assert_equal(layer.ready, {"params": {"kernel": module.kernel[...], "bias": module.bias[...]}})
    assert_equal(layer.init(key, (X,), None), layer.ready)


def test_the_users_nnx_module_is_not_changed():
    module = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
    layer = adapt(module)
    before = np.asarray(module.mean[...])
    _, updates = layer.apply(layer.ready, (3 * X,), Context(None, True))
    assert not np.array_equal(updates["batch_stats"]["mean"], before)
    assert_equal(np.asarray(module.mean[...]), before)
    assert module.use_running_average is False


class Drop(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.5)(x, deterministic=False)


@pytest.mark.parametrize(
    "layer",
    [Drop(), lambda rngs: NnxDrops(rngs=rngs)],
    ids=["linen", "nnx"],
)
def test_a_layer_that_needs_a_key_says_so(key, layer):
    layer = adapt(layer)
    with pytest.raises(LayerError, match="draws random numbers in evaluation mode"):
        layer.apply({}, (X,), Context(None, True))
    layer.apply({}, (X,), Context(key, True))


def test_two_nnx_streams_of_one_layer_differ(key):
    class Two(nnx.Module):
        def __init__(self, rngs):
            self.first, self.second = nnx.Dropout(0.5, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.first(x), self.second(x)

    (a, b), _ = adapt(lambda rngs: Two(rngs)).apply({}, (np.ones((20, 20), np.float32),), Context(key, True))
    assert not np.array_equal(a, b)


def test_partition_specs(key):
    init = nn.with_partitioning(nn.initializers.ones, (None, "model"))
    layer = adapt(nn.Dense(4, kernel_init=init))
    variables = jax.eval_shape(lambda k: layer.init(k, (X,), None), key)
    assert layer.partition_specs(variables) == {"params": [PartitionSpec(), PartitionSpec(None, "model")]}
    factory = lambda rngs: nnx.Linear(
        4, 4, kernel_init=nnx.with_partitioning(nnx.initializers.ones, (None, "model")), rngs=rngs
    )
    layer = adapt(factory)
    variables = jax.eval_shape(lambda k: layer.init(k, (X,), None), key)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(variables["params"])]
    assert dict(zip(paths, layer.partition_specs(variables)["params"], strict=True)) == {
        "['bias']": PartitionSpec(),
        "['kernel']": PartitionSpec(None, "model"),
    }


def test_partition_specs_by_logical_rules(key):
    """Of linen, names without a rule split nothing; of nnx, they stand for themselves, as in Flax."""

    def specs(layer):
        layer = adapt(layer)
        variables = jax.eval_shape(lambda k: layer.init(k, (X,), None), key)
        return layer.partition_specs(variables)["params"]

    ones, names = nn.initializers.ones, ("embed", "mlp")
    linen = nn.Dense(4, use_bias=False, kernel_init=nn.with_logical_partitioning(ones, names))
    own = nn.with_logical_partitioning(ones, names, rules=(("embed", "fsdp"),))
    plain = nn.Dense(4, use_bias=False, kernel_init=nn.with_partitioning(ones, names))

    def nnx_linear(rngs, **metadata):
        return nnx.Linear(4, 4, use_bias=False, kernel_init=nnx.with_partitioning(ones, names, **metadata), rngs=rngs)

    local = lambda rngs: nnx_linear(rngs, sharding_rules=(("embed", "fsdp"),))
    bare = [linen, nn.Dense(4, use_bias=False, kernel_init=own), plain, lambda rngs: nnx_linear(rngs), local]
    assert [tuple(*specs(layer)) for layer in bare] == [
        (None, None),
        ("fsdp", None),
        names,
        names,
        ("fsdp", "mlp"),
    ]
    with nn.logical_axis_rules((("mlp", ("tp", "sp")), ("batch", "data"))):
        later, fewer = logical_rules({"tp", "sp"}), logical_rules({"tp"})
        assert [tuple(*specs(layer)) for layer in bare] == [
            (None, ("tp", "sp")),
            ("fsdp", None),
            names,
            ("embed", ("tp", "sp")),
            ("fsdp", ("tp", "sp")),
        ]
    with later():
        assert tuple(*specs(linen)) == (None, ("tp", "sp"))
    with fewer():
        assert specs(linen) == [PartitionSpec(None, ("tp",))]
    assert tuple(*specs(linen)) == (None, None)
    with nn.logical_axis_rules((("embed", "tp"),)), pytest.raises(LayerError, match="Flax says: Inconsistent"):
        specs(local)


def test_parameters_of_types_of_their_own_are_parameters():
    """A regression: LoRA's were state, and never trained."""

    def make(rngs):
        return nnx.LoRA(4, 2, 4, base_module=nnx.Linear(4, 4, rngs=rngs), rngs=rngs)

    (layer,) = as_layers([make])
    variables = layer.init(jax.random.key(0), (jnp.ones((1, 4), jnp.float32),), None)
    assert set(variables) == {"params"}
    assert set(variables["params"]) == {"base_module", "lora_a", "lora_b"}
    outputs, _ = layer.apply(variables, (jnp.ones((1, 4), jnp.float32),), Context(None, True))
    expected = make(nnx.Rngs(jax.random.key(0)))(jnp.ones((1, 4), jnp.float32))
    np.testing.assert_allclose(outputs, expected, rtol=1e-6)


def test_names_do_not_make_linen_layers_differ():
    first, second = as_layers([nn.Dense(3, name="a"), nn.Dense(3, name="b")])
    assert is_same(first, second)


class NnxConstant(nnx.Module):
    def __init__(self, c):
        self.c = c

    def __call__(self, x):
        return x * jnp.copysign(1.0, jnp.asarray(self.c, jnp.float32))


def test_nnx_modules_of_other_bits_are_other_layers():
    """A regression, as above."""
    for a, b, same in [(0.0, -0.0, False), (1, True, False), (float("nan"), float("nan"), True), (2.0, 2.0, True)]:
        first, second = as_layers([NnxConstant(a), NnxConstant(b)])
        assert is_same(first, second) is same


class Masked(nnx.Module):
    """Holds arrays that are no Variables, as masks and rotary tables are."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.mask = jnp.tril(jnp.ones((4, 4), jnp.float32))
        self.order = np.asarray([3, 2, 1, 0])
        self.tables = nnx.data((jnp.full(4, -jnp.inf), {"random": jax.random.normal(rngs.params(), (4,))}))

    def __call__(self, x):
        x = jnp.where(self.mask[0] > 0, self.linear(x) @ self.mask, 1.0)[:, self.order]
        return x * jnp.exp(self.tables[0]) + self.tables[1]["random"] * x


@pytest.mark.parametrize("ready", [False, True])
def test_arrays_in_nnx_modules(ready):
    """A regression: `init` of a factory passed, then UnexpectedTracerError; a ready module was refused."""
    modules = [Masked(nnx.Rngs(seed)) for seed in range(2)]
    layers = modules if ready else [lambda rngs: Masked(rngs) for _ in range(2)]
    pipe = jpipe.Pipeline(layers, lambda y, _: jnp.mean(y), num_stages=2, num_microbatches=2, balance="even")
    assert is_same(as_layers(layers)[0], as_layers(layers)[1])
    variables = pipe.init(jax.random.key(0), X)
    trees = pipe.layer_variables(variables)
    assert_equal(trees[1]["arrays"]["mask"], jnp.tril(jnp.ones((4, 4), jnp.float32)))
    assert not np.array_equal(*(tree["arrays"]["tables"][1]["random"] for tree in trees))
    (loss, updates), grads = pipe.value_and_grad(variables, X)
    assert_equal(updates["arrays"], variables["arrays"], "what isn't written stays")
    x = X
    for module in pipe.modules(variables):
        x = module(x)
    assert_close(pipe.apply(variables, X), x)
    assert_close(loss, jnp.mean(x))
    assert set(grads) == set(variables["params"])
    assert_equal(pipe.from_layer_variables(trees), variables)
    if ready:
        assert_equal(trees[1]["arrays"]["tables"][1]["random"], modules[1].tables[1]["random"])


def test_an_array_out_of_sight_in_an_nnx_factory():
    """A regression: an UnexpectedTracerError in the first step."""

    class Hidden(nnx.Module):
        def __init__(self, rngs):
            mask = jnp.ones(4)
            self.linear, self.function = nnx.Linear(4, 4, rngs=rngs), lambda x: x * mask

        def __call__(self, x):
            return self.function(self.linear(x))

    with pytest.raises(TypeError, match=r"layers\[0\] makes a module that keeps an array where nnx doesn't see it"):
        as_layers([lambda rngs: Hidden(rngs)])


class Kept(nnx.Module):
    def __init__(self, kind):
        self.kept = kind(jnp.ones(4))

    def __call__(self, x):
        return x + self.kept[...]


def variable_type(name):
    return type(name, (nnx.Variable,), {"__module__": "users"})


def test_two_variable_types_of_one_name():
    """A regression: their variables silently shared a collection."""
    first, second, params = variable_type("State"), variable_type("State"), variable_type("params")
    both = r"layers\[1\] \(Kept\) has variables of the type users\.State, .* 'State', as that of users\.State; give one"
    with pytest.raises(ValueError, match=both):
        as_layers([lambda rngs: Kept(first), Kept(second)])
    with pytest.raises(
        ValueError, match=r"layers\[0\] .* would be 'params', as that of flax\.nnx\.\w+\.Param; give one"
    ):
        as_layers([Kept(params)])
    alike = as_layers([Kept(first), Kept(first), lambda rngs: nnx.LoRA(4, 2, 4, rngs=rngs)])
    assert [set(layer.ready) for layer in alike[:2]] == [{"State"}] * 2


class Sows(nn.Module):
    @nn.compact
    def __call__(self, x):
        self.sow("intermediates", "x", x)
        self.sow("losses", "load", jnp.mean(x))
        return nn.Dense(3)(x)


class SowsNnx(nnx.Module):
    def __init__(self, kind, rngs):
        self.kind, self.dense = kind, nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x):
        self.sow(self.kind, "load", jnp.mean(x))
        return self.dense(x)


class Losses(nnx.Variable):
    """Losses of layers, which nothing would add up."""


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
@pytest.mark.parametrize(
    ("layer", "what"),
    [
        (Sows(), r"\(Sows\) changes the structure of its collection 'losses' in training"),
        (lambda rngs: SowsNnx(Losses, rngs), r"\(SowsNnx\) makes the collection 'Losses' in training"),
    ],
    ids=["linen", "nnx"],
)
def test_sown_losses_are_refused_with_a_remedy(layer, what):
    pipe = jpipe.Pipeline([layer], lambda y, b: jnp.mean(y), num_stages=1, num_microbatches=1)
    with pytest.raises(ValueError, match=f"{what}, as self.sow does; pass the values on with the activation"):
        pipe.init(jax.random.key(0), jnp.ones((2, 3)))


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_sown_intermediates_are_nobodys():
    """As in Flax, where training asks for no such collection."""
    pipe = jpipe.Pipeline(
        [lambda rngs: SowsNnx(nnx.Intermediate, rngs)], lambda y, b: jnp.mean(y), num_stages=1, num_microbatches=1
    )
    assert set(pipe.init(jax.random.key(0), jnp.ones((2, 3)))) == {"params"}
