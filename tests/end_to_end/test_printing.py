"""What only prints never loses a result: zeros, infinities, NaN, nothing known, and numbers of NumPy's kinds."""

import math
from dataclasses import replace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpipe
from jpipe.processes.tables import bytes_in_words
from jpipe.schedules.simulate import Work, in_time
from jpipe.tools.chips import CHIPS
from jpipe.tools.forecaster import Forecast
from jpipe.tools.measure import SLICES, StageTimes
from jpipe.tools.memory_model import predict_memory
from jpipe.tools.page import facts_of
from jpipe.tools.profile import Finding, Profile
from jpipe.tools.search import Choice, Choices, Setting
from jpipe.tools.step_cost import Parts, StepCost
from jpipe.tools.time_model import predict_time

ODD = [0, 0.0, 1.5, -1.0, math.inf, math.nan, np.float32(1e30), np.int64(3), 10**30]
SCHEDULE = jpipe.make_schedule("1f1b", num_stages=2, num_microbatches=2)
IDLE = in_time(SCHEDULE, Work(dict.fromkeys("FRBIW", (0.0, 0.0)), (0.0, 0.0)))


COUNTS = (0, 0.5, 1023, 1024, 2**30 - 1, np.float32(16e9), np.int64(2**40), 2**60, -2048, math.inf, math.nan)
WORDS = "0 bytes|0.5 bytes|1023 bytes|1.0 KiB|1,024.0 MiB|14.9 GiB|1.0 TiB|1,048,576.0 TiB|-2.0 KiB|inf bytes|nan bytes"


def test_bytes():
    assert "|".join(map(bytes_in_words, COUNTS)) == WORDS


@pytest.fixture(scope="module")
def pipe():
    pipe = jpipe.Pipeline([nn.Dense(8)] * 3, lambda y, _: jnp.mean(y**2), num_stages=2, num_microbatches=2)
    jax.eval_shape(pipe.init, jax.random.key(0), np.ones((4, 8), np.float32))
    return pipe


@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_a_plan(pipe, odd):
    setting = Setting((("stage", 2),), 2)
    slices = dict.fromkeys(["computation", "bubble", "between layers", "update", "collectives"], odd)
    held = Parts(dict.fromkeys(["parameters", "optimizer", "residuals"], odd))
    compiled = StepCost("compiled", Parts(slices), Parts(batch=odd), IDLE)
    seconds = Parts(dict.fromkeys(["computation", "bubble", "collectives", "update"], odd))
    options = setting.options | {"balance": [2, 1]}
    choice = Choice(True, StepCost("predicted", seconds, held, IDLE), setting, options)
    found = Choices("plans", (choice, choice), ())
    forecast = Forecast(True, compiled, "a step", odd)
    for text in (str(found), found._repr_html_(), str(forecast)):
        assert "ms: computation" in text


def test_a_timeline_of_actions_that_take_no_time():
    assert IDLE.bubble_fraction == 0.0 and str(IDLE).startswith("1f1b: K=2, M=2, V=1; time 0, bubble 0.0 %")


@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_a_profile(pipe, odd):
    times = StageTimes(*np.array([[1e-3, 0.0], [1e-3, 1e-3], [0.0, 0.0], [0.0, 0.0]]))
    found = Profile(
        schedule=SCHEDULE,
        partition=jpipe.partition([1.0, 0.0, 0.0], 2),
        stages=times,
        cost=StepCost("measured", Parts(dict.fromkeys(SLICES, odd)), Parts(parameters=odd, temporaries=odd)),
        contention=odd,
        noise=odd,
        findings=(Finding("odd", {"balance": [2, 1]}, odd),),
        predicted=jpipe.simulate(SCHEDULE),
        facts=facts_of(pipe.planner, repr(pipe)),
    )
    for text in (repr(found), str(found), found._repr_html_()):
        assert "find" in text.lower()


@pytest.mark.parametrize("chip", ["v5e", "h100"])
def test_layers_that_cost_nothing(chip):
    """Identity layers have no parameters, and no floating-point operations."""
    layers = [lambda x, i=i: x for i in range(3)]
    batch = np.ones((4, 8), np.float32)
    pipe = jpipe.Pipeline(layers, lambda y, _: jnp.sum(y), num_stages=2, num_microbatches=2)
    assert "2 layers" not in str(pipe) and "stage" in str(pipe)
    jax.eval_shape(pipe.init, jax.random.key(0), batch)
    assert "bubble" in str(pipe) and "slowest" in str(pipe.partition)
    cost = predict_time(pipe.planner, batch, CHIPS[chip])
    held = predict_memory(pipe.planner, batch, optax.sgd(0.1), CHIPS[chip])[0]
    setting = Setting((("stage", 2),), 2)
    choice = Choice(True, replace(cost, bytes=held), setting, setting.options | {"balance": [2, 1]})
    assert "ms: step" in str(Choices("plans", (choice,), ()))
