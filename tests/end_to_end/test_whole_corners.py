"""What readers and users found in models that are one module: each once gave wrong numbers, or a bare error."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jpipe
import plain_whole
import whole_models

X = np.random.default_rng(0).normal(size=(8, 4))
KEY = jax.random.key(0)


@pytest.fixture(autouse=True)
def standard():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


def square(outputs, batch):
    return (outputs**2).mean()


def pipeline(model, loss=square, **options):
    return jpipe.Pipeline(model, loss, num_stages=2, num_microbatches=2, **options)


def dense(width=4):
    return nn.Dense(width, param_dtype=jnp.float64)


class Chain(nn.Module):
    """Products, with something before them.

    Attributes:
      first: what it does first: "callback", "norm", "noise" or nothing.
    """

    first: str = ""

    @nn.compact
    def __call__(self, x, train: bool = False):
        if self.first == "callback":
            jax.experimental.io_callback(lambda mean: None, None, x.mean())
        if self.first == "norm":
            x = nn.BatchNorm(use_running_average=not train, param_dtype=jnp.float64)(x)
        if self.first == "noise" and train:
            x = x + jax.random.normal(self.make_rng("dropout"), x.shape)
        for _ in range(4):
            x = jnp.tanh(dense()(x))
        return x


def test_missing_collections_stay_missing():
    pipe = pipeline(Chain("norm"))
    tree = pipe.model_variables(pipe.init(KEY, X))
    with pytest.raises(ValueError, match=r"lack.*batch_stats"):
        pipe.evaluate(pipe.from_model_variables({"params": tree["params"]}), X)
    with pytest.raises(ValueError, match="no collection 'BatchNorm_0'; pass all by collection"):
        pipe.from_model_variables(tree["params"])
    with pytest.raises(TypeError, match="is being traced; call from_model_variables outside"):
        jax.jit(pipe.from_model_variables)(tree)


@pytest.mark.parametrize("impl", ["rbg", "threefry2x32"])
def test_stacked_weights_under_other_keys(impl):
    make = lambda key: nn.initializers.lecun_normal()(key, (4, 4))
    init = lambda key, x: {"w": jax.vmap(make)(jax.random.split(key, 4))}
    apply = lambda p, x: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["w"])[0]
    with jax.default_prng_impl(impl):
        pipe, key = pipeline(jpipe.Layer(init, apply)), jax.random.key(0)
        np.testing.assert_allclose(pipe.model_variables(pipe.init(key, X))["w"], init(key, X)["w"], rtol=1e-6)
    if impl == "rbg":
        with pytest.raises(ValueError, match="use keys of JAX's default implementation"):
            pipeline(jpipe.Layer(init, apply)).init(key, X)


class Noisy(nn.Module):
    """Blocks that draw from a key of the model's own."""

    @nn.compact
    def __call__(self, x):
        for _ in range(4):
            x = jnp.tanh(dense()(x)) + jax.random.normal(jax.random.key(7), x.shape)
        return x


class Marked(nn.Module):
    """A model with a mark of no use."""

    @nn.compact
    def __call__(self, x):
        return jpipe.cut(Chain()(x))


USES = {
    "a": lambda x, a: x @ a,
    "a, sum(a ** 2)": lambda x, a: x @ a + jnp.sum(a**2),
    "a / norm(a)": lambda x, a: x @ (a / jnp.linalg.norm(a, axis=0)),
}
"""What a block does with its weights: some of it follows from these alone."""


class Weights(nn.Module):
    """A block of one array of weights."""

    use: str

    @nn.compact
    def __call__(self, x):
        return USES[self.use](x, self.param("a", nn.initializers.normal(0.5, jnp.float64), (4, 4)))


class Auxiliary(nn.Module):
    """A model whose auxiliary classifier is zeros in evaluation; blocks are pairs of layers."""

    use: str
    num_blocks: int

    @nn.compact
    def __call__(self, x, train: bool = False):
        x, middle = dense(4)(x), None
        for _ in range(self.num_blocks):
            x = x + Weights(self.use)(jnp.tanh(dense(4)(x)))
            middle = x if middle is None else middle
        beside = dense(2)(middle)
        return {"a": dense(2)(x), "b": beside if train else jnp.zeros_like(beside)}


def squares(outputs, batch):
    return sum((leaf**2).mean() for leaf in jax.tree.leaves(outputs))


class Adapted(nn.Module):
    """Blocks behind which training alone has one more layer, the same behind all."""

    marked: bool = False

    @nn.compact
    def __call__(self, x, train: bool = False):
        adapter = nn.Dense(4, param_dtype=jnp.float64, name="adapter")
        x = dense()(x)
        x = jpipe.cut(x) if self.marked else x
        for _ in range(3):
            x = x + jnp.tanh(dense()(x))
            x = x + jnp.tanh(adapter(x)) if train or self.is_initializing() else x
        return x


def stacked(key, x):
    return {"w": jnp.asarray(np.random.default_rng(1).normal(size=(3, 2, 4, 4)))}


def block(x, w):
    return jax.lax.scan(lambda x, v: (jnp.tanh(x @ v), None), x, w)[0] + 0.1 * jnp.mean(w**2), None


def scaled(key, x):
    keys = jax.random.split(key, 4)
    return {f"w{i}": nn.initializers.lecun_normal()(keys[i], (4, 4)) for i in range(4)} | {"scale": jnp.ones(())}


def with_scale(p, x):
    for i in range(4):
        x = jnp.tanh(x @ p[f"w{i}"])
    return x, jnp.exp(p["scale"])


SLICED = jpipe.Layer(stacked, lambda p, x: jax.lax.scan(block, x, p["w"])[0])
WITH_SCALE = jpipe.Layer(scaled, with_scale), lambda outputs, batch: (outputs[0] ** 2).mean() * outputs[1]


@pytest.mark.parametrize(
    ("model", "loss"),
    [
        pytest.param(SLICED, square, id="a slice that is read whole and in slices"),
        pytest.param(Chain("norm"), square, id="what is done first differs in evaluation"),
        pytest.param(Chain("noise"), square, id="noise in training"),
        pytest.param(Noisy(), square, id="a key among the constants"),
        pytest.param(*WITH_SCALE, id="outputs of parameters alone"),
        # The last block's gradients were zero, silently, where it added a sum that follows from its weights alone:
        # evaluation was cut one operation earlier than training, so two pieces had them, each its own copy.
        *(pytest.param(Auxiliary(use, count), squares, id=f"{use}, {count}") for use in USES for count in (2, 4)),
        pytest.param(Adapted(marked=True), squares, id="a shared layer that only training has"),
    ],
)
def test_equals_the_plain_model(model, loss):
    """Loss, every gradient and the outputs of evaluation."""
    plain_whole.check(whole_models.Case(model, X, loss), num_microbatches=2, outputs=model is not WITH_SCALE[0])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Chain("callback"), "calls back into Python"),
        (Marked(), r"it has 1 marks \(jpipe.cut\), and with marks nothing else is a place"),
        # The error spoke of evaluation's places, and named neither the layer nor that it is in several pieces.
        (Adapted(), r"uses adapter/bias, adapter/kernel in several places.*jpipe\.cut"),
    ],
)
def test_what_can_not_be_cut(model, message):
    with pytest.raises(ValueError, match=message):
        pipeline(model, squares).init(KEY, X)


def test_the_pieces_are_no_modules():
    pipe = pipeline(Chain())
    with pytest.raises(ValueError, match="Chain is one module; call it with"):
        pipe.modules(pipe.init(KEY, X))
