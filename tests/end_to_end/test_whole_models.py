"""A model that is one module trains in a pipeline as it does in plain JAX, without a line of it changed."""

import functools
from typing import Any

import flax.core
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jpipe
import plain_whole
import sequential
import whole_models
from cases import assert_close

KEY, FLOAT = jax.random.key(plain_whole.SEED), jnp.float64
CASES, SLOW = whole_models.cases(), pytest.mark.slow


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
BY_DEFAULT = {("tied", "spread")}
"""`test_on_a_mesh` has a scan and dropout, `test_random_models` remat, `test_whole_checkpoints` chunks in turn,
`test_registry_models` a convolution, `test_corners_equal_the_plain_model` running averages,
`test_models_train_in_stages` U-Net and translation."""


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(name, options, marks=[] if (name, options) in BY_DEFAULT else SLOW)
        for name in CASES
        for options in OPTIONS
    ],
)
def test_equals_the_plain_model(name, options):
    plain_whole.check(CASES[name], **OPTIONS[options])


@pytest.mark.parametrize("axis", [pytest.param("data", marks=SLOW), "model"])
def test_on_a_mesh(axis, make_mesh):
    """After a pipeline on another: a regression, as slices of a scan's random keys remembered the first one's mesh."""
    case = CASES["dropout"]
    first = pipeline(case.model, case.loss, num_stages=3, num_microbatches=4)
    jax.eval_shape(first.value_and_grad, jax.eval_shape(first.init, KEY, case.batch), case.batch, KEY)
    plain_whole.check(case, mesh=make_mesh((2, 2), ("stage", axis)), outputs=False)


@pytest.mark.slow
def test_frozen_parameters():
    plain_whole.check(CASES["loop"], frozen=lambda path: path.startswith(("h_0", "table")))  # all of some layers


@pytest.mark.parametrize("name", ["tied", pytest.param("scan", marks=SLOW), "ready nnx"])
def test_initial_values_are_those_of_the_model(name):
    case = CASES.get(name) or NNX._replace(model=transformer(nnx.Rngs(0)))
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
NNX = whole_models.Case(transformer, WORDS, whole_models.cross_entropy)


def test_a_model_of_nnx():
    plain_whole.check(NNX)


class Drops(nnx.Module):
    """Residual blocks, each with dropout: eleven in a list, two under `nnx.vmap`; noise, and a raw key."""

    def __init__(self, rngs):
        self.blocks = nnx.List([DropsOnce(rngs) for _ in range(11)])
        self.a_stack = nnx.split_rngs(splits=2)(nnx.vmap(DropsOnce))(rngs)
        self.raw, self.noise = nnx.RngKey(jax.random.PRNGKey(7), tag="raw"), rngs

    def __call__(self, x, train):
        for block in self.blocks:
            x = block(x)
        x = nnx.scan(lambda block, x: block(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.a_stack, x)
        keys = [self.noise.noise(), self.noise.noise(), jax.random.wrap_key_data(self.raw[...])] if train else []
        return x + sum(jax.random.normal(key, x.shape) for key in keys)


class DropsOnce(nnx.Module):
    def __init__(self, rngs):
        self.dense, self.dropout = nnx.Linear(4, 4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(jnp.tanh(self.dense(x)))


@pytest.mark.parametrize("ready", [False, True])
def test_streams_of_nnx(ready):
    """What docs/howto/your-model.md says of them, by plain nnx: from this alone the same numbers are drawn."""
    model, key, x = Drops(nnx.Rngs(0)), jax.random.key(5), random(4, 4)
    pipe = pipeline(model if ready else lambda rngs: Drops(rngs))
    tree = {"params": nnx.to_pure_dict(nnx.state(model, nnx.Param))}
    (loss, _), grads = pipe.value_and_grad(pipe.from_model_variables(tree, x), x, key=key)
    graphdef, params, keys, counts = nnx.split(model, nnx.Param, nnx.RngKey, nnx.RngCount)

    def started(m):
        streams = []
        for n, (path, stream) in enumerate(nnx.to_flat_state(keys)):
            start = jax.random.fold_in(jax.random.fold_in(key, m), n)
            if path == ("raw",):
                start = jax.random.key_data(start)
            elif path[0] == "a_stack":
                start = jax.random.split(start, (2,))
            streams.append((path, stream.replace(start)))
        return nnx.from_flat_state(streams)

    def plain(tree):
        own = jax.tree.map(lambda leaf: leaf, params)
        nnx.replace_by_pure_dict(own, tree["params"])
        zeros = [jax.tree.map(jnp.zeros_like, counts) for _ in range(2)]
        models = [nnx.merge(graphdef, own, started(m), zeros[m]) for m in range(2)]
        return square(jnp.concatenate([models[m](x[2 * m : 2 * m + 2], train=True) for m in range(2)]), x)

    wanted, wanted_grads = jax.jit(jax.value_and_grad(plain))(tree)
    assert len(nnx.to_flat_state(keys)) == 14
    assert_close(loss, wanted)
    assert_close(pipe.model_variables({"params": grads}), wanted_grads)


def test_what_nothing_uses_is_kept_and_what_counts_counts():
    case = whole_models.Case(Odd(), random(4, 4), square)
    pipe, variables = plain_whole.check(case, num_stages=3, num_microbatches=1)
    jax.tree.map(np.testing.assert_array_equal, pipe.model_variables(variables), plain_whole.made(case))
    (_, new), _ = pipe.value_and_grad(variables, case.batch)
    assert pipe.model_variables(new)["counts"]["calls"] == 1


# --- what users found: each once gave wrong numbers, or a bare error --------------------------------------------------

X = np.random.default_rng(0).normal(size=(8, 4))


def dense(width=4):
    return nn.Dense(width, param_dtype=FLOAT)


class Chain(nn.Module):
    """Four products, with something before or between them.

    Attributes:
      kind: what it does first: "callback", "norm", "noise"; or in each block: "print", "key"; or nothing.
      marks: the products behind which there is a mark.
      dtype: of the parameters.
    """

    kind: str = ""
    marks: tuple[int, ...] = ()
    dtype: Any = FLOAT

    @nn.compact
    def __call__(self, x, train: bool = False):
        if self.kind == "callback":
            jax.experimental.io_callback(lambda mean: None, None, x.mean())
        if self.kind == "norm":
            x = nn.BatchNorm(use_running_average=not train, param_dtype=self.dtype)(x)
        if self.kind == "noise" and train:
            x = x + jax.random.normal(self.make_rng("dropout"), x.shape)
        for i in range(4):
            x = jnp.tanh(nn.Dense(4, param_dtype=self.dtype)(x))
            if self.kind == "print":
                jax.debug.print("between {}", x.shape[0])
                jax.debug.print("mean {}", x.mean())
            if self.kind == "key":
                x = x + jax.random.normal(jax.random.key(7), x.shape)
            x = jpipe.cut(x) if i in self.marks else x
        return x


def test_prints_stay(capfd):
    pipe = pipeline(Chain("print"))
    pipe.evaluate(pipe.init(KEY, X), X)
    jax.effects_barrier()
    assert "mean" in capfd.readouterr().out


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


def keys_of(kind, key):
    """The keys of four blocks and of a head, made in the ways in which libraries make them."""
    match kind:
        case "fold_in":
            return [jax.random.fold_in(key, i) for i in range(5)]
        case "index":
            return [jax.random.split(key, 6)[1:][i] for i in range(5)]
        case "raw":
            key, blocks = jax.random.split(jax.random.key_data(key))
            return [*jax.random.split(blocks, 4), key]
        case "two by two":
            keys = jax.random.split(key, (2, 5))
            return [keys[1, i] for i in range(5)]


def own_block(key):
    w, b = jax.random.split(key)
    return {"w": jax.random.normal(w, (4, 4)), "b": jax.random.normal(b, (4,))}


apply_block = lambda p, x: jnp.tanh(x @ p["w"] + p["b"])


@pytest.mark.parametrize("kind", ["index", "raw", "two by two"])
def test_blocks_whose_keys_are_split_are_one_function(kind):
    """As they are with keys by `fold_in`, and `init` makes the plain model's values, bit for bit."""
    apply = lambda p, x: functools.reduce(lambda x, own: apply_block(own, x), p, x)
    model = lambda kind: jpipe.Layer(lambda key, x: list(map(own_block, keys_of(kind, key))), apply)
    for each in (kind, "fold_in"):
        assert [layer.same_as for layer in jpipe.layers_of(model(each), X)] == [0, 1, 1, 1, 4]
    key, pipe = jax.random.key(0), pipeline(model(kind))
    new = pipe.model_variables(pipe.init(key, X))
    jax.tree.map(np.testing.assert_array_equal, new, model(kind).init(key, X))


def test_listed_blocks_whose_keys_are_split_are_one_function():
    make = lambda i: jpipe.Layer(lambda key, x: own_block(jax.random.split(key, 5)[i]), apply_block)
    layers, key = list(map(make, range(5))), jax.random.key(0)
    pipe = pipeline(layers)
    new = pipe.layer_variables(pipe.init(key, X))
    assert [group.indices for group in pipe.plan.model.groups] == [(0,), (1, 2, 3), (4,)]
    wanted = [layer.init(sequential.init_key(key, i), X) for i, layer in enumerate(layers)]
    jax.tree.map(np.testing.assert_array_equal, new, wanted)


# --- weights and trees as people have them ----------------------------------------------------------------------------


SINGLE = Chain("norm", dtype=jnp.float32)  # as Flax makes parameters by default


class SingleNnx(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(5)])

    def __call__(self, x):
        for layer in self.layers:
            x = x + jnp.tanh(layer(x))
        return x


def cast(tree, dtype):
    return jax.tree.map(lambda leaf: leaf.astype(dtype), tree)


def dtypes_in(tree):
    return {str(leaf.dtype) for leaf in jax.tree.leaves(tree)} - {"int32"}


def single_squares(key, x):
    return cast(squares_of(key, x), jnp.float32)


@pytest.mark.parametrize(
    "model",
    [
        SINGLE,
        pytest.param(lambda rngs: SingleNnx(rngs), marks=SLOW),
        SingleNnx(nnx.Rngs(0)),
        pytest.param(jpipe.Layer(single_squares, through_squares), marks=SLOW),
    ],
    ids=["linen", "nnx factory", "nnx", "two functions"],
)
def test_weights_of_float64_for_a_model_of_float32(model):
    case = whole_models.Case(model, random(8, 3 if isinstance(model, jpipe.Layer) else 4), square)
    made = plain_whole.made(case)
    assert dtypes_in(made) == {"float32"}
    pipe, variables = plain_whole.check(case, variables=cast(made, FLOAT), num_microbatches=2)
    assert dtypes_in(variables) == dtypes_in(pipe.init(KEY, case.batch)) == {"float64"}


def test_weights_of_bfloat16_and_back():
    """The model has these dtypes from then on, until it is given others."""
    case, tx, pipe = whole_models.Case(SINGLE, X, square), optax.adam(0.1), pipeline(SINGLE)
    made = plain_whole.made(case)
    params, single = cast(made["params"], jnp.bfloat16), pipe.from_model_variables(made, X)
    state = pipe.create_state(KEY, X, tx, pipe.from_model_variables(made | {"params": params}))
    assert dtypes_in(state.variables["params"]) == dtypes_in(state.opt_state) == {"bfloat16"}
    with pytest.raises(ValueError, match="layers, balance, mesh or dtypes"):
        pipe.evaluate(single, X)
    mixed = params | {"Dense_0": made["params"]["Dense_0"]}
    with pytest.raises(ValueError, match="has the dtype float32, not bfloat16 as at init; cast it"):
        pipe.from_model_variables({"params": mixed})
    loss, _, gradients = plain_whole.plain(case, made | {"params": params}, 2, KEY)
    updates, opt_state = tx.update(gradients, tx.init(params), params)
    state, metrics = pipe.train_step(state, X)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    moments = pipe.model_variables({"params": state.opt_state[0].mu})["params"]
    for found, wanted in (
        (moments, opt_state[0].mu),
        (pipe.model_variables(state.variables)["params"], optax.apply_updates(params, updates)),
    ):
        assert dtypes_in(wanted) == {"bfloat16"}
        jax.tree.map(lambda a, b: np.testing.assert_allclose(*cast([a, b], FLOAT), rtol=0.02, atol=1e-3), found, wanted)
    single = pipe.from_model_variables(made)
    jax.tree.map(np.testing.assert_array_equal, pipe.model_variables(pipe.init(jax.random.key(0), X)), made)
    narrow = pipe.create_state(KEY, X, tx, cast(single, jnp.bfloat16))
    found = pipe.model_variables(narrow.variables)
    jax.tree.map(np.testing.assert_array_equal, found, cast(made, jnp.bfloat16))
    assert dtypes_in(narrow.opt_state) == dtypes_in(found) == {"bfloat16"}


def test_without_x64_numbers_of_float64_are_float32_as_jax_has_them():
    case, pipe = whole_models.Case(SINGLE, X.astype(np.float32), square), pipeline(SINGLE)
    made = jax.tree.map(np.asarray, plain_whole.made(case))
    with jax.enable_x64(False):
        variables = pipe.from_model_variables(cast(made, np.float64), case.batch)
        assert dtypes_in(variables) == dtypes_in(jax.tree.map(jnp.asarray, cast(made, np.float64))) == {"float32"}


def test_params_with_and_without_their_collection():
    """Of a `Layer` that `pipe.init` gives by collection, and of a Linen module that has nothing else."""
    for model in (Chain(), jpipe.Layer(squares_of, lambda params, x: through_squares(params, x[:, :3]))):
        pipe = pipeline(model)
        variables = pipe.init(KEY, X)
        tree = pipe.model_variables(variables)
        bare = tree["params"] if isinstance(model, Chain) else tree
        for given in (bare, {"params": bare}):
            jax.tree.map(np.testing.assert_array_equal, pipe.from_model_variables(given), variables)
        with pytest.raises(ValueError) as caught:
            pipe.from_model_variables({"params": {"params": [bare]}})
        assert len(str(caught.value)) < 300
    pipe = pipeline([dense(), dense()])
    items = pipe.layer_variables(variables := pipe.init(KEY, X))
    given = [items[0]["params"], flax.core.freeze(items[1])]
    jax.tree.map(np.testing.assert_array_equal, pipe.from_layer_variables(given), variables)


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


class Sampler(nn.Module):
    """Draws in evaluation too, or is handed a key (`asks`); what only has to be there in training is twice as much."""

    asks: bool = False

    @nn.compact
    def __call__(self, x, z_key=None, train: bool = False):
        for _ in range(3):
            x = x + jnp.tanh(dense(4)(x))
        z_key = z_key if self.asks else self.make_rng("noise")
        return dense(2)(x + (2 if train else 1) * jax.random.normal(z_key, x.shape))


class NnxSampler(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(4, width, param_dtype=FLOAT, rngs=rngs) for width in (4, 4, 4, 2)])
        self.rngs = rngs

    def __call__(self, x, train: bool = False):
        for layer in self.layers[:3]:
            x = x + jnp.tanh(layer(x))
        return self.layers[3](x + (2 if train else 1) * jax.random.normal(self.rngs.noise(), x.shape))


def at_noise(model, params, x, key, train):
    """The outputs for a micro-batch in plain Flax, by the key that jpipe has for it."""
    if isinstance(model, Sampler):
        if model.asks:
            return model.apply({"params": params}, x, jax.random.fold_in(key, 0x1A97), train=train)
        return model.apply({"params": params}, x, train=train, rngs={"noise": jax.random.fold_in(key, 1)})
    graph, _, rest = nnx.split(model(nnx.Rngs(0)), nnx.Param, ...)
    module = nnx.merge(graph, nnx.State(params), rest)
    module.rngs = nnx.Rngs(jax.random.fold_in(key, 0))
    return module(x, train=train)


@pytest.mark.parametrize(
    "model", [pytest.param(Sampler(), marks=SLOW), Sampler(asks=True), NnxSampler], ids=["linen", "inputs", "nnx"]
)
def test_random_numbers_in_evaluation(model):
    """They were refused, and so couldn't be trained."""
    model = model if isinstance(model, nn.Module) else lambda rngs: NnxSampler(rngs)
    batch = {"inputs": random(8, 4)}
    inputs = (lambda batch, key: (batch["inputs"], key)) if getattr(model, "asks", False) else None
    pipe = pipeline(model, num_microbatches=4, inputs=inputs)
    variables = pipe.init(KEY, batch)
    params = jax.device_get(pipe.model_variables(variables)["params"])

    def outputs(params, train):
        parts = enumerate(np.split(batch["inputs"], 4))
        each = [at_noise(model, params, part, jax.random.fold_in(KEY, m), train) for m, part in parts]
        return jnp.concatenate(each)

    expected = jax.jit(jax.value_and_grad(lambda params: (outputs(params, True) ** 2).mean()))(params)
    evaluated = jax.jit(lambda params: outputs(params, False))(params)
    (loss, _), grads = pipe.value_and_grad(variables, batch, KEY)
    assert_close((loss, pipe.model_variables({"params": grads})["params"]), expected)
    assert_close(pipe.apply(variables, batch, KEY), evaluated)
    assert_close(pipe.evaluate(variables, batch, KEY), (evaluated**2).mean())
    for call in (pipe.apply, pipe.evaluate):
        with pytest.raises(ValueError, match=r"random .*pipe.evaluate\(.*key\)"):
            call(variables, batch)
    assert pipe.check_gradients(variables, batch, KEY).agrees
    assert len(jpipe.layers_of(model, batch, square, inputs=inputs)) == len(pipe.plan.layers)


class Guarded(nn.Module):
    """Draws if there is a random key; without one it is `quiet`, or fails."""

    quiet: bool

    @nn.compact
    def __call__(self, x, train: bool = False):
        for _ in range(3):
            x = jnp.tanh(dense(4)(x))
        if not (train or self.quiet or self.is_initializing()):
            raise NotImplementedError("no evaluation")
        return x + jax.random.normal(self.make_rng("dropout"), x.shape) if self.has_rng("dropout") else x


def test_evaluation_is_planned_when_it_is_asked_for():
    """With a key and without one it may do other things; a model without any evaluation trains."""
    batch = {"inputs": random(8, 4)}
    pipe = pipeline(Guarded(quiet=True))
    variables = pipe.init(KEY, batch)
    plain = jax.device_get(pipe.model_variables(variables))
    outputs = Guarded(quiet=True).apply(plain, batch["inputs"])
    assert_close(pipe.apply(variables, batch), outputs)
    keys = [jax.random.fold_in(KEY, m) for m in range(2)]
    parts = zip(np.split(batch["inputs"], 2), keys, strict=True)
    drawn = [Guarded(quiet=True).apply(plain, part, rngs={"dropout": key}) for part, key in parts]
    assert_close(pipe.apply(variables, batch, KEY), np.concatenate(drawn))
    pipe = pipeline(Guarded(quiet=False))
    trained = pipe.value_and_grad(pipe.from_model_variables(plain, batch), batch, KEY)
    assert_close(trained[0][0], (np.concatenate(drawn) ** 2).mean())
    for key in (None, KEY):
        with pytest.raises(ValueError, match=r"Guarded raised NotImplementedError at .*: no evaluation"):
            pipe.evaluate(variables, batch, key)


class Taught(nn.Module):
    """In training there are classifiers behind blocks (`deep`), or the blocks are scaled by what they learn."""

    deep: bool

    @nn.compact
    def __call__(self, x, train: bool = False):
        x, beside = dense(4)(x), []
        for i in range(3):
            scale = (
                jnp.exp(self.param(f"scale_{i}", nn.initializers.zeros, (), FLOAT)) if train and not self.deep else 1.0
            )
            x = x + scale * jnp.tanh(dense(4)(x))
            beside.append(x)
        names = enumerate(beside[:2] if train and self.deep else [])
        heads = [nn.Dense(2, param_dtype=FLOAT, name=f"beside_{i}")(h) for i, h in names]
        return {"a": dense(2)(x), "b": jnp.stack(heads).mean(0) if heads else jnp.zeros((len(x), 2))}


@pytest.mark.parametrize("deep", [False, True], ids=["scales", "deep supervision"])
def test_parameters_that_only_training_has(deep):
    """They were refused with Flax's ScopeParamNotFoundError: a model was initialised in evaluation mode."""
    model, batch = Taught(deep), {"inputs": random(8, 4)}
    rngs = {"params": KEY, "dropout": jax.random.fold_in(KEY, 1)}
    tree = model.init(rngs, batch["inputs"], train=True)
    pipe = pipeline(model, squares, num_microbatches=4)
    variables = pipe.init(KEY, batch)
    assert_close(pipe.model_variables(variables), tree)
    loss = lambda params, train: squares(model.apply({"params": params}, batch["inputs"], train=train), batch)
    (found, _), grads = pipe.value_and_grad(pipe.from_model_variables(tree, batch), batch)
    expected = jax.jit(jax.value_and_grad(loss), static_argnums=1)(tree["params"], True)
    assert_close((found, pipe.model_variables({"params": grads})["params"]), expected)
    assert_close(pipe.evaluate(variables, batch), loss(tree["params"], False))
    for other in (tree["params"] | {"more": np.zeros(3)}, model.init(KEY, batch["inputs"])["params"]):
        with pytest.raises(ValueError, match=r"more|scale_0|beside_0"):
            pipe.from_model_variables({"params": other}, batch)


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
        pytest.param(Chain("noise"), square, id="noise in training", marks=SLOW),
        pytest.param(Chain("key"), square, id="a key among the constants"),
        pytest.param(*WITH_SCALE, id="outputs of parameters alone", marks=SLOW),
        pytest.param(jpipe.Layer(squares_of, lambda p, x: through_squares(p, x[:, :3])), square, id="two functions"),
        pytest.param(InParts(), square, id="a layer of which another place uses half", marks=SLOW),
        pytest.param(Mixed(marked=True), square, id="weights of two places, with a mark"),
        # The last block's gradients were zero, silently, where it added a sum that follows from its weights alone:
        # evaluation was cut one operation earlier than training, so two pieces had them, each its own copy.
        *(pytest.param(Auxiliary(u, 2 + 2 * (u == "a")), squares, id=u, marks=[SLOW] * (u == "a")) for u in USES),
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


@pytest.mark.parametrize(
    ("kind", "projects"), [("recurrence", True), pytest.param("look-up", False, marks=SLOW), ("scan", True)]
)
def test_blocks_without_products(kind, projects):
    """They gave no places: "can be cut into 1 pieces"."""
    case = whole_models.Case(Blocks(kind, projects), random(4, 6, 4), square)
    pipe, _ = plain_whole.check(case, num_stages=3, num_microbatches=2, outputs=False)
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


class Writes(nnx.Module):
    """A model that writes one of its parameters."""

    def __init__(self, rngs):
        self.a, self.b = nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        x = self.a(x)
        self.a.bias[...] = self.a.bias[...] + x.mean(0)
        return self.b(x)


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
        (pipeline(Chain(marks=(3,))), X, r"it has 1 marks \(jpipe.cut\), and with marks nothing else is a place"),
        # The error spoke of evaluation's places, and named neither the layer nor that it is in several pieces.
        (pipeline(Adapted()), X, r"uses adapter/bias, adapter/kernel in several places.*jpipe\.cut"),
        (pipeline(Mixed()), np.ones((4, 4)), r"Mixed uses a in several places, in one of them with other parameters"),
        (pipeline(lambda rngs: Writes(rngs)), np.ones((4, 4), np.float32), WRITES),
        (pipeline([lambda rngs: Writes(rngs)] * 2), np.ones((4, 4), np.float32), WRITES),
        (
            pipeline(whole_models.Transformer(), inputs=lambda b: b["inputs"][:, :3]),
            WORDS,
            r"Transformer raised .*\n  it was called with int32",
        ),
    ],
)
def test_what_can_not_be_done(pipe, batch, message):
    """The error names the module, the place or the inputs."""
    with pytest.raises(ValueError, match=message):
        pipe.init(KEY, batch)


def test_fewer_stages():
    """One of the remedies, for a model without parameters."""
    x, pipe = np.ones((4, 4)), pipeline(WithoutParameters(), num_stages=1)
    np.testing.assert_allclose(pipe.evaluate(pipe.init(KEY, x), x), square(WithoutParameters().apply({}, x), None))


def test_lists_have_no_variables_of_one_model():
    pipe = pipeline([nn.Dense(4), nn.Dense(4)])
    variables = pipe.init(KEY, np.ones((4, 4)))
    with pytest.raises(ValueError, match=r"was given a list of layers, not one module; call pipe.layer_variables"):
        pipe.model_variables(variables)


# --- marks ------------------------------------------------------------------------------------------------------------


def test_a_model_is_cut_where_it_is_marked():
    marked, batch = Chain(marks=(1,)), np.ones((4, 4))
    assert [layer.name for layer in jpipe.layers_of(marked, batch)] == ["Dense_0+Dense_1", "Dense_2+Dense_3"]
    assert len(jpipe.layers_of(Chain(), batch)) == 4
    variables = marked.init(KEY, batch)
    np.testing.assert_array_equal(marked.apply(variables, batch), Chain().apply(variables, batch))
    plain_whole.check(whole_models.Case(marked, batch, square))
