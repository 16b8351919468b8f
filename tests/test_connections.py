"""Skips and side inputs: exact under every cut, and clear errors for pairs that don't match."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jpipe
from helpers import CUTS, assert_close, cut

RNG = np.random.default_rng(0)
BATCH = {
    "inputs": RNG.normal(size=(8, 5)).astype(np.float32),
    "targets": RNG.normal(size=(8, 3)).astype(np.float32),
    "mask": (RNG.random(8) > 0.3).astype(np.float32),
}


class Add(nn.Module):
    """Takes what the layer before gives and what was kept."""

    @nn.compact
    def __call__(self, x, kept):
        return nn.Dense(x.shape[-1])(x) + kept


class Masked(nn.Module):
    """Takes a side input."""

    @nn.compact
    def __call__(self, x, mask):
        return nn.tanh(nn.Dense(x.shape[-1])(x)) * mask[..., None]


PLAIN = [nn.Dense(8), nn.Dense(12), Masked(), nn.Dense(8), nn.Dense(12), Add(), nn.Dense(8), Add(), nn.Dense(3)]


def connected():
    layers = list(PLAIN)
    layers[1] = jpipe.stash(layers[1], "a")
    layers[2] = jpipe.reads(layers[2], lambda batch: batch["mask"])
    layers[3] = jpipe.stash(layers[3], "b")
    layers[5] = jpipe.pop(layers[5], "a")
    layers[7] = jpipe.pop(layers[7], "b")
    return layers


def loss_fn(outputs, batch):
    return jnp.mean((outputs - batch["targets"]) ** 2)


def sequential(trees):
    x, kept, extra = BATCH["inputs"], {}, {2: BATCH["mask"]}
    for i, (layer, tree) in enumerate(zip(PLAIN, trees, strict=True)):
        more = {5: ["a"], 7: ["b"]}.get(i, [])
        x = layer.apply(tree, x, *([extra[i]] if i in extra else []), *[kept[name] for name in more])
        if i in (1, 3):
            kept["ab"[i // 3]] = x
    return loss_fn(x, BATCH)


@pytest.mark.parametrize("case", CUTS, ids=str)
def test_equal_to_the_sequential_model(case):
    pipe = cut(connected(), loss_fn, case)
    variables = pipe.init(jax.random.key(0), BATCH)
    trees = jax.device_get(pipe.layer_variables(variables))
    expected, gradients = jax.value_and_grad(sequential)(trees)
    (loss, _), grads = pipe.value_and_grad(variables, BATCH)
    assert_close(loss, expected, "loss")
    assert_close(pipe.layer_variables({"params": grads}), gradients, "gradients")
    assert_close(pipe.evaluate(variables, BATCH), expected, "evaluation")


@pytest.mark.parametrize("counts", [[3], [1, 2], [2, 1], [1, 1, 1]])
def test_a_skip_under_every_cut(counts):
    layers = [jpipe.stash(nn.Dense(4), "x"), nn.Dense(4), jpipe.pop(Add(), "x")]
    sizes = {"num_stages": len(counts), "num_microbatches": 2}
    pipe = jpipe.Pipeline(layers, lambda y, _: jnp.mean(y**2), **sizes, balance=counts)
    variables = pipe.init(jax.random.key(0), BATCH["inputs"])

    def plain(trees):
        kept = nn.Dense(4).apply(trees[0], BATCH["inputs"])
        return jnp.mean(Add().apply(trees[2], nn.Dense(4).apply(trees[1], kept), kept) ** 2)

    trees = jax.device_get(pipe.layer_variables(variables))
    _, grads = pipe.value_and_grad(variables, BATCH["inputs"])
    assert_close(pipe.layer_variables({"params": grads}), jax.grad(plain)(trees), "gradients")


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([jpipe.stash(nn.Dense(4), "a"), nn.Dense(4)], r"layer 0 \(Dense\) stashes 'a', which no later layer pops"),
        ([nn.Dense(4), jpipe.pop(Add(), "a")], r"layer 1 \(Add\) pops 'a', which no earlier layer stashes"),
        ([jpipe.pop(Add(), "a"), jpipe.stash(nn.Dense(4), "a")], r"layer 0 \(Add\) pops 'a', which no earlier"),
        (
            [jpipe.stash(nn.Dense(4), "a"), jpipe.stash(nn.Dense(4), "a"), jpipe.pop(Add(), "a")],
            r"layer 1 \(Dense\) stashes 'a', as layer 0 does",
        ),
        (
            [jpipe.stash(nn.Dense(4), "a"), jpipe.pop(Add(), "a"), jpipe.pop(Add(), "a")],
            r"layer 2 \(Add\) pops 'a', which layer 1 has popped already",
        ),
    ],
)
def test_pairs_that_do_not_match(layers, message):
    with pytest.raises(ValueError, match=message):
        jpipe.Pipeline(layers, lambda y, _: jnp.mean(y), num_stages=1, num_microbatches=1)


def test_side_inputs_that_are_not_there():
    sizes = {"num_stages": 1, "num_microbatches": 1, "balance": "even"}
    layers = [nn.Dense(4), jpipe.reads(Masked(), lambda batch: batch["mask"])]
    pipe = jpipe.Pipeline(layers, lambda y, _: jnp.mean(y), **sizes)
    message = r"layer 1 \(Masked\) can't read its side input from the batch {.*}: its function raised KeyError: 'mask'"
    with pytest.raises(ValueError, match=message):
        pipe.init(jax.random.key(0), {"inputs": BATCH["inputs"]})
    variables = pipe.init(jax.random.key(0), BATCH)
    with pytest.raises(ValueError, match=r"can't read its side input.*pass the whole batch, to apply too"):
        pipe.apply(variables, BATCH["inputs"])


def test_wrong_arguments():
    with pytest.raises(TypeError, match="name has to be a non-empty string"):
        jpipe.stash(nn.Dense(4), 3)
    with pytest.raises(TypeError, match="pass a function of the batch"):
        jpipe.reads(nn.Dense(4), "mask")
    with pytest.raises(ValueError, match="applied twice to the same layer"):
        jpipe.stash(jpipe.stash(nn.Dense(4), "a"), "b")
