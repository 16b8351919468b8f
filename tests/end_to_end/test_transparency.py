"""The headline: the pipelined step equals the sequential model, in outputs, loss and every single gradient leaf."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jpipe
import sequential
from cases import assert_close, assert_step_equals, check_step, model, names, one_slot_from_k, pipeline
from device_programs import DEVICES, devices_of, programs_of
from published import published_of, schedule_of

REMATS = {
    "none": "none",
    "layer": "layer",
    "stage": "stage",
    "full": "full",
    "policy": jax.checkpoint_policies.dots_saveable,
}
SIZES = [1, 3, 4, 6]  # M: below K, and no multiple of K, among them

# model, schedule, K, M, V, remat; of every kind of layer and of remat, and schedules with either kind of backward
BY_DEFAULT = [
    ("linen", "1f1b", 4, 4, 1, "layer"),
    ("nnx factories", "1f1b", 4, 6, 1, "none"),
    ("plain", "1f1b", 3, 4, 1, "stage"),
    ("mixed", "zero_bubble", 4, 6, 1, "policy"),
    ("nnx modules", "zb-v", 2, 4, 2, "none"),
]
IN_TEST_ALL = [
    ("linen", "interleaved", 2, 3, 3, "stage"),
    ("linen", "1f1b", 1, 3, 1, "none"),
    ("nn.Sequential", "1f1b", 3, 4, 1, "policy"),
    ("alternating", "one slot", 2, 4, 1, "layer"),
    ("mixed", "gpipe", 1, 3, 1, "full"),
    ("mixed", "naive", 3, 3, 1, "stage"),
    ("mixed", "ahead", 3, 6, 1, "stage"),
]
CASES = [*BY_DEFAULT, *IN_TEST_ALL]
IN_FLOAT32 = ("linen", "interleaved", 4, 6, 2, "none")
ORDERS = [
    (name, k, v)
    for v in (1, 2, 3)
    for name in [*names(chunks=v, train=True, split=None), *["one slot"] * (v == 1), *published_of(v)]
    for k in (1, 2, 3, 4)
]


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


def runs(case):
    """Whether the backward of a case has what it needs: one in two parts, residuals."""
    _, order, k, m, v, remat = case
    in_two_parts = order != "one slot" and schedule_of(order, k, m, v).splits  # dualpipe-v if M > 1
    return not in_two_parts or REMATS[remat] not in ("stage", "full")


def name(case):
    kind, order, k, m, v, remat = case
    return f"{kind}-{order}-K{k}-M{m}-V{v}-{remat}"


def check(case, dtype):
    with programs_of(name(case)):
        check_program(*case, dtype)


def check_program(kind, order, k, m, v, remat, dtype):
    truth = model(kind, dtype)
    pipe = pipeline(truth, order, k, m, v, remat=REMATS[remat])
    variables, _ = check_step(pipe, truth)
    assert_close(pipe.evaluate(variables, truth.batch), truth.truth[0], "evaluation")


COMBINED = sorted(filter(runs, set(product()) - set(CASES)))


@pytest.mark.filterwarnings("ignore:layer .* alone takes")  # of twelve virtual stages
@pytest.mark.parametrize(
    "case", [*BY_DEFAULT, *(pytest.param(case, marks=pytest.mark.slow) for case in IN_TEST_ALL + COMBINED)], ids=name
)
def test_equals_the_sequential_model_in_float64(case):
    with jax.enable_x64(True):
        check(case, "float64")


def test_equals_the_sequential_model_in_float32():
    check(IN_FLOAT32, "float32")


def test_a_third_of_the_cases_runs_the_program_for_each_kind_of_devices():
    for cases in (CASES, [*product()]):
        shares = [np.mean([devices_of(name(case)) == devices for case in cases]) for devices in DEVICES]
        assert min(shares) > 0.2 and max(shares) < 0.5


# --- 1F1B as papers draw it -------------------------------------------------------------------------------------------


def check_cells(k, m, **options):
    """A model with state and random numbers."""
    with jax.enable_x64(True):
        layers, items, batch, expected = sequential.cells(m)
        sizes = {"num_stages": k, "num_microbatches": m, "balance": "even"}
        pipe = jpipe.Pipeline(layers, sequential.squares, **sizes, **options)
        assert_step_equals(pipe, items, batch, jax.random.key(sequential.CELLS_KEY), expected)


@pytest.mark.parametrize(("k", "m", "remat"), [(2, 3, "none"), pytest.param(4, 6, "layer", marks=pytest.mark.slow)])
def test_state_and_random_numbers_are_those_of_the_forward_where_backwards_are_split(k, m, remat):
    check_cells(k, m, schedule="zero_bubble", remat=remat)


@pytest.mark.parametrize(("k", "m", "remat"), [(4, 6, "none"), pytest.param(2, 3, "stage", marks=pytest.mark.slow)])
def test_stage_k_runs_k_less_forwards_ahead_in_one_slot(k, m, remat):
    """The order of most papers, whose stage k holds min(M, K-k) micro-batches: run, and not only drawn."""
    schedule = one_slot_from_k(k, m)
    assert schedule.ticks.rows["residual"] == tuple(min(m, k - stage) for stage in range(k))
    check_cells(k, m, schedule=schedule, remat=remat)


def not_a_number(shape, dtype):
    """What memory may hold that nothing was written to."""
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.full(shape, jnp.iinfo(dtype).max, dtype)
    return jnp.full(shape, jnp.nan if jnp.issubdtype(dtype, jnp.inexact) else True, dtype)


@pytest.mark.parametrize(
    "case",
    [
        ("mixed", "interleaved", 2, 4, 2, "none"),
        pytest.param(("linen", "one slot", 2, 4, 1, "layer"), marks=pytest.mark.slow),
    ],
)
def test_nothing_is_read_that_was_not_written(case, monkeypatch):
    """A CPU gives zeros for an empty array, an accelerator whatever lies there."""
    monkeypatch.setattr(jax.lax, "empty", not_a_number)
    with jax.enable_x64(True):
        check_program(*case, "float64")
