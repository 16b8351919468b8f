"""Sums of gradients over axes, and groups without layers where backwards are split."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jpipe
from cases import VOCABULARY, WIDTH, check_by_hand, check_step, make_model, pipeline, tokens, weighted_cross_entropy
from collectives import axes_of, in_loop, read


class Dense(nn.Module):
    """A residual block, on positions that `context` splits or on all of them: their kernels share a buffer."""

    splits: bool

    @nn.compact
    def __call__(self, x):
        over = P(None, "context", None) if self.splits else P(None, None, None)
        constrain = lambda x: x if jax.sharding.get_abstract_mesh().empty else jax.lax.with_sharding_constraint(x, over)
        return x + constrain(nn.tanh(nn.Dense(WIDTH, param_dtype=jnp.float64)(constrain(x))))


@pytest.fixture(scope="module")
def sequences():
    with jax.enable_x64(True):
        embed = nn.Embed(VOCABULARY, WIDTH, param_dtype=jnp.float64, dtype=jnp.float64)
        layers = [embed, *map(Dense, (True, False, True, False)), nn.Dense(VOCABULARY, param_dtype=jnp.float64)]
        return make_model(layers, weighted_cross_entropy, {name: array[:, :4] for name, array in tokens().items()})


def test_sums_over_an_axis_that_splits_no_parameter_are_taken_once(make_mesh, sequences):
    with jax.enable_x64(True):
        mesh = make_mesh((2, 2, 2), ("stage", "data", "context"))
        pipe = pipeline(sequences, "1f1b", 2, 3, mesh=mesh, balance="even")
        variables, _ = check_step(pipe, sequences)
        text = jax.jit(pipe.value_and_grad).lower(variables, sequences.batch).compile().as_text()
    kernel = 8 * WIDTH * WIDTH
    sums = [
        c for c in read(text) if c.kind == "all-reduce" and "context" in (axes_of(c, mesh) or ()) and c.bytes >= kernel
    ]
    assert sums and not any(map(in_loop, sums))
    np.testing.assert_equal([axes_of(c, mesh) for c in sums], [("data", "context")] * len(sums))


def test_a_group_without_layers_where_backwards_are_split():
    """A regression: of the layers of stage 0, which never splits, W was traced too, and read buffers without rows."""
    init = lambda columns: lambda key, x: jnp.full((x.shape[-1], columns), 0.1)
    dense = lambda columns: jpipe.Layer(init(columns), lambda w, x: jnp.tanh(x @ w))
    layers, options = [*[dense(4)] * 4, dense(9)], {"num_microbatches": 4, "balance": [4, 1], "remat": "none"}
    loss = lambda y, batch: jnp.mean((y - batch["inputs"].sum(-1, keepdims=True)) ** 2)
    pipe = jpipe.Pipeline(layers, loss, num_stages=2, schedule="zero_bubble", **options)
    with jax.enable_x64(True):
        batch = {"inputs": jax.random.normal(jax.random.key(1), (8, 4))}
        variables = pipe.init(jax.random.key(0), batch)
        step = pipe.planner.training_step(pipe.planner.for_training(batch))
        assert [step.groups_in(kind) for kind in "BIW"] == [[0, 1, 2], [2], [2]]
        chain = lambda weights: functools.reduce(lambda x, w: jnp.tanh(x @ w), weights, batch["inputs"])
        check_by_hand(pipe, batch, lambda weights: loss(chain(weights), batch), variables)
