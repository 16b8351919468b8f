from dataclasses import replace

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

import jpipe
from jpipe.tools.chips import CHIPS
from jpipe.tools.choices import Choice, Choices, Setting, sorted_out
from jpipe.tools.memory_model import predict_memory
from jpipe.tools.step_cost import Parts
from jpipe.tools.time_model import predict_time


@pytest.fixture(scope="module")
def choice():
    pipe = jpipe.Pipeline([nn.Dense(8)] * 2, lambda y, _: jnp.mean(y**2), num_stages=2, num_microbatches=2)
    batch = {"inputs": jax.ShapeDtypeStruct((4, 8), "float32")}
    held = predict_memory(pipe.planner, batch, optax.sgd(0.1))[0]
    cost = replace(predict_time(pipe.planner, batch, CHIPS["v5e"]), bytes=held)
    setting = Setting((("stage", 2),), 2)
    return Choice(True, cost, setting, setting.options | {"balance": [2, 1]})


def but(choice, **seconds):
    """The choice, but for some seconds."""
    return replace(choice, cost=replace(choice.cost, seconds=Parts(choice.time, **seconds)))


def slower(choice, factor, bytes_):
    slow = but(choice, computation=choice.time["computation"] + factor)
    return replace(slow, cost=replace(slow.cost, bytes=Parts(choice.cost.bytes, residuals=bytes_)))


def test_only_what_is_smaller_than_all_that_is_faster_is_kept(choice):
    first, second, third = slower(choice, 1, 900), slower(choice, 2, 901), slower(choice, 3, 100)
    assert sorted_out([third, second, first]) == [first, third]


def test_it_is_a_sequence_and_a_table(choice):
    found = Choices("plans", (choice, slower(choice, 1, 5)), ("mind the gap",))
    assert len(found) == 2 and found[0] is choice and found[:1] == (choice,)
    text = str(found)
    assert text.startswith("plans\n") and text.endswith("mind the gap")
    for name in (*choice.bytes, *choice.time, "bubble"):
        assert name.replace("_", " ") in text
    assert "<table>" in found._repr_html_()


REST = ("collectives", "update")


def test_milliseconds_of_small_models_and_of_large_ones(choice):
    """All settings of a small model took "0.0" ms."""
    small = but(choice, computation=2e-6, bubble=5e-8, **dict.fromkeys(REST, 0.0)).column()
    assert (small["ms: step"], small["ms: computation"], small["ms: bubble"]) == ("0.00205", "0.00200", "5.00e-05")
    large = but(choice, computation=12.3456, **dict.fromkeys((*REST, "bubble"), 0.0)).column()
    assert (large["ms: step"], large["ms: bubble"]) == ("12,346", "0.00")


def test_what_shared_ends_compute_is_no_waiting(choice):
    own = choice.cost.timeline.bubble_fraction
    assert choice.bubble_fraction == pytest.approx(own)
    assert but(choice, computation=2 * choice.time["computation"]).bubble_fraction == pytest.approx(own / (2 - own))
