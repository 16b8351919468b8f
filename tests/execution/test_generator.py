"""What `generate` may be asked for. That its tokens are right is in `test_decoding.py`."""

import flax.linen as nn
import jax
import numpy as np
import pytest

import jpipe
from decoders import VOCABULARY, WIDTH, Counting
from jpipe.execution.generator import timetable
from jpipe.schedules.actions import Placement


@pytest.mark.parametrize(("chunks", "style"), [(1, "loop"), (3, "loop"), (2, "v")])
@pytest.mark.parametrize("stages", [1, 2, 4, 5])
def test_no_stage_waits_after_the_fill(stages, chunks, style):
    placement, rounds = Placement(stages, chunks, style), 4
    table = timetable(placement, rounds)
    busy = table[:, 2] >= 0
    assert busy.sum() == stages * chunks * stages * rounds
    fill = len(busy) - stages * chunks * rounds
    assert fill == (stages - 1) * (2 if style == "v" else 1)
    assert busy[fill : len(busy) - fill].all()
    for stage in range(stages):
        done = [tuple(row) for row in table[busy[:, stage], :3, stage].tolist()]
        assert len(set(done)) == len(done), "each virtual stage, micro-batch and round once"


TOKENS = np.zeros((4, 5), np.int32)


@pytest.fixture(scope="module")
def pipe():
    layers = [nn.Embed(VOCABULARY, WIDTH), Counting(), nn.Dense(VOCABULARY)]
    return jpipe.Pipeline(layers, None, num_stages=2, num_microbatches=2, balance="even")


@pytest.fixture(scope="module")
def variables(pipe):
    return pipe.init(jax.random.key(0), TOKENS)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((TOKENS[:1], 3), ValueError, "1 prompts are fewer than the 2 stages"),
        ((TOKENS, 0), ValueError, "num_tokens=0 is less than 1; ask for at least one token"),
        ((TOKENS, 3, None, 0.0, 2), ValueError, r"prefill=2 is no part of prompts of 5 tokens; feed \[1, 5\]"),
        ((TOKENS * 1.0, 3), TypeError, r"prompts is float64\[4,5\]; pass an array of tokens"),
        (("Hello", 3), TypeError, "prompts is str"),
        ((TOKENS[0], 3), ValueError, r"prompts has the shape \(5,\)"),
        ((TOKENS, 3, None, 0.5), ValueError, "temperature=0.5 draws random numbers, but key=None"),
        ((TOKENS, 3, None, -1.0), ValueError, "temperature=-1.0 has to be at least 0"),
        ((TOKENS, 3, None, "1"), TypeError, "temperature='1' is no number"),
        ((TOKENS, 3, None, np.ones(4)), TypeError, "temperature=array.* is no number; one is for"),
        ((TOKENS, 3, None, np.nan), ValueError, "temperature=nan has to be at least 0"),
        ((TOKENS, 3, None, 1e-40), ValueError, "temperature=1e-40 is no number to divide"),
    ],
)
def test_bad_input(pipe, variables, arguments, error, message):
    with pytest.raises(error, match=message):
        pipe.generate(variables, *arguments[:4], **dict(zip(["prefill"], arguments[4:], strict=False)))


def test_a_traced_temperature_is_named(pipe, variables):
    with pytest.raises(TypeError, match="temperature or num_tokens is traced"):
        jax.jit(lambda t: pipe.generate(variables, TOKENS, 3, jax.random.key(0), t))(0.5)
