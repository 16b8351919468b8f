"""A model that is one module trains in a pipeline as it does in plain JAX, without a line of it changed."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jpipe
import plain_whole
import whole_models
from cases import assert_close

KEY, FLOAT = jax.random.key(plain_whole.SEED), jnp.float64
CASES = whole_models.cases()


@pytest.fixture(scope="module", autouse=True)
def float64():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


def random(*shape):
    return np.random.default_rng(0).normal(size=shape)


def square(outputs, batch):
    return (outputs**2).mean()


def pipeline(model, loss=square, **options):
    return jpipe.Pipeline(model, loss, **{"num_stages": 2, "num_microbatches": 2} | options)


OPTIONS = {
    "1f1b": {},
    "gpipe": {"schedule": "gpipe", "remat": "none", "num_stages": 3},
    "interleaved": {"schedule": "interleaved", "num_chunks": 2, "remat": "stage"},
    "zero_bubble": {"schedule": "zero_bubble", "remat": "none"},
    "spread": {"ends": "spread", "schedule": "v", "num_chunks": 2},
}
BY_DEFAULT = {("tied", "spread"), ("resnet", "interleaved")}
"""`test_on_a_mesh` has a scan, `test_a_second_pipeline_on_another_mesh` dropout, `test_random_models` remat,
`test_models_train_in_stages` U-Net and translation."""


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(name, options, marks=[] if (name, options) in BY_DEFAULT else pytest.mark.slow)
        for name in CASES
        for options in OPTIONS
    ],
)
def test_equals_the_plain_model(name, options):
    plain_whole.check(CASES[name], **OPTIONS[options])


def test_a_second_pipeline_on_another_mesh():
    """A regression: slices of a scan's random keys remembered the first pipeline's mesh."""
    for num_stages in (2, 3):
        plain_whole.check(CASES["dropout"], num_stages=num_stages, outputs=False)


@pytest.mark.parametrize("axis", [pytest.param("data", marks=pytest.mark.slow), "model"])
def test_on_a_mesh(axis, make_mesh):
    plain_whole.check(CASES["scan"], mesh=make_mesh((2, 2), ("stage", axis)), outputs=False)


@pytest.mark.slow
def test_frozen_parameters():
    plain_whole.check(CASES["loop"], frozen=lambda path: path.startswith(("h_0", "table")))  # all of some layers


@pytest.mark.parametrize("name", ["tied", "scan"])
def test_initial_values_are_those_of_the_model(name):
    case = CASES[name]
    pipe = pipeline(case.model, case.loss)
    assert_close(pipe.model_variables(pipe.init(jax.random.key(0), case.batch)), plain_whole.made(case))


def test_training_is_that_of_the_model():
    case, tx = CASES["tied"], optax.sgd(0.1, 0.9)
    pipe, variables = pipeline(case.model, case.loss, num_microbatches=4), plain_whole.made(case)
    state = pipe.create_state(KEY, case.batch, tx, pipe.from_model_variables(variables, case.batch))
    params, opt_state = variables["params"], tx.init(variables["params"])
    for _ in range(3):
        loss, _, gradients = plain_whole.plain(case, {"params": params}, 4, KEY)
        updates, opt_state = tx.update(gradients, opt_state, params)
        params = optax.apply_updates(params, updates)
        state, metrics = pipe.train_step(state, case.batch)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-12)
    assert_close(nn.unbox(pipe.model_variables(state.variables)["params"]), nn.unbox(params))


def squares_of(key, x):
    return [jax.random.normal(k, (3, 3)) for k in jax.random.split(key, 4)]


def through_squares(params, x):
    for w in params:
        x = x + jnp.tanh(x @ w)
    return x


class Odd(nn.Module):
    """Has a parameter that nothing uses, a count of its calls, and products without weights between places."""

    @nn.compact
    def __call__(self, x, train: bool = False):
        self.param("unused", nn.initializers.ones_init(), (3,), FLOAT)
        count = self.variable("counts", "calls", lambda: jnp.zeros((), jnp.int32))
        if train:
            count.value += 1
        for _ in range(3):
            x = jnp.tanh(nn.Dense(4, param_dtype=FLOAT)(x))
            x = jpipe.cut(jnp.tanh(jpipe.cut(x @ x.T @ x)))
        return x


class InParts(nn.Module):
    """A layer is used whole, and later without its second half."""

    @nn.compact
    def __call__(self, x):
        first, second = (self.param(name, nn.initializers.lecun_normal(), (4, 4), x.dtype) for name in "ab")
        x = jnp.tanh(x @ jnp.concatenate([first, second], 1))[:, :4]
        for _ in range(3):
            x = x + jnp.tanh(nn.Dense(4, param_dtype=x.dtype)(x))
        return x @ first.T


def transformer(rngs):
    return whole_models.NnxTransformer(rngs)


WORDS = whole_models.tokens("inputs", "targets")


@pytest.mark.parametrize(
    "case",
    [
        whole_models.Case(transformer, WORDS, whole_models.cross_entropy),
        whole_models.Case(jpipe.Layer(squares_of, through_squares), random(8, 3), square),
        whole_models.Case(InParts(), random(8, 4), square),
    ],
    ids=["nnx", "two functions", "a layer of which another place uses half"],
)
def test_other_kinds_of_models(case):
    plain_whole.check(case)


def test_a_ready_nnx_module():
    model = transformer(nnx.Rngs(0))
    pipe = pipeline(model, whole_models.cross_entropy)
    found = pipe.model_variables(pipe.init(KEY, WORDS))
    jax.tree.map(np.testing.assert_array_equal, found, {"params": nnx.to_pure_dict(nnx.state(model, nnx.Param))})


def test_what_nothing_uses_is_kept_and_what_counts_counts():
    case = whole_models.Case(Odd(), random(4, 4), square)
    pipe, variables = plain_whole.check(case, num_stages=3, num_microbatches=1)
    jax.tree.map(np.testing.assert_array_equal, pipe.model_variables(variables), plain_whole.made(case))
    (_, new), _ = pipe.value_and_grad(variables, case.batch)
    assert pipe.model_variables(new)["counts"]["calls"] == 1


def test_prints_stay(capfd):
    class Prints(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(4, param_dtype=FLOAT)(x)
            jax.debug.print("between {}", x.shape[0])
            jax.debug.print("mean {}", x.mean())
            return nn.Dense(4, param_dtype=FLOAT)(x)

    batch, pipe = np.ones((4, 4)), pipeline(Prints())
    pipe.evaluate(pipe.init(KEY, batch), batch)
    jax.effects_barrier()
    assert "mean" in capfd.readouterr().out


# --- what users found: each once gave wrong numbers, or a bare error --------------------------------------------------

X = np.random.default_rng(0).normal(size=(8, 4))


def dense(width=4):
    return nn.Dense(width, param_dtype=FLOAT)


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
            x = nn.BatchNorm(use_running_average=not train, param_dtype=FLOAT)(x)
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


class MarkedOnce(nn.Module):
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
        return USES[self.use](x, self.param("a", nn.initializers.normal(0.5, FLOAT), (4, 4)))


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
        adapter = nn.Dense(4, param_dtype=FLOAT, name="adapter")
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
        *(pytest.param(Auxiliary(use, 2 + 2 * (use == "a")), squares, id=use) for use in USES),
        pytest.param(Adapted(marked=True), squares, id="a shared layer that only training has"),
    ],
)
def test_corners_equal_the_plain_model(model, loss):
    """Loss, every gradient and the outputs of evaluation."""
    plain_whole.check(whole_models.Case(model, X, loss), num_microbatches=2, outputs=model is not WITH_SCALE[0])


def test_the_pieces_are_no_modules():
    pipe = pipeline(Chain())
    with pytest.raises(ValueError, match="Chain is one module; call it with"):
        pipe.modules(pipe.init(KEY, X))


# --- blocks without products ------------------------------------------------------------------------------------------


class Elementwise(nn.Module):
    """A block without a product or a convolution."""

    kind: str

    @nn.compact
    def __call__(self, x):
        weights = lambda *shape: self.param("w", nn.initializers.normal(1.0), shape, x.dtype)
        width = x.shape[-1]
        if self.kind == "recurrence":
            x = nn.LayerNorm(param_dtype=x.dtype)(x)
            decays = jnp.broadcast_to(jax.nn.sigmoid(weights(width)), x.shape)
            join = lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1])
            return x + jax.lax.associative_scan(join, (decays, x), axis=1)[1]
        if self.kind == "look-up":
            return x[..., :1] / 2 + weights(width, width)[jnp.argmax(x, -1)]
        decay = weights(width)
        over_time = lambda carry, x_t: (jnp.tanh(decay * carry + x_t),) * 2
        return x + jax.lax.scan(over_time, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))[1].swapaxes(0, 1)


class Blocks(nn.Module):
    kind: str
    projects: bool = False

    @nn.compact
    def __call__(self, x):
        dense = nn.Dense(4, param_dtype=x.dtype)
        x = dense(x) if self.projects else x
        for _ in range(8):
            x = Elementwise(self.kind)(x)
        return x


@pytest.mark.parametrize(("kind", "projects"), [("recurrence", True), ("look-up", False), ("scan", True)])
def test_blocks_without_products(kind, projects):
    """They gave no places: "can be cut into 1 pieces"."""
    case = whole_models.Case(Blocks(kind, projects), random(4, 6, 4), square)
    pipe, _ = plain_whole.check(case, num_stages=4, num_microbatches=2)
    assert max(pipe.partition.costs) < 0.4 * sum(pipe.partition.costs)


class WithoutParameters(nn.Module):
    def __call__(self, x):
        return jnp.sin(jnp.cumsum(x, 1))


class Looped(nn.Module):
    """All of the work is in a loop whose trips share their weights."""

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (4, 4), x.dtype)
        _, y = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1] @ kernel)), (0, x))
        return y


class Mixed(nn.Module):
    """Weights are used in two places, in one of them by the operation that uses others too."""

    marked: bool = False

    @nn.compact
    def __call__(self, x):
        first, *others = (self.param(name, nn.initializers.lecun_normal(), (4, 4), x.dtype) for name in "abc")
        x = jnp.tanh(x @ first)
        x = jnp.tanh(x @ (first @ others[0] @ others[1]))
        x = jpipe.cut(x) if self.marked else x
        return nn.Dense(4, param_dtype=x.dtype)(x)


class Writes(nnx.Module):
    """A model that writes one of its parameters."""

    def __init__(self, rngs):
        self.a, self.b = nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        x = self.a(x)
        self.a.bias[...] = self.a.bias[...] + x.mean(0)
        return self.b(x)


def of_inputs(model, read):
    return pipeline(model, inputs=read)


WRITES = r"Writes.* writes its parameter a/bias, as only the optimiser may"
CUTS = r"1 pieces, .* use fewer stages or chunks, .* each piece has to use parameters"


@pytest.mark.parametrize(
    ("pipe", "batch", "message"),
    [
        (pipeline(WithoutParameters()), np.ones((4, 4)), CUTS),
        (
            pipeline(Looped()),
            np.ones((4, 4)),
            r"Looped can be cut into 1 pieces, but there are 2 virtual stages .* in a while "
            r"at test_whole_models.py:\d+; a loop is one operation",
        ),
        (pipeline(Chain("callback")), X, "calls back into Python"),
        (pipeline(MarkedOnce()), X, r"it has 1 marks \(jpipe.cut\), and with marks nothing else is a place"),
        # The error spoke of evaluation's places, and named neither the layer nor that it is in several pieces.
        (pipeline(Adapted()), X, r"uses adapter/bias, adapter/kernel in several places.*jpipe\.cut"),
        (pipeline(Mixed()), np.ones((4, 4)), r"Mixed uses a in several places, in one of them with other parameters"),
        (pipeline(lambda rngs: Writes(rngs)), np.ones((4, 4), np.float32), WRITES),
        (pipeline([lambda rngs: Writes(rngs)] * 2), np.ones((4, 4), np.float32), WRITES),
        (
            of_inputs(whole_models.Transformer(), lambda b: b["words"]),
            WORDS,
            r"inputs raised KeyError\('words'\) for the",
        ),
        (
            of_inputs(whole_models.Transformer(), lambda b: b["inputs"][:, :3]),
            WORDS,
            r"Transformer raised .*\n  it was called with int32",
        ),
    ],
)
def test_what_can_not_be_done(pipe, batch, message):
    """The error names the module, the place or the inputs."""
    with pytest.raises(ValueError, match=message):
        pipe.init(KEY, batch)


def test_remedies():
    """Fewer stages, and marks."""
    x, pipe = np.ones((4, 4)), pipeline(WithoutParameters(), num_stages=1)
    np.testing.assert_allclose(pipe.evaluate(pipe.init(KEY, x), x), square(WithoutParameters().apply({}, x), None))
    plain_whole.check(whole_models.Case(Mixed(marked=True), x, square), num_microbatches=2)


def test_lists_have_no_variables_of_one_model():
    pipe = pipeline([nn.Dense(4), nn.Dense(4)])
    variables = pipe.init(KEY, np.ones((4, 4)))
    with pytest.raises(ValueError, match=r"was given a list of layers, not one module; call pipe.layer_variables"):
        pipe.model_variables(variables)


# --- marks ------------------------------------------------------------------------------------------------------------


class Marked(nn.Module):
    """Four products, with one mark."""

    marked: bool = True

    @nn.compact
    def __call__(self, x):
        for i in range(4):
            x = jnp.tanh(nn.Dense(4, param_dtype=FLOAT)(x))
            x = jpipe.cut(x) if self.marked and i == 1 else x
        return x


def test_a_model_is_cut_where_it_is_marked():
    batch = np.ones((4, 4))
    assert [layer.name for layer in jpipe.layers_of(Marked(), batch)] == ["Dense_0+Dense_1", "Dense_2+Dense_3"]
    assert len(jpipe.layers_of(Marked(marked=False), batch)) == 4
    variables = Marked().init(KEY, batch)
    np.testing.assert_array_equal(Marked().apply(variables, batch), Marked(marked=False).apply(variables, batch))
    plain_whole.check(whole_models.Case(Marked(), batch, square))
