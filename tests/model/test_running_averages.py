"""Running averages: the rate that a layer's code implies, and moments of a mini-batch out of micro-batches."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jpipe
from cases import assert_close


class Moving(nn.Module):
    """Running averages that move at a rate of `how`."""

    how: str

    @nn.compact
    def __call__(self, x, train: bool):
        mean = self.variable("batch_stats", "mean", lambda: jnp.zeros(3))
        var = self.variable("batch_stats", "var", lambda: jnp.ones(3))
        count = self.variable("batch_stats", "count", lambda: jnp.ones(()))
        raw = self.param("rate", nn.initializers.ones, ())
        if train:
            rate = {
                "count": 1 / (count.value + 1),
                "parameter": jax.lax.stop_gradient(nn.sigmoid(raw)),
                "inputs": jnp.where(jnp.sum(jnp.abs(x)) > 0, 0.5, 0.0),
            }[self.how]
            mean.value += rate * (x.mean(0) - mean.value)
            var.value += rate * (x.var(0) - var.value)
            count.value += 1
        return x - mean.value


@pytest.mark.parametrize("how", ["count", "parameter", "inputs"])
def test_a_rate_that_is_no_number_of_the_code_is_refused(how):
    """A regression: it was taken as what it is where everything is zero, and variances were silently off."""
    options = {"num_stages": 2, "num_microbatches": 2, "balance": "even"}
    pipe = jpipe.Pipeline([Moving(how), nn.Dense(2)], lambda y, _: jnp.mean(y), **options)
    batch = np.ones((8, 3), np.float32)
    variables = pipe.init(jax.random.key(0), batch)
    with pytest.raises(ValueError, match=r"layer 0 \(Moving\) keeps a running mean .* pass merge="):
        pipe.value_and_grad(variables, batch)
    pipe = jpipe.Pipeline(
        [Moving(how), nn.Dense(2)], lambda y, _: jnp.mean(y), merge={"batch_stats": "mean"}, **options
    )
    jax.eval_shape(pipe.value_and_grad, variables, batch)


# --- how often averages move in a step --------------------------------------------------------------------------------


EXACT = {"param_dtype": jnp.float64, "force_float32_reductions": False, "momentum": 0.8}


def norm(train, **options):
    """A BatchNorm of Linen in float64."""
    return nn.BatchNorm(not train, **EXACT, **options)


class Linen(nn.Module):
    """Two views `[b, 2, 4]` of each example, and BatchNorms that are called for them as `how` says.

    It hands on the views, and adds what it gives to what those before it gave.
    """

    how: str

    @nn.compact
    def __call__(self, x, before=0.0, train: bool = False):
        return x, before + getattr(self, self.how)(x, train)

    def two(self, x, train):
        return norm(train)(x[:, 0]) + norm(train)(x[:, 1])

    def behind_one_that_stays(self, x, train):
        still = norm(False, name="still")(x[:, 0])
        return norm(train)(nn.Dense(4, param_dtype=jnp.float64)(still))

    def vmapped(self, x, train):
        axes = {"variable_axes": {"params": 0, "batch_stats": 0}, "split_rngs": {"params": True}}
        many = nn.vmap(nn.BatchNorm, in_axes=1, out_axes=1, **axes)
        return many(not train, **EXACT)(x)[:, 0]

    def scanned(self, x, train):
        class Cell(nn.Module):
            @nn.compact
            def __call__(self, x, scale):
                return x, norm(train)(x[:, 0] * scale)

        axes = {"variable_axes": {"params": 0, "batch_stats": 0}, "split_rngs": {"params": True}}
        cells = nn.scan(nn.remat(Cell, prevent_cse=False), length=2, **axes)
        return cells()(x, jnp.asarray([1.0, 2.0]))[1].sum(0)

    def in_calls(self, x, train):
        return nn.jit(nn.remat(nn.BatchNorm))(not train, **EXACT)(x[:, 0])

    def beside_what_has_no_derivative(self, x, train):
        y = norm(train)(x[:, 0])
        shape = jax.ShapeDtypeStruct(y.shape, y.dtype)
        return y + jax.pure_callback(np.sign, shape, jax.lax.stop_gradient(y), vmap_method="sequential")

    def twice(self, x, train):
        one = norm(train)
        return one(x[:, 0]) + one(x[:, 1])

    def carried(self, x, train):
        one = norm(train, name="one")
        if self.is_initializing():
            return one(x[:, 0])
        axes = {"variable_carry": "batch_stats", "variable_broadcast": "params"}
        turns = nn.scan(lambda one, x, scale: (x, one(x[:, 0] * scale)), **axes)
        return turns(one, x, jnp.asarray([1.0, 2.0]))[1].sum(0)

    def twice_in_scan(self, x, train):
        class Cell(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                one = norm(train)
                return x, one(x[:, 0]) + one(x[:, 1])

        axes = {"variable_axes": {"params": 0, "batch_stats": 0}, "split_rngs": {"params": True}}
        return nn.scan(Cell, length=2, **axes)()(x, None)[1].sum(0)


class Whole(nn.Module):
    """A model that is one module."""

    @nn.compact
    def __call__(self, x, train: bool = False):
        x = nn.Dense(4, param_dtype=jnp.float64)(x)
        return nn.Dense(3, param_dtype=jnp.float64)(jnp.tanh(Linen("twice")(x, train=train)[1]))


STYLES = {
    "towards": lambda old, new: old + 0.2 * (new - old),
    "optax": lambda old, new: optax.incremental_update(new, old, 0.2),
    "a rate a feature": lambda old, new: old + jnp.asarray([0.1, 0.5, 0.0, 1.0]) * (new - old),
    "stacked": lambda old, new: jnp.stack([old, new], -1) @ jnp.asarray([0.8, 0.2]),
    "branch": lambda old, new: jax.lax.cond(jnp.zeros(()) == 0, lambda: old + 0.2 * (new - old), lambda: old),
}


class ByHand(nn.Module):
    """Running averages that move by a formula of the user's, once for each of `uses` views."""

    style: str
    uses: int = 1

    @nn.compact
    def __call__(self, x, before=0.0, train: bool = False):
        mean = self.variable("batch_stats", "mean", lambda: jnp.zeros(4))
        var = self.variable("batch_stats", "var", lambda: jnp.ones(4))
        for view in range(self.uses if train else 0):
            mean.value = STYLES[self.style](mean.value, x[:, view].mean(0))
            var.value = STYLES[self.style](var.value, x[:, view].var(0))
        return x, before + x[:, 0]


class Nnx(nnx.Module):
    """The same as `Linen` for NNX, whose averages are float32."""

    def __init__(self, how, rngs):
        make = lambda rngs: nnx.BatchNorm(4, momentum=0.8, rngs=rngs)
        many = nnx.vmap(make, in_axes=0)
        self.how = how
        self.norms = many(rngs.split(2)) if how in ("vmapped", "scanned") else nnx.List([make(rngs), make(rngs)])

    def __call__(self, x, before=0.0):
        return x, before + self.given(x.astype(jnp.float32))

    def given(self, x):
        if self.how == "vmapped":
            return nnx.vmap(lambda norm, x: norm(x), in_axes=(0, 1))(self.norms, x).sum(0)
        if self.how == "scanned":
            run = nnx.scan(lambda x, norm: (x, norm(x[:, 0])), in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
            return run(x, self.norms)[1].sum(0)
        if self.how == "remat":  # which keeps its statistics out of gradients
            return nnx.remat(lambda norm, x: norm(x))(self.norms[0], x[:, 0])
        second = 0 if self.how == "twice" else 1
        return self.norms[0](x[:, 0]) + self.norms[second](x[:, 1])


ONCE = {
    "linen": [Linen(how) for how in ("two", "behind_one_that_stays", "vmapped", "scanned", "in_calls")],
    "by hand": [ByHand(style) for style in STYLES],
    "nnx": [lambda rngs, how=how: Nnx(how, rngs) for how in ("two", "vmapped", "scanned", "remat")],
}
SEVERAL = {
    **{how: Linen(how) for how in ("twice", "carried", "twice_in_scan")},
    "by hand, twice": ByHand("optax", 2),
    "nnx twice": lambda rngs: Nnx("twice", rngs),
    "one module": Whole(),
}


def views(size=16):
    """Examples `[size, 2, 4]` whose micro-batches differ in their means."""
    x = np.random.default_rng(0).normal(size=(size, 2, 4)) + 3 * np.asarray([0, 1])[:, None]
    return x + np.arange(size)[:, None, None] * np.asarray([1, -1])[:, None]


def new_state(layer, tree, x):
    """The state of a layer after one call in training by plain Flax."""
    if isinstance(layer, nn.Module):
        return layer.apply(tree, x, train=True, mutable=["batch_stats"])[1]["batch_stats"]
    module = layer(nnx.Rngs(0))  # new averages, which depend on no parameter
    module.train()
    module(jnp.asarray(x))
    return nnx.to_pure_dict(nnx.state(module, nnx.BatchStat))


def pipeline(layers, **options):
    options = {"num_stages": 2, "num_microbatches": 4, "balance": "even"} | options
    return jpipe.Pipeline(layers, lambda y, _: jnp.mean(jnp.square(y)), **options)


HEAD = jpipe.Layer(lambda key, x, h: jax.random.normal(key, (4, 3), h.dtype), lambda kernel, x, h: h @ kernel)


@pytest.mark.parametrize("name", ONCE)
def test_averages_that_move_once_are_those_of_the_whole_mini_batch(x64, name):
    """Several BatchNorms in a layer, in loops, in calls, by formulas of one's own: each one moves once.

    Regressions: one that was left as it is made another one behind it look as if its rate followed from parameters, and
    the rate was not seen inside a checkpoint.
    """
    layers, x = ONCE[name], views()
    pipe = pipeline([*layers, HEAD])
    variables = pipe.init(jax.random.key(0), x)
    (_, updates), _ = pipe.value_and_grad(variables, x)
    trees, found = (jax.device_get(pipe.layer_variables(v)) for v in (variables, {**variables, **updates}))
    for i, layer in enumerate(layers):
        assert_close(found[i]["batch_stats"], jax.device_get(new_state(layer, trees[i], x)), f"averages of layer {i}")


def test_what_a_layer_does_besides_needs_no_derivative(x64):
    """A regression: the whole layer was differentiated, what lies behind `stop_gradient` too."""
    pipe = pipeline([Linen("beside_what_has_no_derivative"), HEAD])
    variables = jax.eval_shape(pipe.init, jax.random.key(0), views())
    jax.eval_shape(pipe.value_and_grad, variables, views())


@pytest.mark.parametrize("name", SEVERAL)
def test_averages_that_move_several_times_are_refused(x64, name):
    """A regression: the variance was neither the whole mini-batch's nor the micro-batches' mean, without a word."""
    layer, x = SEVERAL[name], views()
    pipe = pipeline(layer if name == "one module" else [layer, HEAD])
    variables = jax.eval_shape(pipe.init, jax.random.key(0), x)
    with pytest.raises(ValueError, match=r"layer \d \(.*\) updates a running mean and variance several times"):
        pipe.value_and_grad(variables, x)


@pytest.mark.parametrize(("options", "parts"), [({"num_microbatches": 1}, 1), ({"merge": {"batch_stats": "mean"}}, 4)])
def test_several_moves_in_a_single_micro_batch_or_under_the_rule_mean(x64, options, parts):
    """A single one is the mini-batch, so nothing is merged. The rule is the remedy: the mean of micro-batches' own."""
    layer, x = SEVERAL["twice"], views()
    pipe = pipeline([layer, HEAD], **options)
    variables = pipe.init(jax.random.key(0), x)
    (_, updates), _ = pipe.value_and_grad(variables, x)
    found, tree = (jax.device_get(pipe.layer_variables(v))[0] for v in ({**variables, **updates}, variables))
    states = [new_state(layer, tree, part) for part in np.split(x, parts)]
    assert_close(found["batch_stats"], jax.tree.map(lambda *a: np.mean(a, 0), *states), "the micro-batches' mean")
