"""Numbers as people write them: of NumPy, of JAX, floats for bytes and seconds; others are refused at once, by name."""

import math
import re
from fractions import Fraction
from functools import partial
from pathlib import Path

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpipe
from jpipe.users_numbers import as_integer, as_number, integer_or_none

NO_INTEGERS = [
    4.0,
    np.float32(4),
    True,
    np.True_,
    "4",
    b"4",
    None,
    [4],
    np.array([4]),
    jnp.array(True),
    4j,
    Fraction(4),
]
NO_NUMBERS = [True, np.False_, jnp.array(True), "1e9", b"1", None, [1.0], np.ones(1), 1j]
LAYERS = [nn.Dense(4) for _ in range(4)]
BATCH = np.ones((8, 4), np.float32)


def loss_fn(outputs, batch):
    return jnp.mean(outputs**2)


@pytest.mark.parametrize("value", NO_INTEGERS, ids=repr)
def test_what_is_no_integer(value):
    assert integer_or_none(value) is None
    with pytest.raises(TypeError, match="^" + re.escape(f"n={value!r} is no integer; use 1")):
        as_integer("n", value, "use 1")
    assert as_integer("n", 0, "use 0", least=0) == 0


@pytest.mark.parametrize("value", NO_NUMBERS, ids=repr)
def test_what_is_no_number(value):
    with pytest.raises(TypeError, match="^" + re.escape(f"n={value!r} is no number; give 1")):
        as_number("n", value, "give 1")


@pytest.mark.parametrize(
    ("value", "options", "wanted"),
    [
        (-1, {}, "at least 0 and finite"),
        (math.nan, {}, "at least 0 and finite"),
        (np.float32(np.inf), {}, "at least 0 and finite"),
        (0, {"positive": True}, "more than 0 and finite"),
        (math.nan, {"finite": False}, "at least 0"),
    ],
)
def test_numbers_out_of_range(value, options, wanted):
    with pytest.raises(ValueError, match="^" + re.escape(f"n={value!r} has to be {wanted}; give 1") + "$"):
        as_number("n", value, "give 1", **options)
    assert as_number("n", math.inf, "give 1", finite=False) == math.inf


# --- the public functions ---------------------------------------------------------------------------------------------

SCHEDULE = jpipe.make_schedule("1f1b", num_stages=2, num_microbatches=4)
TX = optax.sgd(0.1)


def make(**options):
    return jpipe.Pipeline(LAYERS, loss_fn, **{"num_stages": 2, "num_microbatches": 4, "balance": "even"} | options)


def plan(**options):
    return jpipe.plan(LAYERS, loss_fn, BATCH, TX, topology="v5e:1x2", **options)


COUNTS = {
    "Pipeline num_stages": lambda n: make(num_stages=n),
    "Pipeline num_microbatches": lambda n: make(num_microbatches=n),
    "Pipeline num_chunks": lambda n: make(num_chunks=n),
    "make_schedule num_stages": lambda n: jpipe.make_schedule("gpipe", num_stages=n, num_microbatches=2),
    "make_schedule num_microbatches": lambda n: jpipe.make_schedule("gpipe", num_stages=2, num_microbatches=n),
    "partition num_stages": lambda n: jpipe.partition([1.0] * 4, n),
    "partition num_chunks": lambda n: jpipe.partition([1.0] * 4, 1, num_chunks=n),
    "make_mesh stage": lambda n: jpipe.make_mesh(stage=n),
    "make_mesh model": lambda n: jpipe.make_mesh(stage=1, model=n),
    "plan num_stages": lambda n: plan(num_stages=n),
    "plan num_microbatches": lambda n: plan(num_microbatches=n),
    "plan num_chunks": lambda n: plan(num_chunks=n),
    "Checkpointer keep": lambda n: jpipe.Checkpointer("", keep=n),
    "load_layers step": lambda n: jpipe.load_layers("", step=n),
    "initialize num_processes": lambda n: jpipe.initialize("nowhere", n, 0),
    "initialize process_id": lambda n: jpipe.initialize("nowhere", 9, n),
}
NUMBERS = {
    "plan memory": lambda n: plan(memory=n),
    "simulate transfer": lambda n: jpipe.simulate(SCHEDULE, transfer=n),
    "initialize timeout": lambda n: jpipe.initialize("nowhere", 2, 0, timeout=n),
    "initialize heartbeat_timeout": lambda n: jpipe.initialize("nowhere", 2, 0, heartbeat_timeout=n),
}


@pytest.mark.parametrize("name", COUNTS)
def test_counts_are_integers_of_at_least_some_number(name):
    """Others are refused before anything is searched, made or compiled."""
    for value in (2.0, True, "2"):
        with pytest.raises(TypeError, match=f"^{name.split()[1]}={value!r} is no integer; "):
            COUNTS[name](value)
    with pytest.raises(ValueError, match=rf"^{name.split()[1]}=-1 is less than \d; "):
        COUNTS[name](np.int64(-1))


@pytest.mark.parametrize("name", NUMBERS)
def test_bytes_and_seconds_are_numbers_that_are_not_negative(name):
    for value in (True, "16GB", [1.0]):
        with pytest.raises(TypeError, match="^" + re.escape(f"{name.split()[1]}={value!r} is no number; ")):
            NUMBERS[name](value)
    for value in (-1.0, math.nan):
        with pytest.raises(ValueError, match=f"^{name.split()[1]}={value} has to be (at least|more than) 0"):
            NUMBERS[name](value)


def test_counts_of_numpy():
    """What is made of them is what is made of Python's integers, and holds such."""
    two, four = np.int64(2), np.uint8(4)
    pipe = make(num_stages=two, num_microbatches=jnp.int32(4), num_chunks=np.int8(1), balance=np.array([1, 3]))
    assert repr(pipe) == repr(make(balance=[1, 3]))
    assert repr(pipe.partition.counts) == "(1, 3)"
    assert repr(jpipe.partition([1.0] * 4, two, num_chunks=two)) == repr(jpipe.partition([1.0] * 4, 2, num_chunks=2))
    assert repr(jpipe.partition([1.0] * 4, two, num_chunks=two).num_chunks) == "2"
    assert jpipe.make_mesh(stage=two, model=four).shape == {"stage": 2, "model": 4}
    split = jpipe.zero_bubble(SCHEDULE, most_waiting=[0, 1])
    assert jpipe.zero_bubble(SCHEDULE, most_waiting=np.array([0, 1])) == split
    orders = [[("F", np.int64(0)), ("B", np.int64(0))]]
    assert repr(jpipe.Schedule(orders).actions) == repr(jpipe.Schedule([["F0", "B0"]]).actions)
    assert jpipe.Action("F", 0) == jpipe.Schedule(orders).actions[0][0]


def test_times_and_costs_of_numpy():
    same = jpipe.simulate(SCHEDULE, 1.0, [2.0, 3.0], 0.5)
    assert jpipe.simulate(SCHEDULE, np.float32(1), np.array([2, 3]), jnp.float32(0.5)) == same
    assert jpipe.partition(np.array([1, 2, 3], np.float32), 2).cuts == jpipe.partition(jnp.arange(1, 4), 2).cuts == (2,)
    costs = [np.float32(1), np.float64(3), 1.0, np.float16(1)]
    assert make(balance=costs).partition.counts == (2, 2)


@pytest.mark.parametrize("memory", [16e9, np.int64(16e9), 10**18])
def test_memory_as_people_write_it(memory):
    """It searched for minutes, and then: 'float' object has no attribute 'bit_length'."""
    kept = {"num_stages": np.int64(2), "num_microbatches": np.int64(4), "num_chunks": np.int8(1), "balance": [2, 2]}
    kept |= {"schedule": "1f1b", "remat": "layer", "ends": "own", "shard_over": ()}
    room = "909,494.7 TiB" if memory == 10**18 else "14.9 GiB"
    assert str(plan(memory=memory, **kept)).startswith(f"Plans for v5e:1x2, {room} a device: 1 settings compared")
    with pytest.raises(ValueError, match=r"^no plan fits in 1 bytes a device on v5e:1x2; the smallest takes 736 bytes"):
        plan(memory=1.5, **kept)


def test_a_number_in_the_batch():
    """It was a raw AttributeError about shapes."""
    batch = {"inputs": BATCH, "scale": 1.0}
    planned = partial(jpipe.plan, LAYERS, loss_fn, topology="v5e:2x2")  # no chip at hand is measured first
    for call in (planned, partial(jpipe.forecast, make())):
        with pytest.raises(TypeError, match=r"batch\['scale'\] is a float, not an array"):
            call(batch, TX)


def test_numbers_are_checked_in_one_place():
    """No other module tells integers from bools by itself."""
    package = Path(jpipe.__file__).parent
    for path in package.rglob("*.py"):
        if path.name != "users_numbers.py":
            text = path.read_text()
            assert not re.search(r"from numbers import|operator\.index|isinstance\(\w+, bool\) or", text), path
