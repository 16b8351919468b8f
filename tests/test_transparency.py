"""The headline: the pipelined step equals the sequential model, in outputs, loss and every single gradient leaf."""

import itertools

import jax
import pytest

from helpers import MODELS, assert_close, model, pipeline

REMATS = {
    "none": "none",
    "layer": "layer",
    "stage": "stage",
    "full": "full",
    "policy": jax.checkpoint_policies.dots_saveable,
}
SIZES = [1, 3, 4, 6]  # M: below K, and no multiple of K, among them

# model, schedule, K, M, V, remat
CASES = [
    ("linen", "1f1b", 4, 4, 1, "layer"),
    ("linen", "gpipe", 3, 1, 1, "full"),
    ("linen", "interleaved", 2, 3, 3, "stage"),
    ("linen", "interleaved", 4, 6, 2, "none"),
    ("linen", "1f1b", 1, 3, 1, "none"),
    ("linen", "one slot", 2, 4, 1, "layer"),
    ("linen", "naive", 2, 4, 1, "policy"),
    ("alternating", "interleaved", 2, 4, 2, "layer"),
    ("alternating", "1f1b", 3, 3, 1, "none"),
    ("alternating", "gpipe", 4, 4, 1, "stage"),
    ("alternating", "1f1b", 1, 1, 1, "full"),
    ("nnx factories", "1f1b", 4, 6, 1, "none"),
    ("nnx factories", "interleaved", 3, 4, 2, "full"),
    ("nnx modules", "gpipe", 2, 3, 1, "layer"),
    ("nn.Sequential", "1f1b", 3, 4, 1, "policy"),
    ("plain", "1f1b", 3, 4, 1, "stage"),
    ("plain", "one slot", 4, 3, 1, "none"),
    ("mixed", "1f1b", 4, 3, 1, "layer"),
    ("mixed", "interleaved", 2, 4, 3, "none"),
    ("mixed", "naive", 3, 3, 1, "stage"),
    ("mixed", "gpipe", 1, 4, 1, "full"),
    ("mixed", "one slot", 4, 6, 1, "policy"),
]
ORDERS = [(name, k, 1) for name in ("naive", "gpipe", "1f1b", "one slot") for k in (1, 2, 3, 4)]
ORDERS += [("interleaved", k, v) for k, v in itertools.product((1, 2, 3, 4), (1, 2, 3))]


def product():
    """Every order (schedule x K x V) with four of M x remat in turn; for the other models with one in turn."""
    rest = list(itertools.product(SIZES, REMATS))
    turn = itertools.cycle(rest[::3] + rest[1::3] + rest[2::3])
    for (order, k, v), _ in itertools.product(ORDERS, range(4)):
        yield "linen", order, k, *swapped(next(turn), v)
    lengths = {"nnx factories": 7, "nnx modules": 7, "plain": 7, "nn.Sequential": 8, "alternating": 10, "mixed": 13}
    for (kind, length), (order, k, v) in itertools.product(lengths.items(), ORDERS):
        if k * v <= length:
            yield kind, order, k, *swapped(next(turn), v)


def swapped(choice, v):
    """(M, V, remat)."""
    m, remat = choice
    return m, v, remat


def name(case):
    kind, order, k, m, v, remat = case
    return f"{kind}-{order}-K{k}-M{m}-V{v}-{remat}"


def check(kind, order, k, m, v, remat, dtype):
    truth = model(kind, dtype)
    pipe = pipeline(truth, order, k, m, v, remat=REMATS[remat])
    variables = pipe.from_layer_variables(truth.trees, truth.batch)
    loss, outputs, grads = truth.truth
    (found, updates), gradients = pipe.value_and_grad(variables, truth.batch)
    assert updates == {}
    assert_close(found, loss, "loss")
    assert_close(pipe.layer_variables({"params": gradients}), grads, "gradients")
    assert_close(pipe.apply(variables, truth.batch), outputs, "outputs")
    assert_close(pipe.evaluate(variables, truth.batch), loss, "evaluation")


@pytest.mark.parametrize("case", CASES, ids=name)
def test_equals_the_sequential_model_in_float64(case):
    with jax.enable_x64(True):
        check(*case, "float64")


@pytest.mark.parametrize("case", [CASES[3], CASES[7], CASES[14], CASES[18]], ids=name)
def test_equals_the_sequential_model_in_float32(case):
    check(*case, "float32")


@pytest.mark.slow
@pytest.mark.parametrize("case", sorted(set(product()) - set(CASES)), ids=name)
def test_equals_the_sequential_model_whatever_is_combined(case):
    with jax.enable_x64(True):
        check(*case, "float64")


def test_every_model_is_in_the_table():
    assert {case[0] for case in CASES} == set(MODELS)
