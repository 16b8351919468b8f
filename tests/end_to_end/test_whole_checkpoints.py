"""A model that is one module is saved under its own names, and restored wherever it is cut."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import jpipe
import whole_models

pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning",  # of what orbax does not read to the end
    "ignore:Sharding info not provided",  # orbax alone
    "ignore:layer .* alone takes",
)
KEY, CASES = jax.random.key(3), whole_models.cases()
BATCH = CASES["scan"].batch


@pytest.fixture(scope="module", autouse=True)
def float64():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


def pipeline(model, loss=whole_models.cross_entropy, **options):
    return jpipe.Pipeline(model, loss, **{"num_stages": 2, "num_microbatches": 4} | options)


def rate_of(path, leaf):
    return "slow" if "mlp" in jax.tree_util.keystr(path) else "fast"


def by_path():
    """Other rates, and so other names in the optimiser's state, for the feed-forwards."""
    rates = {"slow": optax.adamw(1e-3, eps=1e-3), "fast": optax.adamw(1e-2, eps=1e-3)}
    labels = lambda params: jax.tree_util.tree_map_with_path(rate_of, params)
    return optax.chain(optax.clip_by_global_norm(1.0), jpipe.per_layer(optax.multi_transform(rates, labels)))


def saved(directory, pipe, state):
    with jpipe.Checkpointer(directory) as files:
        files.save(pipe, state, position=3)


def equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(nn.unbox(found)), jax.device_get(nn.unbox(expected)))


@pytest.mark.parametrize("tx", [lambda: optax.adam(1e-2, eps=1e-3), pytest.param(by_path, marks=pytest.mark.slow)])
def test_it_goes_on_where_the_model_is_cut_otherwise(tmp_path, tx, make_mesh):
    tx, model, pipe = tx(), whole_models.Transformer(style="scan"), pipeline(whole_models.Transformer(style="scan"))
    state, _ = pipe.train_step(pipe.create_state(KEY, BATCH, tx), BATCH)
    saved(tmp_path, pipe, state)
    other = pipeline(
        model, num_stages=4, num_chunks=3, schedule="interleaved", mesh=make_mesh((4, 2), ("stage", "data"))
    )
    with jpipe.Checkpointer(tmp_path) as files:
        again, position = files.restore(other, BATCH, tx)
    assert position == 3 and other.plan.model.num_layers > pipe.plan.model.num_layers
    equal(other.model_variables(again.variables), pipe.model_variables(state.variables))
    equal(jpipe.load_model(tmp_path), pipe.model_variables(state.variables))
    before, after = pipe.train_step(state, BATCH), other.train_step(again, BATCH)
    np.testing.assert_allclose(after[1]["loss"], before[1]["loss"], rtol=1e-12)
    pairs = (pipe.model_variables(before[0].variables), other.model_variables(after[0].variables))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), *map(nn.unbox, pairs))


def test_arrays_are_named_as_the_model_names_its_parameters(tmp_path):
    pipe = pipeline(whole_models.Transformer(style="scan", tied=True))
    saved(tmp_path, pipe, pipe.create_state(KEY, BATCH, by_path()))
    paths = lambda item: {
        "/".join(p) for p in ocp.tree.to_flat_dict(ocp.PyTreeCheckpointer().restore(tmp_path / "0" / item))
    }
    model, optimizer = paths("model"), paths("optimizer")
    kernel = "blocks/mlp/Dense_0/kernel"
    assert {"params/table/embedding", "params/norm/scale", *(f"params/{kernel}/{i}" for i in range(3))} <= model
    assert f"1/own/inner_states/slow/inner_state/0/mu/{kernel}/2" in optimizer
    assert "1/own/inner_states/fast/inner_state/0/nu/table/embedding" in optimizer
    assert "1/shared/inner_states/fast/inner_state/0/count" in optimizer
    with pytest.raises(ValueError, match=r"checkpoints of one module; read them by jpipe.load_model"):
        jpipe.load_layers(tmp_path)


def marked(is_marked):
    """A model with marks or without: a change of where it is cut."""

    class Chain(nn.Module):
        @nn.compact
        def __call__(self, x):
            for i in range(4):
                x = jnp.tanh(nn.Dense(4, param_dtype=x.dtype)(x))
                x = jpipe.cut(x) if is_marked and i == 1 else x
            return x

    return Chain()


def square(outputs, batch):
    return (outputs**2).mean()


def test_marks_may_come_later_but_no_other_parameters_be_frozen(tmp_path):
    tx = jpipe.per_layer(optax.adam(1e-2))
    batch = np.random.default_rng(0).normal(size=(4, 4))
    where = lambda path: path.startswith("Dense_1")
    pipe = pipeline(jpipe.freeze(marked(False), where), square)
    state, _ = pipe.train_step(pipe.create_state(KEY, batch, tx), batch)
    saved(tmp_path, pipe, state)
    other = pipeline(jpipe.freeze(marked(True), where), square)
    with jpipe.Checkpointer(tmp_path) as files:
        again, _ = files.restore(other, batch, tx)
    equal(other.model_variables(again.variables), pipe.model_variables(state.variables))
    other.train_step(again, batch)
    thawed = pipeline(marked(True), square)
    words = "frozen/Dense_1/bias is .* in the checkpoint and missing in the pipeline"
    with jpipe.Checkpointer(tmp_path) as files, pytest.raises(ValueError, match=words):
        files.restore(thawed, batch, tx)
    variables = thawed.from_model_variables(jpipe.load_model(tmp_path), batch)
    equal(thawed.model_variables(variables), pipe.model_variables(state.variables))


@pytest.mark.parametrize("is_list", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["whole", "list"])
def test_dtypes_come_back(tmp_path, is_list):
    """Of a model of float64 whose weights were cast: trained, or, of a list, kept beside those that are trained."""
    batch, tx = np.random.default_rng(0).normal(size=(4, 4)), optax.adam(1e-2)
    frozen = jpipe.freeze(nn.Dense(4, param_dtype=jnp.float64), lambda path: path == "kernel")
    make = lambda **options: pipeline([frozen] * 4 if is_list else marked(False), square, **options)
    pipe, other = make(), make(num_stages=4, num_microbatches=2)
    variables = pipe.init(KEY, batch)
    name = "frozen" if is_list else "params"
    variables[name] = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), variables[name])
    state, _ = pipe.train_step(pipe.create_state(KEY, batch, tx, variables), batch)
    saved(tmp_path, pipe, state)
    with jpipe.Checkpointer(tmp_path) as files:
        again, _ = files.restore(other, batch, tx)
    trees, load = ("layer_variables", "load_layers") if is_list else ("model_variables", "load_model")
    before, after = getattr(pipe, trees)(state.variables), getattr(other, trees)(again.variables)
    equal(after, before)
    equal(getattr(jpipe, load)(tmp_path), before)
    assert {leaf.dtype for leaf in jax.tree.leaves(again.variables[name])} == {jnp.dtype(jnp.bfloat16)}
    assert len({leaf.dtype for leaf in jax.tree.leaves(again.variables)}) == 1 + is_list
    losses = pipe.train_step(state, batch)[1]["loss"], other.train_step(again, batch)[1]["loss"]
    np.testing.assert_allclose(*losses, rtol=1e-9)


def test_what_does_not_fit_is_told_with_the_remedy(tmp_path):
    batch, layers = np.ones((4, 4)), [nn.Dense(4, param_dtype=jnp.float64)] * 4
    pipe, whole, tx = pipeline(layers, square), pipeline(marked(False), square), optax.sgd(0.1)
    saved(tmp_path / "layers", pipe, pipe.create_state(KEY, batch, tx))
    saved(tmp_path / "model", whole, whole.create_state(KEY, batch, tx))
    with pytest.raises(ValueError, match=r"checkpoints of a list of layers; read them by jpipe.load_layers\(directory"):
        jpipe.load_model(tmp_path / "layers")
    for name, other, words in (
        ("layers", whole, r"is a list of layers in the .* one module in the .*load_layers.*from_model_variables\(tree"),
        ("model", pipe, r"is one module in the checkpoint and a list .*load_model.*from_layer_variables\(trees"),
        ("model", pipeline(layers[:1], square, num_stages=1), r"is one module in the checkpoint"),
        (
            "model",
            pipeline(whole_models.Mlp(), square),
            r"Dense_0/kernel is float64\[4, 4\] in the checkpoint and .*load_model",
        ),
    ):
        with jpipe.Checkpointer(tmp_path / name) as files, pytest.raises(ValueError, match=words):
            files.restore(other, batch, tx)
