"""Transparency for the networks people have: BatchNorm, dropout, skips, shared weights, masks, tuples passed on.

The reference is plain Flax (`sequential.py`): loss, every gradient leaf, running statistics and evaluation. Computed in
float64 with float32 parameters, so that what differs is no more than the last rounding.
"""

import functools
import sys
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jpipe
import sequential
from cases import assert_close

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from models import amoebanet, resnet, translation, unet

RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(8, 8, 8, 2)) + np.arange(8.0)[:, None, None, None] / 4
LABELS = RNG.integers(0, 3, 8).astype(np.int32)
TOKENS = np.where(np.arange(6) < RNG.integers(3, 7, 8)[:, None], RNG.integers(1, 11, (8, 6)), 0).astype(np.int32)
M = 4


class Example(NamedTuple):
    layers: list
    loss_fn: Any
    batch: Any
    rate: float = 0.1


class MaskedBlock(nn.Module):
    """Attention under a padding mask, then dropout."""

    @nn.compact
    def __call__(self, x, mask, train: bool):
        h = nn.LayerNorm(dtype=jnp.float64)(x)
        h = nn.MultiHeadDotProductAttention(2, dtype=jnp.float64)(h, mask=mask[:, None, None, :])
        return x + nn.Dropout(0.2, deterministic=not train)(h)


def tied():
    """A Transformer whose head is its embedding; a mask from the batch and a loss weighted by tokens."""
    table = jpipe.Shared(nn.Embed(11, 8, dtype=jnp.float64))
    blocks = [jpipe.reads(MaskedBlock(), lambda batch: batch["inputs"] > 0) for _ in range(4)]
    batch = {"inputs": TOKENS, "targets": np.roll(TOKENS, 1)}
    return Example([table, *blocks, nn.LayerNorm(dtype=jnp.float64), table.using("attend")], translation.loss_fn, batch)


def images(labels=LABELS):
    return {"inputs": IMAGES, "targets": labels}


@functools.cache
def example(name):
    wide = jnp.float64
    if name == "ResNet":
        return Example(resnet.small_resnet(3, (2, 1), 4, dropout=0.3, dtype=wide), resnet.loss_fn, images())
    if name == "U-Net":
        labels = RNG.integers(-1, 3, (8, 8, 8)).astype(np.int32)
        return Example(unet.unet(3, 2, 4, dtype=wide), unet.loss_fn, images(labels))
    if name == "tied":
        return tied()
    if name == "translation":
        batch = {"inputs": TOKENS, "targets": np.roll(TOKENS, 2, axis=0)[:, :5]}
        return Example(translation.translation(2, 32, 1, 16, 11, dtype=wide), translation.loss_fn, batch)
    layers = amoebanet.amoebanet(3, 8, 3, stem="small", decay=0.75, dropout=0.2, dtype=wide)
    return Example(layers, amoebanet.loss_fn, images(), 0.25)


EXAMPLES = ["ResNet", "U-Net", "tied", "translation", "AmoebaNet"]
KEY = 3


@functools.cache
def truth(name):
    """Each layer's variables, and what the sequential model makes of them."""
    layers, loss_fn, batch, rate = example(name)
    pipe = jpipe.Pipeline(layers, loss_fn, num_stages=1, num_microbatches=M, balance="even")
    shapes = jax.eval_shape(lambda key: pipe.layer_variables(pipe.init(key, batch)), jax.random.key(0))
    # matrices around 0, scales and variances around 1
    value = lambda a: (RNG.normal(size=a.shape) * (0.3 if a.ndim > 1 else 0.1) + (a.ndim < 2)).astype(a.dtype)
    items = sequential.own_items(layers, jax.tree.map(value, shapes))
    found = sequential.truth(layers, items, loss_fn, batch, key=jax.random.key(KEY), m=M, rate=rate)
    return items, found, sequential.evaluation(layers, items, loss_fn, batch)


def assert_same(found, expected, what):
    """Equal to the precision of the losses and logits, which the models compute in float32."""
    narrow = lambda a: np.asarray(a, np.float32)
    assert_close(narrow(found), narrow(expected), what)


def check(name, order, k, v, remat):
    layers, loss_fn, batch, _ = example(name)
    items, (loss, grads, states), (outputs, evaluation) = truth(name)
    sizes = {"num_stages": k, "num_microbatches": M, "num_chunks": v}
    pipe = jpipe.Pipeline(layers, loss_fn, **sizes, schedule=order, remat=remat, balance="even")
    variables = pipe.from_layer_variables(items, batch)
    (found, updates), gradients = pipe.value_and_grad(variables, batch, jax.random.key(KEY))
    assert_same(found, loss, "loss")
    of_first_use = sequential.own_items(layers, grads)
    for i, (tree, want, state) in enumerate(
        zip(pipe.layer_variables({"params": gradients, **updates}), of_first_use, states, strict=True)
    ):
        assert_close(tree.get("params", {}), want, f"gradients of layer {i}")
        narrow = jax.tree.map(lambda a: np.asarray(a, np.float32), state)
        assert_close({n: t for n, t in tree.items() if n != "params"}, narrow, f"state of layer {i}")
    return pipe, variables, outputs, evaluation


@pytest.fixture(autouse=True)
def _wide():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):  # Flax's own layers promote
        yield


CASES = [("tied", "1f1b", 4, 1, "none")]
POLICY = jax.checkpoint_policies.dots_saveable


REMATS = ["none", "layer", "stage", "full", POLICY]
# Each model with every schedule, on two or four stages, and every remat.
GRID = [
    (name, order, 2 if v > 1 else (2, 4)[i % 2], v, remat)
    for name in EXAMPLES
    for order, v in [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)]
    for i, remat in enumerate(REMATS[::2] if name == "AmoebaNet" else REMATS)  # whose cells take minutes to compile
]


def name(case):
    *first, remat = case
    return "-".join(map(str, [*first, "policy" if remat is POLICY else remat]))


@pytest.mark.parametrize("case", CASES, ids=name)
def test_equals_the_sequential_model(case):
    pipe, variables, _, evaluation = check(*case)
    assert_same(pipe.evaluate(variables, example(case[0]).batch), evaluation, "evaluation")


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in GRID if case not in CASES], ids=name)
def test_equals_the_sequential_model_whatever_is_combined(case):
    pipe, variables, outputs, _ = check(*case)
    assert_same(pipe.apply(variables, example(case[0]).batch), outputs, "outputs")
