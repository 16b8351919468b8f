"""Functions that all layers share."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jpipe
from cases import CUTS, assert_close, assert_equal, cut, some_slow
from jpipe.jax.trees import same_value
from jpipe.layers.adapt import as_layers
from jpipe.layers.base import is_same

VOCABULARY = 11
RNG = np.random.default_rng(0)
BATCH = {
    "inputs": RNG.integers(0, VOCABULARY, (8, 5)).astype(np.int32),
    "targets": RNG.integers(0, VOCABULARY, (8, 5)).astype(np.int32),
}


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(8)(nn.tanh(nn.Dense(16)(x)))


@pytest.fixture(autouse=True)
def _promotion():
    with jax.numpy_dtype_promotion("standard"):  # optax and nn.Embed promote
        yield


def loss_fn(outputs, batch):
    return optax.softmax_cross_entropy_with_integer_labels(outputs, batch["targets"]).mean()


MODULES = [nn.Embed(VOCABULARY, 8), *[Block() for _ in range(6)], nn.LayerNorm(force_float32_reductions=False)]
SAME = {3: 3, 5: 3, 6: 3}  # layers 3, 5 and 6 are one block, layers 0 and 8 one table
OWN = (0, 1, 2, 3, 4, 7)  # the layers with parameters that none before them has


def layers():
    table, block = jpipe.Shared(MODULES[0]), jpipe.Shared(MODULES[3])
    own = [block if i in SAME else module for i, module in enumerate(MODULES)]
    return [table, *own[1:], table.using("attend")]


def sequential(trees):
    x = MODULES[0].apply(trees[0], BATCH["inputs"])
    for i in range(1, 8):
        x = MODULES[i].apply(trees[SAME.get(i, i)], x)
    return loss_fn(MODULES[0].apply(trees[0], x, method="attend"), BATCH)


sequential_grads = jax.jit(jax.value_and_grad(sequential))  # compiled once for all cases


@pytest.mark.parametrize("case", some_slow(CUTS[:4]), ids=str)
def test_equal_to_the_sequential_model(case):
    pipe = cut(layers(), loss_fn, case)
    variables = pipe.init(jax.random.key(0), BATCH)
    trees = jax.device_get(pipe.layer_variables(variables))
    assert_equal(trees[8], trees[0], "both uses show the same table")
    expected, gradients = sequential_grads(trees)
    (loss, _), grads = pipe.value_and_grad(variables, BATCH)
    found = jax.device_get(pipe.layer_variables({"params": grads}))
    assert_close(loss, expected, "loss")
    for i in OWN:
        assert_close(found[i], gradients[i], f"gradient of layer {i}")
    own = [gradients[i] for i in OWN]
    assert_close(optax.tree.norm(grads), optax.tree.norm(own), "shared parameters count once in a norm")
    assert_equal(pipe.from_layer_variables(trees), variables, "round trip")
    modules = pipe.modules(variables)  # each calls the method of its place
    outputs = jax.jit(lambda x: functools.reduce(lambda x, module: module(x), modules, x))(BATCH["inputs"])
    assert_close(loss_fn(outputs, BATCH), expected, "bound modules")
    trees[8] = jax.tree.map(lambda a: a + 1, trees[8])
    with pytest.raises(ValueError, match=r"trees\[0\] and trees\[8\] differ, but share parameters; give both the same"):
        pipe.from_layer_variables(trees)


def table_by_hand():
    init = lambda key, tokens: {"embedding": jax.random.normal(key, (VOCABULARY, 8), jnp.float32)}
    return jpipe.Shared(jpipe.Layer(init, lambda params, tokens: params["embedding"][tokens]))


def logits(params, x):
    return x @ params["embedding"].T


@pytest.mark.parametrize(
    ("make", "attend"),
    [(lambda: jpipe.Shared(lambda rngs: nnx.Embed(VOCABULARY, 8, rngs=rngs)), "attend"), (table_by_hand, logits)],
    ids=["nnx factory", "functions"],
)
def test_tables_of_other_libraries(make, attend):
    table = make()
    pipe = jpipe.Pipeline(
        [table, Block(), table.using(attend)], loss_fn, num_stages=3, num_microbatches=2, balance="even"
    )
    variables = pipe.init(jax.random.key(0), BATCH)
    embedding = lambda item: item.get("params", item)["embedding"]
    first, block, last = jax.device_get(pipe.layer_variables(variables))
    assert_equal(last, first, "both uses show the same table")

    def plain(embedded, block):
        x = Block().apply(block, embedded[BATCH["inputs"]])
        return loss_fn(x @ embedded.T, BATCH)

    expected, gradients = jax.jit(jax.value_and_grad(plain, (0, 1)))(embedding(first), block)
    (loss, _), grads = pipe.value_and_grad(variables, BATCH)
    found = pipe.layer_variables({"params": grads})
    assert_close(loss, expected, "loss")
    assert_close(embedding(found[0]), gradients[0], "gradient of the table")
    assert_close(found[1], gradients[1], "gradient of the block")


EMBED = nn.Embed(4, 4)
TWICE = r"layers\[1\] is or holds the same Embed as layers\[0\]; .*tied = jpipe\.Shared\(Embed\("


NNX_TABLE = jpipe.Shared(lambda rngs: nnx.Embed(4, 4, rngs=rngs))
METHOD = r"layers\[1\] is a method of a Embed; .*tied = jpipe\.Shared\(Embed\(.*using\(\"attend\"\)"


class Tied(nn.Module):
    """A head that holds another layer."""

    table: nn.Module

    def __call__(self, x):
        return self.table.attend(x)


class NnxTied(nnx.Module):
    """The same of nnx."""

    def __init__(self, table):
        self.table = table

    def __call__(self, x):
        return self.table.attend(x)


def nnx_tied():
    table = nnx.Embed(4, 4, rngs=nnx.Rngs(0))
    return [table, NnxTied(table)]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: [EMBED, jpipe.Shared(EMBED).using("attend")], ValueError, TWICE),
        (lambda: nn.Sequential([EMBED, Tied(EMBED)]), ValueError, r"\[1\] is or holds the same Embed as layers\[0\]"),
        (lambda: [EMBED, lambda x: EMBED.attend(x)], ValueError, rf"{TWICE}.*tied\.using\(\"attend\"\)"),
        (lambda: [EMBED, EMBED.attend], TypeError, METHOD),
        (nnx_tied, ValueError, r"layers\[1\] is or holds the same Param as layers\[0\]"),
        (lambda: [jpipe.Shared(EMBED).using("transpose")], ValueError, r"uses Embed through 'transpose', which it"),
        (lambda: [table_by_hand().using("attend")], TypeError, r"\[0\] uses Layer through 'attend'; pass a function"),
        (lambda: [NNX_TABLE.using(logits)], TypeError, r"\[0\] uses Embed through a function; name one of its methods"),
        (lambda: [jpipe.Shared(jpipe.stash(EMBED, "a"))], TypeError, r"\[0\] shares a marked layer; mark its use"),
        (lambda: [jpipe.Shared(jpipe.Shared(EMBED))], TypeError, "shared already"),
        (lambda: [jpipe.Shared(3)], TypeError, r"layers\[0\] is a int; use a module"),
    ],
)
def test_errors(make, error, message):
    with pytest.raises(error, match=message):
        jpipe.Pipeline(make(), loss_fn, num_stages=1, num_microbatches=1)


# --- constants that shared layers hold --------------------------------------------------------------------------------

FLOATS = {"param_dtype": jnp.float64, "rngs": nnx.Rngs(0)}
X = {"inputs": np.random.default_rng(1).normal(size=(8, 6))}


class WithTables(nnx.Module):
    """A block that holds arrays which nothing changes, as tables of positions and masks are."""

    def __init__(self, rngs, table):
        self.dense, self.table = nnx.Linear(8, 8, param_dtype=jnp.float64, rngs=rngs), table
        self.mask, self.order = np.arange(8) % 3 > 0, jnp.arange(8)[::-1]

    def __call__(self, x, more=0.0):
        return x + jnp.where(self.mask, jnp.tanh(self.dense(x)), 0.1)[:, self.order] * jnp.asarray(self.table) + more


class Looped(nnx.Module):
    """One block several times, one with tables of its own, and a table that is read beside all of them."""

    def __init__(self, rngs, table):
        linear = functools.partial(nnx.Linear, param_dtype=jnp.float64, rngs=rngs)
        self.enter, self.leave = linear(6, 8), linear(8, 3)
        self.block, self.other = WithTables(rngs, table), WithTables(rngs, table)
        self.beside = jnp.arange(8.0) / 9

    def __call__(self, x):
        x = self.enter(x)
        for block in (self.block, self.block, self.other, self.block, self.block):
            x = block(x, jnp.sin(x) * self.beside)
        return self.leave(x)


@pytest.mark.parametrize(
    ("kind", "options", "make"), [("module", {"ends": "spread"}, jnp.asarray), ("list", {"remat": "none"}, np.asarray)]
)
def test_constants_of_shared_blocks(kind, options, make):
    """They were refused: "is shared but has the collections ['arrays', 'params']"."""
    with jax.enable_x64(True):
        model = Looped(nnx.Rngs(0), make(np.arange(8.0) / 7))
        block, wide = jpipe.Shared(model.block), nnx.Linear(6, 8, **FLOATS)
        layers = model if kind == "module" else [wide, block, block, model.other, block, nnx.Linear(8, 3, **FLOATS)]
        mean = lambda y, _=None: jnp.mean(jnp.sin(y) ** 2)
        pipe = jpipe.Pipeline(layers, mean, num_stages=2, num_microbatches=2, **options)
        variables = pipe.init(jax.random.key(0), X)

        def plain(modules):
            x = X["inputs"]
            for module in modules:
                x = module(x)
            return x

        shared = layers[2] if kind == "list" else None
        modules = [model] if shared is None else [model.block if one is shared else one for one in layers]
        expected, gradients = nnx.value_and_grad(lambda modules: mean(plain(modules)))(nnx.List(modules))
        (loss, updates), grads = pipe.value_and_grad(variables, X)
        assert_close(loss, expected)
        assert not set(updates) - {"arrays"}
        assert_close(pipe.apply(variables, X), plain(modules))
        if shared is None:
            own = nnx.to_pure_dict(gradients)[0]
            assert_close(pipe.model_variables({"params": grads})["params"], own)
            assert_equal(pipe.model_variables(variables)["arrays"]["block"]["table"], model.block.table)
        else:
            found = pipe.layer_variables({"params": grads})
            own = nnx.to_pure_dict(gradients)
            for i in (0, 1, 3, 5):
                assert_close(found[i]["params"], own[i])


class Counting(nnx.Module):
    """Its table changes in training."""

    def __init__(self, rngs):
        self.table = nnx.data(jnp.ones(8))

    def __call__(self, x):
        self.table = self.table + 1
        return x * self.table


NORM, TABLES = jpipe.Shared(nn.BatchNorm()), jpipe.Shared(lambda rngs: WithTables(rngs, np.ones(8)))


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([NORM, NORM], r"layer 0 \(BatchNorm\) gives new values of its collection 'batch_stats'"),
        (
            [TABLES, TABLES, lambda rngs: Counting(rngs)],
            r"layer 2 \(Counting\) gives new values of its collection 'arrays'",
        ),
    ],
)
def test_no_layer_writes_what_a_shared_one_has(layers, message):
    with jax.enable_x64(True):
        pipe = jpipe.Pipeline(layers, lambda y, _: jnp.mean(y), num_stages=1, num_microbatches=1)
        with pytest.raises(ValueError, match=message):
            pipe.init(jax.random.key(0), np.ones((4, 8)))


# --- state that shared layers have ------------------------------------------------------------------------------------


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = False):
        return x + nn.BatchNorm(use_running_average=not train)(nn.Dense(8)(x))


class Thrice(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = False):
        block = Normed()
        for _ in range(3):
            x = block(x, train)
        return x


class LoopedNorms(nn.Module):
    marked: bool = False
    own_norms: bool = False

    @nn.compact
    def __call__(self, x, train: bool = False):
        x = nn.Dense(8)(x)
        x = jpipe.cut(x) if self.marked else x
        if self.own_norms:
            dense = nn.Dense(8)
            for _ in range(3):
                x = x + nn.BatchNorm(use_running_average=not train)(dense(x))
        else:
            x = Thrice()(x, train)
        x = jpipe.cut(x) if self.marked else x
        return nn.Dense(3)(x)


def test_state_that_stays_on_one_stage():
    """The error blamed parameters ("together with other parameters"), and sent to a list that is refused too."""
    batch = np.random.default_rng(2).normal(size=(8, 6)).astype(np.float32)
    options = {"num_stages": 2, "num_microbatches": 2, "merge": {"batch_stats": "mean"}}  # norms used several times
    make = lambda model: jpipe.Pipeline(model, lambda y, _: jnp.mean(y**2), **options)
    text = r"changes the state .*BatchNorm_0/mean, .*/var in between; mark .* jpipe\.cut.* or give each place a module"
    with pytest.raises(ValueError, match=text):
        make(LoopedNorms()).init(jax.random.key(0), batch)
    normed = jpipe.Shared(Normed())
    with pytest.raises(ValueError, match=r"Give each place what has state .* or make one layer of all places"):
        make([nn.Dense(8), normed, normed, nn.Dense(3)]).init(jax.random.key(0), batch)
    dense = jpipe.Shared(nn.Dense(8))
    norms = [dense, nn.BatchNorm(use_running_average=False), dense, nn.BatchNorm(use_running_average=False)]
    for model in (
        LoopedNorms(marked=True),
        LoopedNorms(own_norms=True),
        [nn.Dense(8), Thrice(), nn.Dense(3)],
        [nn.Dense(8), *norms, nn.Dense(3)],
    ):
        pipe = make(model)
        jax.eval_shape(lambda pipe=pipe: pipe.value_and_grad(pipe.init(jax.random.key(0), batch), batch))


# --- two values are the same only if code can't tell them apart; and where there is any doubt they aren't -------------


class Holds(nn.Module):
    held: Any

    def __call__(self, x):
        return self.held(x)


class NnxHolds(nnx.Module):
    def __init__(self, held):
        self.held = held

    def __call__(self, x):
        return self.held(x)


HOLDERS = {
    "a Linen field": Holds,
    "an nnx module": NnxHolds,
    "an nnx factory": lambda held: lambda rngs: NnxHolds(held),
    "a closure": lambda held: lambda x: held(x),
    "a dict in a field": lambda held: Holds(functools.partial(lambda x, table: table["held"](x), table={"held": held})),
}
PAIRS = [
    (0.0, -0.0, False),
    ((1,), (True,), False),
    ([{"a": (0.0,)}], [{"a": (-0.0,)}], False),
    (np.float32(1), np.float64(1), False),
    (frozenset([1]), frozenset([True]), False),
    (float("nan"), float("nan"), True),
    ((1, {"a": [0.5, None, "b"]}), (1, {"a": [0.5, None, "b"]}), True),
    (functools.partial(max, 0.0), functools.partial(max, -0.0), False),
    (functools.partial(max, 1, key=None), functools.partial(max, 1, key=None), True),
    (nn.Dense(2), nn.Dense(2), True),
    (nn.Dense(2, kernel_init=nn.initializers.normal(0.5)), nn.Dense(2, kernel_init=nn.initializers.normal(0.5)), True),
    (nn.Dense(2, kernel_init=nn.initializers.normal(0.5)), nn.Dense(2, kernel_init=nn.initializers.normal(1.0)), False),
]


@pytest.mark.parametrize("name", HOLDERS)
@pytest.mark.parametrize(("a", "b", "same"), PAIRS)
def test_values_of_other_types_or_bits_make_other_layers(name, a, b, same):
    """A regression: 0.0 == -0.0 and (1,) == (True,), so that unlike layers were taken for alike."""
    assert is_same(*as_layers([HOLDERS[name](a), HOLDERS[name](b)])) is same


def test_functions_that_hold_themselves():
    def make(c):
        def count(x):
            return count if x is None else x * c

        return count

    first, second, third = as_layers([make(1.0), make(1.0), make(2.0)])
    assert is_same(first, second)
    assert not is_same(first, third)


class Loose:
    """An activation function that says it equals all others, as if its number didn't matter."""

    def __init__(self, power):
        self.power = power

    def __eq__(self, other):
        return True

    def __hash__(self):
        return 0

    def __call__(self, x):
        return x**self.power


@pytest.mark.parametrize("name", HOLDERS)
def test_a_loose_equality_makes_no_layers_one(name):
    """A regression: layers whose fields said that they are equal were compiled as one, and computed the same."""
    assert not is_same(*as_layers([HOLDERS[name](Loose(power)) for power in (2, 3)]))


ARRAY = np.ones(2)


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ([ARRAY], [ARRAY], True),
        ([ARRAY], [np.ones(2)], False),  # arrays may differ, or change
        (Loose(2), Loose(2), False),  # a user's class says so, which may leave out what matters
        (object(), object(), False),
        (max, max, True),
    ],
)
def test_objects(a, b, same):
    assert same_value(a, b) is same
