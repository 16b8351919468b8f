"""Models that people have, and those of the examples as one module each, train in a pipeline as in plain JAX."""

import importlib.util

import jax
import pytest
from package_models import MODELS

import jpipe
import plain_whole

OPTIONS = {
    "1f1b": {"num_stages": 4},
    "zero_bubble": {"num_stages": 3, "schedule": "zero_bubble", "remat": "none"},
    "interleaved": {"num_stages": 2, "schedule": "interleaved", "num_chunks": 2, "remat": "stage"},
    "data": {"num_stages": 2, "axes": ("data",)},
    "model": {"num_stages": 2, "axes": ("model",)},
    "shard_over": {"num_stages": 2, "axes": ("data",), "shard_over": ("data",)},
}
BY_DEFAULT = {("big_vision ViT", "model")}
"""Models of other kinds are in `test_whole_models`."""


@pytest.fixture(scope="module", autouse=True)
def float64():
    with plain_whole.in_float64():
        yield


def case_of(name, **options):
    package, make = MODELS[name]
    if package and importlib.util.find_spec(package) is None:  # which doesn't import it: the case does, as it needs
        pytest.skip(f"{package} isn't installed")
    return make(**options)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of small models: nothing is split over an axis
@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(name, options, marks=[] if (name, options) in BY_DEFAULT else pytest.mark.slow)
        for name in MODELS
        for options in OPTIONS
    ],
)
def test_equals_the_plain_model(name, options, make_mesh):
    """Loss and every gradient."""
    options = dict(OPTIONS[options])
    if axes := options.pop("axes", ()):
        options["mesh"] = make_mesh((options["num_stages"], 2), ("stage", *axes))
    plain_whole.check(case_of(name), num_microbatches=2, outputs=False, **options)


def test_blocks_of_a_scan_that_returns_pairs_are_equal():
    case = case_of("big_vision ViT")
    found = jpipe.layers_of(case.model, jax.tree.map(lambda a: a[:2], case.batch), case.loss)
    assert [layer.same_as for layer in found] == [0, 1, 2, 1, 2, 1, 2, 7]
