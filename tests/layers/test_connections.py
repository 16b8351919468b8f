"""Skips, side inputs and the first layer's own: exact under every cut, and clear errors for pairs that don't match."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jpipe
from cases import CUTS, check_by_hand, cut, some_slow
from jpipe.layers.adapt import as_layers
from jpipe.model.trace import trace_model

RNG = np.random.default_rng(0)
BATCH = {
    "inputs": RNG.normal(size=(8, 5)).astype(np.float32),
    "targets": RNG.normal(size=(8, 3)).astype(np.float32),
    "mask": (RNG.random(8) > 0.3).astype(np.float32),
}


class Add(nn.Module):
    """Takes what the layer before gives and a skip."""

    @nn.compact
    def __call__(self, x, kept):
        return nn.Dense(x.shape[-1])(x) + kept


class Masked(nn.Module):
    """Takes a side input."""

    @nn.compact
    def __call__(self, x, mask):
        return nn.tanh(nn.Dense(x.shape[-1])(x)) * mask[..., None]


DENSE, ONE = nn.Dense(4), {"num_stages": 1, "num_microbatches": 1, "balance": "even"}


class Join(nn.Module):
    """Takes a pair, as two arguments."""

    @nn.compact
    def __call__(self, x, count):
        return nn.Dense(6)(x) + count


class Mix(nnx.Module):
    """Takes what it popped and read, in this order; what it popped is a pair."""

    def __init__(self, rngs):
        self.dense = nnx.Linear(6, 6, rngs=rngs)

    def __call__(self, x, kept, mask):
        values, count = kept
        return self.dense(x) * values + count * mask[:, None]


SCALE = jpipe.Layer(lambda key, x, kept: jnp.full(x.shape[-1], 0.5, jnp.float32), lambda w, x, kept: w * x - kept)


def count(x):
    return x, jnp.sign(x).astype(jnp.int32)


def all_sorts():
    """Skips of tuples and integers; a layer that pops and stashes, one that pops and reads; all sorts of layers."""
    return [
        jpipe.stash(nn.Dense(6), "a"),
        jpipe.stash(count, "pair"),
        Join(),
        jpipe.stash(jpipe.pop(Add(), "a"), "b"),
        jpipe.reads(jpipe.pop(lambda rngs: Mix(rngs), "pair"), lambda batch: batch["mask"]),
        jpipe.pop(SCALE, "b"),
    ]


def all_sorts_by_hand(trees):
    a = nn.Dense(6).apply(trees[0], BATCH["inputs"])
    pair = count(a)
    b = Add().apply(trees[3], Join().apply(trees[2], *pair), a)
    dense = trees[4]["params"]["dense"]
    x = (b @ dense["kernel"] + dense["bias"]) * pair[0] + pair[1] * BATCH["mask"][:, None]
    return jnp.mean((trees[5] * x - b)[:, :3] * BATCH["targets"])


@pytest.mark.parametrize("case", some_slow(CUTS), ids=str)
def test_all_sorts_of_connections(case):
    with jax.numpy_dtype_promotion("standard"):
        pipe = cut(all_sorts(), lambda y, batch: jnp.mean(y[:, :3] * batch["targets"]), case)
        check_by_hand(pipe, BATCH, all_sorts_by_hand)


def test_alike_layers_with_skips_of_their_own_are_one_group():
    """Compiled once, although every block has another name for its skip and another lambda for its mask."""

    def block(i):
        return [
            jpipe.stash(nn.Dense(5), f"skip {i}"),
            jpipe.reads(Masked(), lambda batch: batch["mask"]),
            jpipe.pop(Add(), f"skip {i}"),
        ]

    shapes = jax.eval_shape(lambda: BATCH)
    layers = as_layers([nn.Dense(5), *[layer for i in range(4) for layer in block(i)], nn.relu])
    model = trace_model(layers, lambda batch: batch["inputs"], shapes)
    assert [group.layer.name for group in model.groups[1:-1]] == ["Dense", "Masked", "Add"]  # between the model's ends


def temporaries(last_use, m):
    """Bytes on a device of a model whose first stage has a wide layer; `last_use` pops what it stashes."""
    wide = jpipe.Layer(lambda key, x: jnp.ones((5, 1000), jnp.float32), lambda w, x: x @ w)
    layers = [nn.Dense(5), wide, *(nn.Dense(5) for _ in range(10))]
    if last_use:
        layers[1] = jpipe.stash(wide, "wide")
        layers[last_use] = jpipe.pop(Narrow(), "wide")
    pipe = jpipe.Pipeline(layers, lambda y, _: jnp.mean(y), num_stages=4, num_microbatches=m, balance=[6, 2, 2, 2])
    batch = {"inputs": jax.ShapeDtypeStruct((100 * m, 5), jnp.float32)}
    variables = jax.eval_shape(pipe.init, jax.random.key(0), batch)
    return jax.jit(pipe.value_and_grad).lower(variables, batch).compile().memory_analysis().temp_size_in_bytes


class Narrow(nn.Module):
    @nn.compact
    def __call__(self, x, kept):
        return nn.Dense(5)(x) + kept.sum(-1, keepdims=True)


def test_skips_are_freed():
    """Within a stage one takes memory for itself and its cotangent; across stages, a row a micro-batch in flight.

    What crosses does so while the next slot runs, and takes another row meanwhile.
    """
    size = 100 * 1000 * 4
    none, within, across = temporaries(None, 8), temporaries(4, 8), temporaries(11, 8)
    assert within - none < 3.5 * size
    assert across - none < 7 * size
    assert temporaries(11, 16) < across + 0.1 * size


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: [jpipe.stash(DENSE, "a"), DENSE], r"layer 0 \(Dense\) stashes 'a', which no later layer pops"),
        (lambda: [DENSE, jpipe.pop(Add(), "a")], r"layer 1 \(Add\) pops 'a', which no earlier layer stashes"),
        (lambda: [*[jpipe.stash(DENSE, "a")] * 2, jpipe.pop(Add(), "a")], r"1 \(Dense\) stashes 'a', as layer 0 does"),
        (
            lambda: [jpipe.stash(DENSE, "a"), *[jpipe.pop(Add(), "a")] * 2],
            r"layer 2 \(Add\) pops 'a', as layer 1 does; pop a second skip",
        ),
        (lambda: [jpipe.stash(DENSE, 3)], "name has to be a non-empty string"),
        (lambda: [jpipe.reads(DENSE, "mask")], "pass a function of the batch"),
        (lambda: [jpipe.stash(jpipe.stash(DENSE, "a"), "b")], "applied twice to the layer Dense"),
        (
            lambda: [jpipe.reads(Add(), lambda batch: batch["targets"])],
            r"layer 0 \(Add\) raised TypeError at test_conn.*py:.*",
        ),
        (
            lambda: [DENSE, jpipe.reads(Masked(), lambda batch: batch["none"])],
            r"layer 1 \(Masked\) can't read a side input from {.*}: KeyError\('none'\); pass the whole batch",
        ),
    ],
)
def test_connections_that_cannot_be(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        jpipe.Pipeline(make(), lambda y, _: jnp.mean(y), **ONE).init(jax.random.key(0), BATCH)


def test_side_inputs_are_read_from_the_whole_batch():
    layers = [DENSE, jpipe.reads(Masked(), lambda batch: batch["mask"])]
    pipe = jpipe.Pipeline(layers, lambda y, _: jnp.mean(y), **ONE)
    variables = pipe.init(jax.random.key(0), BATCH)
    with pytest.raises(ValueError, match=r"layer 1 \(Masked\) reads a side input; pass the whole batch"):
        pipe.apply(variables, BATCH["inputs"])
