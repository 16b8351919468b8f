"""A model that is one module trains in a pipeline as it does in plain JAX, without a line of it changed."""

from operator import itemgetter

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jpipe
import whole_models
from jpipe.layers.calls import signature_of
from jpipe.memory.batches import default_inputs

KEY, FLOAT = jax.random.key(3), jnp.float64
CASES = whole_models.cases()


@pytest.fixture(scope="module", autouse=True)
def float64():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


def called(case, variables, batch, key=None):
    """(outputs, new state) of the model in plain Flax; in training if there is a key."""
    inputs = (case.inputs or default_inputs)(batch)
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    mode = {"train": key is not None} if "train" in signature_of(type(case.model).__call__) else {}
    if key is None:
        return case.model.apply(variables, *inputs, **mode), {}
    mutable = [name for name in variables if name != "params"]
    return case.model.apply(variables, *inputs, rngs={"dropout": key}, mutable=mutable, **mode)


def made(case):
    """New variables in plain Flax."""
    inputs = (case.inputs or default_inputs)(jax.tree.map(lambda a: a[:2], case.batch))
    return dict(jax.jit(case.model.init)(jax.random.key(0), *(inputs if isinstance(inputs, tuple) else (inputs,))))


def plain(case, variables, num_microbatches):
    """((loss, new states of the micro-batches), gradients) in plain JAX."""
    cut = jax.tree.map(lambda a: a.reshape(num_microbatches, -1, *a.shape[1:]), case.batch)
    parts = [jax.tree.map(itemgetter(m), cut) for m in range(num_microbatches)]

    def loss(params):
        losses, states = [], []
        for m, part in enumerate(parts):
            outputs, state = called(case, variables | {"params": params}, part, jax.random.fold_in(KEY, m))
            losses.append(case.loss(outputs, part))
            states.append(state)
        return sum(losses) / len(losses), states

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(variables["params"])


def same(found, expected, what=""):
    """Checks that every leaf agrees, measured by the largest element of all."""
    found, expected = nn.unbox(found), nn.unbox(expected)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    scale = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(expected))
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12 * scale, err_msg=what + jax.tree_util.keystr(path))


def pipeline(case, **options):
    options = {"num_stages": 2, "num_microbatches": 4} | options
    return jpipe.Pipeline(case.model, case.loss, inputs=case.inputs, **options)


OPTIONS = {
    "1f1b": {},
    "gpipe": {"schedule": "gpipe", "remat": "none", "num_stages": 3},
    "interleaved": {"schedule": "interleaved", "num_chunks": 2, "remat": "stage"},
    "zero_bubble": {"schedule": "zero_bubble", "remat": "none"},
    "spread": {"ends": "spread", "schedule": "v", "num_chunks": 2},
}
BY_DEFAULT = {("tied", "spread"), ("resnet", "interleaved")}
"""`test_on_meshes` has a scan, `test_a_second_pipeline_on_another_mesh` dropout, `test_random_models` remat,
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
    case = CASES[name]
    pipe, variables = pipeline(case, **OPTIONS[options]), made(case)
    (loss, states), expected = plain(case, variables, 4)
    placed = pipe.from_model_variables(variables, case.batch)
    (found, new_state), gradients = pipe.value_and_grad(placed, case.batch, KEY)
    np.testing.assert_allclose(found, loss, rtol=1e-13)
    same(pipe.model_variables({"params": gradients})["params"], expected)
    if new_state:
        found = jax.tree_util.tree_leaves_with_path(pipe.model_variables(new_state))
        means = jax.tree.leaves(jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *states))
        for (path, leaf), mean in zip(found, means, strict=True):
            if path[-1].key == "mean":  # of which the whole batch's is the mean
                np.testing.assert_allclose(leaf, mean.astype(leaf.dtype), rtol=1e-6)
    outputs, _ = jax.jit(lambda variables: called(case, variables, case.batch))(variables)
    same(pipe.apply(placed, case.batch), outputs)


@pytest.mark.parametrize("name", ["tied", "scan", "resnet"])
def test_initial_values_are_those_of_the_model(name):
    case = CASES[name]
    pipe = pipeline(case)
    found = pipe.model_variables(pipe.init(jax.random.key(0), case.batch))
    expected = made(case)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-13, atol=1e-15)


def test_variables_go_to_a_pipeline_of_other_cuts_and_back():
    case = CASES["scan"]
    variables = made(case)
    pipe, other = pipeline(case), pipeline(case, num_stages=3)
    there = pipe.model_variables(pipe.from_model_variables(variables, case.batch))
    again = other.model_variables(other.from_model_variables(there, case.batch))
    jax.tree.map(np.testing.assert_array_equal, again, variables)


def test_a_second_pipeline_on_another_mesh():
    """A regression: slices of a scan's random keys remembered the first pipeline's mesh."""
    case = CASES["dropout"]
    variables = made(case)
    (loss, _), _ = plain(case, variables, 4)
    for num_stages in (2, 3):
        pipe = pipeline(case, num_stages=num_stages)
        placed = pipe.from_model_variables(variables, case.batch)
        (found, _), _ = pipe.value_and_grad(placed, case.batch, KEY)
        np.testing.assert_allclose(found, loss, rtol=1e-13)


@pytest.mark.parametrize(("shape", "axes"), [((2, 2), ("stage", "data")), ((2, 2), ("stage", "model"))])
def test_on_meshes(shape, axes, make_mesh):
    case = CASES["scan"]
    pipe, variables = pipeline(case, mesh=make_mesh(shape, axes)), made(case)
    (loss, _), expected = plain(case, variables, 4)
    (found, _), gradients = pipe.value_and_grad(pipe.from_model_variables(variables, case.batch), case.batch, KEY)
    np.testing.assert_allclose(found, loss, rtol=1e-13)
    same(pipe.model_variables({"params": gradients})["params"], expected)


def test_training_is_that_of_the_model():
    case, tx = CASES["tied"], optax.sgd(0.1, 0.9)
    pipe, variables = pipeline(case), made(case)
    state = pipe.create_state(KEY, case.batch, tx, pipe.from_model_variables(variables, case.batch))
    params, opt_state = variables["params"], tx.init(variables["params"])
    for _ in range(3):
        (loss, _), gradients = plain(case, {"params": params}, 4)
        updates, opt_state = tx.update(gradients, opt_state, params)
        params = optax.apply_updates(params, updates)
        state, metrics = pipe.train_step(state, case.batch)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-12)
    same(pipe.model_variables(state.variables)["params"], params)


@pytest.mark.parametrize("is_ready", [False, True])
def test_nnx(is_ready):
    batch, module = whole_models.tokens("inputs", "targets"), whole_models.NnxTransformer(nnx.Rngs(0))
    graphdef, params, rest = nnx.split(module, nnx.Param, ...)

    def loss(params):
        return whole_models.cross_entropy(nnx.merge(graphdef, params, rest)(batch["inputs"]), batch)

    model = module if is_ready else whole_models.NnxTransformer
    pipe = jpipe.Pipeline(
        model if is_ready else lambda rngs: model(rngs), whole_models.cross_entropy, num_stages=2, num_microbatches=4
    )
    variables = pipe.init(KEY, batch)
    if not is_ready:
        variables = pipe.from_model_variables({"params": nnx.to_pure_dict(params)}, batch)
    expected_loss, expected = jax.jit(jax.value_and_grad(loss))(params)
    (found, _), gradients = pipe.value_and_grad(variables, batch, KEY)
    np.testing.assert_allclose(found, expected_loss, rtol=1e-13)
    same(pipe.model_variables({"params": gradients})["params"], nnx.to_pure_dict(expected))


def test_two_functions():
    init = lambda key, x: [jax.random.normal(k, (3, 3)) for k in jax.random.split(key, 4)]

    def apply(params, x):
        for w in params:
            x = x + jnp.tanh(x @ w)
        return x

    batch, loss = np.random.default_rng(0).normal(size=(8, 3)), lambda y, batch: (y**2).mean()
    pipe = jpipe.Pipeline(jpipe.Layer(init, apply), loss, num_stages=2, num_microbatches=2)
    variables = pipe.init(KEY, batch)
    params = init(KEY, batch)
    jax.tree.map(np.testing.assert_array_equal, pipe.model_variables(variables), params)
    (found, _), gradients = pipe.value_and_grad(variables, batch)
    expected, by_params = jax.value_and_grad(lambda p: loss(apply(p, batch), batch))(params)
    np.testing.assert_allclose(found, expected, rtol=1e-13)
    same(pipe.model_variables({"params": gradients}), by_params)


def square(outputs, batch):
    return (outputs**2).mean()


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


def test_what_nothing_uses_is_kept_and_what_counts_counts():
    batch, model = np.random.default_rng(0).normal(size=(4, 4)), Odd()
    pipe = jpipe.Pipeline(model, square, num_stages=3, num_microbatches=1)
    variables = dict(model.init(KEY, batch))
    placed = pipe.from_model_variables(variables, batch)
    jax.tree.map(np.testing.assert_array_equal, pipe.model_variables(placed), variables)
    (loss, new), gradients = pipe.value_and_grad(placed, batch)
    plain_loss = lambda params: square(model.apply(variables | {"params": params}, batch), batch)
    expected_loss, expected = jax.jit(jax.value_and_grad(plain_loss))(variables["params"])
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-13)
    same(pipe.model_variables({"params": gradients})["params"], expected)
    assert pipe.model_variables(new)["counts"]["calls"] == 1


def test_frozen_parameters():
    case = CASES["loop"]
    where = lambda path: path.startswith(("h_0", "table"))  # all of some layers
    frozen, variables = case._replace(model=jpipe.freeze(case.model, where)), made(case)
    (loss, _), expected = plain(case, variables, 4)
    pipe = pipeline(frozen)
    placed = pipe.from_model_variables(variables, case.batch)
    (found, _), gradients = pipe.value_and_grad(placed, case.batch, KEY)
    np.testing.assert_allclose(found, loss, rtol=1e-13)
    trained = {name: tree for name, tree in expected.items() if not where(name)}
    same(pipe.model_variables({"params": gradients})["params"], trained)


def test_prints_stay(capfd):
    class Prints(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(4, param_dtype=FLOAT)(x)
            jax.debug.print("between {}", x.shape[0])
            jax.debug.print("mean {}", x.mean())
            return nn.Dense(4, param_dtype=FLOAT)(x)

    batch = np.ones((4, 4))
    pipe = jpipe.Pipeline(Prints(), square, num_stages=2, num_microbatches=1)
    pipe.evaluate(pipe.init(KEY, batch), batch)
    jax.effects_barrier()
    assert "mean" in capfd.readouterr().out


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
        if self.kind == "gate":
            y = nn.LayerNorm(param_dtype=x.dtype)(x)
            return x + jnp.tanh(y) * jax.nn.sigmoid(y * weights(width))
        if self.kind == "filter":
            spectrum = jnp.fft.rfft(x, axis=1)
            return x + jnp.fft.irfft(spectrum * weights(*spectrum.shape[1:]), n=x.shape[1], axis=1)
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
    ("kind", "projects"),
    [
        ("recurrence", False),
        ("recurrence", True),
        ("gate", True),
        ("filter", False),
        ("look-up", False),
        ("scan", True),
    ],
)
def test_blocks_without_products(kind, projects):
    """They gave no places: "can be cut into 1 pieces"."""
    model, x = Blocks(kind, projects), np.random.default_rng(0).normal(size=(4, 6, 4))
    pipe = jpipe.Pipeline(model, square, num_stages=4, num_microbatches=2)
    variables = pipe.init(KEY, x)
    assert max(pipe.partition.costs) < 0.4 * sum(pipe.partition.costs)
    own = pipe.model_variables(variables)
    (loss, _), grads = pipe.value_and_grad(variables, x)
    expected, gradients = jax.value_and_grad(lambda own: square(model.apply(own, x), None))(own)
    np.testing.assert_allclose(loss, expected, rtol=1e-12)
    same(pipe.model_variables({"params": grads}), gradients)
    same(pipe.apply(variables, x), model.apply(own, x))


class WithoutParameters(nn.Module):
    def __call__(self, x):
        return jnp.sin(jnp.cumsum(x, 1))


def test_a_model_without_parameters_is_one_piece():
    """It was a raw error: "max() arg is an empty sequence"."""
    x, make = (
        np.ones((4, 4)),
        lambda stages: jpipe.Pipeline(WithoutParameters(), square, num_stages=stages, num_microbatches=2),
    )
    with pytest.raises(
        ValueError, match=r"1 pieces, .* use fewer stages or chunks, .* each piece has to use parameters"
    ):
        make(2).init(KEY, x)
    pipe = make(1)
    np.testing.assert_allclose(pipe.evaluate(pipe.init(KEY, x), x), square(WithoutParameters().apply({}, x), None))


# --- what can't be done -----------------------------------------------------------------------------------------------


class Looped(nn.Module):
    """All of the work is in a loop whose trips share their weights."""

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (4, 4), x.dtype)
        _, y = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1] @ kernel)), (0, x))
        return y


def test_too_few_places_are_told_with_the_largest_piece():
    pipe = jpipe.Pipeline(Looped(), square, num_stages=2, num_microbatches=2)
    with pytest.raises(
        ValueError,
        match=r"Looped can be cut into 1 pieces, but there are 2 virtual stages .* in a while "
        r"at test_whole_models.py:\d+; a loop is one operation",
    ):
        pipe.init(KEY, np.ones((4, 4)))


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


class InParts(nn.Module):
    """A layer is used whole, and later without its second half."""

    @nn.compact
    def __call__(self, x):
        first, second = (self.param(name, nn.initializers.lecun_normal(), (4, 4), x.dtype) for name in "ab")
        x = jnp.tanh(x @ jnp.concatenate([first, second], 1))[:, :4]
        for _ in range(3):
            x = x + jnp.tanh(nn.Dense(4, param_dtype=x.dtype)(x))
        return x @ first.T


def test_a_layer_of_which_another_place_uses_half():
    with jax.enable_x64(True):
        batch, model = np.random.default_rng(0).normal(size=(8, 4)), InParts()
        variables = model.init(KEY, batch)
        pipe = jpipe.Pipeline(model, square, num_stages=2, num_microbatches=2)
        (loss, _), grads = pipe.value_and_grad(pipe.from_model_variables(variables, batch), batch)
        expected = jax.value_and_grad(lambda v: square(model.apply(v, batch), batch))(variables)
        found = loss, pipe.model_variables({"params": grads})
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14), found, expected)


def test_ties_that_cannot_be_told_apart_are_named():
    pipe = jpipe.Pipeline(Mixed(), square, num_stages=2, num_microbatches=2)
    with pytest.raises(
        ValueError, match=r"Mixed uses a in several places, in one of them together with other parameters"
    ):
        pipe.init(KEY, np.ones((4, 4)))
    batch, model = np.ones((4, 4)), Mixed(marked=True)
    pipe, variables = jpipe.Pipeline(model, square, num_stages=2, num_microbatches=2), model.init(KEY, batch)
    found = pipe.evaluate(pipe.from_model_variables(variables, batch), batch)
    np.testing.assert_allclose(found, square(model.apply(variables, batch), batch), rtol=1e-13)


class Writes(nnx.Module):
    """A model that writes one of its parameters."""

    def __init__(self, rngs):
        self.a, self.b = nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        x = self.a(x)
        self.a.bias[...] = self.a.bias[...] + x.mean(0)
        return self.b(x)


@pytest.mark.parametrize("of_list", [False, True])
def test_parameters_that_a_step_would_write_are_named(of_list):
    model = lambda rngs: Writes(rngs)
    pipe = jpipe.Pipeline([model] * 2 if of_list else model, square, num_stages=2, num_microbatches=2)
    with pytest.raises(ValueError, match=r"Writes.* writes its parameter a/bias in training, which only the optimiser"):
        pipe.init(KEY, np.ones((4, 4), np.float32))


def test_lists_have_no_variables_of_one_model():
    batch = np.ones((4, 4))
    pipe = jpipe.Pipeline([nn.Dense(4), nn.Dense(4)], square, num_stages=2, num_microbatches=2)
    variables = pipe.init(KEY, batch)
    with pytest.raises(ValueError, match=r"was given a list of layers, not one module; call pipe.layer_variables"):
        pipe.model_variables(variables)


@pytest.mark.parametrize(
    ("model", "inputs", "message"),
    [
        (whole_models.Transformer(), lambda b: b["words"], r"inputs raised KeyError: 'words' for the batch"),
        (
            whole_models.Transformer(),
            lambda b: b["inputs"][:, :3],
            r"Transformer raised .*\n  it was called with int32",
        ),
        (whole_models.ResNet(), lambda b: b["inputs"], r"ResNet raised .*\n  it was called with int32\[4,6\]"),
    ],
    ids=["inputs", "shapes", "rank"],
)
def test_what_a_model_raises_is_told_with_what_it_was_called_with(model, inputs, message):
    batch = whole_models.tokens("inputs", "targets")
    pipe = jpipe.Pipeline(model, square, num_stages=2, num_microbatches=2, inputs=inputs)
    with pytest.raises(ValueError, match=message):
        pipe.init(KEY, batch)


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
    pipe = jpipe.Pipeline(Marked(), square, num_stages=2, num_microbatches=2)
    placed = pipe.from_model_variables(variables, batch)
    np.testing.assert_allclose(
        pipe.evaluate(placed, batch), square(Marked().apply(variables, batch), batch), rtol=1e-13
    )
