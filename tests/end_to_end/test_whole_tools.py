"""The tools take a model that is one module, and name what they show as the model does."""

import copy
import pickle

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpipe
import whole_models

KEY, FLOAT = jax.random.key(3), jnp.float64
CASES = whole_models.cases()
pytestmark = pytest.mark.filterwarnings("ignore:layer .* alone takes")


@pytest.fixture(scope="module", autouse=True)
def float64():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


class Chain(nn.Module):
    """Products between a table and a head."""

    width: int = 16

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(128, self.width, param_dtype=FLOAT, name="table")(tokens)
        for i in range(3):
            x = x + jnp.tanh(nn.Dense(self.width, param_dtype=FLOAT, name=f"h_{i}")(x))
        return nn.Dense(128, param_dtype=FLOAT, name="head")(x)


BATCH = whole_models.tokens("inputs", "targets")


def pipeline(model=None, loss=whole_models.cross_entropy, **options):
    return jpipe.Pipeline(model or Chain(), loss, **{"num_stages": 2, "num_microbatches": 4} | options)


def test_printed_it_has_the_names_of_the_model():
    """Once it has seen a batch; a copy sees its first batch anew."""
    pipe = pipeline()
    assert repr(pipe).startswith("Pipeline(Chain: cut at the first batch, num_stages=2")
    pipe.abstract_state(BATCH, optax.sgd(0.1))
    assert repr(pipe).startswith("Pipeline(Chain: 5 layers, num_stages=2")
    assert all(name in str(pipe) for name in ("table", "h_0", "h_2", "head")), str(pipe)
    for other in (copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))):
        assert "cut at the first batch" in repr(other)


def test_check_gradients_compares_with_the_module_itself():
    """With its dropout, its running averages, and what is frozen."""
    pipe = pipeline(jpipe.freeze(CASES["dropout"].model, lambda path: "table" in path))
    report = pipe.check_gradients(pipe.init(KEY, BATCH), BATCH, KEY)
    assert report.agrees, report
    paths = {(leaf.layer, leaf.path) for leaf in report.leaves}
    assert ("3 (blocks/1/attention)", "blocks/LayerNorm_0/scale[1]") in paths
    assert not any("table" in path for _, path in paths)


def test_a_reference_takes_the_models_own_tree():
    pipe, model = pipeline(), Chain()
    reference = lambda tree, batch: whole_models.cross_entropy(model.apply(tree, batch["inputs"]), batch)
    assert pipe.check_gradients(pipe.init(KEY, BATCH), BATCH, reference=reference).agrees
    wrong = pipe.check_gradients(
        pipe.init(KEY, BATCH),
        BATCH,
        reference=lambda tree, batch: reference(tree, batch) + tree["params"]["h_1"]["bias"][0],
    )
    assert [leaf.path for leaf in wrong.differing if leaf.path != "loss"] == ["h_1/bias"]


def test_rules_of_state():
    case = CASES["resnet"]
    pipe = pipeline(whole_models.ResNet(), merge={"batch_stats": "last"}, num_microbatches=2)
    variables = dict(jax.jit(case.model.init)(KEY, case.batch["inputs"]))
    (_, new), _ = pipe.value_and_grad(pipe.from_model_variables(variables, case.batch), case.batch)
    run = jax.jit(lambda part: case.model.apply(variables, part, train=True, mutable=["batch_stats"])[1]["batch_stats"])
    pairs = pipe.model_variables(new)["batch_stats"], run(np.split(case.batch["inputs"], 2)[1])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), *pairs)


def test_communication_names_layers(make_mesh):
    found = pipeline(CASES["loop"].model, mesh=make_mesh((2, 2), ("stage", "model"))).communication(BATCH)
    assert "h_0/mlp 2-6" in {transfer.layer for transfer in found.transfers}


def test_plan_finds_settings_that_make_a_pipeline():
    options = {"num_stages": 2, "remat": "layer", "schedule": "1f1b", "ends": "own", "num_microbatches": 4}
    best = jpipe.plan(
        Chain(), whole_models.cross_entropy, BATCH, optax.adam(1e-3), topology="v5e:2x2", axes="data", **options
    )[0]
    assert len(best.options["balance"]) == 2
    pipeline(**best.options).abstract_state(BATCH, optax.sgd(0.1))


def test_forecast_and_view(tmp_path):
    pipe = pipeline()
    assert jpipe.forecast(pipe, BATCH, optax.adam(1e-3)).fits
    pipe.view(BATCH, path=tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "Chain: 5 layers" in page and "h_1" in page
