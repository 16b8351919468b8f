"""Random models, one module each, train as in plain JAX: skips, ties, scans, branches that meet, state, dropout."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import compiled_once
import jpipe
import plain_whole
import whole_models

ROWS, WIDTHS = 8, (3, 4, 6)
FLOAT = jnp.float64


class Step(nn.Module):
    """A block of a scan."""

    width: int

    @nn.compact
    def __call__(self, x, scale):
        y = nn.LayerNorm(param_dtype=FLOAT)(x)
        return x + scale * nn.Dense(x.shape[-1], param_dtype=FLOAT)(
            nn.gelu(nn.Dense(self.width, param_dtype=FLOAT)(y))
        ), None


class Terms(nn.Module):
    """A block that adds a number, which follows from its weights alone."""

    @nn.compact
    def __call__(self, x):
        a = self.param("a", nn.initializers.normal(0.4, FLOAT), (x.shape[-1], x.shape[-1]))
        return x + jnp.tanh(x) @ a + 0.1 * jnp.sum(a**2)


class Random(nn.Module):
    """A model of operations by name, each with a number, on an activation and the ones that were kept.

    Attributes:
      steps: (operation, number) in order.
    """

    steps: tuple[tuple[str, int], ...]

    @nn.compact
    def __call__(self, x, mask, train: bool = False):
        dense = lambda width, x: nn.Dense(width, param_dtype=FLOAT)(x)
        tied = [nn.Dense(width, param_dtype=FLOAT, name=f"tied_{width}") for width in WIDTHS]
        kept, beside = [x], []
        scanned = lambda length: nn.scan(
            Step, {"params": 0}, split_rngs={"params": True}, length=length, in_axes=nn.broadcast
        )
        operations = {
            "dense": lambda n, w, x: jnp.tanh(dense(w, x)),
            "block": lambda n, w, x: x + dense(x.shape[-1], nn.gelu(dense(2 * w, x))),
            "branches": lambda n, w, x: jnp.sin(dense(w, x)) * dense(w, nn.relu(x)) + dense(w, x),
            "keep": lambda n, w, x: kept.append(x) or x,
            "join": lambda n, w, x: dense(w, jnp.concatenate([x, kept[n % len(kept)]], -1)),
            "add": lambda n, w, x: x + dense(x.shape[-1], kept[n % len(kept)]),
            "tied": lambda n, w, x: jnp.tanh(tied[n % len(WIDTHS)](dense(4, x))),
            "scan": lambda n, w, x: scanned(2 + n % 2)(w)(x, mask.mean())[0],
            "remat": lambda n, w, x: nn.remat(nn.Dense)(w, param_dtype=FLOAT)(jnp.cos(x)),
            "norm": lambda n, w, x: nn.BatchNorm(not train, param_dtype=FLOAT, momentum=0.9)(x),
            "dropout": lambda n, w, x: nn.Dropout(0.3, deterministic=not train)(x),
            "mask": lambda n, w, x: x * jnp.cumsum(mask)[:, None],
            "cast": lambda n, w, x: x + x.astype(jnp.float32).astype(FLOAT),
            "terms": lambda n, w, x: Terms()(x),
            "head": lambda n, w, x: beside.append(dense(2, x)) or x,
        }
        for operation, number in self.steps:
            x = operations[operation](number, WIDTHS[number % len(WIDTHS)], x)
        # Heads beside the last one are for training alone.
        return dense(2, x) + (sum(beside) if train else 0.0)


@st.composite
def models(draw: st.DrawFn) -> Random:
    """Models of up to eleven operations."""
    names = [
        *("dense", "block", "branches", "keep", "join", "add", "tied", "scan", "remat", "norm", "dropout", "mask"),
        *("cast", "terms", "head"),
    ]
    steps = draw(st.lists(st.tuples(st.sampled_from(names), st.integers(0, 5)), min_size=3, max_size=9))
    return Random((("dense", 1), *steps, ("dense", 0)))


SETTINGS = st.sampled_from(
    [
        {"num_stages": 2},
        {"num_stages": 3, "remat": "none"},
        {"num_stages": 2, "schedule": "zero_bubble", "remat": "none"},
        {"num_stages": 2, "num_chunks": 2, "schedule": "interleaved"},
        {"num_stages": 4, "schedule": "gpipe", "remat": "stage"},
    ]
)


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


def batch():
    random = np.random.default_rng(0)
    return {"x": random.normal(size=(ROWS, 4)), "mask": random.uniform(size=ROWS)}


def loss_fn(outputs, batch):
    return ((outputs - batch["x"][:, :2]) ** 2).mean()


def inputs(batch):
    return batch["x"], batch["mask"]


def compare(model, options):
    """Compares initial values, loss, every gradient, outputs and running means of a model with plain JAX."""
    compiled_once.make_room()  # each model compiles programs of its own
    data = batch()
    pipe = jpipe.Pipeline(model, loss_fn, num_microbatches=2, inputs=inputs, **options)
    try:
        variables = pipe.init(jax.random.key(0), data)
    except ValueError as error:
        refusals = ("can be cut into", "in several places, ", "other things in evaluation")
        if any(words in str(error) for words in refusals):
            return
        raise
    case = whole_models.Case(model, data, loss_fn, inputs)
    own = plain_whole.made(case)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-14), pipe.model_variables(variables), own)
    plain_whole.check(case, variables=own, num_microbatches=2, **options)


EVERY = (("dense", 1), ("keep", 0), ("block", 1), ("scan", 1), ("tied", 1), ("norm", 0), ("branches", 2), ("mask", 0))


@pytest.mark.filterwarnings("ignore:.*look.* at several examples")
def test_a_model_of_everything():
    compare(
        Random((*EVERY, ("dropout", 0), ("join", 1), ("tied", 1), ("remat", 2), ("cast", 0), ("add", 0))),
        {"num_stages": 3},
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*look.* at several examples")
@given(models(), SETTINGS)
@settings(max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=[*HealthCheck])
def test_any_model(model, options):
    compare(model, options)
